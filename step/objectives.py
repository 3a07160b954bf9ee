"""
A user's own loss and advantage, tried on a few tokens before a model is loaded.

    --loss-type FILE.py:function    (Tokens, Objective) -> Loss, in place of a row of grpo.LOSSES
    --advantage FILE.py:function    rewards (B, G) float64 -> advantages (B, G)

Left out: the losses and advantages that are ours (grpo.py).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import grpo
from config import Config, is_user_function
from problems.examples import shorten_value
from problems.functions import describe_raised, load_function, place_of
from step.advantages import Advantage
from step.loss import SUMS, make_objective


class CustomObjective(NamedTuple):
    """What a user put in place of ours; None is ours."""

    loss: grpo.LossFunction | None = None
    advantage: Advantage | None = None


def load_custom_objective(config: Config) -> CustomObjective:
    """What the settings name. Raises ValueError, naming file and line, for what is missing, fails or trains nothing."""
    settings, advantage = config.objective, None
    loss = _load_loss(settings.loss_type, config) if is_user_function(settings.loss_type) else None
    if is_user_function(settings.advantage):
        _, fn = load_function("--advantage", settings.advantage)
        advantage = functools.partial(compute_custom_advantages, settings.advantage, fn)
        advantage(np.array([[0.0, 1.0, 1.0], [0.5, 0.5, 0.5]]))
    return CustomObjective(loss, advantage)


def _load_loss(spec: str, config: Config) -> grpo.LossFunction:
    _, fn = load_function("--loss-type", spec)
    what, mask = f"--loss-type {spec}{place_of(fn)}", mx.array([[1.0, 1, 1], [1, 1, 0]])
    logprobs = mx.array([[-0.5, -1.5, -1.0], [-2.0, -0.1, 7.0]])  # the last is padding
    tokens = grpo.Tokens(
        logprobs,
        old_logprobs=logprobs + 0.1,
        advantages=mx.array([[1.0], [-0.5]]),
        mask=mask,
        ref_logprobs=logprobs - 0.2 if config.objective.beta else None,
        entropies=-logprobs,
        sampled_logprobs=logprobs + 0.05,
        num_items=5,
        num_rows=2,
    )
    loss = _try_out(what, fn, lambda: fn(tokens, make_objective(config)))
    is_loss = isinstance(loss, grpo.Loss) and isinstance(loss.sums, dict)
    values = [loss.value, *loss.sums.values()] if is_loss else [None]
    if (
        not all(isinstance(one, mx.array) and one.shape == () for one in values)
        or loss.value.dtype != mx.float32
    ):
        fix = "return grpo.Loss(value, sums), a float32 array of no axes and a dictionary of arrays of no axes"
        raise ValueError(f"{what} gave {shorten_value(loss)}; {fix}")
    if others := set(loss.sums) - set(SUMS):
        raise ValueError(
            f"{what} gave the sums {', '.join(sorted(map(str, others)))}; a loss has {' and '.join(SUMS)}"
        )

    def loss_of(**changes: Any) -> mx.array:
        return fn(tokens._replace(**changes), make_objective(config)).value

    slope = _try_out(
        what, fn, lambda: mx.grad(lambda logprobs: loss_of(logprobs=logprobs))(logprobs)
    )
    found = loss.value.item(), slope.tolist()
    if not (mx.isfinite(loss.value) & mx.isfinite(slope).all()).item():
        raise ValueError(
            f"{what} gave the loss {found[0]} with the gradient {found[1]}; both must be finite"
        )
    if (slope * (1 - mask) != 0).any().item():
        raise ValueError(
            f"{what} has a gradient where tokens.mask is 0, which is padding; multiply by the mask"
        )
    if not (slope != 0).any().item():
        raise ValueError(
            f"{what} has no gradient with respect to tokens.logprobs, so it trains nothing"
        )
    turned = mx.grad(lambda logprobs: loss_of(logprobs=logprobs, advantages=-tokens.advantages))(
        logprobs
    )
    if (slope * tokens.advantages).sum().item() > 0 and not mx.array_equal(slope, turned).item():
        raise ValueError(f"{what} falls as better answers become less likely; turn its sign")
    arrays: Any = {
        name: value for name, value in tokens._asdict().items() if isinstance(value, mx.array)
    }
    rows = (
        tokens._replace(**{name: value[row : row + 1] for name, value in arrays.items()})
        for row in range(2)
    )
    whole, added = found[0], sum(fn(row, make_objective(config)).value.item() for row in rows)
    if abs(whole - added) > 1e-4 * max(abs(whole), 1):
        fix = "divide by tokens.num_items or tokens.num_rows and not by what a micro-batch has"
        raise ValueError(
            f"{what} gave {whole:.4g} for two rows and {added:.4g} for one and one; {fix}"
        )
    return fn


def _try_out(what: str, fn: Callable[..., Any], compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} {describe_raised(error, fn)}") from error


def compute_custom_advantages(
    spec: str, fn: Callable[[np.ndarray], Any], rewards: np.ndarray
) -> np.ndarray:
    """`fn` of rewards, (B, G) float64, nan where a group has fewer: so many float32, 0 there. ValueError for others."""
    what = f"--advantage {spec}{place_of(fn)}"
    found = _try_out(what, fn, lambda: np.array(fn(rewards.copy()), np.float32))
    if found.shape != rewards.shape:
        raise ValueError(
            f"{what} gave the shape {found.shape} for rewards of shape {rewards.shape}; give the same"
        )
    found[np.isnan(rewards)] = 0
    if not np.isfinite(found).all():
        raise ValueError(
            f"{what} gave {shorten_value(found.tolist())} for the rewards {shorten_value(rewards.tolist())}; be finite"
        )
    return found
