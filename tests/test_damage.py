"""
Run directories that something has damaged: a resume goes on as the undamaged run would have, or ends in a line.

Here a resume does everything but its steps: what it restores, and the logs it goes on with, must be those of the
undamaged run at that step, of which all that follows is a function. `python -m tests.test_damage 300 SEED` also takes
the steps, and compares what they leave.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)
import pytest

import config
import gwen
import lora
import train
from disk import adapters, checkpoint
from disk.run_files import START

pytestmark = pytest.mark.slow
STEPS = 3
RUN = [
    *("--model", "demo", "--batch", "2", "--groups", "2", "--max-tokens", "8", "--eval-every", "1", "--eval-limit"),
    *("4", "--report-every", "0", "--save-every", "1", "--steps", f"{STEPS}", "--lr-schedule", "constant"),
    *("--lora-rank", "2", "--lora-targets", "o_proj"),
]
ADAPTER = ("adapter_config.json", "adapters.safetensors")
MORE = ["--steps", f"{STEPS + 1}"]


def record_run(directory):
    """An undamaged run of three saved steps that began with an adapter and was resumed once; and its settings."""
    model, _ = gwen.load("demo")
    lora.apply(model, 2, 2.0, ["o_proj"])
    lora.save_adapter(model, directory / "start", "demo")
    run = directory / "run"
    train.main([*RUN, "--steps", "1", "--init-adapter", str(directory / "start"), "--run-dir", str(run)])
    train.main(["--resume", str(run), "--steps", f"{STEPS}"])
    return run


# ---- damage


def replace(path, content):
    path.write_bytes(content)


def edited(rng, text, new):
    """A JSON or YAML text with one of its numbers replaced."""
    found = rng.choice(list(re.finditer(rb"-?\d+\.?\d*", text)) or [re.match(b"", text)])
    return text[: found.start()] + new(found[0]) + text[found.end() :]


def flip(rng, path, run):
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 8])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    replace(path, bytes(content))


def cut(rng, path, run):
    replace(path, path.read_bytes()[: rng.randrange(path.stat().st_size)])


def lose_lines(rng, path, run):
    lines = path.read_bytes().splitlines(keepends=True)
    first = rng.choice([0, len(lines) - 1, rng.randrange(len(lines))])
    del lines[first : first + rng.choice([1, 1, 4])]
    replace(path, b"".join(lines))


def repeat_lines(rng, path, run):
    lines = path.read_bytes().splitlines(keepends=True)
    replace(path, b"".join(lines + lines[rng.randrange(len(lines)) :]))


def change_number(rng, path, run):
    replace(path, edited(rng, path.read_bytes(), lambda old: b"%d" % (int(float(old)) + rng.choice([-1, 1, 10**9]))))


def change_type(rng, path, run):
    odd = rng.choice([b'"12"', b"null", b"[]", b"{}", b"true", b"NaN", b"1e999", b"-7", b"[" * 3000, b"9" * 400])
    replace(path, edited(rng, path.read_bytes(), lambda _: odd))


def swap(rng, path, run):
    other = rng.choice([file for file in files_of(run) if file != path])
    content = path.read_bytes()
    replace(path, other.read_bytes())
    replace(other, content)


def swap_directories(rng, path, run):
    one, two = rng.sample([*checkpoint.saved(run), run / "adapter", run / "adapter-best", run / START], 2)
    one.rename(run / "between")
    two.rename(one)
    (run / "between").rename(two)


def lose_directory(rng, path, run):
    shutil.rmtree(rng.choice([*checkpoint.saved(run), run / "adapter", run / "adapter-best", run / START]))


def another_kind(rng, path, run):
    path.unlink()
    kind = rng.choice(["nothing", "directory", "dangling link", "link to itself", "link to another", "pipe"])
    if kind == "directory":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to(run / "nowhere")
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "link to another":
        path.symlink_to(rng.choice(files_of(run)))
    elif kind == "pipe":
        os.mkfifo(path)


DAMAGE = [
    *(flip, flip, flip, cut, cut, lose_lines, lose_lines, repeat_lines, change_number, change_number, change_type),
    *(swap, swap, swap_directories, lose_directory, another_kind, another_kind),
    *(lambda rng, path, run: replace(path, b""), lambda rng, path, run: replace(path, path.read_bytes() + b"\0{}\n")),
]


def files_of(run):
    return sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)


def damage(run, number):
    """Damages a copy of a run; returns words about it."""
    rng = random.Random(number)
    kind = rng.choice(DAMAGE)
    # a kind of file first: tensors are most of the bytes, and no more than the rest
    named = {}
    for file in files_of(run):
        named.setdefault(re.sub("step-0+[0-9]", "step", str(file.relative_to(run))), []).append(file)
    path = rng.choice(rng.choice(list(named.values())))
    with contextlib.suppress(ValueError):  # a number beyond its type stays as it was
        kind(rng, path, run)
    return f"{number}: {kind.__name__} of {path.relative_to(run)}"


# ---- what a resume makes of it


def resume(run):
    """Exit status and what was said; any other exception is for the caller."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            train.main(["--resume", str(run), *MORE])
        except SystemExit as error:
            return error.code, said.getvalue()
    return 0, said.getvalue()


def is_line(status, said):
    """Whether a resume has ended in a line, after one for each damaged checkpoint."""
    *notes, line = said.splitlines() or [""]
    told = all(re.fullmatch(r"checkpoint step-\d{6} is damaged \(.*\); trying the one before", note) for note in notes)
    return status == 2 and told and line.startswith("error: ") and len(line) < 600 and said.endswith("\n")


TIMED = re.compile("/s$|_s$|/s/|^mem/|^step_avg")  # figures of the clock and the machine
KEPT = ["config.yaml", *(f"{name}/{file}" for name in ("adapter", "adapter-best", START) for file in ADAPTER)]


def left(run):
    """What a run has left, but for what depends on the clock and the machine."""
    logs = {name: [json.loads(line) for line in (run / name).read_text().splitlines()] for name in checkpoint.LOGS}
    records = {name: [{k: v for k, v in one.items() if not TIMED.search(k)} for one in logs[name]] for name in logs}
    return records | {name: (run / name).read_bytes() for name in KEPT}


def survey(whole, numbers, states=()):
    """
    Damages a copy of a run for each number and resumes it; returns how many went on and how many ended in a line.

    states: gets what each resume restored, where that is looked at. Each must leave what an undamaged run leaves that
    goes on from the same checkpoint, or has gone wrong in a line.
    """
    expected, counts = {}, {"went on": 0, "went on from an earlier checkpoint": 0, "ended in a line": 0}
    with tempfile.TemporaryDirectory() as directory:
        for step in range(1, STEPS + 1):
            run = shutil.copytree(whole, Path(directory) / f"undamaged-{step}")
            for later in checkpoint.saved(run)[step:]:
                shutil.rmtree(later)
            assert resume(run) == (0, "")
            expected[step] = [left(run), *states[-1:]]
        for number in numbers:
            run = shutil.copytree(whole, Path(directory) / f"{number}")
            what = damage(run, number)
            try:
                status, said = resume(run)
                if status:
                    assert is_line(status, said), said
                    counts["ended in a line"] += 1
                else:
                    step = json.loads((run / "changes.jsonl").read_text().splitlines()[-1])["step"]
                    assert [left(run), *states[-1:]] == expected[step]
                    counts["went on" if step == STEPS else "went on from an earlier checkpoint"] += 1
            except BaseException as error:
                raise AssertionError(f"after {what}") from error
            shutil.rmtree(run)
    return counts


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("whole"))


def test_a_damaged_run_goes_on_as_the_undamaged_one_or_ends_in_a_line(whole, monkeypatch):
    made, states = train.Run(config.resolve({}, None, str(whole), gwen.choose_model)[0], whole), []

    def make(settings, path):
        made.config, made.dir = settings, path
        return made

    def look(_, run):
        state = run.state()
        states.append([state.step, state.extra, *(adapters.checksum(arrays, {}) for arrays in state[1:3])])

    monkeypatch.setattr(train, "Run", make)
    monkeypatch.setattr(train, "train", look)
    counts = survey(whole, range(300), states)
    print(counts)
    assert min(counts.values()) > 10, counts


def main(count, first):
    with tempfile.TemporaryDirectory() as directory:
        with contextlib.redirect_stdout(io.StringIO()):
            whole = record_run(Path(directory))
        print(f"{count} damaged directories: {survey(whole, range(first, first + count))}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
