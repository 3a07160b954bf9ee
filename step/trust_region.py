"""
Measures how far an update moved the policy, so that update.py can shorten a step that is too long.

After an optimizer step, the policy is run again on a part of the rollout, which is called the
probe. If the KL between the policies before and after the step exceeds the target, the step is
shortened. AdamW's moments do not depend on the learning rate, and AdamW's step is proportional to
the learning rate. So scaling the step down has the same effect as a lower learning rate, and no new
gradient is needed. This file does not run the model: update.py passes it the log-probabilities.

Sources: the target KL of PPO, arXiv:1707.06347, and the line search of TRPO, arXiv:1502.05477.

Axes: M rows of a batch, T tokens that the policy wrote.
"""

import itertools
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import grpo
from machine import world
from step.batch import Batch

PROBE_TOKENS = 128  # a probe has about this many tokens or more, unless the step has fewer

# The probe consists of one in 8 micro-batches or rows, or of more if these have too few tokens.
MOST_STRIDE = 8
SLACK = 1.5  # a step is shortened only if the KL exceeds this many times the target

# after a step whose KL is below half the target, the learning rate's scale grows by this factor
RECOVERY = 1.25
MOST_TRIES = 5  # how often a step that moves the policy too far is shortened before it is undone
LEAST_SHARE = 0.1  # the smallest factor by which a step is scaled in one reduction

MasterWeights = dict[str, mx.array]  # the float32 copies of the trainable weights, by name


def select_kl_probe(batches: list[Batch], step: int) -> list[Batch]:
    """
    Selects one in k batches, or one in k rows if there are fewer than k batches.

    k is at most MOST_STRIDE, and smaller if there are few tokens. Each step selects different
    batches or rows. Rows that share a prompt stay together, so that the prompt is computed only
    once. The `old_logprobs` in the probe come from the policy before the update.
    """
    num_tokens = sum(int(batch.mask.sum()) for batch in batches)
    stride = max(min(MOST_STRIDE, num_tokens // PROBE_TOKENS), 1)
    if len(batches) >= stride:
        return batches[step % stride :: stride]

    stride = min(stride, max((len(batch.rows) for batch in batches), default=1))
    probe = []
    for batch in batches:
        places = _select_row_indices(batch, step % stride, stride)
        if places:
            probe.append(batch.select_rows(places))
    return probe


def _select_row_indices(batch: Batch, part: int, num_parts: int) -> list[int]:
    """The indices of the rows in one part of the batch, which is divided into `num_parts` parts."""
    num_rows = len(batch.rows)
    if batch.prefix is None:
        return list(range(part, num_rows, num_parts))
    by_prompt = sorted(range(num_rows), key=batch.prefix.parents.__getitem__)
    return by_prompt[num_rows * part // num_parts : num_rows * (part + 1) // num_parts]


def measure_kl(probe: list[Batch], current_logprobs: list[mx.array]) -> float:
    """
    Estimates KL(old policy, current policy) in nats per token as the mean of r - 1 - log r.

    Here r is the current probability of a token divided by the old probability. The mean over
    tokens that the old policy sampled is an unbiased estimate of the KL, and the term of a token is
    never negative. Source: the estimator k3 in http://joschu.net/blog/kl-approx.html.

    current_logprobs: the log-probabilities in the probe under the current policy, (M, T) for each
    batch.
    """
    local_sums: list[list[Any]] = []
    for batch, current in zip(probe, current_logprobs, strict=True):
        assert batch.old_logprobs is not None
        # values at padding are arbitrary: if their exponential were inf, inf * 0 would be nan
        current = mx.where(batch.mask > 0, current, batch.old_logprobs)
        counted = batch.mask * batch.weights
        terms = grpo.kl_term(batch.old_logprobs, current)
        local_sums.append([(terms * counted).sum().item(), counted.sum().item()])
    all_sums = list(itertools.chain(*world.all_gather(local_sums)))
    # cumsum adds in the same order on every rank, so all ranks get the same result
    total, count = np.array(all_sums, np.float32).cumsum(axis=0)[-1]
    return float(total / count)


class BoundedStep(NamedTuple):
    """The result of shortening a step until it moves the policy no further than allowed."""

    scale: float  # the fraction of the step that remains; also applied to later learning rates
    kl: float  # the KL that the shortened step causes, in nats per token
    num_backtracks: int  # how often the step was shortened
