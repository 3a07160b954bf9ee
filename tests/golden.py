"""
Small runs on the bundled models: six for tests, and eight that compare two commits.

Tests read the six runs. Each run is made once per session, and a test copies it before it changes
it. Processes of pytest-xdist share the runs: the first process that needs a run makes it, under a
lock, while the others wait.

`python -m tests.golden --save DIR` writes the outputs of the eight runs in one commit. `--compare
DIR` repeats the runs in another commit and names the first difference. It uses only commands, flags
and files that users rely on, so it works after any internal change. Times, versions, settings and
paths are left out.
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
SMALL = (
    "--model demo --batch 2 --groups 4 --max-tokens 8 --steps 3 --save-every 1 "
    "--eval-every 2 --eval-limit 8"
)
QUESTION = {"role": "user", "content": "What is {0} plus {0}?"}
REPLY = {"role": "assistant", "content": "It is {0}."}
RUNS = {
    "grpo": "",
    "kl": "--beta 0.05 --mini-batches 2 --num-iterations 2",
    "sft": "--loss-type sft --data {inputs}/chats.jsonl",
    "distill": "--loss-type distill --teacher self --teacher-prompt {inputs}/teacher.txt",
    "tools": "--model demo:tools --task calculator --max-tokens 48",
    "judge": "--judge-mode decode --judge-think 4",
}


def write_inputs(directory: Path) -> None:
    """Writes the data, the teacher's prompt and the environment that runs read."""
    (directory / "teacher.txt").write_text("Answer in one short sentence.")
    (directory / "warmer.py").write_text(ENVIRONMENT)
    with (directory / "chats.jsonl").open("w") as chats:
        for number in range(40):
            question = QUESTION | {"content": QUESTION["content"].format(number)}
            reply = REPLY | {"content": REPLY["content"].format(number)}
            chats.write(json.dumps({"messages": [question, reply]}) + "\n")


# ---- six runs for tests


def run_flags(kind: str, inputs: Path) -> list[str]:
    small = SMALL
    if kind == "sft":
        small = SMALL.replace("--groups 4 --max-tokens 8 ", "")
    return f"{small} {RUNS[kind].format(inputs=inputs)}".split()


def train_run(kind: str, run: Path) -> None:
    """Trains in this process; writes the printed output to NAME.out in the parent directory."""
    import train

    write_inputs(run.parent)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        train.main([*run_flags(kind, run.parent), "--run-dir", str(run)])
    (run.parent / f"{kind}.out").write_text(output.getvalue())


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the directory of a run of one kind. No test writes there."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / "golden"
    directory.mkdir(exist_ok=True)

    def golden(kind: str) -> Path:
        with (directory / f"{kind}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (directory / f"{kind}.out").exists():
                train_run(kind, directory / kind)
        return directory / kind

    return golden


# ---- eight runs that compare two commits

ENVIRONMENT = '''
import random


class Warmer:
    """Rewards each turn by the nearness of its last guess."""

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

COMPARED_FLAGS = "--batch 2 --save-every 1 --eval-every 2 --eval-limit 8 --seed 3"
SAMPLED = "--groups 4 --max-tokens 12"
# A run with tools decodes one row at a time. Otherwise the number of rows in a decoding step would
# depend on the time that tools take, and matmuls with more rows may round differently.
ONE_ROW = "--model demo:tools --groups 4 --rollout-batch-size 1 --max-context 256"
# Each run has settings that the others lack. Large steps without --target-kl let ratios be clipped.
COMPARED_RUNS = {
    "judge": f"--model demo {SAMPLED} --steps 3 --rubric data/demo_rubric.yaml --loss-type grpo"
    " --num-iterations 2 --learning-rate 0.03 --target-kl 0",
    "weights": f"--model demo {SAMPLED} --steps 3 --lora-rank 0 --beta 0.05 --temp 1.2 --top-p 0.9",
    "sft": "--model demo --steps 3 --loss-type sft --data {inputs}/chats.jsonl",
    "distill": f"--model demo {SAMPLED} --steps 3 --loss-type distill --teacher self"
    " --teacher-prompt {inputs}/teacher.txt",
    "tools": f"{ONE_ROW} --steps 2 --task calculator --max-tokens 64 --seed 5",
    "turns": f"{ONE_ROW} --steps 2 --env {{inputs}}/warmer.py:Warmer --max-tokens 64 --max-turns 3",
    "resumed": f"--model demo {SAMPLED} --steps 2 --mini-batches 2 --beta 0.02 --loss-type cispo"
    " --epsilon-high 5",
    "processes": f"--model demo {SAMPLED} --steps 2 --rubric data/demo_rubric.yaml"
    " --judge-mode decode --beta 0.02",
}
RESUMED_STEPS = 4
NUM_PROCESSES = {"processes": 2}

# in the order in which a difference arises: rollouts, updates, evaluations
LOGS = ("rollouts.jsonl", "metrics.jsonl", "eval_answers.jsonl", "eval.jsonl")
ADAPTERS = ("adapter", "adapter-best")
# Keys that depend on the clock and the machine, and a sum that earlier commits did not write.
TIMED_KEY = re.compile(r"(/s|_s|tok_s)$|tok_s/|^mem/|^seconds$|^tokens/total$")
USER_VARIABLES = ("GWEN_", "RUBRIC_", "WANDB_", "MLX_", "OPENAI_", "HF_")


def make_run_environment() -> dict[str, str]:
    """The variables of this process without a user's settings, for one thread and no hub."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(USER_VARIABLES)
    }
    return variables | {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}


def train_in_processes(flags: list[str], num_processes: int, directory: Path) -> None:
    """
    Runs `train.py` in one process or in several connected processes.

    Raises RuntimeError with the errors that a failed process printed.
    """
    environment = make_run_environment()
    if num_processes == 1:
        command = [sys.executable, "train.py", *flags]
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        results = [((process.stdout, process.stderr), process.returncode)]
    else:
        from tests.machines import Machines

        command = ["train.py", *flags]
        with Machines(num_processes, directory, *command, base=environment) as machines:
            results = machines.wait()
    for (_, errors), status in results:
        if status:
            raise RuntimeError(f"train.py {' '.join(flags)} ended with status {status}:\n{errors}")


def train_compared_run(name: str, directory: Path) -> Path:
    """Trains a run of COMPARED_RUNS below a directory; returns the run's directory."""
    write_inputs(directory)
    run = directory / name
    flags = [*COMPARED_FLAGS.split(), *COMPARED_RUNS[name].format(inputs=directory).split()]
    flags += ["--run-dir", str(run)]
    train_in_processes(flags, NUM_PROCESSES.get(name, 1), directory)
    if name == "resumed":
        train_in_processes(["--resume", str(run), "--steps", str(RESUMED_STEPS)], 1, directory)
    return run


def strip_times(value: Any) -> Any:
    """A JSON value without the keys of times, at any depth."""
    if isinstance(value, dict):
        return {
            key: strip_times(inner) for key, inner in value.items() if not TIMED_KEY.search(key)
        }
    if isinstance(value, list):
        return [strip_times(inner) for inner in value]
    return value


def copy_outputs(run: Path, out: Path) -> None:
    """Copies the outputs of a run that must not change: logs without times, and adapters."""
    out.mkdir(parents=True)
    for log in LOGS:
        with (run / log).open() as lines, (out / log).open("w") as stripped:
            for line in lines:
                stripped.write(json.dumps(strip_times(json.loads(line))) + "\n")
    for adapter in ADAPTERS:
        if (run / adapter).is_dir():
            shutil.copytree(run / adapter, out / adapter)


# ---- the first difference


def shorten(value: object) -> str:
    """A value as JSON in one line, cut to 120 characters."""
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def find_value_difference(saved: Any, now: Any, place: str) -> str | None:
    """
    The first place where two JSON values differ, with both values, or None.

    Two nans are equal, and 1 differs from 1.0.
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        new_keys = [key for key in now if key not in saved]
        for key in [*saved, *new_keys]:
            inner = f"{place}, {json.dumps(key)}"
            if key not in now:
                return f"{inner}: saved {shorten(saved[key])}, now absent"
            if key not in saved:
                return f"{inner}: saved absent, now {shorten(now[key])}"
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
    return f"{place}: saved {shorten(saved)}, now {shorten(now)}"


def find_log_difference(saved: Path, now: Path, place: str) -> str | None:
    """The first difference of two JSONL files, or None."""
    saved_lines = saved.read_text().splitlines()
    now_lines = now.read_text().splitlines()
    for number, (old, new) in enumerate(zip(saved_lines, now_lines, strict=False), 1):
        line_place = f"{place}, line {number}"
        difference = find_value_difference(json.loads(old), json.loads(new), line_place)
        if difference:
            return difference
    if len(saved_lines) != len(now_lines):
        return f"{place}: saved {len(saved_lines)} lines, now {len(now_lines)}"
    return None


def find_tensor_difference(saved: Path, now: Path, place: str) -> str | None:
    """The first tensor that differs in two safetensors files, with its first different number."""
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


def find_files(directory: Path) -> set[Path]:
    """The relative paths of all files below a directory."""
    return {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}


def find_difference(saved: Path, now: Path) -> str | None:
    """
    The first difference of two directories that `copy_outputs` wrote, or None.

    It names the run, the file, the line or tensor, and both values.
    """
    saved_names = find_files(saved)
    now_names = find_files(now)
    names = saved_names | now_names
    log_names = [Path(log) for log in LOGS if Path(log) in names]
    other_names = sorted(names.difference(log_names))
    for name in [*log_names, *other_names]:
        place = f"{saved.name}, {name}"
        if name not in now_names:
            return f"{place}: saved, now absent"
        if name not in saved_names:
            return f"{place}: not saved, now present"
        if name.suffix == ".jsonl":
            difference = find_log_difference(saved / name, now / name, place)
        elif name.suffix == ".safetensors":
            difference = find_tensor_difference(saved / name, now / name, place)
        else:
            saved_value = json.loads((saved / name).read_text())
            now_value = json.loads((now / name).read_text())
            difference = find_value_difference(saved_value, now_value, place)
        if difference:
            return difference
    return None


# ---- the command


def describe_rounding() -> dict[str, str]:
    """
    The OpenBLAS kernels and the version of MLX, which decide how sums are rounded.

    The outputs of machines are comparable only if these are equal.
    """
    from tests.blas import kernel_family

    return {"kernels": kernel_family(), "mlx": version("mlx")}


def save(directory: Path, names: list[str]) -> None:
    """Makes runs and writes their outputs below a directory that does not exist or is empty."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; give --save a new directory")
    (directory / "machine.json").write_text(json.dumps(describe_rounding()))
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            run = train_compared_run(name, Path(scratch))
            copy_outputs(run, directory / name)
            lines = (directory / name / "metrics.jsonl").read_text().splitlines()
            if not any(json.loads(line)["grad_norm"] for line in lines):
                raise RuntimeError(
                    f"run {name} had no gradient, so it can show no difference; "
                    "give it another --seed"
                )
            print(f"{name}: saved", flush=True)


def compare(directory: Path, names: list[str]) -> str | None:
    """Repeats the runs of `save` until outputs differ; returns the first difference, or None."""
    try:
        saved_rounding = json.loads((directory / "machine.json").read_text())
    except FileNotFoundError as error:
        raise ValueError(
            f"{directory} has no machine.json; write it with --save {directory}"
        ) from error
    difference = find_value_difference(saved_rounding, describe_rounding(), "machine")
    if difference:
        raise ValueError(
            f"{difference}; set OPENBLAS_CORETYPE, install that mlx, or save anew on this machine"
        )
    for name in names:
        if not (directory / name).is_dir():
            raise ValueError(f"{directory} has no run {name}; name those that it has with --only")

    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            run = train_compared_run(name, Path(scratch))
            outputs = Path(scratch) / "now" / name
            copy_outputs(run, outputs)
            difference = find_difference(directory / name, outputs)
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
        "--only",
        nargs="+",
        choices=COMPARED_RUNS,
        default=list(COMPARED_RUNS),
        help="some of the runs",
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
