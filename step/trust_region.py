"""
How far an update moved the policy, by which update.py shortens a step that goes too far.

After an optimizer step the policy is run again on a part of the rollout, the probe. If the KL between the policy
before and after passes the target, the step is shortened. AdamW's moments do not depend on the learning rate, and its
step is proportional to it, so scaling the step equals a lower rate and needs no new gradient.
Sources: PPO's target KL (Schulman et al. 2017), the line search of TRPO (Schulman et al. 2015). Left out: the model.

Axes: M rows of a batch, T own tokens.
"""

import itertools
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import grpo
from machine import world
from step.batch import Batch

PROBE_TOKENS, MOST_STRIDE = 128, 8  # every 8th micro-batch or row is probed; more, if that had fewer tokens
SLACK = 1.5  # a step may move this many times the target
RECOVERY = 1.25  # the rate grows by this factor after a step below half the target
MOST_TRIES, LEAST_SHARE = 5, 0.1  # tries to shorten a step that goes too far, and the smallest factor of one try

Weights = dict[str, mx.array]  # float32 masters by name


def make_probe(batches: list[Batch], step: int) -> list[Batch]:
    """
    A k-th of the batches, or of each one's rows if there are too few, another every step. Rows that share a prompt stay
    together, as it is computed once.

    Their `old_logprobs` are the policy's before the update. k is at most MOST_STRIDE, and less if few tokens count.
    """
    stride = max(min(MOST_STRIDE, sum(int(batch.mask.sum()) for batch in batches) // PROBE_TOKENS), 1)
    if len(batches) >= stride:
        return batches[step % stride :: stride]
    stride = min(stride, max((len(batch.rows) for batch in batches), default=1))
    places = [_part(batch, step % stride, stride) for batch in batches]
    return [batch.take(some) for batch, some in zip(batches, places, strict=True) if some]


def _part(batch: Batch, number: int, stride: int) -> list[int]:
    """The places of one of `stride` parts of a batch's rows."""
    num_rows = len(batch.rows)
    if batch.prefix is None:
        return list(range(number, num_rows, stride))
    ordered = sorted(range(num_rows), key=batch.prefix.parents.__getitem__)
    return ordered[num_rows * number // stride : num_rows * (number + 1) // stride]


def distance(probe: list[Batch], present: list[mx.array]) -> float:
    """
    KL(old policy, current policy) in nats per token: the mean of r - 1 - log r over the old policy's tokens.

    present: the probe's log-probabilities under the current policy, (M, T) per batch; r = current / old probability.
    The mean over tokens drawn by the old policy is unbiased, and no token's term is negative (k3,
    http://joschu.net/blog/kl-approx.html).
    """
    found: list[list[Any]] = []
    for batch, new in zip(probe, present, strict=True):
        assert batch.old_logprobs is not None
        new = mx.where(batch.mask > 0, new, batch.old_logprobs)  # padding's exp must not become inf * 0 = nan
        counted = batch.mask * batch.weights
        found.append([(grpo.kl_term(batch.old_logprobs, new) * counted).sum().item(), counted.sum().item()])
    everywhere = list(itertools.chain(*world.share(found)))
    total, count = np.array(everywhere, np.float32).cumsum(axis=0)[-1]  # one after another
    return float(total / count)


class BoundedStep(NamedTuple):
    """How a step was shortened until it moved the policy no further than allowed."""

    share: float  # of the requested step that was kept; the caller multiplies its rate by it
    moved: float  # nats per token
    repeats: int  # tries that went too far and were undone
