"""
Supervised fine-tuning: cross-entropy on the assistant's replies, with the parts of the GRPO trainer.

    uv run train.py --loss-type sft --data chats.jsonl

A step takes B conversations, cuts their rows into micro-batches by length, and takes one step of AdamW on the mean
negative log-probability of all trained tokens. Evaluations give loss and perplexity of held-out conversations. Left
out: reading and rendering conversations (problems/chats.py), the optimizer step (update.py).

Axes: B conversations a step, M rows of a micro-batch, L positions, T trained tokens of a row.
"""

import math
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import gwen
import preflight
import run
import run_files
import update
import world
from config import Config
from losses.policy import MISMATCH, Share, completion_logprobs
from micro_batch import MicroBatch, my_part, padded, plan
from problems import chats
from problems.chats import Row
from problems.examples import Example, epoch_indices, short, split_examples, spread
from reporting.console import SFT_COLUMNS, say, sft_line
from reporting.journal import Journal, PhaseClock

# figures of a step that this method does not measure; null in metrics.jsonl
NOT_MEASURED = (
    *("reward/mean", "reward/std", "reward/zero_std_frac", "reward/none", "reward/s"),
    *("sampling/draws", "sampling/signal_groups", "sampling/unused_frac"),
    *("rollout/s", "rollout/tok_s", "prefill/s", "decode/s", "ref/s", "teacher/s", "distill/kl"),
    *("judge/s", "judge/crit_eval_s", "judge/unparsed", "judge/unparsed_frac", "judge/mass", "judge/cached"),
    *("kl", "clip_frac", "update/kl", "update/repeats", "completion/truncated_frac", "mem/cache_gb"),
    *(f"mismatch/{name}" for name in MISMATCH),
)


# ---- the loss


class CrossEntropy:
    """The mean negative log-probability of a step's trained tokens, in nats: a loss on tokens."""

    def __init__(self, config: Config, num_items: int):
        self.config, self.num_items = config, num_items

    def __call__(self, model: gwen.Model, batch: MicroBatch) -> Share:
        logprobs, entropy = completion_logprobs(model, batch, self.config, "logprobs")
        loss = -(logprobs * batch.mask).sum() / self.num_items
        return Share(loss, logprobs, {"loss": loss, "entropy": (entropy * batch.mask).sum()})


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


def evaluate(model: gwen.Model, config: Config, conversations: list[list[Row]]) -> dict[str, Any]:
    """
    The record of `eval.jsonl` without `step`: loss, nats per trained token, and perplexity of held-out conversations.

    The 95% interval is that of a ratio of two sums over conversations.
    """
    begin = time.perf_counter()
    owners = np.repeat(np.arange(len(conversations)), [len(rows) for rows in conversations])
    sums = np.zeros((3, len(conversations)))  # negative log-probabilities, entropies, tokens
    batches = make_batches([row for rows in conversations for row in rows], config.train_token_budget)
    for batch in my_part(batches):
        logprobs, entropy = completion_logprobs(model, batch, config, "none")
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


# ---- the run


class Run(run.Core):
    """The conversations, beside the model, its learner and the journal."""

    columns = SFT_COLUMNS

    def __init__(self, config: Config, run_dir: Path):
        train, held_out = split_examples(chats.load(config.data, config.columns or None))
        if not train:
            raise ValueError(f"--data {config.data} leaves no conversation to train on, all are held out; add some")
        if config.eval_every and not held_out:
            raise ValueError(f"--data {config.data} holds out no conversation; add some or set --eval-every 0")
        super().__init__(config, run_dir)
        self.train = self._render(train, "training")
        held_out = spread(held_out, config.eval_limit) if config.eval_every else []
        self.held_out = self._render(held_out, "held-out")
        self.learner = update.Learner(self.model, config)
        lengths = [sum(len(row.ids) for row in rows) for rows in self.train]
        self.longest = max(len(row.ids) for rows in self.train + self.held_out for row in rows)
        demand = (self.model.config, self.model.head_weight.dtype, config, lengths)
        preflight.settle(*demand)  # replaces each `auto` in `config`
        self.agree(self.train)
        preflight.limit_cache(*demand)
        self.memory = preflight.line(*demand)
        self.end_step()

    def _render(self, examples: list[Example], kind: str) -> list[list[Row]]:
        """The rows of each conversation. ValueError names one that cannot be rendered."""
        config, model = self.config, self.model.config
        end_ids = {*model.eos_ids, self.tokenizer.eos_token_id}
        rendered = []
        for number, example in enumerate(examples, 1):
            try:
                rendered.append(
                    chats.render(
                        self.tokenizer,
                        example,
                        turns=config.train_turns,
                        thinking=config.thinking,
                        end_ids=end_ids,
                        context=model.max_position_embeddings,
                    )
                )
            except ValueError as error:
                raise ValueError(f"{kind} conversation {number}, {short(example['prompt'])}: {error}") from error
        return rendered

    def open(self) -> None:
        """Opens the logs, once the directory exists."""
        self.keep_start()
        self.journal = Journal(self.config, self.dir, "loss", self.step, keep_scores=False)

    def evaluate(self) -> None:
        self.journal.write_evaluation(self.step, evaluate(self.model, self.config, self.held_out), [])

    def stops_early(self) -> bool:
        """Whether the last --early-stopping evaluations were not better than the best before them."""
        best, patience = self.journal.best_step(), self.config.early_stopping
        if not patience or best is None:
            return False
        return sum(record["step"] > best for record in self.journal.evaluations) >= patience


def train(config: Config, run: Run) -> None:
    """Runs the steps from `run.step` to `config.steps`, or until the held-out loss stays up; see --early-stopping."""
    learner, clock = run.learner, PhaseClock(run.journal.live.begin)
    if run.evaluate_if_due():
        run.save()
    run.journal.update_page(run.step)
    while run.step < config.steps and not run.stops_early():
        clock.lap()  # evaluation and saving belong to no step
        mx.reset_peak_memory()
        with clock.phase("update") as done:
            chosen = epoch_indices(len(run.train), config.batch, run.step, config.seed)
            rows = [row for index in chosen for row in run.train[index]]
            batches = make_batches(rows, config.train_token_budget)
            lr = update.learning_rate(config, run.step)
            loss = CrossEntropy(config, sum(len(row.places) for row in rows))
            _, measured = update.optimizer_step(learner, batches, loss, lr)
            update.keep_equal(learner)
            done(learner.trainable, learner.optimizer.state)
        run.step += 1
        # ---- everything below is reporting
        seconds, peak = clock.lap(), mx.get_peak_memory()
        run.journal.recent.append(seconds["step"])
        figures = step_metrics(run, batches, loss.num_items, measured, seconds)
        figures |= {"lr": lr, "mem/peak_gb": peak / 1e9}
        run.journal.record(figures, sft_line(figures, config.steps))
        run.end_step()
        is_best = run.evaluate_if_due()
        if is_best or run.step % config.save_every == 0 or run.step == config.steps or run.stops_early():
            run.save()
        run.journal.update_page(run.step)
    if run.step < config.steps:
        say(f"stopped after step {run.step}: {config.early_stopping} evaluations in a row had no lower eval/loss")


def step_metrics(
    run: Run, batches: list[MicroBatch], num_items: int, measured: dict[str, float], seconds: dict[str, float]
) -> dict[str, Any]:
    """One object of `metrics.jsonl`, without learning rate and memory."""
    learner, recent = run.learner, run.journal.recent
    num_forwards, learner.num_forwards = learner.num_forwards, 0
    num_rows = sum(len(batch.rows) for batch in batches)
    metrics: dict[str, Any] = dict.fromkeys(NOT_MEASURED) | {
        "step": run.step,
        "loss": measured["loss"],
        "update/s": seconds["update"],
        "update/tok_s": num_items / seconds["update"],
        "train/s": seconds["update"],
        "train/tok_s": num_items / seconds["update"],
        "other/s": seconds["other"],
        "step/s": seconds["step"],
        "step_avg_last10/s": sum(recent) / len(recent),
        **({"wait/s": seconds["wait"]} if "wait" in seconds else {}),
        "entropy": measured["entropy"] / num_items,
        "grad_norm": measured["grad_norm"],
        "loss_scale": learner.loss_scale.value,
        "update/rate": learner.rate,
        "skipped": measured["skipped"],
        "skipped_total": learner.num_skipped,
        "completion/mean_tokens": num_items / run.config.batch,
        "pad_frac": 1 - sum(batch.num_tokens for batch in batches) / sum(batch.num_positions for batch in batches),
        "forwards_per_completion": num_forwards / num_rows,
    }
    return run_files.finite(metrics)
