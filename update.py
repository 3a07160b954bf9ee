"""
Updates the policy: computes the gradient over the batches of a step, and takes an optimizer step.

The masters are the float32 copies of the trainable weights. step/loss.py computes the loss.
step/trust_region.py measures how far a step moved the policy.

Axes: M rows of a batch, T tokens that the policy wrote.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

import gwen
import lora
from config import Config
from layers import lm_head
from machine import alive, gpu, kernels, world
from step import optimizers, trust_region
from step.batch import Batch, padding_fraction
from step.loss import (
    LOSS_PREFIX,
    MEASURED,
    MISMATCH,
    NUM_OWN_TOKENS,
    NUM_REPLAYED_TOKENS,
    REPLAY_GAP,
    BatchLoss,
    StepLoss,
    UpdateResult,
)
from step.trust_region import LEAST_SHARE, MOST_TRIES, SLACK, BoundedStep, MasterWeights

# the run stops after this many consecutive failures that a smaller loss scale cannot prevent
MOST_FAILURES = 3
# the learner's attributes that a checkpoint stores in addition to the tensors and the loss scale
COUNTS = ("failures", "lr_scale", "num_skipped")


class LossScale(NamedTuple):
    """
    A factor on the loss that keeps small float16 gradients above zero.

    A dynamic scale doubles after 200 steps without an overflow, and halves after an overflow.
    """

    value: float = 1.0
    good_steps: int = 0
    dynamic: bool = False

    def scale_after_step(self, overflowed: bool) -> "LossScale":
        """The loss scale for the next step, given whether the gradient of this step overflowed."""
        if not self.dynamic:
            return self
        if overflowed:
            return self._replace(value=max(self.value / 2, 1.0), good_steps=0)
        if self.good_steps + 1 == 200:
            return self._replace(value=min(self.value * 2, 2.0**24), good_steps=0)
        return self._replace(good_steps=self.good_steps + 1)


class Learner:
    """
    A model in training, with the float32 masters of its trainable weights, an optimizer and a loss
    scale.

    base: the model before training; needed only if disabling the adapters does not restore it.
    """

    def __init__(
        self, model: gwen.Model, config: Config, loss: StepLoss, base: gwen.Model | None = None
    ):
        self.model = model
        self.config = config
        self.loss = loss
        self.base = base
        if gpu.can_run_metal_kernels() and kernels.is_kernels_variable_on():
            kernels.turn_off_faulty_kernels(lm_head.record_head_calls(model.head_weight))

        parameters = tree_flatten(model.trainable_parameters())
        self.trainable = {name: array.astype(mx.float32) for name, array in parameters}
        weights = tree_unflatten(list(self.trainable.items()))
        self.configured_optimizer = optimizers.make_optimizer(config, weights)
        self.optimizer = self.configured_optimizer

        is_float16 = model.head_weight.dtype == mx.float16
        self.loss_scale = LossScale(2.0**15 if is_float16 else 1.0, dynamic=is_float16)
        self.failures = 0  # number of failed updates in a row (see MOST_FAILURES)
        self.num_skipped = 0  # number of updates skipped because the gradient was not finite

        # factor on the scheduled learning rate; lowered when a step moves the policy too far
        self.lr_scale = 1.0
        # number of rows in forward passes of the policy or the reference model since the last
        # update
        self.num_forwards = 0
        self.num_changes = 0  # number of optimizer steps that changed or began to change this state
        broadcast_state_if_ranks_differ(self)

    def state(self) -> dict[str, Any]:
        """The state that must be kept from one step to the next, for example in a checkpoint."""
        names = ("trainable", "loss_scale", "num_changes", *COUNTS)
        values = {name: getattr(self, name) for name in names}
        return values | {"moments": dict(tree_flatten(self.optimizer.state))}

    def load_state(self, state: dict[str, Any]) -> None:
        """
        Restores a state that `state()` returned.

        A partial state is also accepted, if it includes `trainable` and `moments`.
        """
        self.optimizer.state = tree_unflatten(list(state["moments"].items()))
        attributes = {name: value for name, value in state.items() if name != "moments"}
        vars(self).update(attributes)
        install_weights(self.model, self.trainable)


# ---- reference and old log-probabilities


def add_reference_logprobs(learner: Learner, batches: list[Batch]) -> list[Batch]:
    """Copies of the batches with the tokens' log-probabilities under the model before training."""
    model = learner.base or learner.model
    local_batches = [batch for batch in batches if batch.is_local]
    with lora.use_initial_weights(model):
        logprobs = iter(compute_logprobs(learner, local_batches, model))

    completed = []
    for batch in batches:
        if batch.is_local:
            columns = batch.columns | {"ref_logprobs": next(logprobs)}
            batch = batch._replace(columns=columns)
        completed.append(batch)
    return completed


def fill_in_missing_old_logprobs(batches: list[Batch], logprobs: list[mx.array]) -> list[Batch]:
    """Copies of the batches in which `logprobs` replaces missing old log-probabilities."""
    completed = []
    for batch, batch_logprobs in zip(batches, logprobs, strict=True):
        if batch.old_logprobs is None:
            batch = batch._replace(old_logprobs=batch_logprobs)
        completed.append(batch)
    return completed


# ---- the update


class LogprobsAndStats(NamedTuple):
    """The results of a pass over some batches."""

    logprobs: list[mx.array]  # (M, T) for each batch
    stats: dict[str, float]  # statistics of all ranks' batches together


class GradientResult(NamedTuple):
    """The results of a forward and backward pass over some batches."""

    gradient: Any  # float32, summed over all ranks; a tree like the trainable parameters
    logprobs: list[mx.array]  # (M, T) for each batch
    stats: dict[str, float]  # statistics of all ranks' batches together


def run_optimizer_steps(learner: Learner, batches: list[Batch], lr: float) -> UpdateResult:
    """
    Passes `num_iterations` times over the samples, with `mini_batches` optimizer steps per pass.

    The old policy is the policy before the first optimizer step. For the first mini-batch, the
    log-probabilities under the old policy come from the training pass itself; only later
    mini-batches need an extra forward pass. A few of the samples, called the probe, show how far
    all steps together have moved the policy, and `--target-kl` limits that distance. If no sample
    has a gradient, no step is taken.

    Raises ValueError if too many updates in a row have a gradient that is not finite.
    """
    optimizer = learner.config.optimizer
    means: dict[str, float | None] = dict.fromkeys(MEASURED)
    if not batches:  # every sample was truncated and therefore left out
        return UpdateResult(
            lr, learner.lr_scale, learner.num_skipped, learner.loss_scale.value, means
        )

    # The KL that a step causes grows with the square of the learning rate. So the KL target is
    # scaled with the square of the scheduled rate.
    target = 0.0
    if lr and batches[0].sampled_logprobs is not None:
        target = optimizer.target_kl * (lr / optimizer.learning_rate) ** 2

    num_mini_batches = optimizer.mini_batches
    num_with_gradient = sum(batch.num_with_gradient for batch in batches)
    all_batches: list[list[Batch]] = []  # the batches of each mini-batch
    local_batches: list[list[Batch]] = []  # of these batches, only those that this rank computes
    for number in range(num_mini_batches):
        mini_batch = [batch for batch in batches if batch.mini_batch == number]
        all_batches.append(mini_batch)
        local_batches.append([batch for batch in mini_batch if batch.is_local])

    # the old log-probabilities of later mini-batches are computed now, before the policy changes
    for number in range(1, num_mini_batches):
        old_logprobs = install_weights_and_compute_logprobs(
            learner, local_batches[number], learner.trainable
        )
        local_batches[number] = fill_in_missing_old_logprobs(local_batches[number], old_logprobs)

    num_iterations = optimizer.num_iterations if num_with_gradient else 1
    order = [number for number in range(num_mini_batches) if all_batches[number]]
    step_stats: list[dict[str, float]] = []
    bounded_steps: list[BoundedStep] = []
    for number in order * num_iterations:
        has_gradient = any(batch.num_with_gradient for batch in all_batches[number])
        # without a KL target, the weights from before the step need not stay in memory
        weights_before = learner.trainable if target and has_gradient else None
        if has_gradient:
            logprobs, stats = take_optimizer_step(learner, local_batches[number], lr)
        else:
            logprobs, stats = compute_logprobs_and_stats(learner, local_batches[number])
        local_batches[number] = fill_in_missing_old_logprobs(local_batches[number], logprobs)
        step_stats.append(stats)

        if weights_before and not stats["skipped"]:
            if not bounded_steps:
                probed = list(itertools.chain(*local_batches))
                probe = trust_region.select_kl_probe(
                    probed, optimizers.count_optimizer_steps(learner.optimizer)
                )
            bounded = backtrack_to_target_kl(learner, weights_before, probe, target)
            # Later steps of the run keep the reduced learning rate. From the second step of an
            # update on, part of the KL is due to earlier steps, so each of these steps at most
            # halves the rate.
            learner.lr_scale *= max(bounded.scale, 0.5) if bounded_steps else bounded.scale
            bounded_steps.append(bounded)

    broadcast_state_if_ranks_differ(learner)
    dtype = learner.model.head_weight.dtype
    rounded: list[Any] = []
    if dtype != mx.float32:
        rounded = [
            layer.cached_a_and_scaled_b(dtype) for _, layer in lora.adapted_layers(learner.model)
        ]
    # evaluate the new weights now, because a GPU error in the next rollout would corrupt them
    mx.eval(learner.model.trainable_parameters(), rounded)

    lr_scale = learner.lr_scale
    if bounded_steps:
        last = bounded_steps[-1]
        if last.kl < target / 2 and last.num_backtracks < MOST_TRIES:
            learner.lr_scale = min(lr_scale * trust_region.RECOVERY, 1.0)

    num_forwards = sum(world.all_gather(learner.num_forwards))
    learner.num_forwards = 0
    num_counted_tokens = round(batches[0].num_counted_tokens * num_mini_batches)
    grad_norms = [stats["grad_norm"] for stats in step_stats if "grad_norm" in stats]
    measured = set().union(*step_stats)
    names_of_loss = sorted(name for name in measured if name.startswith(LOSS_PREFIX))
    for name in [*MEASURED, *names_of_loss]:
        if name not in measured:
            continue
        # a user's loss may return a statistic of its own in only some of the steps
        values = [stats[name] for stats in step_stats if name in stats]
        if name.endswith("_max"):
            means[name] = max(values)
        else:
            means[name] = sum(values) / (num_iterations * num_counted_tokens)
    if any(batch.is_replayed is not None for batch in batches):
        means |= mean_gaps_of_own_and_replayed_tokens(step_stats)
    return UpdateResult(
        lr,
        lr_scale,
        learner.num_skipped,
        learner.loss_scale.value,
        means=means,
        num_counted_tokens=num_counted_tokens,
        num_with_gradient=num_with_gradient,
        loss=sum(stats["loss"] for stats in step_stats) / (num_mini_batches * num_iterations),
        grad_norm=sum(grad_norms) / len(grad_norms) if grad_norms else None,
        moved=bounded_steps[-1].kl if bounded_steps else None,
        num_backtracks=sum(bounded.num_backtracks for bounded in bounded_steps),
        num_skipped_now=int(sum(stats.get("skipped", 0) for stats in step_stats)),
        num_forwards=num_forwards,
        pad_frac=padding_fraction(batches),
    )


def take_optimizer_step(learner: Learner, batches: list[Batch], lr: float) -> LogprobsAndStats:
    """
    Takes one optimizer step on the masters, and copies the new masters to the model.

    The learning rate is `lr` times the learner's `lr_scale`. If the gradient is not finite, no
    weights change. Returns the log-probabilities before the step and the statistics of the step.

    Raises ValueError if too many updates in a row have a gradient that is not finite.
    """
    grads, logprobs, stats = compute_gradient(learner, batches)
    grads, norm = clip_gradient(grads, learner.config.optimizer.max_grad_norm)
    stats["grad_norm"] = norm.item()
    overflow = not (math.isfinite(stats["grad_norm"]) and math.isfinite(stats["loss"]))
    stats["skipped"] = int(overflow)
    if overflow:
        count_failed_update_or_raise(learner, stats["loss"])
    else:
        learner.num_changes += 1
        learner.failures = 0
        learner.optimizer.learning_rate = lr * learner.lr_scale
        masters = tree_unflatten(list(learner.trainable.items()))
        new_masters = learner.optimizer.apply_gradients(grads, masters)
        learner.trainable = dict(tree_flatten(new_masters))
        # without this `del`, the model's old tensors and the old masters would stay in memory
        del grads, masters, new_masters
        install_weights(learner.model, learner.trainable)
        mx.eval(learner.trainable, learner.optimizer.state)
    learner.loss_scale = learner.loss_scale.scale_after_step(overflow)
    return LogprobsAndStats(logprobs, stats)


def clip_gradient(gradient: Any, max_norm: float) -> tuple[Any, Any]:
    """
    The gradient, scaled down if its norm exceeds `max_norm`, and its norm before clipping.

    max_norm: 0 means no limit.
    """
    return optim.clip_grad_norm(gradient, max_norm or math.inf)


def mean_gaps_of_own_and_replayed_tokens(
    step_stats: list[dict[str, float]],
) -> dict[str, float | None]:
    """
    The means of MISMATCH over the step's own tokens, and of REPLAY_GAP over the replayed tokens.

    step_stats: the statistics of each optimizer step. A mean over no tokens is None.
    """

    def total(name: str) -> float:
        return sum(stats.get(name, 0.0) for stats in step_stats)

    num_own = total(NUM_OWN_TOKENS)
    num_replayed = total(NUM_REPLAYED_TOKENS)
    means: dict[str, float | None] = {}
    for name in MISMATCH:
        if not num_own:
            means[name] = None
        elif not name.endswith("_max"):
            means[name] = total(name) / num_own
    means[REPLAY_GAP] = total(REPLAY_GAP) / num_replayed if num_replayed else None
    return means


def compute_gradient(learner: Learner, batches: list[Batch]) -> GradientResult:
    """Computes the gradient of the loss over the batches of all ranks."""
    names = [name for name, _ in tree_flatten(learner.model.trainable_parameters())]
    grads: dict[str, Any] = dict.fromkeys(names)
    batch_losses: list[BatchLoss] = []
    for batch in count_forwards_with_progress_bar(learner, batches, "update"):
        if not batch.is_trained:
            batch_losses.append(compute_batch_loss_without_gradient(learner, batch))
            continue
        batch_loss, tree = scaled_loss_and_gradient(learner, batch)
        batch_grads = dict(tree_flatten(tree))
        del tree  # otherwise all gradients would stay in memory until the last one is computed
        for layer_names in group_weights_in_backward_order(grads):
            for name in layer_names:
                grad = batch_grads.pop(name).astype(mx.float32) / learner.loss_scale.value
                grads[name] = grad if grads[name] is None else grads[name] + grad
            mx.async_eval([grads[name] for name in layer_names])
        mx.eval(grads, batch_loss)  # wait, so that the next batch can reuse this batch's memory
        logprobs = mx.stop_gradient(batch_loss.logprobs)
        batch_losses.append(batch_loss._replace(logprobs=logprobs))

    if not any(batch.is_trained for batch in batches):
        grads = {name: mx.zeros(learner.trainable[name].shape) for name in grads}
    sums = world.all_sum(list(grads.values()))
    grads = dict(zip(grads, sums, strict=True))
    gradient = tree_unflatten(list(grads.items()))
    logprobs_by_batch = [batch_loss.logprobs for batch_loss in batch_losses]
    return GradientResult(gradient, logprobs_by_batch, aggregate_stats_over_ranks(batch_losses))


def compute_logprobs_and_stats(learner: Learner, batches: list[Batch]) -> LogprobsAndStats:
    """Computes the log-probabilities and statistics of `compute_gradient`, but no gradient."""
    counted_batches = count_forwards_with_progress_bar(learner, batches, "update")
    batch_losses = [
        compute_batch_loss_without_gradient(learner, batch) for batch in counted_batches
    ]
    logprobs_by_batch = [batch_loss.logprobs for batch_loss in batch_losses]
    return LogprobsAndStats(logprobs_by_batch, aggregate_stats_over_ranks(batch_losses))


@gpu.without_gradients()
def compute_batch_loss_without_gradient(learner: Learner, batch: Batch) -> BatchLoss:
    """The batch's part of the step's loss, and its statistics, without a gradient."""
    batch_loss = learner.loss.compute_batch_loss(learner.model, batch)
    mx.eval(batch_loss)  # wait, so that the next batch can reuse this batch's memory
    return batch_loss


def aggregate_stats_over_ranks(batch_losses: list[BatchLoss]) -> dict[str, float]:
    """Statistics over the batches of all ranks: sums, or maxima if a name ends in `_max`."""
    local_sums: list[dict[str, Any]] = []
    for batch_loss in batch_losses:
        local_sums.append({name: value.item() for name, value in batch_loss.sums.items()})
    totals: dict[str, float] = {}
    for sums in itertools.chain(*world.all_gather(local_sums)):
        for name, value in sums.items():
            if name.endswith("_max"):
                totals[name] = max(totals.get(name, value), value)
            else:
                totals[name] = totals.get(name, 0.0) + value
    return totals


def scaled_loss_and_gradient(learner: Learner, batch: Batch) -> tuple[BatchLoss, Any]:
    """A batch's part of the step's loss and its gradient, both multiplied by the loss scale."""

    def scaled_loss(model: gwen.Model) -> BatchLoss:
        batch_loss = learner.loss.compute_batch_loss(model, batch)
        return batch_loss._replace(loss=batch_loss.loss * learner.loss_scale.value)

    batch_loss, tree = nn.value_and_grad(learner.model, scaled_loss)(learner.model)
    return BatchLoss(*batch_loss), tree


def count_forwards_with_progress_bar(
    learner: Learner, batches: list[Batch], bar_label: str
) -> Iterator[Batch]:
    """Yields the batches, shows a progress bar, and adds the rows to `learner.num_forwards`."""
    learner.num_forwards += sum(len(batch.rows) for batch in batches)
    yield from alive.Bar(batches, desc=bar_label, unit="part")


@gpu.without_gradients()
def compute_logprobs(learner: Learner, batches: list[Batch], model: gwen.Model) -> list[mx.array]:
    """Each batch's token log-probabilities under the model, (M, T), without a gradient."""
    logprobs: list[mx.array] = []
    for batch in count_forwards_with_progress_bar(learner, batches, "log-probabilities"):
        logprobs.append(learner.loss.logprobs_and_entropies(model, batch)[0])
        mx.eval(logprobs[-1])  # wait, so that the next batch can reuse this batch's memory
    return logprobs


def group_weights_in_backward_order(weight_names: Iterable[str]) -> list[list[str]]:
    """
    The weight names, grouped by layer, in the order in which a backward pass computes gradients.

    If MLX evaluated the gradients in another order, the inputs of each gradient would stay in
    memory for longer.
    """

    def position_in_backward_pass(weight_name: str) -> float:
        first, second, *_ = weight_name.split(".")
        if first == "layers":
            return -int(second)
        return math.inf if first == "embed_tokens" else -math.inf

    ordered = sorted(weight_names, key=position_in_backward_pass)
    return [list(layer) for _, layer in itertools.groupby(ordered, position_in_backward_pass)]


# ---- limiting how far a step moves the policy


def backtrack_to_target_kl(
    learner: Learner, weights_before: MasterWeights, probe: list[Batch], target: float
) -> BoundedStep:
    """
    Shortens a step until the KL between the old and the new policy is at most SLACK * target.

    A step that is still too long after MOST_TRIES reductions is undone.
    """
    scale = 1.0
    weights = learner.trainable
    for num_backtracks in range(MOST_TRIES):
        kl = trust_region.measure_kl(
            probe, install_weights_and_compute_logprobs(learner, probe, weights)
        )
        if kl <= SLACK * target:
            return BoundedStep(scale, kl, num_backtracks)
        # The KL of a short step grows with the square of the step's length. If overflowing logits
        # make the KL inf or nan, the smallest factor is used.
        factor = min(max(LEAST_SHARE, math.sqrt(target / kl)), 0.5)
        scale *= factor
        for name, before in weights_before.items():
            weights[name] = before + factor * (weights[name] - before)
    weights |= weights_before
    kl = trust_region.measure_kl(
        probe, install_weights_and_compute_logprobs(learner, probe, weights)
    )
    return BoundedStep(scale, kl, MOST_TRIES)


def install_weights_and_compute_logprobs(
    learner: Learner, batches: list[Batch], weights: MasterWeights
) -> list[mx.array]:
    """Copies the weights into the model. Returns the log-probabilities under the changed model."""
    install_weights(learner.model, weights)
    return compute_logprobs(learner, batches, learner.model)


# ---- weights


def install_weights(model: gwen.Model, masters: dict[str, mx.array]) -> None:
    """Copies the float32 masters into the model, cast to the types of the model's weights."""
    dtypes = {name: array.dtype for name, array in tree_flatten(model.trainable_parameters())}
    weights = [(name, array.astype(dtypes[name])) for name, array in masters.items()]
    model.load_weights(weights, strict=False)


def broadcast_state_if_ranks_differ(learner: Learner) -> None:
    """
    Gives all ranks the masters and moments of rank 0 if the masters differ between ranks.

    The masters can differ because different processors round differently.
    """
    if world.size() == 1:
        return
    checksums = world.all_gather(world.checksum(list(learner.trainable.values())))
    if len(set(checksums)) > 1:
        moments = dict(tree_flatten(learner.optimizer.state))
        state = {
            "trainable": world.broadcast_from_rank0(learner.trainable),
            "moments": world.broadcast_from_rank0(moments),
        }
        learner.load_state(state)


def count_failed_update_or_raise(learner: Learner, loss: float) -> None:
    """Counts a failed update. Raises ValueError after too many failures in a row."""
    # a smaller loss scale may keep the gradient from overflowing
    can_recover = math.isfinite(loss) and learner.loss_scale.value > 1
    if not can_recover and learner.failures + 1 == MOST_FAILURES:
        failed = "gradient" if math.isfinite(loss) else "loss"
        raise ValueError(
            f"the {failed} was not finite in {MOST_FAILURES} updates in a row; start again with a "
            f"--learning-rate below {learner.config.optimizer.learning_rate:g} or with another "
            "GWEN_DTYPE"
        )
    learner.num_changes += 1
    learner.num_skipped += 1
    learner.failures += not can_recover


def scheduled_learning_rate(config: Config, step: int) -> float:
    """
    The learning rate at a step; steps are counted from 0.

    The rate rises linearly during the warm-up. Then it falls along half a cosine to a tenth of its
    maximum, or stays at the maximum with --lr-scheduler-type constant.
    """
    settings = config.optimizer
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.lr_scheduler_type == "constant":
        return settings.learning_rate
    num_decay_steps = max(settings.steps - settings.warmup_steps, 1)
    progress = (step - settings.warmup_steps) / num_decay_steps
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return settings.learning_rate * (0.1 + 0.9 * cosine)
