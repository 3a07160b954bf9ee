"""
The update: one gradient over all of a step's batches, then one optimizer step on float32 masters.

The masters are the float32 copies of the trainable weights. This file does not cover where
completions and rewards come from, the loss itself (step/loss.py), or how to tell that a step moved
the policy too far (step/trust_region.py).

Axes: M rows of a batch, T tokens that the policy wrote.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

import gwen
import lora
from config import Config
from layers import lm_head
from machine import alive, gpu, kernels, world
from step import trust_region
from step.batch import Batch, padding_fraction
from step.loss import MEASURED, BatchLoss, StepLoss, UpdateResult
from step.trust_region import LEAST_SHARE, MOST_TRIES, SLACK, BoundedStep, Weights

MAX_GRAD_NORM = 1.0  # a step's gradient is clipped to this norm
MOST_FAILURES = 3  # consecutive failed updates that no smaller loss scale can fix
# the learner's attributes that a checkpoint keeps, in addition to the tensors and the loss scale
COUNTS = ("failures", "lr_scale", "num_skipped")


class LossScale(NamedTuple):
    """
    A factor on the loss that keeps small float16 gradients above zero.

    A dynamic scale doubles after 200 good steps and halves after an overflow.
    """

    value: float = 1.0
    good_steps: int = 0
    dynamic: bool = False

    def next_scale(self, overflow: bool) -> "LossScale":
        if not self.dynamic:
            return self
        if overflow:
            return self._replace(value=max(self.value / 2, 1.0), good_steps=0)
        if self.good_steps + 1 == 200:
            return self._replace(value=min(self.value * 2, 2.0**24), good_steps=0)
        return self._replace(good_steps=self.good_steps + 1)


class Sgd(optim.Optimizer):
    """Plain descent, w - lr g. It keeps no momentum, whereas MLX's own SGD stores one of zeros."""

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        self.state["step"] = self.step + 1
        return tree_map(
            lambda weight, grad: weight - self.learning_rate * grad, parameters, gradients
        )


class Learner:
    """
    A model in training, with float32 masters of its trainable weights by name, an optimizer for
    them, and the loss scale.

    base: the model before training; needed only if disabling adapters does not restore it.
    """

    def __init__(
        self, model: gwen.Model, config: Config, loss: StepLoss, base: gwen.Model | None = None
    ):
        self.model = model
        self.config = config
        self.loss = loss
        self.base = base
        if gpu.has_metal() and kernels.kernels_are_wanted():
            kernels.check_calls(lm_head.rehearse_head(model.head_weight))

        parameters = tree_flatten(model.trainable_parameters())
        self.trainable = {name: array.astype(mx.float32) for name, array in parameters}
        self.optimizer: optim.Optimizer = Sgd()
        if config.optimizer.kind == "adamw":
            self.optimizer = optim.AdamW(
                config.optimizer.learning_rate, weight_decay=0.0, bias_correction=True
            )
            self.optimizer.init(tree_unflatten(list(self.trainable.items())))

        is_float16 = model.head_weight.dtype == mx.float16
        self.loss_scale = LossScale(2.0**15 if is_float16 else 1.0, dynamic=is_float16)
        self.failures = 0  # failed updates in a row, see MOST_FAILURES
        self.num_skipped = 0  # updates skipped because their gradient was not finite
        # factor on the scheduled learning rate; it falls after steps that went too far
        self.lr_scale = 1.0
        self.num_forwards = 0  # rows computed since the last update, including the reference's
        self.num_changes = 0  # optimizer steps that changed this state or began to change it
        broadcast_weights(self)

    def state(self) -> dict[str, Any]:
        """Everything that outlives a step."""
        names = ("trainable", "loss_scale", "num_changes", *COUNTS)
        values = {name: getattr(self, name) for name in names}
        return values | {"moments": dict(tree_flatten(self.optimizer.state))}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what `state()` returned, or a part of it with `trainable` and `moments`."""
        self.optimizer.state = tree_unflatten(list(state["moments"].items()))
        attributes = {name: value for name, value in state.items() if name != "moments"}
        vars(self).update(attributes)
        install_weights(self.model, self.trainable)


# ---- log-probabilities that a loss compares with


def add_reference_logprobs(learner: Learner, batches: list[Batch]) -> list[Batch]:
    """The batches, with the log-probabilities under the model before training added."""
    model = learner.base or learner.model
    local_batches = [batch for batch in batches if batch.is_local]
    with lora.with_initial_weights(model):
        logprobs = iter(compute_logprobs(learner, local_batches, model))

    completed = []
    for batch in batches:
        if batch.is_local:
            columns = batch.columns | {"ref_logprobs": next(logprobs)}
            batch = batch._replace(columns=columns)
        completed.append(batch)
    return completed


def fill_in_old_logprobs(batches: list[Batch], logprobs: list[mx.array]) -> list[Batch]:
    """The batches, with `logprobs` as old log-probabilities wherever a batch has none yet."""
    completed = []
    for batch, batch_logprobs in zip(batches, logprobs, strict=True):
        if batch.old_logprobs is None:
            batch = batch._replace(old_logprobs=batch_logprobs)
        completed.append(batch)
    return completed


# ---- the update


def run_optimizer_steps(learner: Learner, batches: list[Batch], lr: float) -> UpdateResult:
    """
    Passes `num_iterations` times over the samples, with `mini_batches` optimizer steps per pass.

    The old policy is the policy before the first of these steps. Its log-probabilities come from
    the first forward pass; only later mini-batches need an extra pass for them. A part of the
    samples, the probe, measures how far all steps together move the policy, and `--target-kl`
    limits that distance. If no sample has a gradient, no step is taken.

    Raises ValueError if the gradient fails too often in a row.
    """
    optimizer = learner.config.optimizer
    means: dict[str, float | None] = dict.fromkeys(MEASURED)
    if not batches:  # every sample was truncated and left out
        return UpdateResult(
            lr, learner.lr_scale, learner.num_skipped, learner.loss_scale.value, means
        )

    # A step's KL grows with the square of its learning rate, so the target follows the schedule's
    # square.
    target = 0.0
    if lr and batches[0].sampled_logprobs is not None:
        target = optimizer.target_kl * (lr / optimizer.learning_rate) ** 2

    num_mini_batches = optimizer.mini_batches
    num_with_gradient = sum(batch.num_with_gradient for batch in batches)
    # for each mini-batch: all its batches, and then only those that this rank computes
    all_batches = [
        [batch for batch in batches if batch.mini_batch == number]
        for number in range(num_mini_batches)
    ]
    local_batches = [[batch for batch in part if batch.is_local] for part in all_batches]
    for number in range(1, num_mini_batches):  # the policy moves before these are trained
        old_logprobs = logprobs_with(learner, local_batches[number], learner.trainable)
        local_batches[number] = fill_in_old_logprobs(local_batches[number], old_logprobs)

    num_iterations = optimizer.num_iterations if num_with_gradient else 1
    order = [number for number in range(num_mini_batches) if all_batches[number]]
    step_stats: list[dict[str, float]] = []
    bounded_steps: list[BoundedStep] = []
    for number in order * num_iterations:
        has_gradient = any(batch.num_with_gradient for batch in all_batches[number])
        # without a target, the weights before the step need not be kept in memory
        weights_before = learner.trainable if target and has_gradient else None
        if has_gradient:
            logprobs, stats = optimizer_step(learner, local_batches[number], lr)
        else:
            logprobs, stats = compute_stats(learner, local_batches[number])
        local_batches[number] = fill_in_old_logprobs(local_batches[number], logprobs)
        step_stats.append(stats)

        if weights_before and not stats["skipped"]:
            if not bounded_steps:
                probed = list(itertools.chain(*local_batches))
                probe = trust_region.make_probe(probed, learner.optimizer.step.item())
            bounded = backtrack_to_target_kl(learner, weights_before, probe, target)
            # Later steps of the run use the scale that was small enough. From an update's second
            # step on, part of the KL comes from earlier steps, so no step more than halves it.
            learner.lr_scale *= max(bounded.scale, 0.5) if bounded_steps else bounded.scale
            bounded_steps.append(bounded)

    broadcast_weights(learner)
    dtype = learner.model.head_weight.dtype
    rounded: list[Any] = []
    if dtype != mx.float32:
        rounded = [layer.rounded_matrices(dtype) for _, layer in lora.adapted_layers(learner.model)]
    # evaluate these now, because a GPU error in the next rollout would spoil them
    mx.eval(learner.model.trainable_parameters(), rounded)

    lr_scale = learner.lr_scale
    if bounded_steps:
        last = bounded_steps[-1]
        if last.kl < target / 2 and last.num_backtracks < MOST_TRIES:
            learner.lr_scale = min(lr_scale * trust_region.RECOVERY, 1.0)

    num_forwards = sum(world.all_gather(learner.num_forwards))
    learner.num_forwards = 0
    num_loss_tokens = round(batches[0].num_loss_tokens * num_mini_batches)
    grad_norms = [stats["grad_norm"] for stats in step_stats if "grad_norm" in stats]
    for name in means.keys() & step_stats[0].keys():
        values = [stats[name] for stats in step_stats]
        if name.endswith("_max"):
            means[name] = max(values)
        else:
            means[name] = sum(values) / (num_iterations * num_loss_tokens)
    return UpdateResult(
        lr,
        lr_scale,
        learner.num_skipped,
        learner.loss_scale.value,
        means=means,
        num_loss_tokens=num_loss_tokens,
        num_with_gradient=num_with_gradient,
        loss=sum(stats["loss"] for stats in step_stats) / (num_mini_batches * num_iterations),
        grad_norm=sum(grad_norms) / len(grad_norms) if grad_norms else None,
        moved=bounded_steps[-1].kl if bounded_steps else None,
        num_backtracks=sum(bounded.num_backtracks for bounded in bounded_steps),
        num_skipped_now=int(sum(stats.get("skipped", 0) for stats in step_stats)),
        num_forwards=num_forwards,
        pad_frac=padding_fraction(batches),
    )


def optimizer_step(
    learner: Learner, batches: list[Batch], lr: float
) -> tuple[list[mx.array], dict[str, float]]:
    """
    Takes one step on the masters, at `lr` times the learner's scale, and copies them to the model.

    Changes no weights if the gradient is not finite. Returns each batch's log-probabilities before
    the step, (M, T), and the step's statistics.
    """
    grads, logprobs, stats = compute_gradient(learner, batches)
    grads, norm = optim.clip_grad_norm(grads, MAX_GRAD_NORM)
    stats["grad_norm"] = norm.item()
    overflow = not (math.isfinite(stats["grad_norm"]) and math.isfinite(stats["loss"]))
    stats["skipped"] = int(overflow)
    if overflow:
        count_failure(learner, stats["loss"])
    else:
        learner.num_changes += 1
        learner.failures = 0
        learner.optimizer.learning_rate = lr * learner.lr_scale
        masters = tree_unflatten(list(learner.trainable.items()))
        new_masters = learner.optimizer.apply_gradients(grads, masters)
        learner.trainable = dict(tree_flatten(new_masters))
        # These names would keep the model's old tensors in memory until all new ones are computed,
        # and without --target-kl the old masters too.
        del grads, masters, new_masters
        install_weights(learner.model, learner.trainable)
        mx.eval(learner.trainable, learner.optimizer.state)
    learner.loss_scale = learner.loss_scale.next_scale(overflow)
    return logprobs, stats


def compute_gradient(
    learner: Learner, batches: list[Batch]
) -> tuple[Any, list[mx.array], dict[str, float]]:
    """The float32 gradient of the step's loss, each batch's log-probabilities, and statistics."""
    names = [name for name, _ in tree_flatten(learner.model.trainable_parameters())]
    grads: dict[str, Any] = dict.fromkeys(names)
    batch_losses: list[BatchLoss] = []
    for batch in count_forwards(learner, batches, "update"):
        batch_loss, tree = loss_and_gradient(learner, batch)
        batch_grads = dict(tree_flatten(tree))
        del tree  # otherwise every gradient would stay in memory until the last one is computed
        for layer_names in group_by_layer(grads):
            for name in layer_names:
                grad = batch_grads.pop(name).astype(mx.float32) / learner.loss_scale.value
                grads[name] = grad if grads[name] is None else grads[name] + grad
            mx.async_eval([grads[name] for name in layer_names])
        mx.eval(grads, batch_loss)  # wait: the next batch may use this one's memory
        logprobs = mx.stop_gradient(batch_loss.logprobs)
        batch_losses.append(batch_loss._replace(logprobs=logprobs))

    if not batches:
        grads = {name: mx.zeros(learner.trainable[name].shape) for name in grads}
    sums = world.all_sum(list(grads.values()))
    grads = dict(zip(grads, sums, strict=True))
    gradient = tree_unflatten(list(grads.items()))
    logprobs_by_batch = [batch_loss.logprobs for batch_loss in batch_losses]
    return gradient, logprobs_by_batch, sum_stats_over_ranks(batch_losses)


def compute_stats(
    learner: Learner, batches: list[Batch]
) -> tuple[list[mx.array], dict[str, float]]:
    """The log-probabilities and statistics of `compute_gradient`, from forward passes alone."""
    batch_losses = []
    with gpu.without_gradients():
        for batch in count_forwards(learner, batches, "update"):
            batch_loss = learner.loss.compute(learner.model, batch)
            mx.eval(batch_loss)  # wait
            batch_losses.append(batch_loss)
    logprobs_by_batch = [batch_loss.logprobs for batch_loss in batch_losses]
    return logprobs_by_batch, sum_stats_over_ranks(batch_losses)


def sum_stats_over_ranks(batch_losses: list[BatchLoss]) -> dict[str, float]:
    """The sums of the statistics of all ranks' batches; of `..._max`, the largest value."""
    local_sums = [
        {name: value.item() for name, value in batch_loss.sums.items()}
        for batch_loss in batch_losses
    ]
    totals: dict[str, float] = {}
    for sums in itertools.chain(*world.all_gather(local_sums)):
        for name, value in sums.items():
            total = totals.get(name, 0.0)
            totals[name] = max(total, value) if name.endswith("_max") else total + value
    return totals


def loss_and_gradient(learner: Learner, batch: Batch) -> tuple[BatchLoss, Any]:
    """A batch's part of the step's loss, and its gradient, both multiplied by the loss scale."""

    def scaled_loss(model: gwen.Model) -> BatchLoss:
        batch_loss = learner.loss.compute(model, batch)
        return batch_loss._replace(loss=batch_loss.loss * learner.loss_scale.value)

    batch_loss, tree = nn.value_and_grad(learner.model, scaled_loss)(learner.model)
    return BatchLoss(*batch_loss), tree


def count_forwards(learner: Learner, batches: list[Batch], activity: str) -> Iterator[Batch]:
    """Yields the batches, counts their rows as forward passes, and shows a progress bar."""
    learner.num_forwards += sum(len(batch.rows) for batch in batches)
    yield from alive.Bar(batches, desc=activity, unit="part")


@gpu.without_gradients()
def compute_logprobs(learner: Learner, batches: list[Batch], model: gwen.Model) -> list[mx.array]:
    """Each batch's log-probabilities under a model, (M, T), without gradient."""
    logprobs: list[mx.array] = []
    for batch in count_forwards(learner, batches, "log-probabilities"):
        logprobs.append(learner.loss.logprobs(model, batch)[0])
        mx.eval(logprobs[-1])  # wait: the next batch may use this one's memory
    return logprobs


def group_by_layer(names: Iterable[str]) -> list[list[str]]:
    """
    The weight names, grouped by layer, in the order in which a backward pass computes gradients.

    If MLX evaluated the gradients in another order, they would keep their inputs in memory.
    """

    def backward_position(name: str) -> float:
        first, second, *_ = name.split(".")
        if first == "layers":
            return -int(second)
        return math.inf if first == "embed_tokens" else -math.inf

    ordered = sorted(names, key=backward_position)
    return [list(layer) for _, layer in itertools.groupby(ordered, backward_position)]


# ---- the trust region


def backtrack_to_target_kl(
    learner: Learner, weights_before: Weights, probe: list[Batch], target: float
) -> BoundedStep:
    """
    Shortens a step until the policy has moved by at most SLACK times the target.

    A step that is still too long after MOST_TRIES shortenings is undone.
    """
    scale = 1.0
    weights = learner.trainable
    for num_backtracks in range(MOST_TRIES):
        kl = trust_region.measure_kl(probe, logprobs_with(learner, probe, weights))
        if kl <= SLACK * target:
            return BoundedStep(scale, kl, num_backtracks)
        # The KL of a short step grows with the square of its length. If overflowing logits make it
        # inf or nan, the smallest factor is used.
        factor = min(max(LEAST_SHARE, math.sqrt(target / kl)), 0.5)
        scale *= factor
        for name, before in weights_before.items():
            weights[name] = before + factor * (weights[name] - before)
    weights |= weights_before
    kl = trust_region.measure_kl(probe, logprobs_with(learner, probe, weights))
    return BoundedStep(scale, kl, MOST_TRIES)


def logprobs_with(learner: Learner, batches: list[Batch], weights: Weights) -> list[mx.array]:
    """Installs masters into the model. Returns the batches' log-probabilities under them."""
    install_weights(learner.model, weights)
    return compute_logprobs(learner, batches, learner.model)


# ---- weights


def install_weights(model: gwen.Model, trainable: dict[str, mx.array]) -> None:
    """Copies the float32 masters into the model, cast to the types of the model's weights."""
    dtypes = {name: array.dtype for name, array in tree_flatten(model.trainable_parameters())}
    weights = [(name, array.astype(dtypes[name])) for name, array in trainable.items()]
    model.load_weights(weights, strict=False)


def broadcast_weights(learner: Learner) -> None:
    """Gives all ranks the masters of rank 0 if they differ, as processors round differently."""
    if world.size() == 1:
        return
    checksums = world.all_gather(world.checksum(list(learner.trainable.values())))
    if len(set(checksums)) > 1:
        moments = dict(tree_flatten(learner.optimizer.state))
        state = {
            "trainable": world.broadcast(learner.trainable),
            "moments": world.broadcast(moments),
        }
        learner.load_state(state)


def count_failure(learner: Learner, loss: float) -> None:
    """Counts a failed update. Raises ValueError after too many failures in a row."""
    # a smaller loss scale may keep the gradient from overflowing
    can_recover = math.isfinite(loss) and learner.loss_scale.value > 1
    if not can_recover and learner.failures + 1 == MOST_FAILURES:
        failed = "gradient" if math.isfinite(loss) else "loss"
        raise ValueError(
            f"{MOST_FAILURES} updates in a row had no finite {failed}; start again with a lower "
            f"--learning-rate than {learner.config.optimizer.learning_rate:g} or in another "
            "GWEN_DTYPE"
        )
    learner.num_changes += 1
    learner.num_skipped += 1
    learner.failures += not can_recover


def learning_rate(config: Config, step: int) -> float:
    """The rate at a step: linear warm-up, then half a cosine to a tenth. `step` starts at 0."""
    settings = config.optimizer
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    num_decay_steps = max(settings.steps - settings.warmup_steps, 1)
    progress = (step - settings.warmup_steps) / num_decay_steps
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return settings.learning_rate * (0.1 + 0.9 * cosine)
