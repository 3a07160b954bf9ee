"""
Several processes of this machine in the place of several machines, connected over loopback as `mlx.launch` does.

`python tests/machines.py 50` starts a run that many times, kills one of its processes at a random moment, and looks at
what is left; the run goes on from there with two or three processes.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 300  # seconds; nothing here may hang


def free_hosts(num, directory):
    """A hostfile of `num` free ports."""
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

    def __init__(self, num, directory, *command, **environments):
        """environments: rank0, rank1 ... variables of that process only."""
        hosts = str(free_hosts(num, directory))
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        shared = os.environ | {"MLX_HOSTFILE": hosts, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
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
        raise AssertionError(f"rank {rank} ended before {text!r}: {self.processes[rank].stderr.read()}")

    def wait(self, limit=LIMIT):
        """Exit status, standard output and error of each process, within `limit` seconds."""
        return [(process.communicate(timeout=limit), process.returncode) for process in self.processes]


# ---- many kills

RUN = [
    *("--model", "demo", "--batch", "3", "--groups", "4", "--max-tokens", "12", "--steps", "100000"),
    *("--eval-every", "10", "--eval-limit", "16", "--save-every", "3", "--report-every", "0"),
]


def kill_one(rng, directory, loading):
    """Kills a process at a random moment; returns words about it and the seconds that the last one survived."""
    run, num, began = directory / "run", rng.choice([2, 2, 3]), time.monotonic()
    flags = ["--resume", run] if any((run / "checkpoints").glob("step-*")) else [*RUN, "--run-dir", fresh(run)]
    flags += ["--train-token-budget", rng.choice([100, 1024])]  # with one micro-batch, one machine has no part
    with Machines(num, directory, "train.py", *flags) as machines:
        if rng.random() < 0.25:
            when = "loading"
            time.sleep(rng.uniform(0, loading))
        else:
            when = "training"
            machines.read_until("step ")
            loading = time.monotonic() - began
            time.sleep(rng.uniform(0, 10))
        number, rank = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]), rng.randrange(num)
        machines.processes[rank].send_signal(number)
        begin = time.monotonic()
        statuses = [status for _, status in machines.wait()]
        seconds = time.monotonic() - begin
    return f"{num} processes, {when}, {number.name} of rank {rank}, statuses {statuses}", seconds, loading


def fresh(run):
    """The directory of a run that has saved nothing, without what it left."""
    if run.exists():
        run.rename(run.with_name(f"unsaved-{time.time_ns()}"))
    return run


def step_left(run):
    """The step of the newest checkpoint, which must be intact, as every line of the logs must be but a last one."""
    import checkpoint

    for log in run.glob("*.jsonl"):
        for line in log.read_text().split("\n")[:-1]:
            json.loads(line)
    return checkpoint.load(run).step if any((run / "checkpoints").glob("step-*")) else None


def main(count):
    rng, loading, worst = random.Random(count), 20.0, 0.0
    with tempfile.TemporaryDirectory() as directory:
        for number in range(1, count + 1):
            said, seconds, loading = kill_one(rng, Path(directory), loading)
            worst = max(worst, seconds)
            step = step_left(Path(directory) / "run")
            print(f"{number}: {said}; all had ended after {seconds:.1f} s; step {step} is saved", flush=True)
    print(f"the longest survival of {count}: {worst:.1f} s")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import cpu_blas  # noqa: F401  (before mlx)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so its children
    main(int(sys.argv[1]))
