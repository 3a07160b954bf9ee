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

import gwen
import lora
import report
import train
from disk import adapters, checkpoint, hub
from disk.run_files import START
from machine import gpu
from settings import sources

pytestmark = pytest.mark.slow
STEPS = 3
RUN = [
    *("--model", "demo", "--batch", "2", "--groups", "2", "--max-tokens", "8", "--eval-every", "1", "--eval-limit"),
    *("4", "--save-every", "1", "--steps", f"{STEPS}"),
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


def resume(run, *flags):
    """Exit status and what was said; any other exception is for the caller."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            train.main(["--resume", str(run), *MORE, *flags])
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
    made, states = train.GrpoRun(sources.resolve({}, None, str(whole), gwen.choose_model)[0], whole), []

    def make(settings, path):
        made.config, made.dir = settings, path
        return made

    def look(_, run):
        state = run.state()
        states.append([state.step, state.extra, *(adapters.checksum(arrays, {}) for arrays in state[1:3])])
        return iter(())

    monkeypatch.setattr(gpu, "environment", lambda _: {})  # it asks git
    monkeypatch.setattr(train, "GrpoRun", make)
    monkeypatch.setattr(train, "train", look)
    counts = survey(whole, range(300), states)
    assert min(counts.values()) > 10, counts


# ---- what a run is made of


@pytest.fixture(scope="module")
def made_of_files(tmp_path_factory):
    """A directory with a run of one step, and the user's files that it was made of."""
    at = tmp_path_factory.mktemp("made_of_files")
    shutil.copytree(hub.DEMO, at / "model")
    (at / "mine.py").write_text("def mine(completions, **_): return [float(len(text)) for text in completions]\n")
    rows = [{"prompt": f"What is {word} plus one?", "answer": "5", "split": "train"} for word in ("one", "two", "six")]
    (at / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0] | {"split": "test"}]))
    (at / "mine.yaml").write_text("criteria: [{name: kind, weight: 1.0, text: Is it kind}]")
    flags = f"--model {at}/model --data {at}/mine.jsonl --reward {at}/mine.py:mine --rubric {at}/mine.yaml --curriculum"
    train.main([*RUN, "--steps", "1", *flags.split(), "--run-dir", str(at / "run")])
    return at


def flip_last(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def swap_tokens(content):
    held = json.loads(content)
    vocabulary = held["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    return json.dumps(held).encode()


@pytest.mark.parametrize(
    ("file", "edit", "named"),
    [
        ("mine.py", lambda text: text + b"# longer is better", "{}/mine.py"),
        ("mine.jsonl", lambda text: text.replace(b'"5"', b'"7"', 1), "{}/mine.jsonl"),
        ("mine.yaml", lambda text: text.replace(b"it kind", b"it rude"), "{}/mine.yaml"),
        ("model/chat_template.jinja", lambda text: b"{# #}" + text, "chat template"),
        ("model/tokenizer.json", swap_tokens, "tokenizer"),
        ("model/model.safetensors", flip_last, "base model"),
        ("run/config.yaml", lambda text: text.replace(b"seed: 0", b"seed: 5"), "seed (0, now 5)"),
        ("run/config.yaml", lambda text: text.replace(b"keep: 3", b"keep: 1"), "keep (3, now 1)"),
        ("run/metrics.jsonl", lambda text: b"", "metrics.jsonl, which lacks step 1,"),
        ("run/rollouts.jsonl", lambda text: text.replace(b"finish", b"Finish", 1), "rollouts.jsonl"),
        ("run/adapter-best/adapters.safetensors", lambda text: text[:-1], None),  # which a checkpoint has
    ],
)
def test_a_resume_names_what_has_changed_since_the_run_was_saved(made_of_files, tmp_path, file, edit, named):
    run, path, before = made_of_files / "run", made_of_files / file, (made_of_files / file).read_bytes()
    shutil.copytree(run, tmp_path / "kept")
    assert edit(before) != before
    try:
        path.write_bytes(edit(before))
        expected = (0, "")
        if named:
            said = f"{named.format(made_of_files)} changed since step 1; --allow-changes goes on with it"
            expected = 2, f"error: --resume {run}: {said}\n"
        assert resume(run) == expected
    finally:
        path.write_bytes(before)
        shutil.rmtree(run)
        shutil.move(tmp_path / "kept", run)


def test_changes_that_are_allowed_are_recorded_and_not_asked_for_again(made_of_files, tmp_path, monkeypatch):
    run = shutil.copytree(made_of_files / "run", tmp_path / "run")
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("seed: 0", "seed: 5"))
    (run / "warnings.jsonl").unlink()
    text = (made_of_files / "mine.jsonl").read_text()
    (made_of_files / "mine.jsonl").write_text("".join(text.splitlines(keepends=True)[1:]))  # the curriculum forgets
    monkeypatch.setattr(checkpoint, "save", lambda *_, **__: None)  # as if it was killed before
    monkeypatch.setattr(checkpoint, "publish", lambda *_: None)
    try:
        status, said = resume(run, "--allow-changes")
        assert status == 0, said
        assert said.splitlines() == [
            f"{run}: seed (0, now 5) changed since step 1",
            f"{run}: warnings.jsonl, which is missing, changed since step 1",
            f"{run}: {made_of_files}/mine.jsonl changed since step 1",
        ]
        changes = [json.loads(line) for line in (run / "changes.jsonl").read_text().splitlines()]
        changed = [f"{made_of_files}/mine.jsonl", "seed", "steps"]
        assert [(line["step"], line["setting"]) for line in changes] == [(1, name) for name in changed]
        (run / "warnings.jsonl").touch()
        assert resume(run) == (0, "")
    finally:
        (made_of_files / "mine.jsonl").write_text(text)


def test_a_run_does_not_become_one_of_another_kind_and_changes_are_for_a_resume(made_of_files, tmp_path, refused):
    run = shutil.copytree(made_of_files / "run", tmp_path / "run")
    settings = {"model": "demo", "data": "mine.jsonl", "loss_type": "sft"}
    (run / "config.yaml").write_text(json.dumps(settings))
    said = f"error: --resume {run}: its loss_type was dapo, not sft; start a new run\n"
    assert resume(run, "--allow-changes") == (2, said)
    shutil.copy(made_of_files / "run" / "config.yaml", run)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("lora_rank: 2", "lora_rank: 4"))
    status, said = resume(run, "--allow-changes")
    assert status == 2 and "the checkpoint's tensors do not match this configuration" in said.splitlines()[-1]
    refused(train.main, [*RUN, "--allow-changes"], "--allow-changes is for a run that goes on; name it with --resume")


def test_a_command_that_reads_a_damaged_run_shows_it_or_ends_in_a_line(whole, tmp_path):
    counts = {0: 0, 2: 0}
    for number in range(40):
        run, out = shutil.copytree(whole, tmp_path / "run", symlinks=True), tmp_path / "out"
        what = damage(run, number)
        for command, flags in ((report.main, [run]), (lora.main, ["--export", "peft", "--run", run, "--out", out])):
            said, status = io.StringIO(), 0
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                try:
                    command(list(map(str, flags)))
                except SystemExit as error:
                    status = error.code
                except Exception as error:
                    raise AssertionError(f"after {what}") from error
            assert len(said.getvalue().splitlines()) == bool(status), what
            counts[status] += 1
        shutil.rmtree(run)
        shutil.rmtree(out, ignore_errors=True)
    assert min(counts.values()) > 10, counts


def main(count, first):
    with tempfile.TemporaryDirectory() as directory:
        with contextlib.redirect_stdout(io.StringIO()):
            whole = record_run(Path(directory))
        print(f"{count} damaged directories: {survey(whole, range(first, first + count))}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
