"""
The update: gradient of the step's loss over micro-batches, then one AdamW step on float32 masters.

Left out: where completions and rewards come from, and the loss itself (`grpo.py`).

Axes: N rows of the step, M rows of a micro-batch, L positions of prompt and completion, T completion positions,
C hidden.
"""

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

import gpu
import grpo
import gwen
import lm_head
import lora
import sampler
from config import Config
from micro_batch import MicroBatch, completion_hidden, in_rows, take_rows

MISMATCH = ("gap", "gap_max", "trust", "trust_max", "over_cap")  # policy before the update vs. sampler
# measured at each step: means over the counted tokens; `_max` is the largest
MEASURED = ("kl", "clip_frac", "entropy", *MISMATCH)
PROBE_TOKENS, PROBE_SHARE = 128, 8  # a probe has this many tokens, or 1/8 of all if that is more
SLACK = 1.5  # a step may move this many times the target
RECOVERY = 1.25  # the rate grows by this factor after a step below half the target
MOST_TRIES, LEAST_SHARE = 5, 0.1  # tries to shorten a step that goes too far, and the smallest factor of one try
MOST_FAILURES = 3  # consecutive failed updates that no smaller loss scale can fix
NO_CHOICE = 1e-4  # nats; below this entropy, as when --top-p leaves one token, a gradient of 0 is possible


class Learner:
    """
    A model in training: float32 masters of its trainable weights by name, their optimizer, the loss scale.

    base: the model before training, if disabling adapters does not restore it.
    """

    def __init__(self, model: gwen.Model, config: Config, base: gwen.Model | None = None):
        self.model, self.config, self.base = model, config, base
        if gpu.backend() and gpu.is_wanted():
            gpu.check_calls(lm_head.rehearse(model.head_weight))
        self.trainable = {n: array.astype(mx.float32) for n, array in tree_flatten(model.trainable_parameters())}
        self.optimizer = optim.AdamW(config.learning_rate, weight_decay=config.weight_decay, bias_correction=True)
        self.optimizer.init(tree_unflatten(list(self.trainable.items())))
        half = model.head_weight.dtype == mx.float16
        self.loss_scale = LossScale(2.0**15 if half else 1.0, dynamic=half)
        self.failures = 0  # in a row, see MOST_FAILURES
        self.num_skipped = 0  # updates skipped because their gradient was not finite
        self.rate = 1.0  # factor of the scheduled learning rate; reduced after steps that went too far, see `hold`
        self.num_forwards = 0  # rows computed since the last update, including the reference's
        self.unproved = set(self.trainable)  # tensors not yet seen to learn, see `prove_gradients`
        self.num_changes = 0  # optimizer steps that changed this state, or began to


def make_objective(config: Config) -> grpo.Objective:
    """The loss that the settings define."""
    return grpo.Objective(
        loss_type=config.loss_type,
        importance_sampling_level=config.importance_sampling_level,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        delta=config.delta or None,
        beta=config.beta,
        kl_estimator=config.kl_estimator,
        max_tokens=config.max_tokens,
    )


def completion_logprobs(
    model: gwen.Model, batch: MicroBatch, config: Config, gradient: str = "both"
) -> tuple[mx.array, mx.array]:
    """Log-probabilities of the completion tokens given all tokens before, and entropies, (M, T) each."""
    hidden = completion_hidden(model, batch, config.num_checkpointed(len(model.layers)))
    params = sampler.params_of(config)
    head = "frozen" if config.lora_rank else "trained"
    return lm_head.token_logprobs(
        hidden,
        model.head_weight,
        batch.completion_ids,
        temperature=params.temperature,
        support=params.support,
        head=head,
        gradient=gradient,
    )


def completion_terms(
    model: gwen.Model, batch: MicroBatch, config: Config, advantages: mx.array, old_logprobs: mx.array | None
) -> tuple[mx.array | None, mx.array, mx.array]:
    """
    Terms of the clipped loss if a kernel computes them (else None), and the two results of `completion_logprobs`;
    (M, T) each.

    advantages (M,); old_logprobs (M, T), None for the policy's own.
    """
    objective = make_objective(config)
    clipped = objective.loss_type in grpo.CLIPPED and objective.importance_sampling_level == "token"
    plain = config.lora_rank and not config.entropy_coef
    if not (clipped and plain and lm_head.has_token_losses(model.head_weight, sampler.params_of(config).support)):
        return None, *completion_logprobs(model, batch, config, "both" if config.entropy_coef else "logprobs")
    hidden = completion_hidden(model, batch, config.num_checkpointed(len(model.layers)))
    each = mx.broadcast_to(advantages[:, None], batch.mask.shape)
    surrogate = grpo.Surrogate(each, old_logprobs, objective)
    return lm_head.token_losses(hidden, model.head_weight, batch.completion_ids, surrogate, config.temp)


def forward_all(
    learner: Learner, model: gwen.Model, batches: list[MicroBatch], shape: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """Log-probabilities and entropies of the step, (N, T) each, 0 outside the micro-batches; without gradient."""
    learner.num_forwards += sum(len(batch.rows) for batch in batches)
    return in_rows(batches, shape, lambda batch: completion_logprobs(model, batch, learner.config, "none"))


def reference_logprobs(learner: Learner, batches: list[MicroBatch], rollout: sampler.Rollout) -> mx.array:
    """Log-probabilities under the model before training, (N, T), without gradient."""
    model = learner.base or learner.model
    with lora.disabled(model):
        return forward_all(learner, model, batches, rollout.logprobs.shape)[0]


class Targets(NamedTuple):
    """The inputs of a step's loss besides the policy, and its divisors."""

    advantages: mx.array  # (N,)
    ref_logprobs: mx.array | None  # (N, T)
    chosen: mx.array  # (N, T), 1 for the tokens whose policy term counts
    num_rows: int
    num_items: int  # counted tokens of all rows
    num_chosen: int


class UpdateResult(NamedTuple):
    """Result of the optimizer steps on one rollout; Python numbers, means over these steps, None if not measured."""

    loss: float | None
    grad_norm: float | None  # before clipping
    lr: float  # as scheduled
    rate: float  # factor of it in the last step
    moved: float | None  # KL between the policies before the first and after the last step, see `distance`
    repeats: int  # tries that went too far and were undone
    skipped: int  # steps skipped because their gradient was not finite
    num_skipped: int  # skipped steps since the run began
    num_forwards: int  # rows computed, including the reference's
    loss_scale: float  # after the last step
    pad_frac: float | None  # padding's share of the computed positions
    # over the counted tokens; `_max` is the largest; MISMATCH from the first step only
    means: dict[str, float | None]
    pushes: dict[int, np.ndarray]  # see `pushes_of`


def update(
    learner: Learner,
    batches: list[MicroBatch],
    rollout: sampler.Rollout,
    advantages: mx.array,
    ref_logprobs: mx.array | None,
    lr: float,
) -> UpdateResult:
    """
    `num_iterations` steps of AdamW, each on the gradient of the full step's loss, accumulated over micro-batches.

    The old policy is the one before the first of them. Its log-probabilities come from the first forward pass or from
    the sampler, so they cost no extra pass.
    Raises ValueError if the gradient fails too often in a row, or if a tensor does not learn.
    """
    config = learner.config
    if not batches:  # every row was truncated and left out
        kept = (learner.num_skipped, 0, learner.loss_scale.value)
        return UpdateResult(None, None, lr, learner.rate, None, 0, 0, *kept, None, dict.fromkeys(MEASURED), {})
    chosen = rollout.mask
    if config.top_entropy_quantile < 1:  # the quantile needs the whole step before the first gradient
        _, entropy = forward_all(learner, learner.model, batches, rollout.mask.shape)
        chosen = grpo.top_entropy_mask(entropy, rollout.mask, config.top_entropy_quantile)
    targets = Targets(
        advantages, ref_logprobs, chosen, len(advantages), *(round(float(x.sum())) for x in (rollout.mask, chosen))
    )
    old = [batch.sampled_logprobs if config.old_logprobs == "sampler" else None for batch in batches]
    # the KL of a step grows with the square of its rate, so the target follows the squared schedule
    target = config.target_kl * (lr / config.learning_rate) ** 2 if lr else 0.0
    steps, probe, moved, repeats = [], None, None, 0
    pushes: dict[int, np.ndarray] = {}
    for _ in range(config.num_iterations):
        before = learner.trainable if target else None  # else it need not be kept alive
        logprobs, measured = step(learner, batches, old, targets, lr * learner.rate)
        if before and not measured["skipped"]:
            probe = probe or make_probe(batches, logprobs, targets.num_items, learner.optimizer.step.item())
            moved, again, present = hold(learner, before, probe, target)
            repeats, pushes = repeats + again, pushes_of(probe, present)
        old = [new if held is None else held for held, new in zip(old, logprobs, strict=True)]
        steps.append(measured)
    rate = learner.rate
    if moved is not None and moved < target / 2:
        learner.rate = min(rate * RECOVERY, 1.0)
    num_positions = sum(batch.num_positions for batch in batches)
    merged = {name: [one[name] for one in (steps[:1] if name in MISMATCH else steps)] for name in steps[0]}
    num_forwards, learner.num_forwards = learner.num_forwards, 0
    return UpdateResult(
        loss=sum(merged["loss"]) / len(steps),
        grad_norm=sum(merged["grad_norm"]) / len(steps),
        lr=lr,
        rate=rate,
        moved=moved,
        repeats=repeats,
        skipped=int(sum(merged["skipped"])),
        num_skipped=learner.num_skipped,
        num_forwards=num_forwards,
        loss_scale=learner.loss_scale.value,
        pad_frac=1 - sum(batch.num_tokens for batch in batches) / num_positions,
        means=dict.fromkeys(MEASURED)
        | {
            name: max(values) if name.endswith("_max") else sum(values) / len(values) / targets.num_items
            for name, values in merged.items()
            if name in MEASURED
        },
        pushes=pushes,
    )


def objective(
    learner: Learner, model: gwen.Model, batch: MicroBatch, old_logprobs: mx.array | None, targets: Targets
) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
    """The micro-batch's share of the step's loss, times the loss scale; its log-probabilities; measurements."""
    config, mask, rows, rule = learner.config, batch.mask, batch.rows, make_objective(learner.config)
    advantages = targets.advantages[rows]
    clipped, logprobs, entropy = completion_terms(model, batch, config, advantages, old_logprobs)
    learner.num_forwards += len(rows)
    if old_logprobs is None:  # first iteration: the current policy is the old one
        old_logprobs = mx.stop_gradient(logprobs)
    chosen = targets.chosen[rows, : mask.shape[1]]
    sampled = batch.sampled_logprobs
    weights = chosen * grpo.mismatch_weights(old_logprobs, sampled, mask, config.mismatch, config.mismatch_cap)
    ref = None if targets.ref_logprobs is None else targets.ref_logprobs[rows, : mask.shape[1]]
    terms = grpo.token_terms(logprobs, old_logprobs, advantages, mask, rule, ref_logprobs=ref, clipped=clipped)
    losses, stats = terms.losses(rule, weights), terms.stats(mask)
    loss = grpo.aggregate(losses, mask, rule, num_rows=targets.num_rows, num_items=targets.num_items)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * (entropy * chosen).sum() / targets.num_chosen
    trust = grpo.importance_ratio(logprobs, sampled, mask, "token") * mask
    gap = mx.abs(logprobs - sampled) * mask
    sums = {
        "loss": loss,
        "entropy": (entropy * mask).sum(),
        "gap": gap.sum(),
        "gap_max": gap.max(),
        "trust": trust.sum(),
        "trust_max": trust.max(),
        "over_cap": (trust > config.mismatch_cap).sum(),
        "signal": (mx.abs(advantages)[:, None] * weights * (entropy > NO_CHOICE)).sum(),
    }
    means = {"kl": stats.kl, "clip_frac": stats.clip_frac}
    sums |= {name: value * mask.sum() for name, value in means.items() if value is not None}
    return loss * learner.loss_scale.value, logprobs, sums


def accumulate(
    learner: Learner, batches: list[MicroBatch], old_logprobs: list[mx.array | None], targets: Targets
) -> tuple[Any, list[mx.array], dict[str, float]]:
    """The float32 gradient of the step's loss, each micro-batch's log-probabilities, and summed measurements."""
    grads: dict[str, Any] = {}
    seen: list[mx.array] = []
    totals: dict[str, float] = {}
    for batch, old in zip(tqdm(batches, desc="update", leave=False, disable=None), old_logprobs, strict=True):
        share = nn.value_and_grad(learner.model, lambda model, b=batch, o=old: objective(learner, model, b, o, targets))
        (_, logprobs, sums), tree = share(learner.model)
        part = dict(tree_flatten(tree))
        del tree  # else every gradient would stay alive until the last one is computed
        grads = grads or dict.fromkeys(part)
        for names in in_backward_order(grads):
            for name in names:
                new = part.pop(name).astype(mx.float32) / learner.loss_scale.value
                grads[name] = new if grads[name] is None else grads[name] + new
            mx.async_eval([grads[name] for name in names])
        mx.eval(grads, logprobs, sums)  # wait: the next micro-batch may use this one's memory
        seen.append(mx.stop_gradient(logprobs))
        for name, value in sums.items():
            held = totals.get(name, 0.0)
            totals[name] = max(held, value.item()) if name.endswith("_max") else held + value.item()
    return tree_unflatten(list(grads.items())), seen, totals


def in_backward_order(names: Iterable[str]) -> list[list[str]]:
    """
    Weight names in the order in which a backward pass produces their gradients, grouped by layer.

    In another order, MLX would keep a gradient's inputs alive while it computes later ones.
    """

    def place(name: str) -> float:
        first, second, *_ = name.split(".")
        return -int(second) if first == "layers" else math.inf if first == "embed_tokens" else -math.inf

    return [list(layer) for _, layer in itertools.groupby(sorted(names, key=place), place)]


def step(
    learner: Learner, batches: list[MicroBatch], old_logprobs: list[mx.array | None], targets: Targets, lr: float
) -> tuple[list[mx.array], dict[str, float]]:
    """One AdamW step on the masters, copied into the model; changes nothing if the gradient is not finite."""
    grads, logprobs, measured = accumulate(learner, batches, old_logprobs, targets)
    grads, norm = optim.clip_grad_norm(grads, learner.config.max_grad_norm)
    measured["grad_norm"] = norm.item()
    overflow = not (math.isfinite(measured["grad_norm"]) and math.isfinite(measured["loss"]))
    measured["skipped"] = int(overflow)
    if overflow:
        count_failure(learner, measured["loss"])
    else:
        provable = lr and measured["signal"] and not measured.get("clip_frac")  # clipped gradients are rightly 0
        proving = prove_gradients(learner, grads) if provable else {}
        before = {name: learner.trainable[name] for name in proving}
        learner.num_changes, learner.failures = learner.num_changes + 1, 0
        learner.optimizer.learning_rate = lr
        masters = tree_unflatten(list(learner.trainable.items()))
        learner.trainable = dict(tree_flatten(learner.optimizer.apply_gradients(grads, masters)))
        # Otherwise the old tensors would stay alive, here and in the model, until the last new one is computed.
        del grads, masters
        install(learner.model, learner.trainable)
        for name in list(proving):
            prove_change(learner, name, before.pop(name), proving.pop(name), lr)
        mx.eval(learner.trainable, learner.optimizer.state)
    learner.loss_scale = learner.loss_scale.after(overflow)
    return logprobs, measured


# ---- how far an update may move the policy


class Probe(NamedTuple):
    """The part of a rollout that measures how far the policy moves."""

    batches: list[MicroBatch]
    old_logprobs: list[mx.array]  # (M, T) per micro-batch, before the first step on the rollout


def make_probe(batches: list[MicroBatch], logprobs: list[mx.array], num_items: int, turn: int) -> Probe:
    """
    Every k-th micro-batch, or every k-th row if there are too few, with an offset that changes every turn.

    logprobs: (M, T) per micro-batch. k is at most PROBE_SHARE, and less if few tokens count.
    """
    stride = max(min(PROBE_SHARE, num_items // PROBE_TOKENS), 1)
    if len(batches) >= stride:
        chosen = slice(turn % stride, None, stride)
        return Probe(batches[chosen], logprobs[chosen])
    stride = min(stride, max(len(batch.rows) for batch in batches))
    places = [list(range(turn % stride, len(batch.rows), stride)) for batch in batches]
    return Probe(
        [take_rows(batch, some) for batch, some in zip(batches, places, strict=True) if some],
        [old[mx.array(some)] for old, some in zip(logprobs, places, strict=True) if some],
    )


def present_logprobs(learner: Learner, probe: Probe) -> list[mx.array]:
    """Log-probabilities under the current policy, (M, T) per micro-batch of the probe."""
    found = []
    for batch in probe.batches:
        new, _ = completion_logprobs(learner.model, batch, learner.config, "none")
        learner.num_forwards += len(batch.rows)
        mx.eval(new)  # wait: the next micro-batch may use this one's memory
        found.append(new)
    return found


def distance(probe: Probe, present: list[mx.array]) -> float:
    """
    KL(old policy, current policy) in nats per token: the mean of r - 1 - log r over the old policy's tokens.

    r = current / old probability. The mean over tokens drawn by the old policy is unbiased, and no token's term is
    negative (k3, http://joschu.net/blog/kl-approx.html).
    """
    total, count = mx.array(0.0), mx.array(0.0)
    for batch, old, new in zip(probe.batches, probe.old_logprobs, present, strict=True):
        total += (grpo.kl_term(old, new, mx.ones_like(new)) * batch.mask).sum()
        count += batch.mask.sum()
    return float(total / count)


def pushes_of(probe: Probe, present: list[mx.array]) -> dict[int, np.ndarray]:
    """The change in nats of each token's log-probability, by row of the step, for the probe's rows."""
    found = {}
    for batch, old, new in zip(probe.batches, probe.old_logprobs, present, strict=True):
        lengths, changes = np.array(batch.mask).sum(-1).astype(int), np.array(new - old)
        for place, row in enumerate(np.array(batch.rows)):
            found[int(row)] = changes[place, : lengths[place]]
    return found


def hold(
    learner: Learner, before: dict[str, mx.array], probe: Probe, target: float
) -> tuple[float, int, list[mx.array]]:
    """
    Shortens the last step, taken from the masters `before`, until the policy has moved no further than allowed.

    Returns how far it moved, how many tries were undone, and the probe's current log-probabilities. AdamW's moments do
    not depend on the learning rate, and its step is proportional to it, so scaling the step equals a lower rate and
    needs no new gradient. Later steps keep the lower rate. A step that is too long at every try is dropped.
    """
    for repeats in range(MOST_TRIES):
        present = present_logprobs(learner, probe)
        moved = distance(probe, present)
        if moved <= SLACK * target:
            return moved, repeats, present
        # the KL grows with the square of a short step; inf and nan, from overflowing logits, take the least share
        share = min(max(LEAST_SHARE, math.sqrt(target / moved)), 0.5)
        learner.rate *= share
        learner.trainable = {name: old + share * (learner.trainable[name] - old) for name, old in before.items()}
        install(learner.model, learner.trainable)
        mx.eval(learner.trainable)
    learner.trainable = before
    install(learner.model, before)
    return 0.0, MOST_TRIES, probe.old_logprobs


def count_failure(learner: Learner, loss: float) -> None:
    """Counts an update that changes nothing. Raises ValueError after too many in a row."""
    mended = math.isfinite(loss) and learner.loss_scale.value > 1  # a smaller scale may avoid the overflow
    if not mended and learner.failures + 1 == MOST_FAILURES:
        raise ValueError(
            f"{MOST_FAILURES} updates in a row had no finite {'gradient' if math.isfinite(loss) else 'loss'}; "
            f"start again with a lower --learning-rate than {learner.config.learning_rate:g} or in another GWEN_DTYPE"
        )
    learner.num_changes += 1
    learner.num_skipped += 1
    learner.failures += not mended


def prove_gradients(learner: Learner, grads: Any) -> dict[str, mx.array]:
    """
    The gradients of the tensors not yet seen to learn, by name.

    Raises ValueError for a tensor without gradient. An adapter's A has none while B is 0; it is checked again later.
    """
    flat, proving = dict(tree_flatten(grads)), {}
    for name in sorted(learner.unproved):
        if mx.any(flat[name] != 0).item():
            proving[name] = flat[name]
        elif not name.endswith("lora_a") or mx.any(learner.trainable[name[:-1] + "b"] != 0).item():
            raise ValueError(f"{name} has no gradient in an update whose advantages are not 0; nothing would train it")
    return proving


def prove_change(learner: Learner, name: str, before: mx.array, gradient: mx.array, lr: float) -> None:
    """
    Removes a changed tensor from the unproved. Raises ValueError if it has not changed.

    A step far below the last bit of every weight is invisible and proves nothing either way.
    """
    if mx.any(learner.trainable[name] != before).item():
        learner.unproved.remove(name)
        return
    size = lr * mx.abs(gradient) / (mx.abs(gradient) + 1e-8)  # AdamW's first step
    if mx.any(size > mx.abs(before) * 2**-16).item():
        raise ValueError(f"{name} has a gradient, but an update at learning rate {lr:g} did not change it")


def install(model: gwen.Model, trainable: dict[str, mx.array]) -> None:
    """Copies the float32 masters into the model, rounded to its dtype of each."""
    dtypes = {name: array.dtype for name, array in tree_flatten(model.trainable_parameters())}
    model.load_weights([(name, array.astype(dtypes[name])) for name, array in trainable.items()], strict=False)


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then constant or half a cosine down to a tenth; `step` starts at 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return config.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


class LossScale(NamedTuple):
    """Keeps small float16 gradients above zero: doubles after 200 good steps, halves after an overflow."""

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
