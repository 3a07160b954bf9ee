"""A Mac that trains through the night stays awake. Elsewhere nothing is done."""

import os
import platform
import subprocess


def keep_awake() -> None:
    """Keeps macOS from sleeping while this process lives. The display may sleep, and then no watchdog guards it."""
    if platform.system() == "Darwin":
        # a session of its own: Ctrl-C, after which a run still saves, must not end it
        subprocess.Popen(["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())], start_new_session=True)
