"""
The update: gradient of the step's loss over batches, then one step of AdamW, or SGD, on float32 masters.

Left out: where completions and rewards come from, the loss (step/loss.py), how far a step moved the policy
(step/trust_region.py).

Axes: M rows of a batch, T own tokens.
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
from step.batch import Batch, pad_frac
from step.loss import MEASURED, Share, StepLoss, UpdateResult
from step.trust_region import LEAST_SHARE, MOST_TRIES, SLACK, BoundedStep, Weights

MAX_GRAD_NORM = 1.0  # the gradient of a step is clipped to this norm
MOST_FAILURES = 3  # consecutive failed updates that no smaller loss scale can fix
COUNTS = ("failures", "rate", "num_skipped")  # what a checkpoint keeps of a learner beside tensors and loss scale


class LossScale(NamedTuple):
    """Keeps small float16 gradients above zero. Doubles after 200 good steps, halves after an overflow, if dynamic."""

    value: float = 1.0
    good_steps: int = 0
    dynamic: bool = False

    def after(self, overflow: bool) -> "LossScale":
        if not self.dynamic:
            return self
        if overflow:
            return self._replace(value=max(self.value / 2, 1.0), good_steps=0)
        if self.good_steps + 1 == 200:
            return self._replace(value=min(self.value * 2, 2.0**24), good_steps=0)
        return self._replace(good_steps=self.good_steps + 1)


class Sgd(optim.Optimizer):
    """w - lr g, and nothing is kept between two steps; MLX's own keeps a momentum of zeros."""

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        self.state["step"] = self.step + 1
        return tree_map(lambda weight, grad: weight - self.learning_rate * grad, parameters, gradients)


class Learner:
    """
    A model in training: float32 masters of its trainable weights by name, their optimizer, the loss scale.

    base: the model before training, if disabling adapters does not restore it.
    """

    def __init__(self, model: gwen.Model, config: Config, loss: StepLoss, base: gwen.Model | None = None):
        self.model, self.config, self.loss, self.base = model, config, loss, base
        if gpu.has_metal() and kernels.is_wanted():
            kernels.check_calls(lm_head.rehearse(model.head_weight))
        self.trainable = {n: array.astype(mx.float32) for n, array in tree_flatten(model.trainable_parameters())}
        self.optimizer: optim.Optimizer = Sgd()
        if config.optimizer.kind == "adamw":
            self.optimizer = optim.AdamW(config.optimizer.learning_rate, weight_decay=0.0, bias_correction=True)
            self.optimizer.init(tree_unflatten(list(self.trainable.items())))
        half = model.head_weight.dtype == mx.float16
        self.loss_scale = LossScale(2.0**15 if half else 1.0, dynamic=half)
        self.failures = 0  # in a row, see MOST_FAILURES
        self.num_skipped = 0  # updates skipped because their gradient was not finite
        self.rate = 1.0  # factor of the scheduled learning rate; reduced after steps that went too far
        self.num_forwards = 0  # rows computed since the last update, including the reference's
        self.num_changes = 0  # optimizer steps that changed this state, or began to
        keep_equal(self)

    def state(self) -> dict[str, Any]:
        """What outlives a step."""
        held = {name: getattr(self, name) for name in ("trainable", "loss_scale", "num_changes", *COUNTS)}
        return held | {"moments": dict(tree_flatten(self.optimizer.state))}

    def load(self, state: dict[str, Any]) -> None:
        """Returns to such a state, or to a part of it with `trainable` and `moments`."""
        self.optimizer.state = tree_unflatten(list(state["moments"].items()))
        vars(self).update({name: value for name, value in state.items() if name != "moments"})
        install(self.model, self.trainable)


def with_reference(learner: Learner, batches: list[Batch]) -> list[Batch]:
    """The batches with the log-probabilities of the model before training; without gradient."""
    model, mine = learner.base or learner.model, [batch for batch in batches if batch.is_mine]
    with lora.before_training(model):
        found = iter(logprobs_of(learner, mine, model))
    return [b._replace(columns=b.columns | {"ref_logprobs": next(found)}) if b.is_mine else b for b in batches]


def update(learner: Learner, batches: list[Batch], lr: float) -> UpdateResult:
    """
    `num_iterations` times `mini_batches` optimizer steps, each on the gradient of its samples over all batches.

    The old policy is the one before the first of them. Its log-probabilities come from the first forward pass; only
    those of later mini-batches cost an extra one. A probe, some of the samples, tells how far all steps move it, and
    `--target-kl` bounds that. Where no sample teaches there is no step.
    Raises ValueError if the gradient fails too often in a row.
    """
    optimizer = learner.config.optimizer
    means: dict[str, float | None] = dict.fromkeys(MEASURED)
    if not batches:  # every sample was truncated and left out
        return UpdateResult(lr, learner.rate, learner.num_skipped, learner.loss_scale.value, means)
    # the KL of a step grows with the square of its rate, so the target follows the squared schedule
    has_target = lr and batches[0].sampled_logprobs is not None
    target = optimizer.target_kl * (lr / optimizer.learning_rate) ** 2 if has_target else 0.0
    steps, bounded = list[dict[str, float]](), list[BoundedStep]()
    num, num_taught = optimizer.mini_batches, sum(batch.num_taught for batch in batches)
    whole = [[batch for batch in batches if batch.number == number] for number in range(num)]
    parts = [[batch for batch in part if batch.is_mine] for part in whole]
    for number in range(1, num):  # the policy will have moved before their turn
        parts[number] = with_old(parts[number], under(learner, parts[number], learner.trainable))
    num_passes = optimizer.num_iterations if num_taught else 1
    for number in [number for number in range(num) if whole[number]] * num_passes:
        teaches = any(batch.num_taught for batch in whole[number])
        before = learner.trainable if target and teaches else None  # else it need not be kept alive
        logprobs, measured = optimizer_step(learner, parts[number], lr) if teaches else measure(learner, parts[number])
        parts[number] = with_old(parts[number], logprobs)
        steps.append(measured)
        if before and not measured["skipped"]:
            if not bounded:
                probe = trust_region.make_probe(list(itertools.chain(*parts)), learner.optimizer.step.item())
            held = hold(learner, before, probe, target)
            # from now on at what fitted of it; a later step, where earlier ones have moved already, halves it at most
            learner.rate *= max(held.share, 0.5) if bounded else held.share
            bounded.append(held)
    keep_equal(learner)
    dtype = learner.model.head_weight.dtype
    copies = [layer.rounded(dtype) for _, layer in lora.layers(learner.model)] if dtype != mx.float32 else []
    mx.eval(learner.model.trainable_parameters(), copies)  # now: an error of the GPU in a rollout would spoil them
    rate = learner.rate
    if bounded and bounded[-1].moved < target / 2 and bounded[-1].repeats < MOST_TRIES:
        learner.rate = min(rate * trust_region.RECOVERY, 1.0)

    num_forwards, learner.num_forwards = sum(world.share(learner.num_forwards)), 0
    num_items = round(batches[0].num_items * num)
    norms = [step["grad_norm"] for step in steps if "grad_norm" in step]
    for name in means.keys() & steps[0].keys():
        values = [step[name] for step in steps]
        means[name] = max(values) if name.endswith("_max") else sum(values) / (num_passes * num_items)
    return UpdateResult(
        lr,
        rate,
        learner.num_skipped,
        learner.loss_scale.value,
        means=means,
        num_items=num_items,
        num_taught=num_taught,
        loss=sum(step["loss"] for step in steps) / (num * num_passes),
        grad_norm=sum(norms) / len(norms) if norms else None,
        moved=bounded[-1].moved if bounded else None,
        repeats=sum(held.repeats for held in bounded),
        skipped=int(sum(step.get("skipped", 0) for step in steps)),
        num_forwards=num_forwards,
        pad_frac=pad_frac(batches),
    )


def with_old(batches: list[Batch], logprobs: list[mx.array]) -> list[Batch]:
    """The batches with the log-probabilities of the policy before the update, those that do not have them yet."""
    pairs = zip(batches, logprobs, strict=True)
    return [batch._replace(old_logprobs=new) if batch.old_logprobs is None else batch for batch, new in pairs]


def optimizer_step(learner: Learner, batches: list[Batch], lr: float) -> tuple[list[mx.array], dict[str, float]]:
    """
    One step on the masters at `lr` times the learner's rate, copied into the model; changes nothing if the gradient is
    not finite.

    Returns each batch's log-probabilities before the step, (M, T), and what was measured.
    """
    grads, logprobs, measured = gradient(learner, batches)
    grads, norm = optim.clip_grad_norm(grads, MAX_GRAD_NORM)
    measured["grad_norm"] = norm.item()
    overflow = not (math.isfinite(measured["grad_norm"]) and math.isfinite(measured["loss"]))
    measured["skipped"] = int(overflow)
    if overflow:
        count_failure(learner, measured["loss"])
    else:
        learner.num_changes, learner.failures = learner.num_changes + 1, 0
        learner.optimizer.learning_rate = lr * learner.rate
        masters = tree_unflatten(list(learner.trainable.items()))
        learner.trainable = dict(tree_flatten(learner.optimizer.apply_gradients(grads, masters)))
        # Otherwise the model's old tensors, and without --target-kl the masters, would stay until all new are computed.
        del grads, masters
        install(learner.model, learner.trainable)
        mx.eval(learner.trainable, learner.optimizer.state)
    learner.loss_scale = learner.loss_scale.after(overflow)
    return logprobs, measured


def gradient(learner: Learner, batches: list[Batch]) -> tuple[Any, list[mx.array], dict[str, float]]:
    """The float32 gradient of the step's loss, each batch's log-probabilities, and summed measurements."""
    grads: dict[str, Any] = {name: None for name, _ in tree_flatten(learner.model.trainable_parameters())}
    shares = list[Share]()
    for batch in passes(learner, batches, "update"):
        share, tree = share_and_gradient(learner, batch)
        part = dict(tree_flatten(tree))
        del tree  # else every gradient would stay alive until the last one is computed
        for names in in_backward_order(grads):
            for name in names:
                new = part.pop(name).astype(mx.float32) / learner.loss_scale.value
                grads[name] = new if grads[name] is None else grads[name] + new
            mx.async_eval([grads[name] for name in names])
        mx.eval(grads, share)  # wait: the next batch may use this one's memory
        shares.append(share._replace(logprobs=mx.stop_gradient(share.logprobs)))
    if not batches:
        grads = {name: mx.zeros(learner.trainable[name].shape) for name in grads}
    grads = dict(zip(grads, world.all_sum(list(grads.values())), strict=True))
    return tree_unflatten(list(grads.items())), *joined(shares)


def measure(learner: Learner, batches: list[Batch]) -> tuple[list[mx.array], dict[str, float]]:
    """What `gradient` gives beside the gradient, by forward passes alone."""
    shares = []
    with gpu.without_gradients():
        for batch in passes(learner, batches, "update"):
            shares.append(learner.loss.share(learner.model, batch))
            mx.eval(shares[-1])  # wait
    return joined(shares)


def joined(shares: list[Share]) -> tuple[list[mx.array], dict[str, float]]:
    """The log-probabilities of this machine's shares, and the measurements of all machines'."""
    sums = [{name: value.item() for name, value in share.sums.items()} for share in shares]
    totals = dict[str, float]()
    for its in itertools.chain(*world.share(sums)):
        for name, value in its.items():
            held = totals.get(name, 0.0)
            totals[name] = max(held, value) if name.endswith("_max") else held + value
    return [share.logprobs for share in shares], totals


def share_and_gradient(learner: Learner, batch: Batch) -> tuple[Share, Any]:
    """A batch's `Share` of the step's loss, and its gradient, both times the loss scale."""

    def scaled(model: gwen.Model) -> Share:
        share = learner.loss.share(model, batch)
        return share._replace(loss=share.loss * learner.loss_scale.value)

    share, tree = nn.value_and_grad(learner.model, scaled)(learner.model)
    return Share(*share), tree


def passes(learner: Learner, batches: list[Batch], what: str) -> Iterator[Batch]:
    """The batches, whose rows are counted."""
    learner.num_forwards += sum(len(batch.rows) for batch in batches)
    yield from alive.Bar(batches, desc=what, unit="part")


@gpu.without_gradients()
def logprobs_of(learner: Learner, batches: list[Batch], model: gwen.Model) -> list[mx.array]:
    """Log-probabilities under a model, (M, T) of each batch; without gradient."""
    found = list[mx.array]()
    for batch in passes(learner, batches, "log-probabilities"):
        found.append(learner.loss.logprobs(model, batch)[0])
        mx.eval(found[-1])  # wait: the next batch may use this one's memory
    return found


def in_backward_order(names: Iterable[str]) -> list[list[str]]:
    """Weight names by layer, as a backward pass gives their gradients: in another order MLX keeps inputs alive."""

    def place(name: str) -> float:
        first, second, *_ = name.split(".")
        return -int(second) if first == "layers" else math.inf if first == "embed_tokens" else -math.inf

    return [list(layer) for _, layer in itertools.groupby(sorted(names, key=place), place)]


def hold(learner: Learner, before: Weights, probe: list[Batch], target: float) -> BoundedStep:
    """Shortens the step from `before` until the policy has moved at most SLACK times the target; or else drops it."""
    share, after = 1.0, learner.trainable
    for repeats in range(MOST_TRIES):
        moved = trust_region.distance(probe, under(learner, probe, after))
        if moved <= SLACK * target:
            return BoundedStep(share, moved, repeats)
        # the KL grows with the square of a short step; inf and nan, from overflowing logits, take the least share
        factor = min(max(LEAST_SHARE, math.sqrt(target / moved)), 0.5)
        share *= factor
        after |= {name: old + factor * (after[name] - old) for name, old in before.items()}
    after |= before
    return BoundedStep(share, trust_region.distance(probe, under(learner, probe, after)), MOST_TRIES)


def under(learner: Learner, batches: list[Batch], weights: Weights) -> list[mx.array]:
    """Installs masters and returns the batches' log-probabilities under them."""
    install(learner.model, weights)
    return logprobs_of(learner, batches, learner.model)


def install(model: gwen.Model, trainable: dict[str, mx.array]) -> None:
    """Copies the float32 masters into the model, each cast to the dtype of the weight it replaces."""
    dtypes = {name: array.dtype for name, array in tree_flatten(model.trainable_parameters())}
    model.load_weights([(name, array.astype(dtypes[name])) for name, array in trainable.items()], strict=False)


def keep_equal(learner: Learner) -> None:
    """Gives every machine the masters of rank 0, where processors of another kind have rounded otherwise."""
    if world.size() > 1 and len(set(world.share(world.checksum(list(learner.trainable.values()))))) > 1:
        moments = dict(tree_flatten(learner.optimizer.state))
        learner.load({"trainable": world.of_first(learner.trainable), "moments": world.of_first(moments)})


def count_failure(learner: Learner, loss: float) -> None:
    """Counts an update that changes nothing. Raises ValueError after too many in a row."""
    mended = math.isfinite(loss) and learner.loss_scale.value > 1  # a smaller scale may avoid the overflow
    if not mended and learner.failures + 1 == MOST_FAILURES:
        said = f"{MOST_FAILURES} updates in a row had no finite {'gradient' if math.isfinite(loss) else 'loss'}"
        lower = f"a lower --learning-rate than {learner.config.optimizer.learning_rate:g}"
        raise ValueError(f"{said}; start again with {lower} or in another GWEN_DTYPE")
    learner.num_changes += 1
    learner.num_skipped += 1
    learner.failures += not mended


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth; `step` starts at 0."""
    if step < config.optimizer.warmup_steps:
        return config.optimizer.learning_rate * (step + 1) / config.optimizer.warmup_steps
    done = (step - config.optimizer.warmup_steps) / max(config.optimizer.steps - config.optimizer.warmup_steps, 1)
    return config.optimizer.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)
