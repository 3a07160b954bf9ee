"""
A user's own loss and advantage functions, tried on a few tokens before a model is loaded.

    --loss-type FILE.py:function    (Tokens, Objective) -> Loss, in place of a row of grpo.LOSSES
    --advantage FILE.py:function    rewards (B, G) float64 -> advantages (B, G)

This file does not cover our own losses and advantages (grpo.py).

Axes: B groups, G samples in a group.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import grpo
from config import Config, is_user_function
from prompts.examples import shorten_value
from rewards.functions import describe_raised, load_function, place_suffix
from step.advantages import Advantage
from step.loss import SUMS, make_objective


class CustomObjective(NamedTuple):
    """A user's functions that replace ours. None means that ours is used."""

    loss: grpo.LossFunction | None = None
    advantage: Advantage | None = None


def load_custom_objective(config: Config) -> CustomObjective:
    """
    Loads and tries the functions that the settings name.

    Raises ValueError, with file and line, if a function is missing, fails or trains nothing.
    """
    settings = config.objective
    loss = None
    if is_user_function(settings.loss_type):
        loss = _load_loss(settings.loss_type, config)
    advantage = None
    if is_user_function(settings.advantage):
        _, function = load_function("--advantage", settings.advantage)
        advantage = functools.partial(compute_custom_advantages, settings.advantage, function)
        advantage(np.array([[0.0, 1.0, 1.0], [0.5, 0.5, 0.5]]))
    return CustomObjective(loss, advantage)


# ---- a user's loss


def _load_loss(spec: str, config: Config) -> grpo.LossFunction:
    """Loads a user's loss, and tries it on two rows of tokens."""
    _, function = load_function("--loss-type", spec)
    label = f"--loss-type {spec}{place_suffix(function)}"
    objective = make_objective(config)
    tokens = _make_trial_tokens(has_reference=bool(config.objective.beta))

    loss = _try_out(label, function, lambda: function(tokens, objective))
    _check_loss_form(label, loss)

    def loss_value(logprobs: mx.array, advantages: mx.array) -> mx.array:
        changed = tokens._replace(logprobs=logprobs, advantages=advantages)
        return function(changed, objective).value

    gradient_of_loss = mx.grad(loss_value)
    gradient = _try_out(
        label, function, lambda: gradient_of_loss(tokens.logprobs, tokens.advantages)
    )
    _check_gradient(label, loss, gradient, tokens.mask)

    opposite = gradient_of_loss(tokens.logprobs, -tokens.advantages)
    uses_advantages = not mx.array_equal(gradient, opposite).item()
    raises_loss = (gradient * tokens.advantages).sum().item() > 0
    if raises_loss and uses_advantages:
        raise ValueError(f"{label} falls as better answers become less likely; turn its sign")

    value = loss.value.item()
    row_values = [function(_take_row(tokens, row), objective).value.item() for row in range(2)]
    total = sum(row_values)
    if abs(value - total) > 1e-4 * max(abs(value), 1):
        raise ValueError(
            f"{label} gave {value:.4g} for two rows and {total:.4g} for one and one; divide by "
            "tokens.num_items or tokens.num_rows and not by what a micro-batch has"
        )
    return function


def _make_trial_tokens(has_reference: bool) -> grpo.Tokens:
    """Two rows of three tokens each. The last token of the second row is padding."""
    logprobs = mx.array([[-0.5, -1.5, -1.0], [-2.0, -0.1, 7.0]])
    return grpo.Tokens(
        logprobs,
        old_logprobs=logprobs + 0.1,
        advantages=mx.array([[1.0], [-0.5]]),
        mask=mx.array([[1.0, 1, 1], [1, 1, 0]]),
        ref_logprobs=logprobs - 0.2 if has_reference else None,
        entropies=-logprobs,
        sampled_logprobs=logprobs + 0.05,
        num_items=5,
        num_rows=2,
    )


def _take_row(tokens: grpo.Tokens, row: int) -> grpo.Tokens:
    """One row of the tokens, (1, T). The counts for the whole step stay the same."""
    fields = []
    for value in tokens:
        if isinstance(value, mx.array):
            value = value[row : row + 1]
        fields.append(value)
    return grpo.Tokens._make(fields)


def _check_loss_form(label: str, loss: Any) -> None:
    """Raises ValueError unless `loss` is a grpo.Loss of scalars whose sums have known names."""
    has_form = isinstance(loss, grpo.Loss) and isinstance(loss.sums, dict)
    if has_form:
        values = [loss.value, *loss.sums.values()]
        are_scalars = all(isinstance(value, mx.array) and value.shape == () for value in values)
        has_form = are_scalars and loss.value.dtype == mx.float32
    if not has_form:
        raise ValueError(
            f"{label} gave {shorten_value(loss)}; return grpo.Loss(value, sums), a float32 array "
            "of no axes and a dictionary of arrays of no axes"
        )
    unknown_sums = set(loss.sums) - set(SUMS)
    if unknown_sums:
        names = ", ".join(sorted(map(str, unknown_sums)))
        raise ValueError(f"{label} gave the sums {names}; a loss has {' and '.join(SUMS)}")


def _check_gradient(label: str, loss: grpo.Loss, gradient: mx.array, mask: mx.array) -> None:
    """Raises ValueError if a gradient is not finite, not 0 on padding, or 0 everywhere."""
    is_finite = mx.isfinite(loss.value) & mx.isfinite(gradient).all()
    if not is_finite.item():
        raise ValueError(
            f"{label} gave the loss {loss.value.item()} with the gradient {gradient.tolist()}; "
            "both must be finite"
        )
    if (gradient * (1 - mask) != 0).any().item():
        raise ValueError(
            f"{label} has a gradient where tokens.mask is 0, which is padding; multiply by the mask"
        )
    if not (gradient != 0).any().item():
        raise ValueError(
            f"{label} has no gradient with respect to tokens.logprobs, so it trains nothing"
        )


def _try_out(label: str, function: Callable[..., Any], compute: Callable[[], Any]) -> Any:
    """The result of `compute`. If `function` fails, raises ValueError with file and line."""
    try:
        return compute()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{label} {describe_raised(error, function)}") from error


# ---- a user's advantage


def compute_custom_advantages(
    spec: str, function: Callable[[np.ndarray], Any], rewards: np.ndarray
) -> np.ndarray:
    """
    The advantages that a user's function gives to rewards, (B, G) float64 -> (B, G) float32.

    Where a group has fewer samples, rewards are nan and advantages become 0. Raises ValueError if
    the function fails, or returns another shape or a value that is not finite.
    """
    label = f"--advantage {spec}{place_suffix(function)}"
    advantages = _try_out(label, function, lambda: np.array(function(rewards.copy()), np.float32))
    if advantages.shape != rewards.shape:
        raise ValueError(
            f"{label} gave the shape {advantages.shape} for rewards of shape {rewards.shape}; "
            "return one advantage for each reward"
        )
    advantages[np.isnan(rewards)] = 0
    if not np.isfinite(advantages).all():
        raise ValueError(
            f"{label} gave {shorten_value(advantages.tolist())} for the rewards "
            f"{shorten_value(rewards.tolist())}; all advantages must be finite"
        )
    return advantages
