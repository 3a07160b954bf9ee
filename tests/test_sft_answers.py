"""Supervised fine-tuning with --verifier or --reward, so that evaluations also sample answers."""

import json
import shutil

import pytest
from conftest import catch_message, read_log, write_log
from small_run import resolve_settings

import evaluate
import report
import train
from disk.eval_record import format_figure_with_interval
from prompts.examples import last_user_text
from run import make_run
from settings.sources import parse_flags, settings_from_flags
from tasks import replies

NUM_ROWS = 30


def addition_rows():
    """Conversations with a number as the reply; every third one is held out."""
    rows = []
    for number in range(NUM_ROWS):
        split = "train" if number % 3 else "held_out"
        prompt = f"What is {number} plus {number}?"
        rows.append({"prompt": prompt, "completion": f"{2 * number}", "split": split})
    return rows


def sft_flags(data, *flags):
    return [
        *("--model", "demo", "--loss-type", "sft", "--data", str(data), "--batch", "4"),
        *("--steps", "2", "--eval-every", "1", "--save-every", "1", *flags),
    ]


def make_config(data, *flags):
    settings = settings_from_flags(parse_flags(sft_flags(data, *flags)))
    config, _ = resolve_settings(settings)
    return config


@pytest.fixture
def data(tmp_path):
    return write_log(tmp_path / "replies.jsonl", addition_rows())


# ---- the held-out task


def load_task(rows, tmp_path, *flags):
    path = write_log(tmp_path / "rows.jsonl", rows)
    return replies.load_conversations_and_task(make_config(path, *flags), []).task


def test_the_reply_is_the_right_answer_unless_the_data_has_a_column_answer(tmp_path):
    rows = addition_rows()
    task = load_task(rows, tmp_path, "--verifier", "number")
    assert [example["answer"] for example in task.held_out] == [str(6 * n) for n in range(10)]
    for row in rows:
        row["answer"] = 7
    task = load_task(rows, tmp_path, "--verifier", "number")
    assert {example["answer"] for example in task.held_out} == {"7"}


def test_evaluations_sample_the_last_trained_reply_of_a_conversation(tmp_path):
    held_out_messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "What is two plus two?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Really?"},
        {"role": "assistant", "content": "5", "weight": 0},
    ]
    train_messages = [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "6"}]
    rows = [
        {"messages": held_out_messages, "split": "held_out"},
        {"messages": train_messages, "split": "train"},
    ]
    (example,) = load_task(rows, tmp_path, "--verifier", "number").held_out
    assert last_user_text(example["prompt"]) == "What is two plus two?"
    assert example["answer"] == "4"
    assert len(example["prompt"]) == 3


def test_prompts_that_cannot_be_scored_or_need_tools_are_excluded_and_counted(tmp_path):
    rows = addition_rows()
    rows[0]["completion"] = "There is no answer to that, I am afraid, whatever you may think."
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    rows[3]["tools"] = [schema]
    task = load_task(rows, tmp_path, "--verifier", "number")
    assert len(task.held_out) == 8
    notes = " ".join(task.notes)
    assert "8 held-out prompts are answered" in notes
    assert "1 left out because their conversations use tools" in notes
    assert "1 left out because their answers cannot be compared" in notes


def test_a_verifier_without_any_comparable_answer_is_refused(tmp_path):
    completion = "Who can say? It is hard to tell, I am afraid."
    rows = [row | {"completion": completion} for row in addition_rows()]
    path = write_log(tmp_path / "rows.jsonl", rows)
    message = catch_message(
        replies.load_conversations_and_task, make_config(path, "--verifier", "auto"), []
    )
    assert f"--data {path}" in message
    assert "--columns answer=COLUMN" in message


# ---- settings


def test_settings_for_sampling_need_a_verifier_or_a_reward(data):
    config = make_config(data, "--verifier", "number", "--max-tokens", "12", "--stop", ".")
    assert config.sampling.max_tokens == 12
    assert "--max-tokens 12 is for" in catch_message(make_config, data, "--max-tokens", "12")
    message = catch_message(make_config, data, "--verifier", "number", "--groups", "4")
    assert "--groups 4 is for runs that sample completions" in message


# ---- runs


@pytest.fixture(scope="module")
def verified_run(tmp_path_factory):
    """A run whose evaluations sample answers."""
    folder = tmp_path_factory.mktemp("verified")
    data = write_log(folder / "replies.jsonl", addition_rows())
    reward = folder / "mine.py"
    reward.write_text(
        "def short(completions, **_):\n    return [len(text) for text in completions]\n"
    )
    flags = ["--verifier", "number", "--reward", f"{reward}:short", "--max-tokens", "6"]
    run_dir = folder / "run"
    train.main(sft_flags(data, *flags, "--run-dir", str(run_dir)))
    return run_dir


def test_evaluations_report_accuracy_and_reward_in_addition_to_the_loss(verified_run, capsys):
    evaluations = read_log(verified_run / "eval.jsonl")
    assert [record["step"] for record in evaluations] == [0, 1, 2]
    for record in evaluations:
        assert record["eval/num"] == 10
        assert record["eval/loss"] > 0
        assert len(record["eval/losses"]) == 10
        assert 0 <= record["eval/accuracy"] <= 1
        assert "eval/reward/short" in record
        assert record["eval/kl"] is not None

    answers = read_log(verified_run / "eval_answers.jsonl")
    assert len(answers) == 30
    assert set(answers[0]["rewards"]) == {"short"}

    report.main(["--list", str(verified_run.parent)])
    output = capsys.readouterr().out
    for record in (evaluations[0], evaluations[-1]):
        assert format_figure_with_interval(record, "accuracy") in output


def test_reports_show_the_accuracy_and_the_loss(verified_run, capsys):
    report.main(["--compare", str(verified_run), str(verified_run)])
    output = capsys.readouterr().out
    assert "held-out accuracy before" in output
    assert "held-out loss before" in output

    page = (verified_run / "report.html").read_text()
    for text in ("accuracy", "held-out loss after", "What is"):
        assert text in page


def test_a_resumed_run_repeats_its_evaluations(verified_run, tmp_path):
    run = shutil.copytree(verified_run, tmp_path / "run")
    expected = [drop_costs(record) for record in read_log(run / "eval.jsonl")]
    shutil.rmtree(run / "checkpoints" / "step-000002")
    train.main(["--resume", str(run)])
    assert [drop_costs(record) for record in read_log(run / "eval.jsonl")] == expected


def drop_costs(record):
    names = ("eval/s", "time/s", "tokens/total")
    return {name: value for name, value in record.items() if name not in names}


def test_the_command_evaluate_reproduces_the_accuracy_and_the_loss(verified_run, capsys):
    evaluate.main(["--run", str(verified_run)])
    record = drop_costs(json.loads(capsys.readouterr().out.splitlines()[-1]))
    expected = drop_costs(read_log(verified_run / "eval.jsonl")[-1])
    expected.pop("step")
    assert record == expected


def test_a_resume_with_a_changed_reward_is_refused(verified_run, tmp_path, check_refusal):
    reward = verified_run.parent / "mine.py"
    text = reward.read_text()
    reward.write_text(text.replace("len(text)", "-len(text)"))
    try:
        flags = ["--resume", verified_run, "--steps", "3"]
        check_refusal(train.main, flags, "mine.py changed since step 2")
    finally:
        reward.write_text(text)


def test_the_python_api_takes_a_function_and_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("GWEN_CACHE", str(tmp_path))
    trainer = train.Trainer.start(
        model="demo",
        loss_type="sft",
        data=addition_rows(),
        reward=reward_digits,
        max_tokens=6,
        batch=4,
        steps=1,
        run_dir=str(tmp_path / "run"),
    ).fit()
    figures = trainer.evaluate()
    assert "eval/reward/reward_digits" in figures
    assert figures["eval/loss"] > 0


def reward_digits(completions, **_):
    return [float(text.strip().isdigit()) for text in completions]


def test_a_failing_reward_is_refused_before_the_run_begins(data, tmp_path, capsys):
    reward = tmp_path / "bad.py"
    reward.write_text(
        "def bad(completions, missing, **_):\n    return [0.0 for _ in completions]\n"
    )
    config = make_config(data, "--reward", f"{reward}:bad")
    assert "missing" in catch_message(make_run, config, tmp_path / "run")


def test_evaluate_can_add_a_verifier(data, tmp_path, capsys):
    run_dir = tmp_path / "run"
    train.main(sft_flags(data, "--run-dir", str(run_dir)))
    capsys.readouterr()
    evaluate.main(["--run", str(run_dir), "--verifier", "number", "--max-tokens", "6"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["eval/loss"] == read_log(run_dir / "eval.jsonl")[-1]["eval/loss"]
    assert 0 <= record["eval/accuracy"] <= 1


def test_a_resume_can_add_a_verifier_with_allow_changes(data, tmp_path, check_refusal):
    run_dir = tmp_path / "run"
    train.main(sft_flags(data, "--run-dir", str(run_dir)))
    flags = ["--resume", run_dir, "--steps", "3", "--verifier", "number", "--max-tokens", "6"]
    check_refusal(train.main, flags, "verifier")
    train.main([*map(str, flags), "--allow-changes"])
    evaluations = read_log(run_dir / "eval.jsonl")
    assert [record["step"] for record in evaluations] == [0, 1, 2, 2, 3]
    assert ["eval/accuracy" in record for record in evaluations] == [False] * 3 + [True] * 2


def test_a_reward_that_only_evaluations_use_causes_no_warning_of_reward_hacking(verified_run):
    assert not (verified_run / "warnings.jsonl").read_text()


def test_a_recipe_file_can_set_a_verifier(data, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: demo\nloss_type: sft\ndata: {data}\nverifier: number\nsteps: 1\n")
    args = parse_flags(["--config", str(recipe), "--max-tokens", "6"])
    config, _ = resolve_settings(settings_from_flags(args), args.config)
    assert config.data.verifier == "number"
    assert config.sampling.max_tokens == 6


@pytest.mark.slow
def test_evaluations_on_two_machines_equal_those_on_one(data, tmp_path):
    from machines import Machines

    flags = ["--verifier", "number", "--max-tokens", "6", "--eval-limit", "5"]
    train.main(sft_flags(data, *flags, "--run-dir", str(tmp_path / "one")))
    command = ["train.py", *sft_flags(data, *flags, "--run-dir", str(tmp_path / "two"))]
    with Machines(2, tmp_path, *command) as machines:
        for (_, errors), status in machines.wait():
            assert status == 0, errors
    expected_records = read_log(tmp_path / "one" / "eval.jsonl")
    records = read_log(tmp_path / "two" / "eval.jsonl")
    for record, expected in zip(records, expected_records, strict=True):
        for name in ("eval/accuracy", "eval/greedy", "eval/tokens", "eval/num"):
            assert record[name] == expected[name], name
        assert record["eval/loss"] == pytest.approx(expected["eval/loss"], rel=1e-4)
