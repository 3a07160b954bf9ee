"""Each program in docs/research.md runs with tiny settings and does what the page says."""

import importlib.util
import math
import os
import re
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from conftest import ROOT, read_log
from mlx.utils import tree_flatten

import grpo
from disk import hub
from train import Trainer

PAGE = (ROOT / "docs" / "research.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE, re.M | re.S))
MAX_LINES = 20
TINY = dict(batch=2, groups=4, max_tokens=8, steps=2, eval_every=0, learning_rate=1e-3)


def reward_length_and_place(completions, **columns):
    """A reward that differs within most groups."""
    return [float(len(text) % 7 + place % 2) for place, text in enumerate(completions)]


@pytest.fixture
def run_program(tmp_path, monkeypatch):
    """A function that runs the program of a section with tiny settings; returns its module."""
    monkeypatch.chdir(tmp_path)
    original_start = Trainer.start.__func__
    tiny_settings = dict(TINY)

    def start_tiny_run(cls, **settings):
        if "env" not in settings:
            settings |= {"reward": reward_length_and_place, "reward_weights": {"rubric": 0}}
        default_run_dir = {"run_dir": str(tmp_path / "run")}
        return original_start(cls, **default_run_dir | settings | tiny_settings)

    monkeypatch.setattr(Trainer, "start", classmethod(start_tiny_run))

    def run_program(title, without=(), **changes):
        tiny_settings.update(changes)
        for name in without:
            del tiny_settings[name]
        module_name = "idea_" + re.sub(r"\W", "_", title.lower())
        path = tmp_path / f"{module_name}.py"
        path.write_text(PROGRAMS[title], encoding="utf-8")
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module_name, module)
        spec.loader.exec_module(module)
        return module

    return run_program


def read_steps(tmp_path):
    """For each step, the metrics, and the records of completions in their groups, (B, G)."""
    rollouts = read_log(tmp_path / "run" / "rollouts.jsonl")
    for metrics in read_log(tmp_path / "run" / "metrics.jsonl"):
        records = [record for record in rollouts if record["step"] == metrics["step"]]
        yield metrics, np.array(records).reshape(TINY["batch"], TINY["groups"])


def read_column(records, name):
    """(B, G) records -> (B, G) float64."""
    values = [record[name] for record in records.flat]
    return np.array(values, np.float64).reshape(records.shape)


def count_tokens(records):
    """(B, G) records -> (B, G): the lengths of the completions."""
    return np.array([len(record["ids"]) for record in records.flat]).reshape(records.shape)


def test_train_py_resumes_a_run_of_another_program_if_the_advantage_function_is_imported(tmp_path):
    settings = ", ".join(f"{name}={value!r}" for name, value in TINY.items())
    function = "def centered(rewards):\n    return rewards - rewards.mean(axis=1, keepdims=True)\n"
    start = f"Trainer.start(model='demo', task='demo', advantage=centered, {settings}, "
    (tmp_path / "ideas.py").write_text(function)
    (tmp_path / "main.py").write_text(
        f"from ideas import centered\nfrom train import Trainer\n{start}run_dir='a').fit()\n"
    )
    (tmp_path / "alone.py").write_text(
        f"from train import Trainer\n{function}{start}run_dir='b').fit()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def run_python(*arguments):
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    for program, run, resume_status in (("main.py", "a", 0), ("alone.py", "b", 2)):
        process = run_python(program)
        assert process.returncode == 0, process.stderr
        assert ("only this program can resume" in process.stdout) == (resume_status == 2)

        del environment["PYTHONPATH"]
        resumed = run_python(ROOT / "train.py", "--resume", run, "--steps", 3)
        assert resumed.returncode == resume_status, resumed.stderr
        environment["PYTHONPATH"] = str(ROOT)

    assert "centered" in resumed.stderr
    assert "PYTHONPATH=~/gwen uv run --project ~/gwen mine.py" in PAGE


def test_every_section_has_one_short_program():
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == 11
    assert len(PROGRAMS) == 11
    for section in sections:
        [code] = re.findall(r"```python\n(.*?)```", section, re.S)
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= MAX_LINES, (section.splitlines()[0], len(lines))
        assert max(map(len, lines)) <= 100


def rank_advantage(reward, group_rewards):
    """The number of lower rewards minus the number of higher rewards, over G - 1."""
    return (np.sum(group_rewards < reward) - np.sum(group_rewards > reward)) / 3


def test_the_custom_advantage_compares_ranks(run_program, tmp_path):
    run_program("An advantage")
    for _, records in read_steps(tmp_path):
        rewards = read_column(records, "reward")
        advantages = read_column(records, "advantage")
        for group_rewards, group_advantages in zip(rewards, advantages, strict=True):
            expected = [rank_advantage(reward, group_rewards) for reward in group_rewards]
            np.testing.assert_allclose(group_advantages, expected, atol=1e-6)
            assert len(set(group_rewards)) > 1


def test_the_custom_loss_and_the_added_statistic_follow_the_formula(run_program, tmp_path):
    module = run_program("A loss")
    advantages = np.array([[1.5], [-2.0]])
    logprobs = np.array([[-1.0, -2.0], [-0.5, -3.0]])
    mask = np.array([[1.0, 1.0], [1.0, 0.0]])
    arrays = [
        mx.array(value.astype(np.float32)) for value in (logprobs, logprobs, advantages, mask)
    ]
    tokens = grpo.Tokens(*arrays, num_items=3, num_rows=2, weights=mx.ones((2, 1)))
    loss = module.loss(tokens, grpo.Objective())
    assert loss.value.item() == pytest.approx((1.5 * 3.0 - 0.5 * 2.0 * 0.5) / 3)

    for metrics, records in read_steps(tmp_path):
        num_tokens = count_tokens(records)
        is_bad = read_column(records, "advantage") < 0
        expected = (num_tokens * is_bad).sum() / num_tokens.sum()
        assert metrics["loss/bad_frac"] == pytest.approx(expected)
        assert 0 < expected < 1


def test_the_selection_trains_the_best_and_the_worst_completion_of_each_group(
    run_program, tmp_path
):
    run_program("A selection of completions")
    for metrics, records in read_steps(tmp_path):
        rewards = read_column(records, "reward")
        advantages = read_column(records, "advantage")
        for group_rewards, group_advantages in zip(rewards, advantages, strict=True):
            trained = np.flatnonzero(group_advantages)
            assert sorted(trained) == sorted({group_rewards.argmin(), group_rewards.argmax()})
        assert metrics["update/rows"] == 4


def test_the_selection_never_trains_missing_completions(run_program):
    module = run_program("A selection of completions", steps=1)
    rewards = np.array([[0.5, np.nan, np.nan, np.nan], [1.0, 0.0, 3.0, np.nan], [np.nan] * 4])
    advantages, is_trained = module.best_and_worst(rewards)
    assert is_trained[:2].tolist() == [[True, False, False, False], [False, True, True, False]]
    assert np.isfinite(advantages).all()

    module = run_program("An advantage", steps=1, run_dir="other")
    rank_advantages = module.rank_advantages(rewards)
    assert np.isfinite(rank_advantages[~np.isnan(rewards)]).all()


def test_replayed_completions_have_importance_ratios_other_than_1(run_program, tmp_path):
    module = run_program("Replay", epsilon=1e-4)
    (first_metrics, _), (second_metrics, _) = read_steps(tmp_path)
    assert second_metrics["update/rows"] > first_metrics["update/rows"]
    assert first_metrics["clip_frac"] == 0
    assert second_metrics["clip_frac"] > 0
    assert len(module.trainer.previous) == 8


def test_only_the_most_uncertain_tokens_are_trained(run_program, tmp_path):
    module = run_program("Only the most uncertain tokens")
    for metrics, records in read_steps(tmp_path):
        num_tokens = count_tokens(records)
        expected = np.ceil(np.float32(0.2) * num_tokens).sum() / num_tokens.sum()
        assert metrics["loss/trained_frac"] == pytest.approx(expected)
        assert expected < 1

    entropies = mx.array([[0.1, 0.9, 0.5, 0.2, 7.0]])
    mask = mx.array([[1.0, 1.0, 1.0, 1.0, 0.0]])

    def compute_loss(logprobs, entropies):
        tokens = grpo.Tokens(logprobs, logprobs, mx.array([[2.0]]), mask, num_items=4, num_rows=1)
        tokens = tokens._replace(weights=mx.ones((1, 1)), entropies=entropies)
        return module.uncertain_tokens_loss(tokens, grpo.Objective()).value

    d_logprobs, d_entropies = mx.grad(compute_loss, argnums=(0, 1))(-entropies, entropies)
    np.testing.assert_allclose(np.array(d_logprobs), [[0, -0.5, 0, 0, 0]])
    assert not np.array(d_entropies).any()


def test_lion_changes_every_weight_by_the_same_amount(run_program):
    module = run_program("An optimizer", without=["learning_rate"], steps=1, target_kl=0.0)
    learner = module.trainer.run.learner
    assert type(learner.optimizer).__name__ == "Lion"

    # B of an adapter starts at 0, so it shows the change.
    changed_weights = [
        np.array(array) for name, array in learner.trainable.items() if name.endswith("lora_b")
    ]
    assert changed_weights
    for weights in changed_weights:
        sizes = np.abs(weights)
        np.testing.assert_allclose(sizes[sizes > 0], learner.optimizer.learning_rate.item())
    assert any(weights.any() for weights in changed_weights)


def test_the_curriculum_begins_with_the_shortest_prompts_and_continues_after_a_resume(
    run_program, tmp_path
):
    module = run_program("A curriculum")
    prompts = module.trainer.run.prompts
    assert prompts.state == {"num": 8}  # two steps had rewards above 0

    def make_curriculum():
        return module.ShortestFirst(prompts.config, prompts.train, prompts.prompt_ids)

    shortest_lengths = sorted(map(len, prompts.prompt_ids))[:2]
    _, first_prompts = make_curriculum().next_prompts(0)
    assert sorted(map(len, first_prompts)) == shortest_lengths

    resumed = Trainer.resume(tmp_path / "run", steps=3)
    resumed.run.prompts = make_curriculum()
    assert resumed.run.prompts.state == {"num": 8}


def test_the_model_calls_a_tool_of_the_environment(run_program, tmp_path):
    module = run_program("An environment with two tools", max_tokens=48, steps=1, loss_type="grpo")
    environment = module.Hint()
    environment.reset()
    assert environment.tell_parity() == ["even", "odd"][environment.number % 2]
    assert environment.get_reward() == 0
    assert environment.guess(environment.number) == "right"
    assert environment.get_reward() == 1
    [schemas] = module.trainer.run.toolbox.schemas.values()
    assert list(schemas) == ["guess", "tell_parity"]
    rows = read_log(tmp_path / "run" / "rollouts.jsonl")
    calls = [call for row in rows for call in row["tool_calls"]]
    assert any(call["name"] == "guess" and call["error"] is None for call in calls)


def test_one_row_in_families_lets_gwen_read_another_family(run_program, monkeypatch):
    monkeypatch.setattr(hub, "FAMILIES", dict(hub.FAMILIES))
    module = run_program("A family of models")
    assert module.difference < 1e-4
    assert mx.abs(module.theirs(module.tokens)).max().item() > 0.1


def test_the_sweep_compares_the_runs_seed_by_seed(run_program, capsys):
    run_program("A sweep with a test", ["learning_rate"], eval_every=1, eval_limit=4, steps=1)
    output = capsys.readouterr().out
    assert "--learning-rate" in output
    assert re.search(r"over 3 seeds", output)
    assert re.search(r"± .* \(95%, Student's t\) over 3 pairs", output)


def test_the_notebook_program_shows_logprobs_entropies_and_gradient_norms_of_one_batch(
    run_program, capsys
):
    module = run_program("One batch in a notebook")
    batch = module.batch
    sample = module.samples[batch.rows[0]]
    num_tokens = len(sample.loss_positions)
    first_logprobs = np.array(module.logprobs[0])[:num_tokens]
    np.testing.assert_allclose(first_logprobs, sample.logprobs, atol=1e-3)
    assert (np.array(module.entropies * batch.mask) >= 0).all()

    output = capsys.readouterr().out
    norms = [float(norm) for norm in re.findall(r"layer \d+: gradient norm (\S+)", output)]
    squares = [mx.square(array).sum().item() for _, array in tree_flatten(module.gradient)]
    assert math.hypot(*norms) == pytest.approx(sum(squares) ** 0.5, rel=1e-2)
    assert sum(norm > 0 for norm in norms) == 4
