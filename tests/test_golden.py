"""What holds in every run, whatever it trains on: read from the six of golden.py."""

import base64
import re
import shutil

import mlx.core as mx
import numpy as np
import pytest
from conftest import read_log, read_tree, read_untimed_log
from golden import RUNS
from test_docs import EVALUATION_METRICS, METRICS, always_there, without_meaning
from test_report import data_of

import train
from disk import model_choice
from reporting import page
from settings import sources
from tasks import demo

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", RUNS)]


def test_each_step_has_its_line_its_figures_and_their_meanings(golden, kind):
    metrics, evaluations = (read_log(golden(kind) / f"{log}.jsonl") for log in ("metrics", "eval"))
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert [line["step"] for line in evaluations] == [0, 2, 3]
    for line in metrics:
        assert always_there() <= line.keys() and not without_meaning(line, METRICS)
        phases = [
            line[f"{phase}/s"]
            for phase in ("rollout", "reward", "judge", "ref", "teacher", "update", "other")
        ]
        assert 0 < sum(seconds or 0.0 for seconds in phases) <= line["step/s"] + 1e-6
        assert np.isfinite(line["loss"]) and line["mem/peak_gb"] > 0
        if kind != "sft":
            rest = line["step/s"] - line["rollout/s"] - line["reward/s"] - line["other/s"]
            assert (
                line["train/s"] == pytest.approx(rest) and line["mismatch/logprob_abs_max"] < 1e-4
            )
    assert all(not without_meaning(line, EVALUATION_METRICS) for line in evaluations)
    printed = (golden(kind).parent / f"{kind}.out").read_text().splitlines()
    assert [line.split(" | ")[0] for line in printed if line.startswith("step ")] == [
        f"step {n}/3" for n in (1, 2, 3)
    ]


def test_what_is_recorded_of_a_completion_adds_up(golden, kind):
    rows, settings = (
        read_log(golden(kind) / "rollouts.jsonl"),
        sources.load_recipe(golden(kind) / "config.yaml"),
    )
    assert bool(rows) == (kind != "sft")
    groups = {}
    for row in rows:
        weights = settings["reward_weights"] or {}
        total = sum(
            value * weights.get(name, {"rubric": 0.5}.get(name, 1.0))
            for name, value in row["rewards"].items()
        )
        assert row["reward"] == pytest.approx(total, abs=1e-6)
        groups.setdefault((row["step"], row["group"]), []).append(row)
        if kind not in ("sft", "tools"):  # each is rewarded for its own prompt
            assert len(base64.b64decode(row["logprobs"])) == 2 * len(row["ids"]) > 0
            one = {
                "prompts": [row["prompt"]],
                "completions": [row["completion"]],
                "answer": [row["answer"]],
            }
            assert [row["rewards"]["correct"]] == demo.correct(**one)
    if kind == "grpo":  # on policy the loss is the mean of minus the advantage over all tokens
        for step, line in enumerate(read_log(golden(kind) / "metrics.jsonl"), 1):
            its = [(row["advantage"], len(row["ids"])) for row in rows if row["step"] == step]
            expected = -sum(advantage * tokens for advantage, tokens in its) / sum(
                tokens for _, tokens in its
            )
            assert line["loss"] == pytest.approx(expected, abs=1e-4)
    for group in groups.values():
        assert len(group) == 4
        rewards, advantages = ([row[name] for row in group] for name in ("reward", "advantage"))
        if kind != "distill":
            assert sum(advantages) == pytest.approx(0, abs=1e-5)
            assert (np.std(rewards) > 1e-6) == any(advantages)
            assert np.argmax(rewards) in np.flatnonzero(np.isclose(advantages, max(advantages)))


def test_a_run_that_stopped_after_any_step_ends_with_the_same_bytes(golden, kind, tmp_path):
    """Except with tools, which answer when they can: what is decoded beside what, and so its roundings, may differ."""
    whole = golden(kind)
    for last in {"grpo": (1, 2), "tools": ()}.get(kind, (1,)):
        run = tmp_path / str(last)
        shutil.copytree(whole, run)
        for step in range(last + 1, 4):
            shutil.rmtree(run / "checkpoints" / f"step-{step:06}")
        better = (
            ["--allow-changes"] if kind == "sft" else []
        )  # its best adapter is that of a later step
        train.main(["--resume", str(run), *better])
        for log in ("metrics", "eval", "eval_answers", "rollouts", "judge_scores"):
            assert read_untimed_log(run / f"{log}.jsonl") == read_untimed_log(
                whole / f"{log}.jsonl"
            ), log
        for file in ("adapter", "adapter-best", "checkpoints/step-000003/state.safetensors"):
            paths = [directory / file for directory in (run, whole)]
            if paths[1].is_dir():
                ours, theirs = ([*read_tree(path).values()] for path in paths)
            else:
                ours, theirs = (path.read_bytes() for path in paths)
            assert ours == theirs, file


def test_what_is_recorded_of_an_evaluation_is_what_its_answers_say(golden, kind):
    answers = read_log(golden(kind) / "eval_answers.jsonl")
    for line in read_log(golden(kind) / "eval.jsonl") if kind != "sft" else ():
        values = [answer["values"][0] for answer in answers if answer["step"] == line["step"]]
        assert len(values) == line["eval/num"] == 8 and np.mean(values) == line["eval/accuracy"]


def test_its_best_adapter_is_of_the_lowest_loss_or_of_the_first_accuracy_that_none_beats(
    golden, kind
):
    run = golden(kind)
    losses = {line["step"]: line.get("eval/loss", 0.0) for line in read_log(run / "eval.jsonl")}
    best = min(
        losses, key=losses.__getitem__
    )  # of equals the first; 8 problems tell no other accuracy
    when = f"is from step {best}" if best else "is the model before training"
    if best == max(losses):
        when = "is the same adapter"
    output = (run.parent / f"{kind}.out").read_text()
    (line,) = re.findall(rf"^use: {re.escape(str(run))}/(.*)$", output, re.M)
    assert line.startswith(f"adapter, after step {max(losses)}; adapter-best {when}")
    assert "\nadapter: " not in output  # the line that says what to use is the only one
    kept = run / "adapter-best" / "adapters.safetensors"
    saved = run / "checkpoints" / f"step-{best:06}" / "adapter" / "adapters.safetensors"
    begun = all(
        not array.any() for name, array in mx.load(str(kept)).items() if name.endswith("lora_b")
    )
    assert begun if best == 0 else kept.read_bytes() == saved.read_bytes()


def test_its_settings_are_a_recipe_of_the_same_settings(golden, kind):
    path = golden(kind) / "config.yaml"
    config, _ = sources.resolve_settings({}, str(path), None, model_choice.choose_model_and_reason)
    assert sources.to_yaml(config) == path.read_text()


def test_its_page_shows_what_was_said_and_the_figures(golden, kind, tmp_path):
    assert (
        f"page: {golden(kind) / 'report.html'}" in (golden(kind).parent / f"{kind}.out").read_text()
    )
    markup = page.write_page(shutil.copytree(golden(kind), tmp_path / "run")).read_text()
    assert "3 of 3" in markup and len(markup) > 10_000
    shown = [row for group in data_of(markup)["completions"]["groups"] for row in group["rows"]]
    written = read_log(golden(kind) / "rollouts.jsonl")
    assert sorted(row["reward"] for row in shown) == pytest.approx(
        sorted(row["reward"] for row in written), abs=1e-3
    )
    said = [
        row["messages"][-1]["content"] if "messages" in row else row["completion"]
        for row in written
    ]
    assert all(any(text in row["text"] for row in shown) for text in said)
