"""
Supervised fine-tuning: cross-entropy on the assistant's replies, with the parts of the GRPO trainer.

    uv run train.py --loss-type sft --data chats.jsonl

A step cuts the rows of B conversations into micro-batches by length; its loss is the mean negative log-probability of
all trained tokens. Evaluations give loss and perplexity of held-out conversations. Left out: reading and rendering
conversations (chats.py), the optimizer step (update.py), the loop (train.py).

Axes: B conversations a step, M rows of a micro-batch, L positions, T trained tokens of a row.
"""

import math
import time
from typing import Any

import mlx.core as mx
import numpy as np

import gwen
from disk import run_files
from machine import world
from sft.chats import Row
from step.micro_batch import MicroBatch, my_part, padded, plan
from step.policy import Reader
from step.result import UpdateResult

# ---- the step


def make_batches(rows: list[Row], token_budget: int) -> list[MicroBatch]:
    """Rows in micro-batches of at most `token_budget` positions, or of one row, sorted by length."""
    first, rest = [row.ids[:1] for row in rows], np.array([len(row.ids) - 1 for row in rows])
    return [_make_batch([rows[place] for place in part], part) for part, _ in plan(first, rest, token_budget, "off")[1]]


def _make_batch(rows: list[Row], part: list[int]) -> MicroBatch:
    num_tokens = [len(row.places) for row in rows]
    mask = (np.arange(max(num_tokens)) < np.array(num_tokens)[:, None]).astype(np.float32)
    return MicroBatch(
        rows=mx.array(part),
        prefix=None,
        tokens=padded([row.ids[:-1] for row in rows]),
        lengths=[len(row.ids) - 1 for row in rows],
        positions=padded([[place - 1 for place in row.places] for row in rows]),
        completion_ids=padded([[row.ids[place] for place in row.places] for row in rows]),
        mask=mx.array(mask),
        sampled_logprobs=mx.zeros(mask.shape),  # nothing was sampled
    )


# ---- the evaluation


def evaluate(model: gwen.Model, reader: Reader, conversations: list[list[Row]], token_budget: int) -> dict[str, Any]:
    """
    The record of `eval.jsonl` without `step`: loss, nats per trained token, and perplexity of held-out conversations.

    The 95% interval is that of a ratio of two sums over conversations.
    """
    begin = time.perf_counter()
    owners = np.repeat(np.arange(len(conversations)), [len(rows) for rows in conversations])
    sums = np.zeros((3, len(conversations)))  # negative log-probabilities, entropies, tokens
    batches = make_batches([row for rows in conversations for row in rows], token_budget)
    for batch in my_part(batches):
        logprobs, entropy = reader.logprobs(model, batch)
        parts = np.array(mx.stack([-logprobs * batch.mask, entropy * batch.mask, batch.mask]), np.float64).sum(-1)
        for place, row in enumerate(np.array(batch.rows)):
            sums[:, owners[row]] += parts[:, place]
    losses, entropies, tokens = sum(world.share(sums))
    num, total = len(conversations), tokens.sum()
    loss = losses.sum() / total
    reach = None
    if num > 1:
        reach = 1.96 * math.sqrt(((losses - loss * tokens) ** 2).sum() * num / (num - 1)) / total
    record = {
        "eval/loss": float(loss),
        "eval/loss_ci95": reach,
        "eval/perplexity": math.exp(min(loss, 700.0)),  # of more there is no float
        "eval/entropy": float(entropies.sum() / total),
        "eval/tokens": float(total / num),
        "eval/num": num,
        "eval/s": time.perf_counter() - begin,
    }
    return run_files.finite(record)


# ---- a step's figures

# those that this method does not measure; null in metrics.jsonl
NOT_MEASURED = (
    *("reward/mean", "reward/std", "reward/zero_std_frac", "reward/none", "reward/s"),
    *("sampling/draws", "sampling/signal_groups", "sampling/unused_frac"),
    *("rollout/s", "rollout/tok_s", "prefill/s", "decode/s", "ref/s", "teacher/s"),
    *("judge/s", "judge/crit_eval_s", "judge/unparsed", "judge/unparsed_frac", "judge/mass", "judge/cached"),
    *("completion/truncated_frac", "completion/repeated", "completion/degenerate_frac", "mem/cache_gb"),
)


def step_metrics(
    result: UpdateResult, seconds: dict[str, float], num_rows: int, batch: int, recent: Any
) -> dict[str, Any]:
    """
    One object of `metrics.jsonl`, without `step` and memory.

    num_rows: of the step's batch of conversations. recent: seconds of the last steps, including this one.
    """
    metrics: dict[str, Any] = dict.fromkeys(NOT_MEASURED) | result.metrics(seconds, num_rows, recent)
    return run_files.finite(metrics | {"completion/mean_tokens": result.num_items / batch})
