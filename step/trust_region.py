"""
Measures how far an update moved the policy; update.py shortens a step that goes too far.

After an optimizer step, the policy is run again on a part of the rollout, the probe. If the KL
between the policies before and after the step exceeds the target, the step is shortened. AdamW's
moments do not depend on the learning rate, and its step is proportional to that rate. So scaling
the step has the same effect as a lower rate, and needs no new gradient. This file does not use the
model.

Sources: PPO's target KL (Schulman et al. 2017), the line search of TRPO (Schulman et al. 2015).

Axes: M rows of a batch, T tokens that the policy wrote.
"""

import itertools
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import grpo
from machine import world
from step.batch import Batch

PROBE_TOKENS = 128  # a probe has at least this many tokens, if the step has as many
MOST_STRIDE = 8  # one in 8 micro-batches or rows is probed; more if these have too few tokens
SLACK = 1.5  # a step may move the policy by this many times the target
RECOVERY = 1.25  # the learning rate's scale grows by this factor after a step below half the target
MOST_TRIES = 5  # how often a step that goes too far is shortened before it is undone
LEAST_SHARE = 0.1  # the smallest factor by which one shortening scales a step

Weights = dict[str, mx.array]  # float32 masters, by name


def make_probe(batches: list[Batch], step: int) -> list[Batch]:
    """
    One in k of the batches, or one in k of the rows if there are few batches.

    k is at most MOST_STRIDE, and less if there are few tokens. Each step takes others. Rows that
    share a prompt stay together, because the prompt is computed once. The probe's `old_logprobs`
    are those under the policy before the update.
    """
    num_tokens = sum(int(batch.mask.sum()) for batch in batches)
    stride = max(min(MOST_STRIDE, num_tokens // PROBE_TOKENS), 1)
    if len(batches) >= stride:
        return batches[step % stride :: stride]

    stride = min(stride, max((len(batch.rows) for batch in batches), default=1))
    probe = []
    for batch in batches:
        places = _select_places(batch, step % stride, stride)
        if places:
            probe.append(batch.select_rows(places))
    return probe


def _select_places(batch: Batch, number: int, stride: int) -> list[int]:
    """The indices of the rows in part `number` of a batch that is cut into `stride` parts."""
    num_rows = len(batch.rows)
    if batch.prefix is None:
        return list(range(number, num_rows, stride))
    by_prompt = sorted(range(num_rows), key=batch.prefix.parents.__getitem__)
    return by_prompt[num_rows * number // stride : num_rows * (number + 1) // stride]


def measure_kl(probe: list[Batch], logprobs: list[mx.array]) -> float:
    """
    KL(old policy, current policy) in nats per token: the mean of r - 1 - log r.

    logprobs: the probe's log-probabilities under the current policy, (M, T) for each batch.
    r is the current probability / the old one. The mean over tokens that the old policy drew is
    unbiased, and no token's term is negative (k3, http://joschu.net/blog/kl-approx.html).
    """
    local_sums: list[list[Any]] = []
    for batch, current in zip(probe, logprobs, strict=True):
        assert batch.old_logprobs is not None
        # if the exponential of padding were inf, inf * 0 would be nan
        current = mx.where(batch.mask > 0, current, batch.old_logprobs)
        counted = batch.mask * batch.weights
        terms = grpo.kl_term(batch.old_logprobs, current)
        local_sums.append([(terms * counted).sum().item(), counted.sum().item()])
    all_sums = list(itertools.chain(*world.all_gather(local_sums)))
    # a running sum adds in the same order on every rank
    total, count = np.array(all_sums, np.float32).cumsum(axis=0)[-1]
    return float(total / count)


class BoundedStep(NamedTuple):
    """The result of shortening a step until it moves the policy no further than allowed."""

    scale: float  # fraction of the requested step that remains; it also scales the learning rate
    kl: float  # nats per token
    num_backtracks: int  # how often the step was shortened
