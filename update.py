"""
The update: rows cut into micro-batches, the gradient of the step's loss, one step of AdamW on float32 masters.

What is left out: where completions and rewards come from, and what the loss is, which is in `grpo.py`.

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

MISMATCH = ("gap", "gap_max", "trust", "trust_max", "over_cap")  # the policy before the update against the sampler
# what a step measures, as means over its counted tokens; `_max` is the largest
MEASURED = ("kl", "clip_frac", "entropy", *MISMATCH)
PROBE_TOKENS, PROBE_SHARE = 128, 8  # a move is measured on so many tokens, or on one part in so many if that is more
SLACK = 1.5  # times the target is as far as a step may go
RECOVERY = 1.25  # by so much the rate grows after a step of less than half the target
MOST_TRIES, LEAST_SHARE = 5, 0.1  # of a step that goes too far, and how much shorter one try may be than the one before
MOST_FAILURES = 3  # updates in a row that may fail for a reason that no loss scale mends
NO_CHOICE = 1e-4  # nats; a token of less entropy, as one that --top-p leaves alone, may have a gradient of 0


class Learner:
    """
    What learns: a model, the float32 masters of its trainable weights by name, their optimizer, the loss scale.

    `base` is the model before training where switching adapters off does not give it.
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
        self.num_skipped = 0  # updates that changed nothing because their gradient was not finite
        self.rate = 1.0  # of the scheduled learning rate; less after steps that went too far, see `hold`
        self.num_forwards = 0  # rows that went through a model since the last update, the reference too
        self.unproved = set(self.trainable)  # tensors that were not yet seen to learn, see `prove_gradients`
        self.num_changes = 0  # optimizer steps that changed anything kept here, or began to


def make_objective(config: Config) -> grpo.Objective:
    """What the settings make of the loss."""
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
    """Log-probabilities of the completion tokens given everything before them, and entropies, (M, T) each."""
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
    The terms of a clipped loss where a kernel makes them together with the two of `completion_logprobs`, else None
    before those two; (M, T) each.

    advantages (M,); old_logprobs (M, T), None where they are the policy's own.
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
    """Log-probabilities and entropies of the step, (N, T) each, 0 in what no micro-batch holds; without gradient."""
    learner.num_forwards += sum(len(batch.rows) for batch in batches)
    return in_rows(batches, shape, lambda batch: completion_logprobs(model, batch, learner.config, "none"))


def reference_logprobs(learner: Learner, batches: list[MicroBatch], rollout: sampler.Rollout) -> mx.array:
    """Log-probabilities under the model that training began with, (N, T), without gradient."""
    model = learner.base or learner.model
    with lora.disabled(model):
        return forward_all(learner, model, batches, rollout.logprobs.shape)[0]


class Targets(NamedTuple):
    """What a step's loss is made of beside the policy, and what it is divided by."""

    advantages: mx.array  # (N,)
    ref_logprobs: mx.array | None  # (N, T)
    chosen: mx.array  # (N, T), 1 for the tokens whose policy term counts
    num_rows: int
    num_items: int  # counted tokens of all rows
    num_chosen: int


class UpdateResult(NamedTuple):
    """What the optimizer steps on one rollout did; Python numbers, means over these steps, None where not measured."""

    loss: float | None
    grad_norm: float | None  # before clipping
    lr: float  # as scheduled
    rate: float  # share of it that the last step took
    moved: float | None  # KL of the policy after the last step from that before the first, see `distance`
    repeats: int  # tries that went too far and were taken back
    skipped: int  # steps whose gradient was not finite, so that they changed nothing
    num_skipped: int  # such steps since the run began
    num_forwards: int  # rows that went through a model, the reference too
    loss_scale: float  # after the last step
    pad_frac: float | None  # of the positions that went through the model
    # over the counted tokens; `_max` is the largest; of MISMATCH in the first step alone
    means: dict[str, float | None]


def update(
    learner: Learner,
    batches: list[MicroBatch],
    rollout: sampler.Rollout,
    advantages: mx.array,
    ref_logprobs: mx.array | None,
    lr: float,
) -> UpdateResult:
    """
    `num_iterations` steps of AdamW, each on the gradient of the whole step's loss, accumulated over micro-batches.

    The old policy is the one before the first of them: its log-probabilities are those that the first forward pass
    itself gives, or the sampler's, so no pass is spent on them.
    Raises ValueError when the gradient fails too often in a row, and for a tensor that does not learn.
    """
    config = learner.config
    if not batches:  # every row was truncated and left out: there is nothing to learn from
        kept = (learner.num_skipped, 0, learner.loss_scale.value)
        return UpdateResult(None, None, lr, learner.rate, None, 0, 0, *kept, None, dict.fromkeys(MEASURED))
    chosen = rollout.mask
    if config.top_entropy_quantile < 1:  # the quantile needs all of the step before the first gradient
        _, entropy = forward_all(learner, learner.model, batches, rollout.mask.shape)
        chosen = grpo.top_entropy_mask(entropy, rollout.mask, config.top_entropy_quantile)
    targets = Targets(
        advantages, ref_logprobs, chosen, len(advantages), *(round(float(x.sum())) for x in (rollout.mask, chosen))
    )
    old = [batch.sampled_logprobs if config.old_logprobs == "sampler" else None for batch in batches]
    # a step moves by the square of its rate, so the target follows the schedule as its square
    target = config.target_kl * (lr / config.learning_rate) ** 2 if lr else 0.0
    steps, probe, moved, repeats = [], None, None, 0
    for _ in range(config.num_iterations):
        before = learner.trainable if target else None  # else it would be held for nothing
        logprobs, measured = step(learner, batches, old, targets, lr * learner.rate)
        if before and not measured["skipped"]:
            probe = probe or make_probe(batches, logprobs, targets.num_items, learner.optimizer.step.item())
            moved, again = hold(learner, before, probe, target)
            repeats += again
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
    )


def objective(
    learner: Learner, model: gwen.Model, batch: MicroBatch, old_logprobs: mx.array | None, targets: Targets
) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
    """The micro-batch's share of the step's loss, times the loss scale; its log-probabilities; what is measured."""
    config, mask, rows, rule = learner.config, batch.mask, batch.rows, make_objective(learner.config)
    advantages = targets.advantages[rows]
    clipped, logprobs, entropy = completion_terms(model, batch, config, advantages, old_logprobs)
    learner.num_forwards += len(rows)
    if old_logprobs is None:  # the first epoch: the policy that updates is the old one
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
    """The float32 gradient of the step's loss, the log-probabilities of each micro-batch, sums of what is measured."""
    grads: dict[str, Any] = {}
    seen: list[mx.array] = []
    totals: dict[str, float] = {}
    for batch, old in zip(tqdm(batches, desc="update", leave=False, disable=None), old_logprobs, strict=True):
        share = nn.value_and_grad(learner.model, lambda model, b=batch, o=old: objective(learner, model, b, o, targets))
        (_, logprobs, sums), tree = share(learner.model)
        part = dict(tree_flatten(tree))
        del tree  # else each gradient would live until the last one is computed
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
    Names of weights in the order in which a backward pass comes by their gradients, those of a layer together.

    Asked for in another order, MLX would keep what a gradient is made of while it computes all that come after.
    """

    def place(name: str) -> float:
        first, second, *_ = name.split(".")
        return -int(second) if first == "layers" else math.inf if first == "embed_tokens" else -math.inf

    return [list(layer) for _, layer in itertools.groupby(sorted(names, key=place), place)]


def step(
    learner: Learner, batches: list[MicroBatch], old_logprobs: list[mx.array | None], targets: Targets, lr: float
) -> tuple[list[mx.array], dict[str, float]]:
    """One step of AdamW on the masters, which then go into the model; nothing changes if the gradient is not finite."""
    grads, logprobs, measured = accumulate(learner, batches, old_logprobs, targets)
    grads, norm = optim.clip_grad_norm(grads, learner.config.max_grad_norm)
    measured["grad_norm"] = norm.item()
    overflow = not (math.isfinite(measured["grad_norm"]) and math.isfinite(measured["loss"]))
    measured["skipped"] = int(overflow)
    if overflow:
        count_failure(learner, measured["loss"])
    else:
        provable = lr and measured["signal"] and not measured.get("clip_frac")  # what the clip removes is rightly 0
        proving = prove_gradients(learner, grads) if provable else {}
        before = {name: learner.trainable[name] for name in proving}
        learner.num_changes, learner.failures = learner.num_changes + 1, 0
        learner.optimizer.learning_rate = lr
        masters = tree_unflatten(list(learner.trainable.items()))
        learner.trainable = dict(tree_flatten(learner.optimizer.apply_gradients(grads, masters)))
        # Here, and in the model, the old tensors would live until the last of the new ones is computed.
        del grads, masters
        install(learner.model, learner.trainable)
        for name in list(proving):
            prove_change(learner, name, before.pop(name), proving.pop(name), lr)
        mx.eval(learner.trainable, learner.optimizer.state)
    learner.loss_scale = learner.loss_scale.after(overflow)
    return logprobs, measured


# ---- how far an update may move the policy


class Probe(NamedTuple):
    """The part of a rollout on which it is measured how far the policy moves."""

    batches: list[MicroBatch]
    old_logprobs: list[mx.array]  # of each micro-batch, (M, T), before the first step on the rollout


def make_probe(batches: list[MicroBatch], logprobs: list[mx.array], num_items: int, turn: int) -> Probe:
    """
    Every k-th micro-batch, or every k-th row where there are too few, beginning at another one each turn.

    logprobs: of each micro-batch, (M, T). k is at most PROBE_SHARE, and less where few tokens are counted.
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


def distance(learner: Learner, probe: Probe) -> float:
    """
    KL of the old policy from the present one, nats a token: the mean of r - 1 - log r over the old policy's tokens.

    r is the present probability / the old one. The mean over tokens that the old policy drew is an unbiased estimate,
    and no token's share is negative (k3, http://joschu.net/blog/kl-approx.html).
    """
    total, count = mx.array(0.0), mx.array(0.0)
    for batch, old in zip(probe.batches, probe.old_logprobs, strict=True):
        new, _ = completion_logprobs(learner.model, batch, learner.config, "none")
        learner.num_forwards += len(batch.rows)
        total += (grpo.kl_term(old, new, mx.ones_like(new)) * batch.mask).sum()
        count += batch.mask.sum()
        mx.eval(total)  # wait: the next micro-batch may use this one's memory
    return float(total / count)


def hold(learner: Learner, before: dict[str, mx.array], probe: Probe, target: float) -> tuple[float, int]:
    """
    Shortens the step that led here from the masters `before`, until the policy has moved no further than allowed.

    Returns how far it has moved, and how many tries were taken back. AdamW's moments do not depend on the learning
    rate, and its step is proportional to it: a share of the step is the step at that share of the rate, without
    another gradient. Later steps begin with that share. A step that is too long at every try is not made.
    """
    for repeats in range(MOST_TRIES):
        moved = distance(learner, probe)
        if moved <= SLACK * target:
            return moved, repeats
        # a KL grows with the square of a short step; inf and nan, of logits that overflow, take the least share
        share = min(max(LEAST_SHARE, math.sqrt(target / moved)), 0.5)
        learner.rate *= share
        learner.trainable = {name: old + share * (learner.trainable[name] - old) for name, old in before.items()}
        install(learner.model, learner.trainable)
        mx.eval(learner.trainable)
    learner.trainable = before
    install(learner.model, before)
    return 0.0, MOST_TRIES


def count_failure(learner: Learner, loss: float) -> None:
    """Counts an update that changes nothing. ValueError when too many follow each other."""
    mended = math.isfinite(loss) and learner.loss_scale.value > 1  # an overflow that a smaller scale may avoid
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
    The gradients of the tensors that were not yet seen to learn, by name.

    Raises ValueError for one without any. An adapter's A has none while its B is 0, and is looked at again next time.
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
    Takes a tensor that has changed off the list. ValueError for one that has not.

    A step far below the last bit of every weight cannot show, and proves nothing either way.
    """
    if mx.any(learner.trainable[name] != before).item():
        learner.unproved.remove(name)
        return
    size = lr * mx.abs(gradient) / (mx.abs(gradient) + 1e-8)  # of AdamW's first step
    if mx.any(size > mx.abs(before) * 2**-16).item():
        raise ValueError(f"{name} has a gradient, but an update at learning rate {lr:g} did not change it")


def install(model: gwen.Model, trainable: dict[str, mx.array]) -> None:
    """Puts the float32 masters into the model, rounded to the dtype in which the model holds each."""
    dtypes = {name: array.dtype for name, array in tree_flatten(model.trainable_parameters())}
    model.load_weights([(name, array.astype(dtypes[name])) for name, array in trainable.items()], strict=False)


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then constant or half a cosine down to a tenth; `step` counts from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return config.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


class LossScale(NamedTuple):
    """Keeps small gradients of float16 activations above zero: doubled after 200 good steps, halved by an overflow."""

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
