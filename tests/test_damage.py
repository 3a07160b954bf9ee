"""
Damaged run directories: a resume continues like a resume of the undamaged run, or ends in one line.

Here a resume does everything except its steps. What it restores, and the logs that it continues,
must be those of the undamaged run at that step: everything that follows is a function of them.
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
from conftest import read_log, write_log
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
RUN = (
    "--model demo --batch 2 --groups 2 --max-tokens 8 --eval-every 1 --eval-limit 4 --save-every 1 "
    f"--steps {STEPS} --lora-rank 2 --lora-targets o_proj"
).split()


@pytest.fixture(scope="module")
def intact_run(tmp_path_factory):
    """An undamaged run of three saved steps that began with an adapter."""
    directory = tmp_path_factory.mktemp("intact")
    model, _ = gwen.load("demo")
    lora.apply(model, 2, 2.0, ["o_proj"])
    start = directory / "start"
    lora.save_adapter_or_full_weights(model, start, "demo")
    train.main([*RUN, "--init-adapter", str(start), "--run-dir", str(directory / "run")])
    return directory / "run"


@pytest.fixture(scope="module")
def resume_without_steps(intact_run):
    """Like `resume` below, but without steps and with one model; also returns the state."""
    choose_model = model_choice.choose_model_and_reason
    config, _ = sources.resolve_settings({}, None, str(intact_run), choose_model)
    shared_run = train.GrpoRun(config, intact_run)
    states = []

    def reuse_run(config, path):
        shared_run.config = config
        shared_run.dir = path
        return shared_run

    def record_state(run):
        state = run.checkpoint_state()
        # Some settings may change.
        extra = {name: value for name, value in state.extra.items() if name != "settings"}
        sorted_arrays = []
        for arrays_by_name in state[1:3]:
            arrays = [
                (name, str(array.dtype), array.tolist()) for name, array in arrays_by_name.items()
            ]
            sorted_arrays.append(sorted(arrays))
        states.append([state.step, extra, checkpoint.digest_of_reprs(*sorted_arrays)])
        return iter(())

    def resume_without_steps(run):
        with pytest.MonkeyPatch.context() as patch:
            # Collecting the facts would start git.
            patch.setattr(versions, "collect_environment_facts", lambda _: {})
            patch.setattr(trainer, "make_run", reuse_run)
            patch.setattr(train, "train", record_state)
            status, output = resume(run)
        return status, output, states[-1] if states else None

    return resume_without_steps


@pytest.fixture(scope="module")
def expected_by_step(intact_run, resume_without_steps, tmp_path_factory):
    """The restored state and the outputs of an undamaged run, by the step of its checkpoint."""
    expected = {}
    for step in range(1, STEPS + 1):
        run = shutil.copytree(intact_run, tmp_path_factory.mktemp("undamaged") / "run")
        for later in checkpoint.list_checkpoints(run)[step:]:
            shutil.rmtree(later)
        status, output, state = resume_without_steps(run)
        assert (status, output) == (0, "")
        expected[step] = [state, read_outputs(run)]
    return expected


def resume(run, *flags):
    """Resumes a run; returns the exit status and the text on stderr."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
        try:
            train.main(["--resume", str(run), "--steps", f"{STEPS + 1}", *flags])
        except SystemExit as error:
            return error.code, output.getvalue()
    return 0, output.getvalue()


# A resume prints this note for each damaged checkpoint.
NOTE = re.compile(r"checkpoint step-\d{6} is damaged \(.*\); trying the checkpoint before it\n")
TIMED = re.compile("/s$|_s$|/s/|^mem/|^step_avg")  # figures of the clock and the machine
LOGS = "metrics rollouts eval eval_answers warnings judge_scores".split()
RUN_FILES = ["config.yaml"]
for folder in ("adapter", "adapter-best", START):
    RUN_FILES += [f"{folder}/adapter_config.json", f"{folder}/adapters.safetensors"]


def read_outputs(run):
    """The logs and files of a run, without the values that depend on the clock and the machine."""

    def without_timed_values(record):
        return {key: value for key, value in record.items() if not TIMED.search(key)}

    outputs = {}
    for name in LOGS:
        records = read_log(run / f"{name}.jsonl")
        outputs[name] = [without_timed_values(record) for record in records]
    for name in RUN_FILES:
        outputs[name] = (run / name).read_bytes()
    return outputs


# ---- damage


def edit(name, change):
    """Makes a damage: the content of a file of the run becomes `change(content)`."""

    def damage(run):
        path = run / name
        content = path.read_bytes()
        assert change(content) != content
        path.write_bytes(change(content))

    return damage


def replace(name, make):
    """Makes a damage: `make(path)` puts something else in the place of a file."""

    def damage(run):
        (run / name).unlink()
        make(run / name)

    return damage


def flip_bit(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def swap(first, second):
    """Makes a damage: two paths of the run change places."""

    def damage(run):
        (run / first).rename(run / "between")
        (run / second).rename(run / first)
        (run / "between").rename(run / second)

    return damage


def damage_each_checkpoint(run):
    for path in checkpoint.list_checkpoints(run):
        edit("state.safetensors", flip_bit)(path)


NEWEST = "checkpoints/step-000003"
RECORD = f"{NEWEST}/state.json"
DAMAGE = {  # the damage, and the step from which the run continues, or the line in which it ends
    "a bit of the optimizer": (edit(f"{NEWEST}/state.safetensors", flip_bit), 2),
    "a digit of a record": (
        edit(RECORD, lambda text: text.replace(b'"num_skipped": 0', b'"num_skipped": 1')),
        2,
    ),
    "a record without a checksum": (edit(RECORD, lambda _: b"{}"), 2),
    "no record": (lambda run: (run / RECORD).unlink(), 2),
    "a record nested without end": (edit(RECORD, lambda _: b"[" * 3000), 2),
    "a record that links to itself": (replace(RECORD, lambda path: path.symlink_to(path)), 2),
    "tensors that are a directory": (replace(f"{NEWEST}/state.safetensors", Path.mkdir), 2),
    "no newest checkpoint": (lambda run: shutil.rmtree(run / NEWEST), 2),
    "checkpoints in each other's place": (swap(NEWEST, "checkpoints/step-000002"), 1),
    "no intact checkpoint": (
        damage_each_checkpoint,
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
        replace("lock", Path.mkdir),
        "the run directory .* cannot be written",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_continues_like_the_undamaged_run_or_ends_in_one_line(
    intact_run, resume_without_steps, expected_by_step, tmp_path, name
):
    damage, outcome = DAMAGE[name]
    run = shutil.copytree(intact_run, tmp_path / "run")
    damage(run)
    status, output, state = resume_without_steps(run)
    message = NOTE.sub("", output)
    if isinstance(outcome, int):
        assert (status, message) == (0, "")
        assert [state, read_outputs(run)] == expected_by_step[outcome]
    else:
        assert status == 2, output
        assert message.count("\n") == 1, output
        assert re.match(f"error: .*{outcome}", message), output


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_run_with_changed_bytes_restores_the_saved_state_or_ends_in_one_line(
    intact_run, resume_without_steps, expected_by_step, data
):
    paths = [path for path in intact_run.rglob("*") if path.is_file()]
    name = data.draw(st.sampled_from(sorted({str(path.relative_to(intact_run)) for path in paths})))
    content = (intact_run / name).read_bytes()

    # Some bytes of the file are replaced by others, or by the whole file.
    fractions = sorted(data.draw(st.tuples(*[st.floats(0, 1)] * 2)))
    first, last = (round(fraction * len(content)) for fraction in fractions)
    special = st.sampled_from([b"1e999", b'"12"', b"null", b"[]", None])
    new = data.draw(st.one_of(st.binary(max_size=8), special))
    if new is None:
        new = content

    with tempfile.TemporaryDirectory() as directory:
        run = shutil.copytree(intact_run, Path(directory) / "run")
        (run / name).write_bytes(content[:first] + new + content[last:])
        status, output, state = resume_without_steps(run)
        message = NOTE.sub("", output)
        if status:
            assert status == 2, output
            assert message.startswith("error: "), output
            assert message.count("\n") == 1, output
            assert len(message) < 900, output
        else:
            assert state == expected_by_step[state[0]][0]
            steps = [record["step"] for record in read_log(run / "metrics.jsonl")]
            assert max(steps, default=0) <= state[0]


# ---- the files that a run depends on


@pytest.fixture(scope="module")
def run_of_user_files(tmp_path_factory):
    """A directory with a run of one step, and with the user's files that the run depends on."""
    directory = tmp_path_factory.mktemp("run_of_user_files")
    shutil.copytree(hub.DEMO, directory / "model")
    (directory / "mine.py").write_text(
        "def mine(completions, **_): return [float(len(text)) for text in completions]\n"
    )
    rows = [
        {"prompt": f"What is {word} plus one?", "answer": "5", "split": "train"}
        for word in ("one", "two", "six")
    ]
    write_log(directory / "mine.jsonl", [*rows, rows[0] | {"split": "test"}])
    rubric = "criteria: [{name: kind, weight: 1.0, text: Is it kind}]"
    (directory / "mine.yaml").write_text(rubric)
    flags = (
        "--model {0}/model --data {0}/mine.jsonl --reward {0}/mine.py:mine --rubric {0}/mine.yaml"
    )
    flags += " --steps 1 --run-dir {0}/run"
    train.main([*RUN, *flags.format(directory).split()])
    return directory


def flip_last_bit(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def swap_tokens(content):
    tokenizer = json.loads(content)
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    return json.dumps(tokenizer).encode()


@pytest.mark.parametrize(
    ("file", "change", "changed_name"),
    [
        ("mine.py", lambda text: text + b"# longer is better", "{}/mine.py"),
        ("mine.jsonl", lambda text: text.replace(b"plus", b"and"), "{}/mine.jsonl"),
        ("mine.yaml", lambda text: text.replace(b"it kind", b"it rude"), "{}/mine.yaml"),
        ("model/chat_template.jinja", lambda text: b"{# #}" + text, "chat template"),
        ("model/tokenizer.json", swap_tokens, "tokenizer"),
        ("model/model.safetensors", flip_last_bit, "base model"),
        ("run/config.yaml", lambda text: text.replace(b"seed: 0", b"seed: 5"), "seed (0, now 5)"),
    ],
)
def test_a_resume_names_each_file_and_setting_that_changed_since_the_checkpoint(
    run_of_user_files, tmp_path, file, change, changed_name
):
    run = run_of_user_files / "run"
    path = run_of_user_files / file
    content = path.read_bytes()
    shutil.copytree(run, tmp_path / "backup")
    assert change(content) != content
    try:
        path.write_bytes(change(content))
        status, output = resume(run)
        assert status == 2
        name = changed_name.format(run_of_user_files)
        assert f"{run}: {name} changed since step 1; " in output
        assert "--allow-changes" in output
    finally:
        path.write_bytes(content)
        shutil.rmtree(run)
        shutil.move(tmp_path / "backup", run)


def test_allowed_changes_are_reported_once_and_saved_in_the_next_checkpoint(
    run_of_user_files, tmp_path
):
    run = shutil.copytree(run_of_user_files / "run", tmp_path / "run")
    edit("config.yaml", lambda text: text.replace(b"seed: 0", b"seed: 5"))(run)
    data = run_of_user_files / "mine.jsonl"
    text = data.read_text()
    data.write_text(text.replace("plus", "and"))
    try:
        status, output = resume(run, "--allow-changes")
        assert status == 0, output
        *changes, warning = output.splitlines()
        assert changes == [
            f"{run}: seed (0, now 5) changed since step 1",
            f"{run}: {data} changed since step 1",
        ]
        assert "held-out problems" in warning
        assert resume(run) == (0, "")
    finally:
        data.write_text(text)


def test_allow_changes_permits_no_other_loss_type_no_other_lora_rank_and_no_new_run(
    run_of_user_files, tmp_path, check_refusal
):
    run = shutil.copytree(run_of_user_files / "run", tmp_path / "run")
    settings = {"model": "demo", "data": "mine.jsonl", "loss_type": "sft"}
    (run / "config.yaml").write_text(json.dumps(settings))
    message = (
        f"error: --resume {run}: the loss type of this run was dapo, not sft; start a new run\n"
    )
    assert resume(run, "--allow-changes") == (2, message)

    shutil.copy(run_of_user_files / "run" / "config.yaml", run)
    edit("config.yaml", lambda text: text.replace(b"lora_rank: 2", b"lora_rank: 4"))(run)
    status, output = resume(run, "--allow-changes")
    assert status == 2
    mismatch = f"--resume {run}: the tensors of the checkpoint do not match"
    assert mismatch in output.splitlines()[-1]

    refusal = "--allow-changes works only with --resume"
    check_refusal(train.main, [*RUN, "--allow-changes"], refusal)


def test_a_report_or_export_of_a_damaged_run_succeeds_or_ends_in_one_line(intact_run, tmp_path):
    run = tmp_path / "run"
    out = tmp_path / "out"
    commands = [
        (report.main, [str(run)]),
        (export.main, ["--export", "peft", "--run", str(run), "--out", str(out)]),
    ]
    statuses = []
    for name, (damage, _) in DAMAGE.items():
        shutil.copytree(intact_run, run)
        damage(run)
        for command, flags in commands:
            output = io.StringIO()
            status = 0
            with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
                try:
                    command(flags)
                except SystemExit as error:
                    status = error.code
            assert len(output.getvalue().splitlines()) == bool(status), name
            statuses.append(status)
        shutil.rmtree(run)
        shutil.rmtree(out, ignore_errors=True)
    assert set(statuses) == {0, 2}
