"""
Small runs on the bundled models: six that many tests read, and eight whose outputs two commits are compared by.

Tests: each of the six is made once a session. Tests copy a run before they change it. Processes of pytest-xdist share
the runs: the first process that asks for a run makes it, under a lock, while the others wait.

Commits: `python -m tests.golden --save DIR` writes the outputs of the eight in one commit, `--compare DIR` repeats them
in another commit and names the first difference. It uses only commands, flags and files of a run that users rely on, so
it outlives a change of everything inside. Times, versions, settings and paths are left out.
"""

import argparse
import contextlib
import fcntl
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SMALL = "--model demo --batch 2 --groups 4 --max-tokens 8 --steps 3 --save-every 1 --eval-every 2 --eval-limit 8"
QUESTION = {"role": "user", "content": "What is {0} plus {0}?"}
REPLY = {"role": "assistant", "content": "It is {0}."}
RUNS = {
    "grpo": "",
    "kl": "--beta 0.05 --mini-batches 2 --num-iterations 2",
    "sft": "--loss-type sft --data {at}/chats.jsonl",
    "distill": "--loss-type distill --teacher self --teacher-prompt {at}/teacher.txt",
    "tools": "--model demo:tools --task calculator --max-tokens 48",
    "judge": "--judge-mode decode --judge-think 4",
}


def write_inputs(directory: Path) -> None:
    """Writes the data, the teacher's prompt and the environment that runs read."""
    (directory / "teacher.txt").write_text("Answer in one short sentence.")
    (directory / "warmer.py").write_text(ENVIRONMENT)
    with (directory / "chats.jsonl").open("w") as chats:
        for number in range(40):
            messages = [
                message | {"content": message["content"].format(number)}
                for message in (QUESTION, REPLY)
            ]
            chats.write(json.dumps({"messages": messages}) + "\n")


# ---- six runs that tests read


def flags_of(kind: str, at: Path) -> list[str]:
    small = SMALL.replace("--groups 4 --max-tokens 8 ", "") if kind == "sft" else SMALL
    return f"{small} {RUNS[kind].format(at=at)}".split()


def make(kind: str, run: Path) -> None:
    """Trains in this process; what it prints stands beside the run, in NAME.out."""
    import train

    write_inputs(run.parent)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        train.main([*flags_of(kind, run.parent), "--run-dir", str(run)])
    (run.parent / f"{kind}.out").write_text(printed.getvalue())


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the directory of a run, by its kind. Nobody writes there."""
    base = tmp_path_factory.getbasetemp()
    at = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "golden"
    at.mkdir(exist_ok=True)

    def golden(kind: str) -> Path:
        with (at / f"{kind}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (at / f"{kind}.out").exists():
                make(kind, at / kind)
        return at / kind

    return golden


# ---- eight runs that two commits are compared by

ENVIRONMENT = '''
import random


class Warmer:
    """Rewards each turn for how near its last guess was."""

    reward_per_turn = True

    def reset(self, **columns):
        self.number = random.randint(1, 20)
        self.nearness = 0.0
        return "I think of a number from 1 to 20. Find it."

    def guess(self, number: int) -> str:
        """
        Compares a guess with the number.

        Args:
            number: The guess.
        """
        self.nearness = 1 - abs(number - self.number) / 20
        if number == self.number:
            return "right"
        return "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        nearness = self.nearness
        self.nearness = 0.0
        return nearness
'''

FROZEN_FLAGS = "--batch 2 --save-every 1 --eval-every 2 --eval-limit 8 --seed 3"
SAMPLED = "--groups 4 --max-tokens 12"
# Where tools answer, one row is decoded at a time: beside which others a row is decoded depends on the answers' times,
# and a matmul of another height may round differently.
ONE_ROW = "--model demo:tools --groups 4 --rollout-batch-size 1 --max-context 256"
# Each has settings that the others lack. Large steps without a bound let the ratio pass its clip.
FROZEN = {
    "judge": f"--model demo {SAMPLED} --steps 3 --rubric data/demo_rubric.yaml --loss-type grpo --num-iterations 2"
    " --learning-rate 0.03 --target-kl 0",
    "weights": f"--model demo {SAMPLED} --steps 3 --lora-rank 0 --beta 0.05 --temp 1.2 --top-p 0.9",
    "sft": "--model demo --steps 3 --loss-type sft --data {inputs}/chats.jsonl",
    "distill": f"--model demo {SAMPLED} --steps 3 --loss-type distill --teacher self"
    " --teacher-prompt {inputs}/teacher.txt",
    "tools": f"{ONE_ROW} --steps 2 --task calculator --max-tokens 64 --seed 5",
    "turns": f"{ONE_ROW} --steps 2 --env {{inputs}}/warmer.py:Warmer --max-tokens 64 --max-turns 3",
    "resumed": f"--model demo {SAMPLED} --steps 2 --mini-batches 2 --beta 0.02 --loss-type cispo --epsilon-high 5",
    "processes": f"--model demo {SAMPLED} --steps 2 --rubric data/demo_rubric.yaml --judge-mode decode --beta 0.02",
}
RESUMED_STEPS = 4
NUM_PROCESSES = {"processes": 2}

# In the order in which a difference arises: what is sampled, what is learned of it, what that gives.
LOGS = ("rollouts.jsonl", "metrics.jsonl", "eval_answers.jsonl", "eval.jsonl")
ADAPTERS = ("adapter", "adapter-best")
IS_TIME = re.compile(
    r"(/s|_s|tok_s)$|tok_s/|^mem/|^seconds$|^tokens/total$"
)  # keys that depend on the clock and the machine, and a sum that earlier commits did not write
USERS_VARIABLES = ("GWEN_", "RUBRIC_", "WANDB_", "MLX_", "OPENAI_", "HF_")


def frozen_environment() -> dict[str, str]:
    """The variables of a run: those of this process without a user's settings, on one thread and without a hub."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(USERS_VARIABLES)
    }
    return kept | {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}


def train_in_processes(flags: list[str], num_processes: int, directory: Path) -> None:
    """Runs `train.py` in one process, or in several that are connected. Raises RuntimeError with what it printed."""
    if num_processes == 1:
        command = [sys.executable, "train.py", *flags]
        done = subprocess.run(
            command, cwd=ROOT, env=frozen_environment(), capture_output=True, text=True
        )
        results = [((done.stdout, done.stderr), done.returncode)]
    else:
        from tests.machines import Machines

        with Machines(
            num_processes, directory, "train.py", *flags, base=frozen_environment()
        ) as machines:
            results = machines.wait()
    for (_, errors), status in results:
        if status:
            raise RuntimeError(f"train.py {' '.join(flags)} ended with status {status}:\n{errors}")


def make_frozen(name: str, directory: Path) -> Path:
    """Trains a run of FROZEN below a directory; returns the run's directory."""
    write_inputs(directory)
    run = directory / name
    flags = [
        *FROZEN_FLAGS.split(),
        *FROZEN[name].format(inputs=directory).split(),
        "--run-dir",
        str(run),
    ]
    train_in_processes(flags, NUM_PROCESSES.get(name, 1), directory)
    if name == "resumed":
        train_in_processes(["--resume", str(run), "--steps", str(RESUMED_STEPS)], 1, directory)
    return run


def strip_times(value: Any) -> Any:
    """A value of JSON without the keys that hold times, at any depth."""
    if isinstance(value, dict):
        return {key: strip_times(inner) for key, inner in value.items() if not IS_TIME.search(key)}
    if isinstance(value, list):
        return [strip_times(inner) for inner in value]
    return value


def collect(run: Path, out: Path) -> None:
    """Copies to `out` what two commits must have in common of a run: logs without times, and adapters."""
    out.mkdir(parents=True)
    for log in LOGS:
        with (run / log).open() as lines, (out / log).open("w") as stripped:
            for line in lines:
                stripped.write(json.dumps(strip_times(json.loads(line))) + "\n")
    for adapter in ADAPTERS:
        if (run / adapter).is_dir():
            shutil.copytree(run / adapter, out / adapter)


# ---- the first difference


def describe(value: object) -> str:
    """A value as a reader sees it, cut to a line."""
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def find_value_difference(saved: Any, now: Any, place: str) -> str | None:
    """The first place where two values of JSON differ, with both values there. A nan equals a nan, 1 is not 1.0."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in [*saved, *(key for key in now if key not in saved)]:
            inner = f"{place}, {json.dumps(key)}"
            if key not in now:
                return f"{inner}: saved {describe(saved[key])}, now absent"
            if key not in saved:
                return f"{inner}: saved absent, now {describe(now[key])}"
            difference = find_value_difference(saved[key], now[key], inner)
            if difference:
                return difference
        return None

    if isinstance(saved, list) and isinstance(now, list):
        for index, (old, new) in enumerate(zip(saved, now, strict=False)):
            difference = find_value_difference(old, new, f"{place}, item {index}")
            if difference:
                return difference
        if len(saved) != len(now):
            return f"{place}: saved {len(saved)} items, now {len(now)}"
        return None

    if json.dumps(saved) == json.dumps(now):
        return None
    return f"{place}: saved {describe(saved)}, now {describe(now)}"


def find_log_difference(saved: Path, now: Path, place: str) -> str | None:
    """The first line of two JSONL files that differs."""
    saved_lines = saved.read_text().splitlines()
    now_lines = now.read_text().splitlines()
    for number, (old, new) in enumerate(zip(saved_lines, now_lines, strict=False), 1):
        difference = find_value_difference(
            json.loads(old), json.loads(new), f"{place}, line {number}"
        )
        if difference:
            return difference
    if len(saved_lines) != len(now_lines):
        return f"{place}: saved {len(saved_lines)} lines, now {len(now_lines)}"
    return None


def find_tensor_difference(saved: Path, now: Path, place: str) -> str | None:
    """The first tensor of two safetensors files that differs, and its first number that does."""
    import numpy as np
    from safetensors.numpy import load_file

    saved_tensors = load_file(saved)
    now_tensors = load_file(now)
    if sorted(saved_tensors) != sorted(now_tensors):
        return find_value_difference(sorted(saved_tensors), sorted(now_tensors), f"{place}, names")
    for name, old in sorted(saved_tensors.items()):
        new = now_tensors[name]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            return f"{place}, {name}: saved {old.dtype} {old.shape}, now {new.dtype} {new.shape}"
        if old.tobytes() != new.tobytes():
            bits = old.dtype.itemsize * 8
            is_different = old.view(f"uint{bits}") != new.view(f"uint{bits}")
            index = tuple(int(axis) for axis in np.argwhere(is_different)[0])
            return f"{place}, {name} at {index}: saved {old[index]!s}, now {new[index]!s}"
    if saved.read_bytes() != now.read_bytes():
        return f"{place}: the tensors are equal, the file's header is not"
    return None


def find_difference(saved: Path, now: Path) -> str | None:
    """The first difference of two directories that `collect` wrote, or None: run, file, line or tensor, both values."""
    names = [
        {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
        for root in (saved, now)
    ]
    in_logs = [Path(log) for log in LOGS if Path(log) in names[0] | names[1]]
    others = sorted((names[0] | names[1]).difference(in_logs))
    for name in [*in_logs, *others]:
        place = f"{saved.name}, {name}"
        if name not in names[1]:
            return f"{place}: saved, now absent"
        if name not in names[0]:
            return f"{place}: not saved, now present"
        if name.suffix == ".jsonl":
            difference = find_log_difference(saved / name, now / name, place)
        elif name.suffix == ".safetensors":
            difference = find_tensor_difference(saved / name, now / name, place)
        else:
            contents = [json.loads((root / name).read_text()) for root in (saved, now)]
            difference = find_value_difference(*contents, place)
        if difference:
            return difference
    return None


# ---- the command


def roundings_of_machine() -> dict[str, str]:
    """What decides how sums are rounded: outputs of machines that differ in it cannot be compared."""
    from tests.blas import kernel_family

    return {"kernels": kernel_family(), "mlx": version("mlx")}


def save(directory: Path, names: list[str]) -> None:
    """Makes runs and writes their outputs below a directory that does not exist or is empty."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; give --save a new directory")
    (directory / "machine.json").write_text(json.dumps(roundings_of_machine()))
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            collect(make_frozen(name, Path(scratch)), directory / name)
            steps = [
                json.loads(line)
                for line in (directory / name / "metrics.jsonl").read_text().splitlines()
            ]
            if not any(step["grad_norm"] for step in steps):
                raise RuntimeError(
                    f"run {name} had no gradient, so it can show no difference; give it another --seed"
                )
            print(f"{name}: saved", flush=True)


def compare(directory: Path, names: list[str]) -> str | None:
    """Repeats the runs of `save` up to the first whose outputs differ. Returns that difference, or None."""
    try:
        saved_on = json.loads((directory / "machine.json").read_text())
    except FileNotFoundError as error:
        raise ValueError(
            f"{directory} has no machine.json; write it with --save {directory}"
        ) from error
    difference = find_value_difference(saved_on, roundings_of_machine(), "machine")
    if difference:
        raise ValueError(
            f"{difference}; set OPENBLAS_CORETYPE, install that mlx, or save anew on this machine"
        )
    for name in names:
        if not (directory / name).is_dir():
            raise ValueError(f"{directory} has no run {name}; name those that it has with --only")

    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            collect(make_frozen(name, Path(scratch)), Path(scratch) / "now" / name)
            difference = find_difference(directory / name, Path(scratch) / "now" / name)
            if difference:
                return difference
            print(f"{name}: equal", flush=True)
    return None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description=__doc__.partition("\n\n")[0]
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--save", type=Path, metavar="DIR", help="write the outputs of the runs to a new directory"
    )
    action.add_argument(
        "--compare", type=Path, metavar="DIR", help="repeat the runs and name the first difference"
    )
    parser.add_argument(
        "--only", nargs="+", choices=FROZEN, default=list(FROZEN), help="some of the runs"
    )
    flags = parser.parse_args(arguments)
    try:
        if flags.save:
            save(flags.save, flags.only)
            return
        difference = compare(flags.compare, flags.only)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if difference:
        print(difference)
        sys.exit(1)


if __name__ == "__main__":
    main()
