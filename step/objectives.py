"""
Loads a user's own loss and advantage functions, and tries them out before a model is loaded.

Gwen's own losses and advantages are in grpo.py. A user sets these flags:

    --loss-type FILE.py:function    (Tokens, Objective) -> Loss, like the functions in grpo.LOSSES
    --advantage FILE.py:function    rewards (B, G) float64 -> advantages (B, G)

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
from rewards.functions import describe_error_in_function, file_and_line_suffix, load_function
from step.advantages import AdvantageFunction
from step.loss import SUMS, make_objective


class CustomObjective(NamedTuple):
    """A user's own functions. If a field is None, Gwen's function is used."""

    loss: grpo.LossFunction | None = None
    advantage: AdvantageFunction | None = None


def load_and_try_custom_objective(config: Config) -> CustomObjective:
    """
    Loads the user's functions that the settings name, and tries each of them on made-up input.

    Raises ValueError, with file and line, if a function is missing, fails or trains nothing.
    """
    settings = config.objective
    loss = None
    if is_user_function(settings.loss_type):
        loss = _load_and_try_loss(settings.loss_type, config)
    advantage = None
    if is_user_function(settings.advantage):
        _, function = load_function("--advantage", settings.advantage)
        advantage = functools.partial(compute_custom_advantages, settings.advantage, function)
        advantage(np.array([[0.0, 1.0, 1.0], [0.5, 0.5, 0.5]]))
    return CustomObjective(loss, advantage)


# ---- a user's loss


def _load_and_try_loss(spec: str, config: Config) -> grpo.LossFunction:
    """Loads a user's loss function, and tries it on two rows of made-up tokens."""
    _, function = load_function("--loss-type", spec)
    label = f"--loss-type {spec}{file_and_line_suffix(function)}"
    objective = make_objective(config)
    tokens = _make_trial_tokens(has_reference=bool(config.objective.beta))

    loss = _compute_or_raise_with_location(label, function, lambda: function(tokens, objective))
    _raise_if_loss_has_wrong_type_or_sums(label, loss)

    def loss_value(logprobs: mx.array, advantages: mx.array) -> mx.array:
        changed = tokens._replace(logprobs=logprobs, advantages=advantages)
        return function(changed, objective).value

    gradient_of_loss = mx.grad(loss_value)
    gradient = _compute_or_raise_with_location(
        label, function, lambda: gradient_of_loss(tokens.logprobs, tokens.advantages)
    )
    _check_gradient(label, loss, gradient, tokens.mask)

    opposite = gradient_of_loss(tokens.logprobs, -tokens.advantages)
    uses_advantages = not mx.array_equal(gradient, opposite).item()
    raises_loss = (gradient * tokens.advantages).sum().item() > 0
    if raises_loss and uses_advantages:
        raise ValueError(
            f"{label} gets smaller when better answers become less likely; reverse the sign of the "
            "loss"
        )

    value = loss.value.item()
    row_values = [function(_keep_only_row(tokens, row), objective).value.item() for row in range(2)]
    total = sum(row_values)
    if abs(value - total) > 1e-4 * max(abs(value), 1):
        raise ValueError(
            f"{label} returned {value:.4g} for two rows together, but {total:.4g} as the sum over "
            "the same rows one by one; divide by tokens.num_items or tokens.num_rows, and not by "
            "the size of the micro-batch"
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


def _keep_only_row(tokens: grpo.Tokens, row: int) -> grpo.Tokens:
    """The tokens of one row, (1, T). The counts for the whole step stay the same."""
    fields = []
    for value in tokens:
        if isinstance(value, mx.array):
            value = value[row : row + 1]
        fields.append(value)
    return grpo.Tokens._make(fields)


def _raise_if_loss_has_wrong_type_or_sums(label: str, loss: Any) -> None:
    """Raises ValueError unless `loss` is a grpo.Loss of scalar arrays with the allowed sums."""
    has_form = isinstance(loss, grpo.Loss) and isinstance(loss.sums, dict)
    if has_form:
        values = [loss.value, *loss.sums.values()]
        are_scalars = all(isinstance(value, mx.array) and value.shape == () for value in values)
        has_form = are_scalars and loss.value.dtype == mx.float32
    if not has_form:
        raise ValueError(
            f"{label} returned {shorten_value(loss)}; return grpo.Loss(value, sums), where value "
            "is a scalar float32 array and sums is a dictionary of scalar arrays"
        )
    unknown_sums = set(loss.sums) - set(SUMS)
    if unknown_sums:
        names = ", ".join(sorted(map(str, unknown_sums)))
        raise ValueError(
            f"{label} returned the sums {names}, but a loss may return only {' and '.join(SUMS)}"
        )


def _check_gradient(label: str, loss: grpo.Loss, gradient: mx.array, mask: mx.array) -> None:
    """Raises ValueError if a gradient is not finite, is not 0 at padding, or is 0 everywhere."""
    is_finite = mx.isfinite(loss.value) & mx.isfinite(gradient).all()
    if not is_finite.item():
        raise ValueError(
            f"{label} returned the loss {loss.value.item()} with the gradient {gradient.tolist()}; "
            "both must be finite"
        )
    if (gradient * (1 - mask) != 0).any().item():
        raise ValueError(
            f"{label} has a gradient at padding, where tokens.mask is 0; multiply by tokens.mask"
        )
    if not (gradient != 0).any().item():
        raise ValueError(
            f"{label} has no gradient with respect to tokens.logprobs, so it trains nothing"
        )


def _compute_or_raise_with_location(
    label: str, function: Callable[..., Any], compute: Callable[[], Any]
) -> Any:
    """
    Calls `compute`, which calls the user's function, and returns the result.

    If the user's function fails, raises ValueError with file and line.
    """
    try:
        return compute()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{label} {describe_error_in_function(error, function)}") from error


# ---- a user's advantage


def compute_custom_advantages(
    spec: str, function: Callable[[np.ndarray], Any], rewards: np.ndarray
) -> np.ndarray:
    """
    Calls a user's advantage function with rewards (B, G) float64. Returns (B, G) float32.

    The rewards of missing samples are nan, and their advantages are set to 0.

    Raises ValueError if the user's function fails, or if it returns an array of another shape or a
    value that is not finite.
    """
    label = f"--advantage {spec}{file_and_line_suffix(function)}"
    advantages = _compute_or_raise_with_location(
        label, function, lambda: np.array(function(rewards.copy()), np.float32)
    )
    if advantages.shape != rewards.shape:
        raise ValueError(
            f"{label} returned the shape {advantages.shape} for rewards of shape {rewards.shape}; "
            "return one advantage for each reward"
        )
    advantages[np.isnan(rewards)] = 0
    if not np.isfinite(advantages).all():
        raise ValueError(
            f"{label} returned {shorten_value(advantages.tolist())} for the rewards "
            f"{shorten_value(rewards.tolist())}; all advantages must be finite"
        )
    return advantages
