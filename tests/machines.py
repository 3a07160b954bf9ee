"""
Several processes of this machine in the place of several machines, connected over loopback as `mlx.launch` does.

`python tests/machines.py 50` starts a run that many times, kills one of its processes at a random moment, and looks at
what is left; the run goes on from there with two or three processes.
"""

import contextlib
import io
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
LIMIT = 900  # seconds, on a busy machine; nothing here may hang


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
    *("--eval-every", "10", "--eval-limit", "16", "--save-every", "3"),
]


def fork(num, directory, flags):
    """Process ids of `num` machines that train, forked after the imports; what they say is in `directory`/RANK."""
    import train

    hosts, pids = free_hosts(num, directory), []
    for rank in range(num):
        (directory / str(rank)).write_bytes(b"")
        if (pid := os.fork()) == 0:
            os.environ |= {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
            said = os.open(directory / str(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            try:
                train.main(list(map(str, flags)))
                os._exit(0)
            except SystemExit as error:
                os._exit(int(error.code or 0))
            finally:
                os._exit(99)  # a bug: its traceback would be the harness's
        pids.append(pid)
    return pids


def kill_one(rng, directory, loading):
    """Kills a process at a random moment; returns words about it and the seconds that the last one survived."""
    run, num, began = directory / "run", rng.choice([2, 2, 3]), time.monotonic()
    flags = ["--resume", run] if any((run / "checkpoints").glob("step-*")) else [*RUN, "--run-dir", fresh(run)]
    flags += ["--train-token-budget", rng.choice([100, 1024])]  # with one micro-batch, one machine has no part
    pids, when = fork(num, directory, flags), "loading"
    if rng.random() < 0.25:
        time.sleep(rng.uniform(0, loading))
    else:
        when = "training"
        while b"\nstep " not in (directory / "0").read_bytes():
            assert not os.waitpid(pids[0], os.WNOHANG)[0], (directory / "0").read_text()
            time.sleep(0.05)
        loading = time.monotonic() - began
        time.sleep(rng.uniform(0, 10))
    number, rank = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]), rng.randrange(num)
    worked = [processor_seconds(pid) for pid in pids]
    os.kill(pids[rank], number)
    begin = time.monotonic()
    ended = [os.wait4(pid, 0) for pid in pids]
    seconds = time.monotonic() - begin
    worked = max(use.ru_utime + use.ru_stime - before for (_, _, use), before in zip(ended, worked, strict=True))
    statuses = [os.waitstatus_to_exitcode(status) for _, status, _ in ended]
    said = f"{num} processes, {when}, {number.name} of rank {rank}, statuses {statuses}"
    return f"{said}, at most {worked:.1f} s of processor until the end", seconds, loading


def processor_seconds(pid):
    """What a process has used until now; on Linux, and 0 elsewhere."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    return sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")


def fresh(run):
    """The directory of a run that has saved nothing, without what it left."""
    if run.exists():
        run.rename(run.with_name(f"unsaved-{time.time_ns()}"))
    return run


def step_left(run):
    """The step of the newest checkpoint, which must be intact, as every line of the logs must be but a last one."""
    from disk import checkpoint

    for log in run.glob("*.jsonl"):
        for line in log.read_text().split("\n")[:-1]:
            json.loads(line)
    if not any((run / "checkpoints").glob("step-*")):
        return None
    with contextlib.redirect_stderr(io.StringIO()) as said:
        step = checkpoint.load(run).step
    assert not said.getvalue(), said.getvalue()
    return step


def main(count):
    rng, loading, survived = random.Random(count), 20.0, []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(1, count + 1):
            said, seconds, loading = kill_one(rng, Path(directory), loading)
            survived.append(seconds)
            step = step_left(Path(directory) / "run")
            print(f"{number}: {said}; all had ended after {seconds:.1f} s; step {step} is saved", flush=True)
    print(f"survival in seconds: median {sorted(survived)[count // 2]:.1f}, most {max(survived):.1f}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so its children
    sys.path.insert(0, str(ROOT))
    import cpu_blas  # noqa: F401  (before mlx)

    main(int(sys.argv[1]))
