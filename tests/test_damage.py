"""
Run directories that something has damaged: a resume goes on as the undamaged run would have, or ends in a line.

Here a resume does everything but its steps: what it restores, and the logs it goes on with, must be those of the
undamaged run at that step, of which all that follows is a function.
"""

import contextlib
import io
import json
import re
import shutil
import tempfile
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import export
import gwen
import lora
import report
import train
import trainer
from disk import checkpoint, hub, model_choice
from disk.run_files import START
from machine import versions
from settings import sources

pytestmark = pytest.mark.slow
STEPS = 3
RUN = [
    *(
        "--model",
        "demo",
        "--batch",
        "2",
        "--groups",
        "2",
        "--max-tokens",
        "8",
        "--eval-every",
        "1",
        "--eval-limit",
    ),
    *("4", "--save-every", "1", "--steps", f"{STEPS}"),
    *("--lora-rank", "2", "--lora-targets", "o_proj"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undamaged run of three saved steps that began with an adapter."""
    directory = tmp_path_factory.mktemp("whole")
    model, _ = gwen.load("demo")
    lora.apply(model, 2, 2.0, ["o_proj"])
    lora.save_adapter_or_full_weights(model, directory / "start", "demo")
    train.main(
        [*RUN, "--init-adapter", str(directory / "start"), "--run-dir", str(directory / "run")]
    )
    return directory / "run"


@pytest.fixture(scope="module")
def go_on(whole):
    """As `resume` below, but without steps and with one model; adds what was restored."""
    made = train.GrpoRun(
        sources.resolve_settings({}, None, str(whole), model_choice.choose_model_and_reason)[0],
        whole,
    )
    states = []

    def make(config, path):
        made.config, made.dir = config, path
        return made

    def look(run):
        state = run.checkpoint_state()
        extra = {
            name: value for name, value in state.extra.items() if name != "settings"
        }  # some may change
        arrays = (
            sorted(
                (name, str(array.dtype), array.tolist()) for name, array in arrays_by_name.items()
            )
            for arrays_by_name in state[1:3]
        )
        states.append([state.step, extra, checkpoint.digest_of_reprs(*arrays)])
        return iter(())

    def go_on(run):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(versions, "collect_environment_facts", lambda _: {})  # it asks git
            patch.setattr(trainer, "make_run", make)
            patch.setattr(train, "train", look)
            return *resume(run), states[-1] if states else None

    return go_on


@pytest.fixture(scope="module")
def undamaged(whole, go_on, tmp_path_factory):
    """What an undamaged run restores and has left when it goes on, by the step of its newest checkpoint."""
    expected = {}
    for step in range(1, STEPS + 1):
        run = shutil.copytree(whole, tmp_path_factory.mktemp("undamaged") / "run")
        for later in checkpoint.list_checkpoints(run)[step:]:
            shutil.rmtree(later)
        status, output, state = go_on(run)
        assert (status, output) == (0, "")
        expected[step] = [state, left(run)]
    return expected


def resume(run, *flags):
    """Exit status and what was said on stderr; any other exception is for the caller."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
        try:
            train.main(["--resume", str(run), "--steps", f"{STEPS + 1}", *flags])
        except SystemExit as error:
            return error.code, output.getvalue()
    return 0, output.getvalue()


NOTE = re.compile(
    r"checkpoint step-\d{6} is damaged \(.*\); trying the checkpoint before it\n"
)  # one for each such checkpoint
TIMED = re.compile("/s$|_s$|/s/|^mem/|^step_avg")  # figures of the clock and the machine
LOGS = [
    f"{name}.jsonl"
    for name in ("metrics", "rollouts", "eval", "eval_answers", "warnings", "judge_scores")
]
ADAPTER = ("adapter_config.json", "adapters.safetensors")
KEPT = [
    "config.yaml",
    *(f"{name}/{file}" for name in ("adapter", "adapter-best", START) for file in ADAPTER),
]


def left(run):
    """What a run has left, but for what depends on the clock and the machine."""
    logs = {
        name: [json.loads(line) for line in (run / name).read_text().splitlines()] for name in LOGS
    }
    records = {
        name: [
            {key: value for key, value in record.items() if not TIMED.search(key)}
            for record in logs[name]
        ]
        for name in logs
    }
    return records | {name: (run / name).read_bytes() for name in KEPT}


# ---- damage


def edit(name, change):
    """A damage: the content of a file of the run becomes `change(content)`."""

    def damage(run):
        path = run / name
        content = path.read_bytes()
        assert change(content) != content
        path.write_bytes(change(content))

    return damage


def instead(name, make):
    """A damage: `make(path)` puts something else in the place of a file."""

    def damage(run):
        (run / name).unlink()
        make(run / name)

    return damage


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def swap(first, second):
    def damage(run):
        (run / first).rename(run / "between")
        (run / second).rename(run / first)
        (run / "between").rename(run / second)

    return damage


def each_checkpoint(run):
    for path in checkpoint.list_checkpoints(run):
        edit("state.safetensors", flip)(path)


NEWEST = "checkpoints/step-000003"
DAMAGE = {  # what is done, and the step from which the run goes on, or the line in which it ends
    "a bit of the optimizer": (edit(f"{NEWEST}/state.safetensors", flip), 2),
    "a digit of a record": (
        edit(
            f"{NEWEST}/state.json",
            lambda text: text.replace(b'"num_skipped": 0', b'"num_skipped": 1'),
        ),
        2,
    ),
    "a record without a checksum": (edit(f"{NEWEST}/state.json", lambda _: b"{}"), 2),
    "no record": (lambda run: (run / NEWEST / "state.json").unlink(), 2),
    "a record nested without end": (edit(f"{NEWEST}/state.json", lambda _: b"[" * 3000), 2),
    "a record that links to itself": (
        instead(f"{NEWEST}/state.json", lambda path: path.symlink_to(path)),
        2,
    ),
    "tensors that are a directory": (instead(f"{NEWEST}/state.safetensors", Path.mkdir), 2),
    "no newest checkpoint": (lambda run: shutil.rmtree(run / NEWEST), 2),
    "checkpoints in each other's place": (swap(NEWEST, "checkpoints/step-000002"), 1),
    "no whole checkpoint": (
        each_checkpoint,
        "this run has no intact checkpoint; start over with: uv run train.py",
    ),
    "no adapter": (lambda run: shutil.rmtree(run / "adapter"), 3),
    "a torn last line": (edit("eval.jsonl", lambda text: text + b'{"step": 4, "eval/acc'), 3),
    "later records": (edit("metrics.jsonl", lambda text: text + b'{"step": 4}\n'), 3),
    "a line that is no JSON": (
        edit("eval.jsonl", lambda text: b"null\n" + text),
        "eval.jsonl, line 1 is damaged",
    ),
    "no settings": (edit("config.yaml", lambda _: b""), "config.yaml contains no settings"),
    "another seed": (
        edit("config.yaml", lambda text: text.replace(b"seed: 0", b"seed: 5")),
        r"seed \(0, now 5\) changed",
    ),
    "an environment that is no JSON": (
        edit("env.json", lambda _: b"\xff"),
        "env.json cannot be read as JSON",
    ),
    "a lock that is a directory": (
        instead("lock", Path.mkdir),
        "the run directory .* cannot be written",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_goes_on_as_the_undamaged_one_or_ends_in_a_line(
    whole, go_on, undamaged, tmp_path, name
):
    damage, outcome = DAMAGE[name]
    run = shutil.copytree(whole, tmp_path / "run")
    damage(run)
    status, output, state = go_on(run)
    rest = NOTE.sub("", output)
    if isinstance(outcome, int):
        assert (status, rest) == (0, "")
        assert [state, left(run)] == undamaged[outcome]
    else:
        assert status == 2 and rest.count("\n") == 1 and re.match(f"error: .*{outcome}", rest), (
            output
        )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_bytes_of_a_run_change_it_restores_what_was_saved_or_ends_in_a_line(
    whole, go_on, undamaged, data
):
    names = sorted({str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()})
    content = (whole / (name := data.draw(st.sampled_from(names)))).read_bytes()
    first, last = sorted(data.draw(st.tuples(*[st.floats(0, 1)] * 2)))
    first, last = round(first * len(content)), round(last * len(content))
    new = data.draw(
        st.one_of(st.binary(max_size=8), st.sampled_from([b"1e999", b'"12"', b"null", b"[]", None]))
    )
    with tempfile.TemporaryDirectory() as directory:
        run = shutil.copytree(whole, Path(directory) / "run")
        (run / name).write_bytes(
            content[:first] + (content if new is None else new) + content[last:]
        )
        status, output, state = go_on(run)
        rest = NOTE.sub("", output)
        if status:
            assert (
                status == 2
                and rest.startswith("error: ")
                and rest.count("\n") == 1
                and len(rest) < 900
            ), output
        else:
            assert state == undamaged[state[0]][0]
            steps = [
                json.loads(line)["step"]
                for line in (run / "metrics.jsonl").read_text().splitlines()
            ]
            assert max(steps, default=0) <= state[0]


# ---- what a run is made of


@pytest.fixture(scope="module")
def made_of_files(tmp_path_factory):
    """A directory with a run of one step, and the user's files that it was made of."""
    at = tmp_path_factory.mktemp("made_of_files")
    shutil.copytree(hub.DEMO, at / "model")
    (at / "mine.py").write_text(
        "def mine(completions, **_): return [float(len(text)) for text in completions]\n"
    )
    rows = [
        {"prompt": f"What is {word} plus one?", "answer": "5", "split": "train"}
        for word in ("one", "two", "six")
    ]
    (at / "mine.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, rows[0] | {"split": "test"}])
    )
    (at / "mine.yaml").write_text("criteria: [{name: kind, weight: 1.0, text: Is it kind}]")
    flags = f"--model {at}/model --data {at}/mine.jsonl --reward {at}/mine.py:mine --rubric {at}/mine.yaml"
    train.main([*RUN, "--steps", "1", *flags.split(), "--run-dir", str(at / "run")])
    return at


def flip_last(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def swap_tokens(content):
    tokenizer = json.loads(content)
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    return json.dumps(tokenizer).encode()


@pytest.mark.parametrize(
    ("file", "edit", "named"),
    [
        ("mine.py", lambda text: text + b"# longer is better", "{}/mine.py"),
        ("mine.jsonl", lambda text: text.replace(b"plus", b"and"), "{}/mine.jsonl"),
        ("mine.yaml", lambda text: text.replace(b"it kind", b"it rude"), "{}/mine.yaml"),
        ("model/chat_template.jinja", lambda text: b"{# #}" + text, "chat template"),
        ("model/tokenizer.json", swap_tokens, "tokenizer"),
        ("model/model.safetensors", flip_last, "base model"),
        ("run/config.yaml", lambda text: text.replace(b"seed: 0", b"seed: 5"), "seed (0, now 5)"),
    ],
)
def test_a_resume_names_what_has_changed_since_the_run_was_saved(
    made_of_files, tmp_path, file, edit, named
):
    run, path, before = (
        made_of_files / "run",
        made_of_files / file,
        (made_of_files / file).read_bytes(),
    )
    shutil.copytree(run, tmp_path / "kept")
    assert edit(before) != before
    try:
        path.write_bytes(edit(before))
        status, output = resume(run)
        assert (
            status == 2
            and f"{run}: {named.format(made_of_files)} changed since step 1; " in output
            and "--allow-changes" in output
        )
    finally:
        path.write_bytes(before)
        shutil.rmtree(run)
        shutil.move(tmp_path / "kept", run)


def test_changes_that_are_allowed_are_told_and_the_next_checkpoint_knows_them(
    made_of_files, tmp_path
):
    run = shutil.copytree(made_of_files / "run", tmp_path / "run")
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("seed: 0", "seed: 5")
    )
    text = (made_of_files / "mine.jsonl").read_text()
    (made_of_files / "mine.jsonl").write_text(text.replace("plus", "and"))
    try:
        status, output = resume(run, "--allow-changes")
        assert status == 0, output
        *changes, warning = output.splitlines()
        assert changes == [
            f"{run}: seed (0, now 5) changed since step 1",
            f"{run}: {made_of_files}/mine.jsonl changed since step 1",
        ]
        assert "held-out problems" in warning
        assert resume(run) == (0, "")
    finally:
        (made_of_files / "mine.jsonl").write_text(text)


def test_a_run_does_not_become_one_of_another_kind_and_changes_are_for_a_resume(
    made_of_files, tmp_path, check_refusal
):
    run = shutil.copytree(made_of_files / "run", tmp_path / "run")
    settings = {"model": "demo", "data": "mine.jsonl", "loss_type": "sft"}
    (run / "config.yaml").write_text(json.dumps(settings))
    message = (
        f"error: --resume {run}: the loss type of this run was dapo, not sft; start a new run\n"
    )
    assert resume(run, "--allow-changes") == (2, message)
    shutil.copy(made_of_files / "run" / "config.yaml", run)
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("lora_rank: 2", "lora_rank: 4")
    )
    status, message = resume(run, "--allow-changes")
    assert (
        status == 2
        and f"--resume {run}: the tensors of the checkpoint do not match"
        in message.splitlines()[-1]
    )
    check_refusal(
        train.main,
        [*RUN, "--allow-changes"],
        "--allow-changes works only with --resume",
    )


def test_a_command_that_reads_a_damaged_run_shows_it_or_ends_in_a_line(whole, tmp_path):
    statuses = []
    for name, (damage, _) in DAMAGE.items():
        run, out = shutil.copytree(whole, tmp_path / "run"), tmp_path / "out"
        damage(run)
        for command, flags in (
            (report.main, [run]),
            (export.main, ["--export", "peft", "--run", run, "--out", out]),
        ):
            output, status = io.StringIO(), 0
            with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
                try:
                    command(list(map(str, flags)))
                except SystemExit as error:
                    status = error.code
            assert len(output.getvalue().splitlines()) == bool(status), name
            statuses.append(status)
        shutil.rmtree(run)
        shutil.rmtree(out, ignore_errors=True)
    assert set(statuses) == {0, 2}
