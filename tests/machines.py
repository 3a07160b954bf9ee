"""Several processes that act as several machines, connected over loopback like `mlx.launch`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIME_LIMIT = 900  # seconds, on a busy machine


def write_host_file(num, directory):
    """Writes a host file of MLX with free ports of this machine; returns its path."""
    hosts = []
    with contextlib.ExitStack() as stack:
        for _ in range(num):
            server = stack.enter_context(socket.socket())
            server.bind(("127.0.0.1", 0))
            hosts.append([f"127.0.0.1:{server.getsockname()[1]}"])
    path = Path(directory) / "hosts.json"
    path.write_text(json.dumps(hosts))
    return path


class Machines:
    """`num` processes of one command, in the order of their ranks, with their output."""

    def __init__(self, num, directory, *command, base=os.environ, **environments):
        """
        Starts the processes.

        base: the variables of all processes. environments: rank0, rank1 ... are additional
        variables of one process.
        """
        variables = base | {
            "MLX_HOSTFILE": str(write_host_file(num, directory)),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.processes = []
        for rank in range(num):
            rank_variables = {"MLX_RANK": str(rank)} | environments.get(f"rank{rank}", {})
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=ROOT,
                env=variables | rank_variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def read_until(self, text, rank=0):
        """Reads the output of a rank until a line begins with a text."""
        process = self.processes[rank]
        for line in process.stdout:
            if line.startswith(text):
                return
        raise AssertionError(f"rank {rank} ended before {text!r}: {process.stderr.read()}")

    def wait(self, time_limit=TIME_LIMIT):
        """
        Waits for all processes; returns ((standard output, standard error), exit status) of each.
        """
        return [
            (process.communicate(timeout=time_limit), process.returncode)
            for process in self.processes
        ]
