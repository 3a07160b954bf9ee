"""A user's own loss and advantage get the tokens, train the model, and are refused if they are wrong."""

import json
import re

import numpy as np
import pytest
from conftest import read_log
from small_run import SMALL_FLAGS, make_run, record_gradient, sample_first_prompts, update_once

import grpo
import train
from config import Config
from reporting import charts, seeds
from settings import sources
from step import loss_trial, objectives
from step.batch import make_batches

OWN_FUNCTIONS = '''
import grpo
import mlx.core as mx

def reinforce(tokens, objective):
    """The plain policy gradient: no ratio, no clip."""
    each = -tokens.advantages * tokens.logprobs * tokens.mask
    return grpo.Loss(each.sum() / tokens.num_items, {})

def dapo_again(tokens, objective):
    return grpo.LOSSES["dapo"](tokens, objective)

def of_one(rewards):
    return rewards - rewards[:, :1]

def group_again(rewards):
    return grpo.group_advantages(rewards, signal_floor=grpo.SIGNAL_FLOOR)

no_function = 3
def raises(tokens, objective): return tokens.nothing
def a_number(tokens, objective): return 1.0
def unmasked(tokens, objective): return grpo.Loss((tokens.logprobs * tokens.advantages).sum(), {})
def constant(tokens, objective): return grpo.Loss(mx.array(1.0), {})
def badly_named(tokens, objective):
    return grpo.Loss(reinforce(tokens, objective).value, {"my entropy": tokens.mask.sum()})
def mean_as_sum(tokens, objective):
    entropy = (tokens.entropies * tokens.mask).sum() / tokens.mask.sum()
    return grpo.Loss(reinforce(tokens, objective).value, {"entropy": entropy})
def no_sums(tokens, objective): return grpo.Loss(reinforce(tokens, objective).value, None)
def a_number_of(tokens, objective): return grpo.Loss(reinforce(tokens, objective).value, {"kl": 0.5})
def per_token(tokens, objective): return grpo.Loss(reinforce(tokens, objective).value, {"kl": tokens.mask})
def half(tokens, objective): return grpo.Loss(reinforce(tokens, objective).value.astype(mx.float16), {})
def turned(tokens, objective): return grpo.Loss(-reinforce(tokens, objective).value, {})
def own_mean(tokens, objective): return grpo.Loss(-(tokens.advantages * tokens.logprobs * tokens.mask).mean(), {})
def counted(tokens, objective):
    return reinforce(tokens, objective)._replace(sums={"clip_frac": (tokens.mask > 0).sum()})
def bonus_at_padding(tokens, objective):
    value = reinforce(tokens, objective).value
    return grpo.Loss(value - tokens.entropies.sum() / tokens.num_items, {})
def infinite(tokens, objective): return grpo.Loss((tokens.logprobs * tokens.mask).sum() / 0, {})
def too_small(rewards): return rewards.mean(axis=1)
def not_a_number(rewards): return rewards * float("nan")
def fails(rewards): return rewards / "1"
'''


@pytest.fixture
def own_file(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_FUNCTIONS)
    return str(tmp_path / "mine.py")


def load_own_loss(spec, **settings):
    config = Config.from_flags(loss_type=spec, **settings)
    return objectives.load_and_try_custom_objective(config)


def train_two_steps(tmp_path, name, *flags):
    run = tmp_path / name
    common_flags = "--task demo --eval-every 0 --steps 2 --judge-chunk-size 64".split()
    train.main([*SMALL_FLAGS, *common_flags, *flags, "--run-dir", str(run)])
    records = read_log(run / "metrics.jsonl")
    return [(record["loss"], record["grad_norm"], record["reward/mean"]) for record in records]


@pytest.mark.slow
def test_an_own_loss_or_advantage_equal_to_a_built_in_one_trains_the_same(tmp_path, own_file):
    loss_flags = ("--loss-type", f"{own_file}:dapo_again")
    advantage_flags = ("--advantage", f"{own_file}:group_again")
    figures = train_two_steps(tmp_path, "built_in")
    figures_of_loss = train_two_steps(tmp_path, "loss", "--loss", f"{own_file}:dapo_again")
    figures_of_both = train_two_steps(tmp_path, "both", *loss_flags, *advantage_flags)
    assert figures_of_loss == figures_of_both
    # The built-in loss may be computed from tiles of the logits.
    np.testing.assert_allclose(figures, figures_of_loss, rtol=1e-4)

    other_figures = train_two_steps(tmp_path, "other", "--loss", f"{own_file}:reinforce")
    other_loss, _, other_reward = other_figures[0]
    loss, _, reward = figures[0]
    assert other_reward == reward
    assert other_loss != loss


def test_an_own_loss_gets_the_tokens_and_the_settings_of_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import grpo\ncalls = []\n"
        "def record_call(tokens, objective):\n"
        "    calls.append((tokens, objective))\n"
        "    return grpo.Loss((tokens.logprobs * tokens.mask).sum(), {})\n"
    )
    spec = f"{tmp_path}/mine.py:record_call"
    loss = load_own_loss(spec, beta=0.1, epsilon=0.3, max_tokens=7).loss
    tokens, objective = loss.__globals__["calls"][0]
    assert (objective.beta, objective.epsilon, objective.max_tokens) == (0.1, 0.3, 7)
    assert tokens.ref_logprobs is not None
    assert tokens.num_items == 5
    assert tokens.mask.sum().item() == 5

    custom = objectives.load_and_try_custom_objective(Config.from_flags())
    assert custom == objectives.CustomObjective()


BAD_FUNCTIONS = [
    ("loss", "raises", "raised AttributeError"),
    ("loss", "a_number", "returned 1.0; return grpo.Loss(value, sums)"),
    ("loss", "badly_named", "'my entropy'"),
    ("loss", "mean_as_sum", "as the sum 'entropy' for two rows"),
    ("loss", "unmasked", "where tokens.mask is 0"),
    ("loss", "constant", "has no gradient with respect to tokens.logprobs"),
    ("loss", "infinite", "both must be finite"),
    *(("loss", name, "return grpo.Loss(") for name in ("no_sums", "a_number_of", "per_token")),
    ("loss", "half", "a scalar float32 array"),
    ("loss", "turned", "reverse the sign of the loss"),
    ("loss", "own_mean", "0.325 for two rows together, but 0.65"),
    ("loss", "bonus_at_padding", "has a gradient through tokens.entropies at padding"),
    ("loss", "no_function", "no_function is an object of type int, not a function"),
    ("loss", "dapo_agin", "has no function 'dapo_agin', did you mean 'dapo_again'"),
    ("advantage", "too_small", "the shape (2,) for rewards of shape (2, 3)"),
    ("advantage", "not_a_number", "must be finite"),
    ("advantage", "fails", "raised"),
]


@pytest.mark.parametrize(
    ("flag", "name", "expected_text"), BAD_FUNCTIONS, ids=[name for _, name, _ in BAD_FUNCTIONS]
)
def test_the_refusal_of_a_bad_loss_or_advantage_is_one_line(
    own_file, flag, name, expected_text, check_refusal
):
    flags = [*SMALL_FLAGS, "--task", "demo", f"--{flag}", f"{own_file}:{name}"]
    line = check_refusal(train.main, flags, re.escape(expected_text))
    assert f"{own_file}:{name}" in line


def test_a_loss_may_ignore_advantages_and_return_integer_sums(own_file, tmp_path):
    loss = "def forget(t, _): return grpo.Loss((t.logprobs * t.mask).sum(), {})\n"
    (tmp_path / "plain.py").write_text(f"import grpo\n\n{loss}")
    assert load_own_loss(f"{own_file}:counted").loss is not None
    assert load_own_loss(f"{tmp_path}/plain.py:forget").loss is not None


def test_the_refusal_of_an_unknown_loss_mentions_own_losses():
    settings = {"loss_type": "dapoo", "model": "demo"}
    pattern = r"'dapoo'; it must be one of grpo, .*,? (or )?FILE\.py:function"
    with pytest.raises(ValueError, match=pattern):
        sources.resolve_settings(settings, None, None, lambda name: (name, ""))


def test_own_advantages_replace_the_built_in_ones_and_allow_no_scaling(own_file):
    spec = f"{own_file}:of_one"
    custom = objectives.load_and_try_custom_objective(Config.from_flags(advantage=spec))
    rewards = np.array([[1.0, 3.0], [2.0, 2.0]])
    assert custom.advantage(rewards).tolist() == [[0.0, 2.0], [0.0, 0.0]]

    settings = {"advantage": spec, "scale_rewards": "none", "model": "demo", "task": "demo"}
    with pytest.raises(ValueError, match="--scale-rewards none is for built-in advantages"):
        sources.resolve_settings(settings, None, None, lambda name: (name, ""))


LOSSES_BY_INPUT = """
import grpo
import mlx.core as mx

def mean(each, tokens):
    return grpo.Loss((each * tokens.mask).sum() / tokens.num_items, {})

def bonus(tokens, objective):
    return mean(-tokens.advantages * tokens.logprobs - 0.01 * tokens.entropies, tokens)

def weights(tokens, objective):
    fixed = mx.stop_gradient(tokens.entropies)
    return mean(-tokens.advantages * fixed * tokens.logprobs, tokens)

def threshold(tokens, objective):
    return mean(-tokens.advantages * (tokens.entropies > 1) * tokens.logprobs, tokens)

def only_entropies(tokens, objective):
    return mean(-tokens.entropies, tokens)

def ratio(tokens, objective):
    return mean(-tokens.advantages * mx.exp(tokens.logprobs - tokens.old_logprobs), tokens)

def with_coefficient(tokens, objective):
    return mean(-tokens.logprobs * tokens.advantages - objective.entropy_coef * tokens.entropies, tokens)
"""
EXPECTED_TEXTS = {
    "bonus": [
        "a gradient through tokens.logprobs and tokens.entropies.",
        "It depends on tokens.advantages.",
        "It ignores tokens.old_logprobs and tokens.sampled_logprobs.",
    ],
    "weights": ["depends on tokens.entropies, but has no gradient through them"],
    "threshold": ["depends on tokens.entropies, but has no gradient through them"],
    "only_entropies": [
        "a gradient through tokens.entropies.",
        "It ignores tokens.logprobs, tokens.advantages, tokens.old_logprobs",
        "the rewards do not change",
    ],
    "ratio": [
        "a gradient through tokens.logprobs.",
        "It depends on tokens.advantages and tokens.old_logprobs.",
        "It ignores tokens.entropies and tokens.sampled_logprobs.",
    ],
}


@pytest.fixture
def losses_file(tmp_path):
    (tmp_path / "uses.py").write_text(LOSSES_BY_INPUT)
    return f"{tmp_path}/uses.py"


@pytest.mark.parametrize("name", EXPECTED_TEXTS)
def test_the_trial_of_a_loss_names_the_inputs_that_train_and_the_ignored_ones(losses_file, name):
    (note,) = load_own_loss(f"{losses_file}:{name}").notes
    for expected_text in EXPECTED_TEXTS[name]:
        assert expected_text in note
    assert f"{losses_file}:{name}" in note
    assert "\n" not in note


def test_the_trial_names_reference_logprobs_that_a_loss_ignores(losses_file):
    (note,) = load_own_loss(f"{losses_file}:bonus", beta=0.1).notes
    assert "It ignores tokens.old_logprobs, tokens.ref_logprobs and tokens.sampled_logprobs" in note


def test_an_entropy_coefficient_that_an_own_loss_ignores_is_refused(losses_file):
    custom = load_own_loss(f"{losses_file}:with_coefficient", entropy_coef=0.01)
    assert custom.loss is not None
    with pytest.raises(ValueError, match=r"--entropy-coef 0\.02 has no effect"):
        load_own_loss(f"{losses_file}:bonus", entropy_coef=0.02)


@pytest.mark.slow
def test_a_run_prints_the_inputs_of_an_own_loss_and_trains_through_entropies(
    tmp_path, losses_file, capsys
):
    run = make_run(tmp_path, "--loss-type", f"{losses_file}:only_entropies")
    assert "a gradient through tokens.entropies." in capsys.readouterr().out
    update_once(run)
    batches = make_batches(sample_first_prompts(run), 1024)
    result, gradient = record_gradient(run, batches)
    assert result.grad_norm > 0
    assert any((array != 0).any().item() for array in gradient.values())


STATISTICS = """
import grpo
import mlx.core as mx

def mean(each, tokens):
    return grpo.Loss((each * tokens.mask).sum() / tokens.num_items, {})

def quantile_of_rows(tokens, objective):
    entropies = mx.where(tokens.mask > 0, tokens.entropies, -1)
    threshold = mx.sort(entropies.reshape(-1))[-entropies.size // 5]
    return mean(-tokens.advantages * (entropies >= threshold) * tokens.logprobs, tokens)

def whitened(tokens, objective):
    advantages = tokens.advantages - tokens.advantages.mean()
    return mean(-advantages * tokens.logprobs, tokens)

def quantile_within_row(tokens, objective):
    entropies = mx.where(tokens.mask > 0, tokens.entropies, -1)
    threshold = mx.sort(entropies, axis=-1)[:, -2:-1]
    return mean(-tokens.advantages * (entropies >= threshold) * tokens.logprobs, tokens)

def mean_of_micro_batch(tokens, objective):
    each = -tokens.advantages * tokens.logprobs * tokens.mask
    return grpo.Loss(each.sum() / tokens.mask.sum(), {})
"""


@pytest.mark.parametrize("name", ["quantile_of_rows", "whitened"])
def test_the_refusal_of_a_statistic_over_a_micro_batch_names_the_advantage_flag(tmp_path, name):
    (tmp_path / "own.py").write_text(STATISTICS)
    with pytest.raises(ValueError, match="micro-batch") as refusal:
        load_own_loss(f"{tmp_path}/own.py:{name}")
    assert "--advantage FILE.py:function" in str(refusal.value)
    assert "num_items" not in str(refusal.value)  # the advice about another mistake


def test_the_refusal_of_a_division_by_the_micro_batch_names_num_items(tmp_path):
    (tmp_path / "own.py").write_text(STATISTICS)
    with pytest.raises(ValueError, match=r"divide by tokens\.num_items") as refusal:
        load_own_loss(f"{tmp_path}/own.py:mean_of_micro_batch")
    assert "--advantage" not in str(refusal.value)


DIVISORS = """
import grpo

def each(tokens): return -tokens.advantages * tokens.logprobs * tokens.mask

def plain_sum(tokens, objective): return grpo.Loss(each(tokens).sum(), {})
def constant_divisor(tokens, objective): return grpo.Loss(each(tokens).sum() / 64, {})
def divided_twice(tokens, objective):
    return grpo.Loss(each(tokens).sum() / tokens.num_items / tokens.num_rows, {})
def per_row(tokens, objective): return grpo.Loss(each(tokens).sum() / tokens.num_rows, {})
def per_row_mean(tokens, objective):
    means = each(tokens).sum(axis=1) / tokens.mask.sum(axis=1)
    return grpo.Loss(means.sum() / tokens.num_rows, {})
"""


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("plain_sum", "from 1.95 to 3.9 "),
        ("constant_divisor", "from 0.03047 to 0.06094 "),
        ("divided_twice", "from 0.195 to 0.0975 "),
    ],
)
def test_a_note_reports_a_loss_that_changes_with_the_number_of_rows(tmp_path, name, values):
    (tmp_path / "own.py").write_text(DIVISORS)
    _, note = load_own_loss(f"{tmp_path}/own.py:{name}").notes
    assert note.startswith(f"--loss-type {tmp_path}/own.py:{name} ({tmp_path}/own.py:")
    assert "\n" not in note
    assert f"the loss changes {values}if every row occurs twice" in note
    assert "so its size depends on --batch and --groups" in note
    assert "divide the sum over the tokens by tokens.num_items" in note
    assert "num_rows" in note


@pytest.mark.parametrize("name", ["per_row", "per_row_mean"])
def test_no_note_criticizes_a_loss_with_one_of_the_right_divisors(tmp_path, name):
    (tmp_path / "own.py").write_text(DIVISORS)
    assert len(load_own_loss(f"{tmp_path}/own.py:{name}").notes) == 1


@pytest.mark.parametrize("name", sorted(grpo.LOSSES.keys() - {"sft", "distill"}))
def test_no_built_in_loss_changes_with_the_number_of_rows(name):
    objective = grpo.Objective(loss_type=name, beta=0.1, max_tokens=6, epsilon_high=5.0)
    tokens = loss_trial.make_random_tokens(0, has_reference=True)
    value = grpo.LOSSES[name](tokens, objective).value.item()
    repeated_tokens = loss_trial.repeat_rows(tokens)
    value_of_repeated = grpo.LOSSES[name](repeated_tokens, objective).value.item()
    assert value_of_repeated == pytest.approx(value, rel=1e-4)


def test_a_statistic_within_a_row_is_allowed(tmp_path):
    (tmp_path / "own.py").write_text(STATISTICS)
    assert load_own_loss(f"{tmp_path}/own.py:quantile_within_row").loss is not None


LOSS_WITH_SUMS = """
import grpo
import mlx.core as mx

def logging(tokens, objective):
    loss, sums = grpo.LOSSES["dapo"](tokens, objective)
    counted = tokens.mask * tokens.weights
    sums["entropy"] = (tokens.entropies * counted).sum()
    sums["ones"] = counted.sum()
    sums["logprob_max"] = mx.where(tokens.mask > 0, tokens.logprobs, -mx.inf).max()
    return grpo.Loss(loss, sums)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [(), ("--mini-batches", "3", "--num-iterations", "2", "--train-token-budget", "60")]
)
def test_sums_of_an_own_loss_become_means_in_the_metrics_and_curves_on_the_page(tmp_path, flags):
    (tmp_path / "own.py").write_text(LOSS_WITH_SUMS)
    own_flags = ("--loss-type", f"{tmp_path}/own.py:logging", "--steps", "2", "--eval-every", "0")
    run = make_run(tmp_path, *own_flags, *flags)
    list(train.train(run))

    for record in run.journal.metrics.read():
        assert record["loss/ones"] == pytest.approx(1, rel=1e-5)
        assert record["loss/entropy"] == pytest.approx(record["entropy"], rel=1e-5)
        assert record["loss/logprob_max"] <= 0  # a maximum of negative numbers
        assert record["loss/logprob_max"] < 0 or record["entropy"] < 1
        assert "clip_frac" in record
        assert "loss/clip_frac" not in record

    (run.dir / "config.yaml").write_text(json.dumps(run.config.to_flags(run.sizes)))
    all_charts = charts.make_charts(seeds.load_seed_groups([run.dir]))
    (chart,) = [chart for chart in all_charts if chart["title"] == "Logged by the loss"]
    labels = {curve["label"] for curve in chart["series"]}
    assert {"entropy", "ones", "logprob_max"} <= labels
