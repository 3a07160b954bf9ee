"""
Loads a user's own loss and advantage functions, and tries them out before a model is loaded.

Gwen's own losses and advantages are in grpo.py. A user names other functions with these
flags:

    --loss-type FILE.py:function    (Tokens, Objective) -> Loss, like the functions in grpo.LOSSES
    --advantage FILE.py:function    rewards (B, G) float64 -> advantages (B, G), or a tuple of the
                                    advantages and is_trained (B, G) bool

Axes: B groups, G samples in a group.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import grpo
from config import Config, is_user_function
from machine.output import restore_streams_after_call
from prompts.examples import shorten_value
from rewards.functions import (
    UserFunctionError,
    describe_error_in_function,
    file_and_line_suffix,
    load_function,
)
from step import loss_trial
from step.advantages import AdvantageFunction
from step.loss import SUMS, make_objective

# the names that a loss may give to the sums that it returns
NAME_OF_SUM = re.compile("[A-Za-z][A-Za-z0-9_]*")

# If a user's function gives the advantage 0 to at least this many different rewards of a group, the
# user may want to leave completions out. A function that subtracts a baseline may also give a 0,
# but only to the one reward that equals the baseline.
LEAST_ZEROS = 2


class CustomObjective(NamedTuple):
    """A user's own functions. If a field is None, Gwen's function is used."""

    loss: grpo.LossFunction | None = None
    advantage: AdvantageFunction | None = None
    notes: tuple[str, ...] = ()  # lines about these functions that the user should read


def load_and_try_custom_objective(config: Config) -> CustomObjective:
    """
    Loads the user's functions that the settings name, and tries each of them on made-up input.

    Raises ValueError, with file and line, if a function is missing, fails or trains nothing.
    """
    settings = config.objective
    loss = None
    notes: tuple[str, ...] = ()
    if is_user_function(settings.loss_type):
        loss, notes = _load_and_try_loss(settings.loss_type, config)
    advantage = None
    if is_user_function(settings.advantage):
        _, function = load_function("--advantage", settings.advantage)
        advantage = functools.partial(compute_custom_advantages, settings.advantage, function)
        notes += _try_advantage(settings.advantage, advantage, config.sampling.groups)
    return CustomObjective(loss, advantage, notes)


# ---- a user's loss


class _TriedLossAndNotes(NamedTuple):
    """A user's loss function that passed its trial, and notes about it for the user."""

    function: grpo.LossFunction
    notes: tuple[str, ...]


def _load_and_try_loss(spec: str, config: Config) -> _TriedLossAndNotes:
    """Loads a user's loss function, and tries it on made-up tokens."""
    _, function = load_function("--loss-type", spec)
    label = f"--loss-type {spec}{file_and_line_suffix(function)}"
    objective = make_objective(config)
    has_reference = bool(objective.beta)
    trials = [loss_trial.make_fixed_tokens(has_reference)]
    for seed in range(2):
        trials.append(loss_trial.make_random_tokens(seed, has_reference))

    uses = _compute_or_raise_with_location(
        label, function, lambda: _measure_uses_or_raise(label, function, trials, objective)
    )
    if not any(uses[name].has_gradient for name in loss_trial.POLICY_FIELDS if name in uses):
        raise ValueError(
            f"{label} has no gradient with respect to tokens.logprobs or tokens.entropies, so it "
            "trains nothing"
        )
    _raise_if_loss_has_wrong_sign(label, function, trials[0], objective)
    for tokens in trials:
        _raise_if_rows_do_not_add_up(label, function, tokens, objective)
    _raise_if_entropy_coef_is_ignored(label, function, trials, objective)
    notes = [f"{label}: {loss_trial.describe_token_field_uses(uses)}"]
    dependence = _describe_dependence_on_rows_per_step(function, trials[0], objective)
    if dependence:
        notes.append(f"{label}: {dependence}")
    return _TriedLossAndNotes(function, tuple(notes))


def _measure_uses_or_raise(
    label: str,
    function: grpo.LossFunction,
    trials: list[grpo.Tokens],
    objective: grpo.Objective,
) -> dict[str, loss_trial.TokenFieldUse]:
    """
    How the loss uses each field of the tokens.

    Raises ValueError if the function returns anything other than a valid loss, or if a gradient is
    invalid.
    """
    for tokens in trials:
        loss = function(tokens, objective)
        _raise_if_loss_has_wrong_type_or_sums(label, loss)
        gradients = loss_trial.loss_gradients_by_token_field(function, tokens, objective)
        for name in loss_trial.POLICY_FIELDS:
            if name in gradients:
                _raise_if_gradient_is_invalid(label, loss, name, gradients[name], tokens.mask)
    return loss_trial.measure_token_field_uses(function, trials, objective)


def _raise_if_loss_has_wrong_type_or_sums(label: str, loss: Any) -> None:
    """Raises ValueError unless `loss` is a grpo.Loss of scalar arrays with the allowed sums."""
    has_form = isinstance(loss, grpo.Loss) and isinstance(loss.sums, dict)
    if has_form:
        values = [loss.value, *loss.sums.values()]
        are_scalars = all(isinstance(value, mx.array) and value.shape == () for value in values)
        has_form = are_scalars and loss.value.dtype == mx.float32
    if not has_form:
        raise _LossMistakeError(
            f"{label} returned {shorten_value(loss)}; return grpo.Loss(value, sums), where value "
            "is a scalar float32 array and sums is a dictionary of scalar arrays"
        )
    for name in loss.sums:
        if not isinstance(name, str) or not NAME_OF_SUM.fullmatch(name):
            raise _LossMistakeError(
                f"{label} returned a sum named {shorten_value(name)}; a name consists of letters, "
                "digits and underscores, and begins with a letter"
            )


def _raise_if_gradient_is_invalid(
    label: str, loss: grpo.Loss, name: str, gradient: mx.array, mask: mx.array
) -> None:
    """Raises ValueError if the gradient is not finite, or if it is not 0 at padding."""
    is_finite = mx.isfinite(loss.value) & mx.isfinite(gradient).all()
    if not is_finite.item():
        raise _LossMistakeError(
            f"{label} returned the loss {loss.value.item()} with the gradient {gradient.tolist()} "
            f"for tokens.{name}; both must be finite"
        )
    if (gradient * (1 - mask) != 0).any().item():
        raise _LossMistakeError(
            f"{label} has a gradient through tokens.{name} at padding, where tokens.mask is 0; "
            "multiply by tokens.mask"
        )


def _raise_if_loss_has_wrong_sign(
    label: str, function: grpo.LossFunction, tokens: grpo.Tokens, objective: grpo.Objective
) -> None:
    """Raises ValueError if the loss makes better answers less likely."""
    gradient = loss_trial.loss_gradients_by_token_field(function, tokens, objective)["logprobs"]
    reversed_tokens = tokens._replace(advantages=-tokens.advantages)
    opposite = loss_trial.loss_gradients_by_token_field(function, reversed_tokens, objective)[
        "logprobs"
    ]
    uses_advantages = not mx.array_equal(gradient, opposite).item()
    slope = (gradient * tokens.advantages).sum()
    raises_loss = bool((slope > 0).item())
    if raises_loss and uses_advantages:
        raise ValueError(
            f"{label} gets smaller when better answers become less likely; reverse the sign of the "
            "loss"
        )


def _raise_if_rows_do_not_add_up(
    label: str, function: grpo.LossFunction, tokens: grpo.Tokens, objective: grpo.Objective
) -> None:
    """
    Raises ValueError unless the loss of several rows is the sum of the losses of the single rows.

    Otherwise the loss of a step would depend on how its rows are divided into micro-batches.
    """
    rows = {2: "two rows", 4: "four rows"}[len(tokens.mask)]
    loss = function(tokens, objective)
    row_losses = loss_trial.losses_of_single_rows(function, tokens, objective)
    value = loss.value.item()
    total = mx.stack([row_loss.value for row_loss in row_losses]).sum().item()
    if abs(value - total) > 1e-4 * max(abs(value), 1):
        if loss_trial.divides_by_micro_batch_size(function, tokens, objective):
            fix = (
                "divide by tokens.num_items or tokens.num_rows, and not by the size of the "
                "micro-batch"
            )
        else:
            fix = (
                "let no row depend on other rows, because the memory limits which rows share a "
                "micro-batch. Compute a mean, quantile or maximum only within a row, and compute "
                "statistics of all rewards of a step in --advantage FILE.py:function"
            )
        raise ValueError(
            f"{label} returned {value:.4g} for {rows} together, but {total:.4g} as the sum over "
            f"the same rows one by one; {fix}"
        )
    for name in loss.sums.keys() - set(SUMS):
        _raise_if_statistic_does_not_add_up(label, name, rows, loss, row_losses)


def _describe_dependence_on_rows_per_step(
    function: grpo.LossFunction, tokens: grpo.Tokens, objective: grpo.Objective
) -> str:
    """Returns a line if the loss changes when every row of a step occurs twice; "" if not."""
    once = function(tokens, objective).value.item()
    twice = function(loss_trial.repeat_rows(tokens), objective).value.item()
    if abs(twice - once) <= 1e-4 * max(abs(once), abs(twice)):
        return ""
    return (
        f"the loss changes from {once:.4g} to {twice:.4g} if every row occurs twice, so its size "
        "depends on --batch and --groups; divide the sum over the tokens by tokens.num_items, or "
        "the sum over the rows by tokens.num_rows"
    )


def _raise_if_statistic_does_not_add_up(
    label: str, name: str, rows: str, loss: grpo.Loss, row_losses: list[grpo.Loss]
) -> None:
    """
    Raises ValueError if the statistic `name` of several rows disagrees with that of each row alone.

    The statistic of several rows must be the sum of the values for the single rows. If `name` ends
    in `_max`, the statistic must be the maximum of these values.
    """
    values = mx.array([row_loss.sums[name] for row_loss in row_losses if name in row_loss.sums])
    if name.endswith("_max"):
        kind = "largest of"
        expected = values.max().item()
        fix = "return the maximum over the tokens"
    else:
        kind = "sum of"
        expected = values.sum().item()
        fix = (
            "return a sum over the tokens, which Gwen divides by the number of tokens in the step, "
            f"or the maximum over the tokens as {name}_max"
        )
    value = loss.sums[name].item()
    if not abs(value - expected) <= 1e-4 * max(abs(value), 1):
        raise ValueError(
            f"{label} returned {value:.4g} as the sum {name!r} for {rows} together, but the {kind} "
            f"its values for the same rows one by one is {expected:.4g}; {fix}"
        )


def _raise_if_entropy_coef_is_ignored(
    label: str, function: grpo.LossFunction, trials: list[grpo.Tokens], objective: grpo.Objective
) -> None:
    """Raises ValueError if --entropy-coef is given, but does not change the loss."""
    if not objective.entropy_coef:
        return
    without_bonus = objective._replace(entropy_coef=0.0)
    for tokens in trials:
        value = function(tokens, objective).value.item()
        if value != function(tokens, without_bonus).value.item():
            return
    raise ValueError(
        f"{label} does not use objective.entropy_coef, so --entropy-coef "
        f"{objective.entropy_coef:g} has no effect; subtract objective.entropy_coef * "
        "tokens.entropies from the loss of each token, or leave --entropy-coef out"
    )


class _LossMistakeError(ValueError):
    """A mistake that the trial found in a loss. The message already names the function."""


def _compute_or_raise_with_location(
    label: str, function: Callable[..., Any], compute: Callable[[], Any]
) -> Any:
    """
    Returns the result of `compute`, which calls the user's function.

    If the user's function fails, raises ValueError with file and line. If the function replaced
    `sys.stdout` or `sys.stderr`, restores the stream.
    """
    try:
        with restore_streams_after_call(label):
            return compute()
    except _LossMistakeError:
        raise
    except (Exception, SystemExit) as error:
        raise UserFunctionError(f"{label} {describe_error_in_function(error, function)}") from None


# ---- a user's advantage


def _try_advantage(spec: str, function: AdvantageFunction, group_size: int) -> tuple[str, ...]:
    """
    Tries a user's advantage function on made-up rewards. Returns notes for the user.

    group_size: the number of completions per prompt in the run.
    """
    # the groups have a high, a low and a negative mean, because a function may select groups by
    # their mean
    small_trial = function(np.array([[0.0, 1.0, 1.0], [0.5, 0.5, 0.5]]))
    other_trials = [function(np.array([[0.0, 0.1, 0.0], [low, low, 0.0]])) for low in (0.2, -1.0)]
    if all(np.isnan(trial).all() for trial in (small_trial, *other_trials)):
        raise ValueError(
            f"--advantage {spec} leaves out every completion in a trial with made-up rewards from "
            "-1 to 1, because is_trained is False for all of them; set it to True for the "
            "completions to train on"
        )
    num_completions = max(group_size, 3)
    advantages = function(np.linspace(0.0, 1.0, num_completions)[None])
    num_zeros = int((advantages == 0).sum())
    if num_zeros < LEAST_ZEROS:
        return ()
    return (
        f"--advantage {spec} gave the advantage 0 to {num_zeros} of {num_completions} completions "
        "with different rewards; their tokens still count in the divisor of the loss; to leave "
        "completions out of the update, return (advantages, is_trained) with a bool array (B, G)",
    )


def compute_custom_advantages(
    spec: str, function: Callable[[np.ndarray], Any], rewards: np.ndarray
) -> np.ndarray:
    """
    Calls a user's advantage function with rewards (B, G) float64. Returns (B, G) float32.

    The function returns either the advantages, or the advantages and a bool array (B, G) that says
    on which samples the update trains. The advantages of all other samples become nan. The rewards
    of missing samples are nan, and their advantages become 0.

    Raises ValueError if the user's function fails, or if it returns an array of another shape or a
    value that is not finite.
    """
    label = f"--advantage {spec}{file_and_line_suffix(function)}"

    def compute_advantages_and_is_trained() -> tuple[np.ndarray, np.ndarray]:
        """The user's advantages, and whether the update trains on each sample."""
        result = function(rewards.copy())
        is_trained = np.ones(rewards.shape, bool)
        if isinstance(result, tuple) and len(result) == 2:
            chosen = np.asarray(result[1])
            if chosen.shape == rewards.shape and np.shape(result[0]) == rewards.shape:
                result, is_trained = result[0], chosen
        return np.array(result, np.float32), is_trained

    advantages, is_trained = _compute_or_raise_with_location(
        label, function, compute_advantages_and_is_trained
    )
    if is_trained.dtype != bool:
        raise UserFunctionError(
            f"{label} returned a second array of dtype {is_trained.dtype}, which must say which "
            "completions to train; convert it with .astype(bool)"
        )
    if advantages.shape != rewards.shape:
        raise UserFunctionError(
            f"{label} returned the shape {advantages.shape} for rewards of shape {rewards.shape}; "
            "return one advantage for each reward"
        )
    is_missing = np.isnan(rewards)
    if not np.isfinite(advantages[is_trained & ~is_missing]).all():
        raise UserFunctionError(
            f"{label} returned {shorten_value(advantages.tolist())} for the rewards "
            f"{shorten_value(rewards.tolist())}; all advantages must be finite"
        )
    advantages[~is_trained] = np.nan
    advantages[is_missing] = 0
    return advantages
