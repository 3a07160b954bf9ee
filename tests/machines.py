"""Several processes of this machine in the place of several machines, connected over loopback as `mlx.launch` does."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 900  # seconds, on a busy machine; nothing here may hang


def free_hosts(num, directory):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
    path = Path(directory) / "hosts.json"
    path.write_text(json.dumps(hosts))
    return path


class Machines:
    """`num` processes of one command, by rank; each line of standard output and error is kept."""

    def __init__(self, num, directory, *command, base=os.environ, **environments):
        """base: the variables of all processes. environments: rank0, rank1 ... variables of that process only."""
        hosts = str(free_hosts(num, directory))
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        shared = base | {"MLX_HOSTFILE": hosts, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=ROOT,
                env=shared | {"MLX_RANK": str(rank)} | environments.get(f"rank{rank}", {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def read_until(self, text, rank=0):
        for line in self.processes[rank].stdout:
            if line.startswith(text):
                return
        raise AssertionError(
            f"rank {rank} ended before {text!r}: {self.processes[rank].stderr.read()}"
        )

    def wait(self, limit=LIMIT):
        """Exit status, standard output and error of each process, within `limit` seconds."""
        return [
            (process.communicate(timeout=limit), process.returncode) for process in self.processes
        ]
