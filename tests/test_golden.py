"""What holds in every run, whatever its method: checked on the six runs of golden.py."""

import base64
import re
import shutil

import mlx.core as mx
import numpy as np
import pytest
from conftest import read_log, read_tree, read_untimed_log
from golden import RUNS
from test_docs import EVALUATION_METRICS, METRICS, required_metrics, undocumented_keys
from test_report import page_data

import train
from disk import model_choice
from reporting import page
from settings import sources
from tasks import demo

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", RUNS)]


PHASES = ("rollout", "reward", "judge", "ref", "teacher", "update", "other")


def test_each_step_has_a_log_line_whose_metrics_are_complete_and_documented(golden, kind):
    metrics = read_log(golden(kind) / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3]
    for record in metrics:
        assert required_metrics() <= record.keys()
        assert not undocumented_keys(record, METRICS)
        seconds = sum(record[f"{phase}/s"] or 0.0 for phase in PHASES)
        assert 0 < seconds <= record["step/s"] + 1e-6
        assert np.isfinite(record["loss"])
        assert record["mem/peak_gb"] > 0
        if kind != "sft":
            other_seconds = record["rollout/s"] + record["reward/s"] + record["other/s"]
            assert record["train/s"] == pytest.approx(record["step/s"] - other_seconds)
            assert record["mismatch/logprob_abs_max"] < 1e-4

    evaluations = read_log(golden(kind) / "eval.jsonl")
    assert [record["step"] for record in evaluations] == [0, 2, 3]
    assert all(not undocumented_keys(record, EVALUATION_METRICS) for record in evaluations)

    output_lines = (golden(kind).parent / f"{kind}.out").read_text().splitlines()
    steps = [line.split(" | ")[0] for line in output_lines if line.startswith("step ")]
    assert steps == ["step 1/3", "step 2/3", "step 3/3"]


def expected_reward(components, weights):
    default_weights = {"rubric": 0.5}
    return sum(
        value * weights.get(name, default_weights.get(name, 1.0))
        for name, value in components.items()
    )


def test_the_recorded_rewards_advantages_and_losses_of_completions_add_up(golden, kind):
    rows = read_log(golden(kind) / "rollouts.jsonl")
    weights = sources.load_recipe(golden(kind) / "config.yaml")["reward_weights"] or {}
    assert bool(rows) == (kind != "sft")

    groups = {}
    for row in rows:
        reward = expected_reward(row["rewards"], weights)
        assert row["reward"] == pytest.approx(reward, abs=1e-6)
        groups.setdefault((row["step"], row["group"]), []).append(row)

        # Each row is rewarded for the answer to its prompt.
        if kind not in ("sft", "tools"):
            assert len(row["ids"]) > 0
            assert len(base64.b64decode(row["logprobs"])) == 2 * len(row["ids"])
            correct = demo.correct(
                prompts=[row["prompt"]],
                completions=[row["completion"]],
                answer=[row["answer"]],
            )
            assert [row["rewards"]["correct"]] == correct

    # On policy, the loss is minus the mean of the advantage over all tokens.
    if kind == "grpo":
        for step, record in enumerate(read_log(golden(kind) / "metrics.jsonl"), 1):
            step_rows = [row for row in rows if row["step"] == step]
            advantage_sum = sum(row["advantage"] * len(row["ids"]) for row in step_rows)
            num_tokens = sum(len(row["ids"]) for row in step_rows)
            assert record["loss"] == pytest.approx(-advantage_sum / num_tokens, abs=1e-4)

    # The advantages of a group sum to 0, and the highest reward has the highest advantage.
    for group in groups.values():
        assert len(group) == 4
        rewards = [row["reward"] for row in group]
        advantages = [row["advantage"] for row in group]
        if kind != "distill":
            assert sum(advantages) == pytest.approx(0, abs=1e-5)
            assert (np.std(rewards) > 1e-6) == any(advantages)
            assert np.argmax(rewards) in np.flatnonzero(np.isclose(advantages, max(advantages)))


def read_contents(path):
    """The bytes of a file, or of all files in a directory."""
    return list(read_tree(path).values()) if path.is_dir() else path.read_bytes()


def test_a_run_resumed_after_any_step_ends_with_the_same_bytes(golden, kind, tmp_path):
    """Except with tools: their speed decides which rows are decoded together, and thereby rounding."""
    complete_run = golden(kind)
    for last_step in {"grpo": (1, 2), "tools": ()}.get(kind, (1,)):
        run = tmp_path / str(last_step)
        shutil.copytree(complete_run, run)
        for step in range(last_step + 1, 4):
            shutil.rmtree(run / "checkpoints" / f"step-{step:06}")
        # The best adapter of the run with `sft` is that of a later step.
        flags = ["--allow-changes"] if kind == "sft" else []
        train.main(["--resume", str(run), *flags])

        for log in ("metrics", "eval", "eval_answers", "rollouts", "judge_scores"):
            resumed_log = read_untimed_log(run / f"{log}.jsonl")
            assert resumed_log == read_untimed_log(complete_run / f"{log}.jsonl"), log
        for file in ("adapter", "adapter-best", "checkpoints/step-000003/state.safetensors"):
            assert read_contents(run / file) == read_contents(complete_run / file), file


def test_the_recorded_accuracy_of_an_evaluation_is_the_mean_over_the_answers(golden, kind):
    answers = read_log(golden(kind) / "eval_answers.jsonl")
    evaluations = read_log(golden(kind) / "eval.jsonl") if kind != "sft" else []
    for record in evaluations:
        values = [answer["values"][0] for answer in answers if answer["step"] == record["step"]]
        assert len(values) == 8
        assert record["eval/num"] == 8
        assert np.mean(values) == record["eval/accuracy"]


def test_the_best_adapter_has_the_lowest_loss_or_the_first_accuracy_that_none_beats(golden, kind):
    run = golden(kind)
    losses = {
        record["step"]: record.get("eval/loss", 0.0) for record in read_log(run / "eval.jsonl")
    }
    # Of equal losses, the first wins. With 8 problems, no accuracy is significantly better.
    best_step = min(losses, key=losses.__getitem__)
    last_step = max(losses)
    description = f"is from step {best_step}" if best_step else "is the model before training"
    if best_step == last_step:
        description = "is the same adapter"
    output = (run.parent / f"{kind}.out").read_text()
    (advice,) = re.findall(rf"^use: {re.escape(str(run))}/(.*)$", output, re.M)
    assert advice.startswith(f"adapter, after step {last_step}; adapter-best {description}")
    assert "\nadapter: " not in output  # only one line says which adapter to use

    best_weights = run / "adapter-best" / "adapters.safetensors"
    if best_step == 0:
        for name, array in mx.load(str(best_weights)).items():
            if name.endswith("lora_b"):
                assert not array.any(), name
    else:
        saved_adapter = run / "checkpoints" / f"step-{best_step:06}" / "adapter"
        saved_weights = saved_adapter / "adapters.safetensors"
        assert best_weights.read_bytes() == saved_weights.read_bytes()


def test_the_settings_of_a_run_are_a_recipe_with_the_same_settings(golden, kind):
    path = golden(kind) / "config.yaml"
    config, _ = sources.resolve_settings({}, str(path), None, model_choice.choose_model_and_reason)
    assert sources.to_yaml(config) == path.read_text()


def test_the_page_of_a_run_shows_completions_and_rewards(golden, kind, tmp_path):
    output = (golden(kind).parent / f"{kind}.out").read_text()
    assert f"page: {golden(kind) / 'report.html'}" in output

    markup = page.write_page(shutil.copytree(golden(kind), tmp_path / "run")).read_text()
    assert "3 of 3" in markup
    assert len(markup) > 10_000

    shown_rows = []
    for group in page_data(markup)["completions"]["groups"]:
        shown_rows += group["rows"]
    logged_rows = read_log(golden(kind) / "rollouts.jsonl")
    shown_rewards = sorted(row["reward"] for row in shown_rows)
    logged_rewards = sorted(row["reward"] for row in logged_rows)
    assert shown_rewards == pytest.approx(logged_rewards, abs=1e-3)
    for row in logged_rows:
        text = row["messages"][-1]["content"] if "messages" in row else row["completion"]
        assert any(text in shown_row["text"] for shown_row in shown_rows), text
