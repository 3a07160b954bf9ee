"""A user's own loss and advantage: what they get, that they train, and what is told of bad ones."""

import re

import numpy as np
import pytest
from conftest import read_log

import train
from config import Config
from settings import sources
from step import objectives
from tests.small_run import SMALL_FLAGS

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
def of_its_own(tokens, objective): return grpo.Loss(tokens.logprobs.sum(), {"entropy": tokens.mask.sum()})
def no_sums(tokens, objective): return grpo.Loss(reinforce(tokens, objective).value, None)
def a_number_of(tokens, objective): return grpo.Loss(reinforce(tokens, objective).value, {"kl": 0.5})
def per_token(tokens, objective): return grpo.Loss(reinforce(tokens, objective).value, {"kl": tokens.mask})
def half(tokens, objective): return grpo.Loss(reinforce(tokens, objective).value.astype(mx.float16), {})
def turned(tokens, objective): return grpo.Loss(-reinforce(tokens, objective).value, {})
def own_mean(tokens, objective): return grpo.Loss(-(tokens.advantages * tokens.logprobs * tokens.mask).mean(), {})
def counted(tokens, objective):
    return reinforce(tokens, objective)._replace(sums={"clip_frac": (tokens.mask > 0).sum()})
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
    ("loss", "of_its_own", "the sums entropy, but a loss may return only kl and clip_frac"),
    ("loss", "unmasked", "where tokens.mask is 0"),
    ("loss", "constant", "has no gradient with respect to tokens.logprobs"),
    ("loss", "infinite", "both must be finite"),
    ("loss", "no_sums", "sums=None); return grpo.Loss(value, sums)"),
    ("loss", "a_number_of", "sums={'kl': 0.5}); return grpo.Loss(value, sums)"),
    ("loss", "per_token", "dtype=float32)}); return grpo.Loss(value, sums)"),
    ("loss", "half", "dtype=float16), sums={}); return grpo.Loss(value, sums)"),
    ("loss", "turned", "reverse the sign"),
    ("loss", "own_mean", "divide by tokens.num_items or tokens.num_rows"),
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
