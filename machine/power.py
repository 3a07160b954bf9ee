"""A Mac that trains through the night: it stays awake, and says what slows it down. Elsewhere nothing is done."""

import os
import platform
import re
import subprocess

PRESSURE = {  # what a warning names, and where macOS's programs say it
    "memory pressure (1 normal, 2 high, 4 critical)": r"vm_pressure_level: (\d+)",
    "swap used": r"used = (\S+)",
    "thermal pressure (0 nominal to 4)": r"thermalpressurelevel (\d)",
    "low power mode": r"lowpowermode\s+(\d)",
}


def keep_awake() -> None:
    """Keeps macOS from sleeping while this process lives. The display may sleep, and then no watchdog guards it."""
    if platform.system() == "Darwin":
        # a session of its own: Ctrl-C, after which a run still saves, must not end it
        subprocess.Popen(["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())], start_new_session=True)


def pressure() -> str:
    """What macOS says of memory, heat and power."""
    if platform.system() != "Darwin":
        return ""
    sysctl = "/usr/sbin/sysctl kern.memorystatus_vm_pressure_level vm.swapusage"
    heat = "/usr/bin/notifyutil -g com.apple.system.thermalpressurelevel"
    commands = [command.split() for command in (sysctl, "/usr/bin/pmset -g", heat)]
    output = "".join(subprocess.run(one, capture_output=True, text=True, check=False).stdout for one in commands)
    matches = {name: re.search(pattern, output) for name, pattern in PRESSURE.items()}
    return ", ".join(f"{name} {match[1]}" for name, match in matches.items() if match)
