"""A user's own loss and advantage: what they get, that they train, and what is told of bad ones."""

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

MINE = '''
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
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def train_two_steps(tmp_path, name, *flags):
    run = tmp_path / name
    flags_of_all = "--task demo --eval-every 0 --steps 2 --judge-chunk-size 64".split()
    train.main([*SMALL_FLAGS, *flags_of_all, *flags, "--run-dir", str(run)])
    records = read_log(run / "metrics.jsonl")
    return [(record["loss"], record["grad_norm"], record["reward/mean"]) for record in records]


@pytest.mark.slow
def test_an_own_loss_or_advantage_that_equals_ours_trains_the_same(tmp_path, mine):
    ours = train_two_steps(tmp_path, "ours")
    loss = train_two_steps(tmp_path, "loss", "--loss", f"{mine}:dapo_again")
    both = train_two_steps(
        tmp_path, "both", "--loss-type", f"{mine}:dapo_again", "--advantage", f"{mine}:group_again"
    )
    assert loss == both
    np.testing.assert_allclose(
        ours, loss, rtol=1e-4
    )  # ours may be computed from the logits by tiles
    other = train_two_steps(tmp_path, "other", "--loss", f"{mine}:reinforce")
    assert other[0][2] == ours[0][2] and other[0][0] != ours[0][0]


def test_an_own_loss_sees_the_tokens_and_the_settings_of_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import grpo\nseen = []\n"
        "def look(tokens, objective):\n"
        "    seen.append((tokens, objective))\n"
        "    return grpo.Loss((tokens.logprobs * tokens.mask).sum(), {})\n"
    )
    config = Config.from_flags(
        loss_type=f"{tmp_path}/mine.py:look", beta=0.1, epsilon=0.3, max_tokens=7
    )
    tokens, objective = objectives.load_and_try_custom_objective(config).loss.__globals__["seen"][0]
    assert (objective.beta, objective.epsilon, objective.max_tokens) == (0.1, 0.3, 7)
    assert (
        tokens.ref_logprobs is not None and tokens.num_items == 5 and tokens.mask.sum().item() == 5
    )
    assert (
        objectives.load_and_try_custom_objective(Config.from_flags())
        == objectives.CustomObjective()
    )


BAD = [
    ("loss", "raises", "raised AttributeError"),
    ("loss", "a_number", "returned 1.0; return grpo.Loss(value, sums)"),
    ("loss", "badly_named", "'my entropy'"),
    ("loss", "mean_as_sum", "as the sum 'entropy' of two rows"),
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


@pytest.mark.parametrize(("flag", "name", "words"), BAD, ids=[name for _, name, _ in BAD])
def test_a_bad_loss_or_advantage_is_one_line_before_a_model_is_loaded(
    mine, flag, name, words, check_refusal
):
    line = check_refusal(
        train.main,
        [*SMALL_FLAGS, "--task", "demo", f"--{flag}", f"{mine}:{name}"],
        re.escape(words),
    )
    assert f"{mine}:{name}" in line


def test_a_loss_may_ignore_advantages_and_count_in_whole_numbers(mine, tmp_path):
    forget = "def forget(t, _): return grpo.Loss((t.logprobs * t.mask).sum(), {})\n"
    (tmp_path / "plain.py").write_text(f"import grpo\n\n{forget}")
    for spec in (f"{mine}:counted", f"{tmp_path}/plain.py:forget"):
        assert (
            objectives.load_and_try_custom_objective(Config.from_flags(loss_type=spec)).loss
            is not None
        )


def test_an_own_loss_is_checked_like_a_word_of_ours():
    with pytest.raises(
        ValueError, match=r"'dapoo'; it must be one of grpo, .*,? (or )?FILE\.py:function"
    ):
        sources.resolve_settings(
            {"loss_type": "dapoo", "model": "demo"}, None, None, lambda name: (name, "")
        )


def test_own_advantages_replace_ours_and_refuse_our_scaling(mine):
    rewards = np.array([[1.0, 3.0], [2.0, 2.0]])
    config = Config.from_flags(advantage=f"{mine}:of_one")
    assert objectives.load_and_try_custom_objective(config).advantage(rewards).tolist() == [
        [0.0, 2.0],
        [0.0, 0.0],
    ]
    flags = {
        "advantage": f"{mine}:of_one",
        "scale_rewards": "none",
        "model": "demo",
        "task": "demo",
    }
    with pytest.raises(ValueError, match="--scale-rewards none is for built-in advantages"):
        sources.resolve_settings(flags, None, None, lambda name: (name, ""))


USES = """
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
SAID = {
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
def uses(tmp_path):
    (tmp_path / "uses.py").write_text(USES)
    return f"{tmp_path}/uses.py"


@pytest.mark.parametrize("name", SAID)
def test_the_trial_of_a_loss_says_through_what_it_trains_and_what_it_ignores(uses, name):
    config = Config.from_flags(loss_type=f"{uses}:{name}")
    (note,) = objectives.load_and_try_custom_objective(config).notes
    for words in SAID[name]:
        assert words in note
    assert f"{uses}:{name}" in note and "\n" not in note


def test_a_reference_that_a_loss_ignores_is_named(uses):
    config = Config.from_flags(loss_type=f"{uses}:bonus", beta=0.1)
    (note,) = objectives.load_and_try_custom_objective(config).notes
    assert "It ignores tokens.old_logprobs, tokens.ref_logprobs and tokens.sampled_logprobs" in note


def test_an_entropy_coefficient_that_an_own_loss_ignores_is_refused(uses):
    config = Config.from_flags(loss_type=f"{uses}:with_coefficient", entropy_coef=0.01)
    assert objectives.load_and_try_custom_objective(config).loss is not None
    config = Config.from_flags(loss_type=f"{uses}:bonus", entropy_coef=0.02)
    with pytest.raises(ValueError, match=r"--entropy-coef 0\.02 has no effect"):
        objectives.load_and_try_custom_objective(config)


@pytest.mark.slow
def test_a_run_prints_what_its_own_loss_uses_and_trains_the_entropies_in_it(tmp_path, uses, capsys):
    run = make_run(tmp_path, "--loss-type", f"{uses}:only_entropies")
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
def test_a_statistic_over_a_micro_batch_s_rows_is_refused_with_the_place_for_it(tmp_path, name):
    (tmp_path / "own.py").write_text(STATISTICS)
    config = Config.from_flags(loss_type=f"{tmp_path}/own.py:{name}")
    with pytest.raises(ValueError, match="micro-batch") as refusal:
        objectives.load_and_try_custom_objective(config)
    assert "--advantage FILE.py:function" in str(refusal.value)
    assert "num_items" not in str(refusal.value)  # the cure of another mistake


def test_a_division_by_the_micro_batch_is_refused_with_its_own_cure(tmp_path):
    (tmp_path / "own.py").write_text(STATISTICS)
    config = Config.from_flags(loss_type=f"{tmp_path}/own.py:mean_of_micro_batch")
    with pytest.raises(ValueError, match=r"divide by tokens\.num_items") as refusal:
        objectives.load_and_try_custom_objective(config)
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
def test_a_loss_that_changes_with_the_number_of_rows_is_told_before_the_first_step(
    tmp_path, name, values
):
    (tmp_path / "own.py").write_text(DIVISORS)
    config = Config.from_flags(loss_type=f"{tmp_path}/own.py:{name}")
    _, note = objectives.load_and_try_custom_objective(config).notes
    assert note.startswith(f"--loss-type {tmp_path}/own.py:{name} ({tmp_path}/own.py:")
    assert "\n" not in note and f"the loss changes {values}if every row occurs twice" in note
    assert "so its size depends on --batch and --groups" in note
    assert "divide the sum over the tokens by tokens.num_items" in note and "num_rows" in note


@pytest.mark.parametrize("name", ["per_row", "per_row_mean"])
def test_a_loss_with_one_of_the_divisors_is_not_told_off(tmp_path, name):
    (tmp_path / "own.py").write_text(DIVISORS)
    config = Config.from_flags(loss_type=f"{tmp_path}/own.py:{name}")
    assert len(objectives.load_and_try_custom_objective(config).notes) == 1


@pytest.mark.parametrize("name", sorted(grpo.LOSSES.keys() - {"sft", "distill"}))
def test_no_loss_of_ours_changes_with_the_number_of_rows(name):
    objective = grpo.Objective(loss_type=name, beta=0.1, max_tokens=6, epsilon_high=5.0)
    tokens = loss_trial.make_random_tokens(0, has_reference=True)
    twice = loss_trial.repeat_rows(tokens)
    once = grpo.LOSSES[name](tokens, objective).value.item()
    assert grpo.LOSSES[name](twice, objective).value.item() == pytest.approx(once, rel=1e-4)


def test_a_statistic_within_a_row_is_allowed(tmp_path):
    (tmp_path / "own.py").write_text(STATISTICS)
    config = Config.from_flags(loss_type=f"{tmp_path}/own.py:quantile_within_row")
    assert objectives.load_and_try_custom_objective(config).loss is not None


LOGS = """
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
def test_sums_of_an_own_loss_are_means_in_the_metrics_and_curves_on_the_page(tmp_path, flags):
    (tmp_path / "own.py").write_text(LOGS)
    own = ("--loss-type", f"{tmp_path}/own.py:logging", "--steps", "2", "--eval-every", "0")
    run = make_run(tmp_path, *own, *flags)
    list(train.train(run))
    for record in run.journal.metrics.read():
        assert record["loss/ones"] == pytest.approx(1, rel=1e-5)
        assert record["loss/entropy"] == pytest.approx(record["entropy"], rel=1e-5)
        assert record["loss/logprob_max"] <= 0  # a maximum of negative numbers
        assert record["loss/logprob_max"] < 0 or record["entropy"] < 1
        assert "clip_frac" in record and "loss/clip_frac" not in record
    (run.dir / "config.yaml").write_text(json.dumps(run.config.to_flags(run.sizes)))
    drawn = charts.make_charts(seeds.load_seed_groups([run.dir]))
    (chart,) = [chart for chart in drawn if chart["title"] == "Logged by the loss"]
    assert {"entropy", "ones", "logprob_max"} <= {curve["label"] for curve in chart["series"]}
