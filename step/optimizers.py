"""
Makes the optimizer of a run: AdamW, plain gradient descent, or the user's own optimizer.

    --optimizer FILE.py:function    learning rate -> mlx.optimizers.Optimizer

The run sets the learning rate of every optimizer before each step. step/trust_region.py assumes
that a step is proportional to the learning rate. update.py computes and clips the gradients.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map

from config import Config, is_user_function
from machine.output import restore_streams_after_call
from prompts.examples import shorten_value
from rewards.functions import describe_error_in_function, file_and_line_suffix, load_function
from text.printable import print_once

# the weights and the gradient with which a user's optimizer is tried
TRIAL_WEIGHTS = np.ones((4, 2), np.float32)
TRIAL_GRADIENT = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
TRIAL_RATES = (1e-3, 5e-4)  # learning rates that must lead to different steps

# A function that takes the learning rate and returns a new optimizer with this learning rate.
OptimizerFunction = Callable[[float], optim.Optimizer]


class Sgd(optim.Optimizer):
    """
    Plain gradient descent: each weight becomes weight - learning_rate * gradient.

    This optimizer stores no momentum, whereas MLX's own SGD stores a momentum of zeros.
    """

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Returns the parameters after one step. The arguments stay unchanged."""
        self.state["step"] = self.step + 1
        return tree_map(
            lambda weight, grad: weight - self.learning_rate * grad, parameters, gradients
        )


def make_optimizer(config: Config, weights: Any) -> optim.Optimizer:
    """
    Makes the optimizer that the settings describe, with the initial state for the weights.

    weights: a tree of the trained float32 weights.
    Raises ValueError, with file and line, if the user's function fails.
    """
    settings = config.optimizer
    if settings.kind == "sgd":
        return Sgd()
    if is_user_function(settings.kind):
        _, function = load_function("--optimizer", settings.kind)
        optimizer = _call_optimizer_function(settings.kind, function, settings.learning_rate)
    else:
        optimizer = optim.AdamW(
            settings.learning_rate,
            betas=[settings.adam_beta1, settings.adam_beta2],
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            bias_correction=True,
        )
    # a user's optimizer may create its state only in its first step
    with contextlib.suppress(NotImplementedError):
        optimizer.init(weights)
    return optimizer


def count_optimizer_steps(optimizer: optim.Optimizer) -> int:
    """The number of steps that the optimizer has taken."""
    if isinstance(optimizer, optim.MultiOptimizer):  # only its parts count the steps
        return count_optimizer_steps(optimizer.optimizers[0])
    return int(optimizer.step.item())


# ---- trying a user's optimizer


def try_own_optimizer(config: Config) -> None:
    """
    Makes the user's optimizer, and takes steps with it on a few weights.

    Prints a line if a step increases a weight whose gradient is positive.

    Does nothing if the optimizer is not the user's own.

    Raises ValueError, with file and line, if the function or the step fails, or if the optimizer
    would not use the run's learning rate.
    """
    spec = config.optimizer.kind
    if not is_user_function(spec):
        return
    rate = config.optimizer.learning_rate
    _, function = load_function("--optimizer", spec)
    label = _optimizer_label(spec, function)
    optimizer = _call_optimizer_function(spec, function, rate)
    if _call_optimizer_function(spec, function, rate) is optimizer:
        raise ValueError(
            f"{label} returned the same object twice; make a new optimizer in each call, because "
            "a run must not continue with the state of another run"
        )
    _refuse_other_learning_rate(label, optimizer, rate)

    change = _take_trial_step(label, function, optimizer)
    changes_by_rate = []
    for trial_rate in TRIAL_RATES:
        new_optimizer = _call_optimizer_function(spec, function, rate)
        new_optimizer.learning_rate = trial_rate
        changes_by_rate.append(_take_trial_step(label, function, new_optimizer))
    if change.any() and np.array_equal(changes_by_rate[0], changes_by_rate[1]):
        raise ValueError(
            f"{label} takes the same step with half of the learning rate; compute the step from "
            "the optimizer's attribute learning_rate, which the run sets before each step"
        )
    # an optimizer that adds noise may move against the gradient by chance, so this is no error
    if (change * TRIAL_GRADIENT).sum() > 0:
        print_once(
            f"{label} increases a weight whose gradient is positive, so it makes the loss larger; "
            "if this is not intended, reverse the sign of the step"
        )


def _take_trial_step(
    label: str, function: Callable[..., Any], optimizer: optim.Optimizer
) -> np.ndarray:
    """
    Takes a step with the user's new optimizer on TRIAL_WEIGHTS, and returns their change.

    label, function: the user's function that made the optimizer, for error messages.
    Raises ValueError, with file and line, if the step fails.
    """
    weights = {"weight": mx.array(TRIAL_WEIGHTS)}
    gradients = {"weight": mx.array(TRIAL_GRADIENT)}
    try:
        changed = optimizer.apply_gradients(gradients, weights)["weight"]
        mx.eval(changed)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{label} {describe_error_in_function(error, function)}") from None
    if not isinstance(changed, mx.array):
        raise ValueError(
            f"{label} replaced a weight by {shorten_value(changed)}; return the new weight from "
            "apply_single"
        )
    values = np.array(changed)
    if values.shape != TRIAL_WEIGHTS.shape or not np.isfinite(values).all():
        raise ValueError(
            f"{label} made a weight inf or nan, or changed its shape, in a step on the weights "
            f"{shorten_value(TRIAL_WEIGHTS.tolist())}"
        )
    return values - TRIAL_WEIGHTS


def _optimizer_label(spec: str, function: Callable[..., Any]) -> str:
    return f"--optimizer {spec}{file_and_line_suffix(function)}"


def _call_optimizer_function(
    spec: str, function: Callable[..., Any], rate: float
) -> optim.Optimizer:
    """Calls the user's function. Raises ValueError unless it returns an optimizer."""
    label = _optimizer_label(spec, function)
    try:
        with restore_streams_after_call(label):
            optimizer = function(rate)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{label} {describe_error_in_function(error, function)}") from None
    if not isinstance(optimizer, optim.Optimizer):
        raise ValueError(
            f"{label} returned {shorten_value(optimizer)}; return an mlx.optimizers.Optimizer"
        )
    return optimizer


def _refuse_other_learning_rate(label: str, optimizer: optim.Optimizer, rate: float) -> None:
    """Raises ValueError unless the optimizer has the run's learning rate, without a schedule."""
    if isinstance(optimizer, optim.MultiOptimizer):
        for part in optimizer.optimizers:
            _refuse_other_learning_rate(label, part, rate)
        return
    advice = "pass the argument of the function to the optimizer as its learning rate"
    if "learning_rate" in optimizer._schedulers:
        raise ValueError(
            f"{label} has a schedule of its own for the learning rate, which the run would "
            f"overwrite; {advice}, and set --lr-scheduler-type and --warmup-steps"
        )
    if "learning_rate" not in optimizer.state:
        raise ValueError(f"{label} has no learning rate that the run can set; {advice}")
    own_rate = float(optimizer.learning_rate.item())
    if abs(own_rate - rate) > 1e-6 * abs(rate):
        raise ValueError(
            f"{label} has the learning rate {own_rate:g}, but the run has --learning-rate "
            f"{rate:g} and would overwrite it; {advice}, and set --learning-rate {own_rate:g}; to "
            "give some weights another rate, let a subclass of the optimizer scale their gradients "
            "or updates"
        )


# ---- the state in a checkpoint


def refuse_other_optimizer_state(
    optimizer: optim.Optimizer,
    saved_state: dict[str, mx.array],
    saved_class_name: str | None,
    run_dir: Path,
) -> None:
    """
    Raises ValueError if a checkpoint contains the state of another optimizer.

    saved_state: the state in the checkpoint, by flattened name. saved_class_name: the
    class of the optimizer that made the state; None in checkpoints of earlier versions.
    """
    name = type(optimizer).__name__
    own_state = dict(tree_flatten(optimizer.state))
    own_names = own_state.keys() - {"learning_rate"}  # Sgd has no rate before its first step
    fits = own_names <= saved_state.keys() and all(
        own_state[key].shape == saved_state[key].shape for key in own_names
    )
    if fits and saved_class_name in (None, name):
        return
    saved = f"the optimizer {saved_class_name}" if saved_class_name else "another optimizer"
    if saved_class_name == name:
        saved = f"an optimizer {name} with other settings"
    raise ValueError(
        f"--resume {run_dir}: the checkpoint has the state of {saved}, but this run uses {name}; "
        f"resume with the run's own optimizer, --optimizer FILE.py:function (in Python, "
        f"optimizer=), or start a new run from the weights with --init-adapter {run_dir}"
    )
