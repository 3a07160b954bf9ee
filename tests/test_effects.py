"""A run names the settings that cannot change the training before the first step."""

import mlx.core as mx
import pytest

import grpo
import preflight
import train
from config import Config
from step import effects
from step.effects import (
    describe_loss_settings_without_effect,
    describe_settings_affecting_only_replay,
)
from tests.small_run import SMALL_FLAGS
from tests.test_grpo import LOSSES

OWN_LOSSES = """
import grpo

def no_reference(tokens, objective):
    each = -tokens.advantages * tokens.logprobs * tokens.mask * tokens.entropies
    return grpo.Loss(each.sum() / tokens.num_items, {})

def measures_reference(tokens, objective):
    loss = no_reference(tokens, objective)
    kl = grpo.kl_term(tokens.logprobs, tokens.ref_logprobs) * tokens.mask
    return loss._replace(sums={"kl": kl.sum()})

def uses_reference(tokens, objective):
    loss = no_reference(tokens, objective)
    kl = grpo.kl_term(tokens.logprobs, tokens.ref_logprobs) * tokens.mask
    return loss._replace(value=loss.value + objective.beta * kl.sum() / tokens.num_items)
"""
ONE_UPDATE = (
    "because each rollout gets one update (--num-iterations 1, --mini-batches 1), so the "
    "importance ratio is always 1"
)


def describe(**settings):
    return describe_loss_settings_without_effect(Config.from_flags(**settings))


def read_console(capsys):
    """The output since the last call, with all white space as single spaces."""
    return " ".join(capsys.readouterr().out.split())


def test_no_line_names_a_default_setting():
    assert describe() == []


@pytest.mark.parametrize(
    ("settings", "expected_lines"),
    [
        ({"epsilon": 0.01}, [f"--epsilon 0.01 has no effect, {ONE_UPDATE}"]),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            [
                f"--epsilon-high 5.0 has no effect, {ONE_UPDATE}",
                f"--loss-type cispo trains exactly like --loss-type dapo, {ONE_UPDATE}",
            ],
        ),
        (
            {"loss_type": "sapo"},
            [f"--loss-type sapo trains exactly like --loss-type grpo, {ONE_UPDATE}"],
        ),
        (
            {"importance_sampling_level": "sequence"},
            [f"--importance-sampling-level sequence has no effect, {ONE_UPDATE}"],
        ),
    ],
    ids=str,
)
def test_with_one_update_per_rollout_lines_name_the_settings_without_effect(
    settings, expected_lines
):
    assert describe(**settings) == expected_lines


@pytest.mark.parametrize("updates", [{"num_iterations": 2}, {"mini_batches": 2}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.01},
        {"epsilon_high": 0.28},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo"},
        {"importance_sampling_level": "sequence"},
    ],
    ids=str,
)
def test_with_several_updates_per_rollout_these_settings_have_an_effect(updates, settings):
    assert describe(**updates, **settings) == []


def test_a_bound_that_the_loss_never_reads_has_no_effect_in_any_update():
    expected = "--epsilon 0.1 has no effect, because --loss-type sapo does not use it"
    assert describe(loss_type="sapo", epsilon=0.1, num_iterations=2) == [expected]
    (line,) = describe(loss_type="cispo", epsilon_high=5.0, epsilon=0.1, num_iterations=2)
    assert line == "--epsilon 0.1 has no effect, because --loss-type cispo does not use it"


def test_a_sequence_ratio_has_an_effect_if_each_turn_has_an_advantage():
    assert describe(importance_sampling_level="sequence", env="world.py:World") == []


@pytest.mark.parametrize("loss", LOSSES)
def test_a_line_names_a_setting_exactly_if_the_gradient_without_it_is_the_same(loss):
    """The random tokens differ from those of the product. The ratios are 1, or far from 1."""
    logprobs = -mx.random.uniform(0.1, 2.0, (64, 5), key=mx.random.key(7))
    shift = mx.random.uniform(-3.0, 3.0, (64, 5), key=mx.random.key(8))
    advantages = mx.random.normal((64, 1), key=mx.random.key(9))
    compute_loss = grpo.LOSSES[loss]
    for name, value in (("epsilon", 0.05), ("epsilon_high", 1.5)):
        flag = f"--{name.replace('_', '-')} "
        settings = {name: value}
        for num_updates in (1, 2):
            config = Config.from_flags(loss_type=loss, num_iterations=num_updates, **settings)
            lines = describe_loss_settings_without_effect(config)
            is_named = any(line.startswith(flag) for line in lines)

            old_logprobs = logprobs if num_updates == 1 else logprobs - shift
            tokens = grpo.Tokens(logprobs, old_logprobs, advantages, mx.ones((64, 5)))
            objective = grpo.Objective(loss_type=loss, max_tokens=5, **settings)
            unbounded = objective._replace(**{name: 1e9})
            is_equal = effects.have_equal_gradients(
                compute_loss, objective, compute_loss, unbounded, tokens
            )
            assert is_named == is_equal, (settings, num_updates)


def describe_with_own_loss(tmp_path, name, **settings):
    from step import objectives

    (tmp_path / "own.py").write_text(OWN_LOSSES)
    config = Config.from_flags(loss_type=f"{tmp_path}/own.py:{name}", **settings)
    custom = objectives.load_and_try_custom_objective(config)
    return describe_loss_settings_without_effect(config, custom.loss)


def test_a_line_names_beta_if_an_own_loss_does_not_use_the_reference(tmp_path):
    (line,) = describe_with_own_loss(tmp_path, "no_reference", beta=0.1)
    assert line.startswith("--beta 0.1 ")
    assert "reference" in line
    assert "tokens.ref_logprobs" in line
    assert line.endswith("--beta 0")

    (line,) = describe_with_own_loss(tmp_path, "measures_reference", beta=0.1)
    assert line.startswith("--beta 0.1 ")
    assert "metric" in line

    assert describe_with_own_loss(tmp_path, "uses_reference", beta=0.1) == []
    assert describe_with_own_loss(tmp_path, "no_reference") == []


def test_a_run_and_preflight_print_the_lines_and_the_run_records_them_once(tmp_path, capsys):
    run = tmp_path / "run"
    flags = [*SMALL_FLAGS, "--task", "demo", "--eval-every", "0", "--epsilon", "0.01"]
    train.main([*flags, "--steps", "1", "--run-dir", str(run)])
    output = read_console(capsys)
    line = f"--epsilon 0.01 has no effect, {ONE_UPDATE}"
    assert output.index(line) < output.index("step 1/1")

    train.main(["--resume", str(run), "--steps", "2"])
    assert line in read_console(capsys)
    assert (run / "warnings.jsonl").read_text().count("--epsilon 0.01 has no effect") == 1
    assert "--epsilon 0.01 has no effect" in (run / "report.html").read_text()

    preflight.main(flags)
    assert line in read_console(capsys)


# ---- with a hook that may replay samples


def test_with_a_samples_hook_a_clip_bound_has_no_effect_only_if_the_loss_never_reads_it():
    for settings in ({"epsilon": 0.01}, {"loss_type": "cispo", "epsilon_high": 5.0}):
        config = Config.from_flags(**settings)
        assert describe_loss_settings_without_effect(config, may_replay=True) == []
    config = Config.from_flags(loss_type="sapo", epsilon=0.1)
    (line,) = describe_loss_settings_without_effect(config, may_replay=True)
    assert line == "--epsilon 0.1 has no effect, because --loss-type sapo does not use it"


def test_with_the_correction_the_ratios_of_replayed_samples_are_1_too():
    config = Config.from_flags(
        loss_type="cispo", epsilon_high=5.0, importance_sampling_correction="token"
    )
    lines = describe_loss_settings_without_effect(config, may_replay=True)
    assert lines == describe_loss_settings_without_effect(config)
    assert any("--epsilon-high 5.0 has no effect" in line for line in lines)
    assert any("trains exactly like --loss-type dapo" in line for line in lines)
    assert describe_settings_affecting_only_replay(config) == []


def test_the_lines_of_a_run_with_a_samples_hook_mention_samples_of_earlier_steps(tmp_path, capsys):
    trainer = train.Trainer.start(
        model="demo",
        task="demo",
        batch=2,
        groups=2,
        max_tokens=6,
        eval_every=0,
        steps=2,
        loss_type="cispo",
        epsilon_high=5.0,
        run_dir=str(tmp_path / "run"),
    )
    trainer.on_samples = lambda run, samples: samples
    next(trainer.steps())
    output = read_console(capsys)
    assert "has no effect" not in output
    assert "trains exactly like" not in output
    assert (
        "--epsilon-high 5.0 has an effect and --loss-type cispo differs from --loss-type dapo only "
        "on samples of earlier steps that on_samples adds"
    ) in output
    assert "without effect" not in (tmp_path / "run" / "warnings.jsonl").read_text()

    trainer.fit()
    assert "only on samples of earlier steps" not in capsys.readouterr().out


def test_a_run_from_python_without_a_hook_prints_the_same_lines(tmp_path, capsys):
    settings = dict(
        model="demo", task="demo", batch=2, groups=2, max_tokens=6, eval_every=0, steps=1
    )
    train.Trainer.start(epsilon=0.01, run_dir=str(tmp_path / "run"), **settings).fit()
    assert f"--epsilon 0.01 has no effect, {ONE_UPDATE}" in read_console(capsys)
