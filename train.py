"""
GRPO: sample groups of completions, reward them, make the better ones of each group likelier. `uv run train.py`

    rollout    G completions of each of B prompts, with the log-probability of every token
    judge      each completion is scored by a frozen judge and by verifiers; the weighted sum is its reward
    reference  only with a KL term: log-probabilities under the model without its adapters
    update     advantage = reward less the group's mean, over its deviation; one step of AdamW on the clipped loss

`train` below is the whole algorithm. A run writes its settings, metrics, completions, evaluations and checkpoints
to its directory, and goes on from there with `--resume DIR`.

Axes: B prompts a step, G completions a prompt, N = B * G rows, T completion positions, M rows of a micro-batch.
"""

import base64
import contextlib
import dataclasses
import json
import math
import shlex
import signal
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

import checkpoint
import dispatch
import evaluate
import gpu
import grpo
import gwen
import health
import judge
import lora
import memory
import preflight
import sampler
import settings
import tasks
import telemetry
import update
from examples import Example, epoch_indices, spread
from micro_batch import micro_batches
from rewards import call_reward
from settings import Config

MOST_ANSWERS = 512  # held-out problems whose answers are recorded at an evaluation, evenly spread over all


def train(config: Config, run: "Run") -> None:
    """Runs the steps from `run.step` to `config.steps`; everything that lasts is in `run`."""
    model, task, learner, clock = run.model, run.task, run.learner, telemetry.PhaseClock()
    most_draws = config.dynamic_sampling_cap if config.dynamic_sampling else 1
    if run.evaluate_if_due():
        run.save()
    while run.step < config.steps:
        clock.end_step()  # evaluation and saving belong to no step
        mx.reset_peak_memory()
        learner.num_forwards, draws, enough = 0, list[Draw](), False
        while not enough:
            number = run.num_draws + len(draws)
            indices = epoch_indices(len(task.train), config.batch, number, config.seed)
            examples = [task.train[index] for index in indices]
            prompts = [run.prompt_ids[index] for index in indices]

            with clock.phase("rollout") as done:
                rollout = sampler.rollout(
                    model,
                    prompts,
                    run.sampling,
                    group_size=config.groups,
                    key=(config.seed << 32) + number + 1,
                    batch_size=run.batch_size,
                    share_prefix=config.sharing,
                )
                done(rollout.completion_ids)

            draws.append(Draw(examples, prompts, rollout, reward_completions(run, examples, rollout, clock)))
            chosen, advantages = choose_groups(config, draws)
            enough = len(draws) == most_draws or bool(has_signal(advantages).all())

        with clock.phase("update") as done:
            rows, rollout = gather(config, draws, chosen)
            batches = micro_batches(rows, rollout, config.train_token_budget, config.train_share_prefix)
            done(batches)

        ref_logprobs = None
        if config.kl_coef:
            with clock.phase("ref") as done:
                ref_logprobs = update.reference_logprobs(learner, batches, rollout)
                done(ref_logprobs)

        with clock.phase("update") as done:
            lr = update.learning_rate(config, run.step)
            result = update.update(learner, batches, rollout, mx.array(advantages.reshape(-1)), ref_logprobs, lr)
            done(learner.trainable, learner.optimizer.state)

        learner.whole = False  # until the step is on record
        run.step, run.num_draws = run.step + 1, run.num_draws + len(draws)
        # ---- everything below is reporting
        run.report(clock.end_step(), draws, rollout, chosen, advantages, result)
        run.end_step()
        is_best = run.evaluate_if_due()
        if is_best or run.step % config.save_every == 0 or run.step == config.steps:
            run.save()


class Rewards(NamedTuple):
    """Rewards of one rollout, numpy float64."""

    total: np.ndarray  # (B, G), weighted sum of the parts; nan where none of them could be read
    filled: np.ndarray  # (B, G), the same, there too
    parts: np.ndarray  # (K, B, G), each reward before weighting, see `fill` for what could not be read
    weights: list[float]  # K
    components: dict[str, np.ndarray]  # name -> (N,), before weighting; nan where the judge was unreadable
    judgement: judge.Judgement | None
    completions: list[str]


class Draw(NamedTuple):
    """One batch of prompts with their completions, and what these earned."""

    examples: list[Example]  # B
    prompts: list[list[int]]  # B
    rollout: sampler.Rollout
    rewards: Rewards


def advantages_of(config: Config, draws: list[Draw], chosen: list[int]) -> np.ndarray:
    """Advantages of the chosen groups, numbered through all draws, (B, G) float32."""
    if config.combine_rewards == "normalize":
        parts = np.concatenate([draw.rewards.parts for draw in draws], axis=1)[:, chosen]
        return grpo.decoupled_advantages(parts, draws[0].rewards.weights, config.signal_floor)
    rewards = np.concatenate([draw.rewards.filled for draw in draws])[chosen]
    return grpo.group_advantages(rewards, config.scale_rewards, config.advantage, config.signal_floor)


def has_signal(advantages: np.ndarray) -> np.ndarray:
    """Which groups change the policy, (B, G) -> (B,) bool: those whose rewards differ by more than noise."""
    return (advantages != 0).any(axis=1)


def choose_groups(config: Config, draws: list[Draw]) -> tuple[list[int], np.ndarray]:
    """
    The B groups that are trained, numbered through all draws, ascending, and their advantages, (B, G).

    They are the first that have a signal; where there are too few, the first without one fill up the batch.
    """
    everything = list(range(len(draws) * config.batch))
    advantages = advantages_of(config, draws, everything)
    if len(draws) == 1:
        return everything, advantages
    chosen = sorted(np.argsort(~has_signal(advantages), kind="stable")[: config.batch].tolist())
    return chosen, advantages_of(config, draws, chosen)


def gather(config: Config, draws: list[Draw], chosen: list[int]) -> tuple[list[list[int]], sampler.Rollout]:
    """
    Prompts of every row, and one rollout of the chosen groups, whose mask is empty where a row is not trained.

    --truncated mask leaves out the rows that ran into --max-tokens.
    """
    rows = [group * config.groups + member for group in chosen for member in range(config.groups)]
    prompts = [prompt for draw in draws for prompt in draw.prompts for _ in range(config.groups)]
    reasons = [reason for draw in draws for reason in draw.rollout.finish_reasons]
    width = max(draw.rollout.mask.shape[1] for draw in draws)

    def merged(arrays: list[mx.array]) -> mx.array:  # what is padded lies outside the mask
        return mx.concatenate([mx.pad(a, [(0, 0), (0, width - a.shape[1])]) for a in arrays])[mx.array(rows)]

    fields = ("completion_ids", "logprobs", "mask")
    ids, logprobs, mask = (merged([getattr(draw.rollout, name) for draw in draws]) for name in fields)
    reasons = [reasons[row] for row in rows]
    if config.truncated == "mask":
        mask = mask * mx.array([[reason != "length"] for reason in reasons])
    rollout = draws[-1].rollout._replace(completion_ids=ids, logprobs=logprobs, mask=mask, finish_reasons=reasons)
    return [prompts[row] for row in rows], rollout


def reward_completions(
    run: "Run", examples: list[Example], rollout: sampler.Rollout, clock: telemetry.PhaseClock
) -> Rewards:
    """
    Weighted sum of the task's verifiers and the judge, each called once.

    What the judge could not read gets the mean that it is compared with: the judge then says nothing of that
    completion, and what the verifiers say of it counts in full.
    """
    config, task = run.config, run.task
    completions = sampler.texts(run.tokenizer, rollout, run.model.config.eos_ids)
    repeated = [example for example in examples for _ in range(config.groups)]
    columns: dict[str, Any] = {
        name: [example.get(name) for example in repeated] for name in examples[0] if name != "prompt"
    }
    columns["num_tokens"] = np.array(rollout.mask).sum(-1).astype(int).tolist()
    prompts = [example["prompt"] for example in repeated]
    components: dict[str, np.ndarray] = {}
    with clock.phase("reward") as done:
        for name, reward in tqdm(task.rewards.items(), desc="reward", leave=False, disable=None):
            components[name] = np.array(call_reward(name, reward, prompts, completions, columns))
        done()
    judgement = None
    if run.judge is not None:
        with clock.phase("judge") as done:
            judgement = run.judge.score([tasks.prompt_text(prompt) for prompt in prompts], completions)
            components["rubric"] = judgement.rewards
            done()
    weights = [task.reward_weights[name] for name in components]
    for (name, values), weight in zip(components.items(), weights, strict=True):
        if (np.abs(weight * values) >= 1e15).any():  # as `rewards.call_reward` refuses it before weighting
            raise ValueError(
                f"reward {name} times its weight {weight:g} passes 1e15; begin anew with lower --reward-weights"
            )
    given = np.stack(list(components.values())).reshape(len(weights), config.batch, config.groups)
    axis = None if config.advantage == "reinforce" else 1
    parts = np.stack([fill(part, axis) for part in given])
    # no BLAS, whose roundings may depend on the place: what is equal must stay equal
    filled = np.asarray(sum(weight * part for weight, part in zip(weights, parts, strict=True)))
    total = np.where(np.isnan(given).all(axis=0), np.nan, filled)
    return Rewards(total, filled, parts, weights, components, judgement, completions)


def fill(values: np.ndarray, axis: int | None) -> np.ndarray:
    """(B, G) with the mean of the readable values, along `axis` or of all, where one is nan, and 0 without any."""
    readable = ~np.isnan(values)
    total, number = (part.sum(axis, keepdims=True) for part in (np.where(readable, values, 0), readable))
    return np.where(readable, values, total / np.maximum(number, 1))


# ---- a run: everything that lasts from step to step, and what it writes


class Run:
    """The model and what it learns with, its task and judge, and the run directory that records them."""

    def __init__(self, config: Config, run_dir: Path):
        self.config, self.dir = config, run_dir
        self.step = 0
        self.num_draws = 0  # batches of prompts that the steps so far have drawn
        self.task = tasks.make(config)
        self.model, self.tokenizer = gwen.load(config.model)
        eos_ids = self.model.config.eos_ids
        pad_id = next((i for i in (self.tokenizer.pad_token_id, *eos_ids) if i is not None), 0)
        self.sampling = sampler.SamplingParams(
            config.max_tokens, config.temp, config.top_p, config.top_k, config.min_p, eos_ids, pad_id
        )
        if config.lora_rank:
            lora.apply(self.model, config.lora_rank, config.lora_scale, config.lora_targets, config.seed)
        # a model whose own weights are trained needs a second one to stay what it was
        judges = {config.judge_model} if self.task.rubric else set()
        judges |= {config.eval_judge_model or config.judge_model} if self.task.witness and config.eval_every else set()
        judges_itself = judges & {"", config.model} and not config.judge_url
        needs_base = not config.lora_rank and (config.kl_coef or judges_itself)
        self.base = gwen.load(config.model)[0] if needs_base else None
        self.prompt_ids = self._render(self.task.train, "training prompt")
        if config.eval_every:
            self._render(spread(self.task.held_out, config.eval_limit), "held-out prompt")
        self.judge = self._make_judge() if self.task.rubric else None
        self.witness = None
        if config.eval_every:
            self.witness = evaluate.make_witness(config, self.task, self.judge, self.base or self.model, self.tokenizer)
        self.learner = update.Learner(self.model, config, self.base)
        self.batch_size = self._settle_rollouts()
        lengths = [len(ids) for ids in self.prompt_ids]
        shape = (self.model.config, self.model.head_weight.dtype, config, lengths)
        preflight.settle(*shape)
        self.memory = preflight.line(*shape)
        self.recent: deque[float] = deque(maxlen=10)
        self.stopping = False  # Ctrl-C was pressed while a step made its changes

    def _make_judge(self) -> judge.Judge | judge.RemoteJudge:
        config = self.config
        assert self.task.rubric is not None

        def load() -> tuple[gwen.Model, Any]:
            if config.judge_model not in ("", config.model):
                return gwen.load(config.judge_model)
            return self.base or self.model, self.tokenizer

        return judge.make(config, self.task.rubric, load)

    def _settle_rollouts(self) -> sampler.BatchSize:
        """How rollouts are cut. What is `auto` on a GPU is measured here, and fixed in the configuration."""
        config = self.config
        if not config.rollout_batch_size or (config.share_prefix == "auto" and gpu.on_gpu()):
            num_held_out = len(spread(self.task.held_out, config.eval_limit)) if config.eval_every else 0
            chosen, why = dispatch.choose(
                self.model,
                [len(prompt) for prompt in self.prompt_ids],
                max_tokens=config.max_tokens,
                group_size=config.groups,
                most_rows=max(config.batch * config.groups, num_held_out),
                rows=config.rollout_batch_size,
            )
            print(why, flush=True)
            config.rollout_batch_size = chosen.rows
            if config.share_prefix == "auto":
                config.share_prefix = "on" if chosen.share_prefix else "off"
        return sampler.BatchSize(config.rollout_batch_size)

    def open(self) -> None:
        """
        Creates the run directory's logs, and drops from them what came after the step the run goes on from.

        Scores that were paid for stay. A judge of our own makes them again, so that the run repeats bit for bit.
        """
        self.metrics, self.rollouts, self.evals, self.judge_scores, self.warnings = (
            telemetry.JsonLines(self.dir / f"{name}.jsonl")
            for name in ("metrics", "rollouts", "eval", "judge_scores", "warnings")
        )
        for log in (self.metrics, self.rollouts, self.evals, self.warnings):
            log.cut_after(self.step)
        self.answers = telemetry.JsonLines(self.dir / "eval_answers.jsonl")
        self.answers.cut_after(max((record["step"] for record in self.evals.read()), default=-1))
        is_paid = self.judge is not None and self.judge.is_paid
        self.judge_scores.cut_after(sys.maxsize if is_paid else self.step)
        self.past_steps, self.past_evals = self.metrics.read(), self.evals.read()
        if self.judge:
            self.judge.cache.fill(self.judge_scores.read())
            if is_paid:
                self.judge.on_score = self.remember_scores  # now, for no step may come to its end

    def _render(self, examples: list[Example], kind: str) -> list[list[int]]:
        """Ids of every prompt. ValueError names one that leaves no room for its completion."""
        return tasks.render(
            self.tokenizer,
            tqdm(examples, desc=f"{kind}s", leave=False, disable=None),
            max_tokens=self.config.max_tokens,
            context=self.model.config.max_position_embeddings,
            thinking=self.config.thinking,
            kind=kind,
        )

    def state(self) -> checkpoint.State:
        """The run between two steps."""
        learner = self.learner
        assert learner.whole, f"step {self.step + 1} is half done"
        extra = {
            "dtype": str(self.model.head_weight.dtype),
            "num_draws": self.num_draws,
            "loss_scale": learner.loss_scale._asdict(),
            "failures": learner.failures,
            "rate": learner.rate,
            "num_skipped": learner.num_skipped,
            "rollout_batch_size": self.batch_size.rows,
            "judge": self.judge and self.judge.state(),
            "best_step": self.best_step(),
        }
        return checkpoint.State(self.step, learner.trainable, dict(tree_flatten(learner.optimizer.state)), extra)

    def restore(self, state: checkpoint.State) -> None:
        shapes, ours = ({n: a.shape for n, a in arrays.items()} for arrays in (state.trainable, self.learner.trainable))
        if shapes != ours:
            raise ValueError(f"--resume {self.dir}: the checkpoint's tensors are not those of this configuration")
        if (dtype := str(self.model.head_weight.dtype)) != state.extra["dtype"]:
            raise ValueError(
                f"--resume {self.dir}: it ran in {state.extra['dtype']}, not {dtype}; set GWEN_DTYPE to that"
            )
        learner, extra = self.learner, state.extra
        self.step, self.num_draws, learner.trainable = state.step, extra["num_draws"], state.trainable
        learner.optimizer.state = tree_unflatten(list(state.optimizer.items()))
        learner.loss_scale = update.LossScale(**extra["loss_scale"])
        learner.failures, learner.num_skipped = extra["failures"], extra["num_skipped"]
        learner.rate = extra["rate"]
        self.batch_size.rows = min(self.batch_size.rows, extra["rollout_batch_size"])
        if self.judge:
            self.judge.restore(extra["judge"])
        update.install(self.model, learner.trainable)

    def save(self) -> None:
        state = self.state()
        checkpoint.save(self.dir, state, self.model, base=self.config.model, keep=self.config.keep)
        publish(self.dir, state)

    def end_step(self) -> None:
        """From here on the run may be saved again; a Ctrl-C that came meanwhile takes effect."""
        self.learner.whole = True
        if self.stopping:
            raise KeyboardInterrupt

    def evaluate_if_due(self) -> bool:
        """
        Evaluates before the first step, every `eval_every` steps and after the last, unless it is on record.

        Whether it did, and the held-out figure is the best so far: such a step is saved, whatever `save_every` says.
        """
        config = self.config
        if not evaluation_is_due(config, self.step, self.dir):
            return False
        record, answers = evaluate.evaluate(
            self.model,
            self.tokenizer,
            self.task,
            max_tokens=config.max_tokens,
            rollout_batch_size=self.batch_size,
            grader=self.judge if self.task.verifier is None else None,
            witness=self.witness,
            reference=self.base or (self.model if config.lora_rank else None),
            limit=config.eval_limit or None,
            thinking=config.thinking,
        )
        for one in spread(answers, MOST_ANSWERS):  # first: what is not on record is evaluated again
            self.answers.write({"step": self.step} | one)
        record = {"step": self.step} | record
        self.evals.write(record)
        self.past_evals.append(record)
        self.remember_scores()
        print(telemetry.evaluation_line(record), flush=True)
        self.warn()
        return self.best_step() == self.step

    def warn(self) -> None:
        """Says what ails the run, each once, and records the step at which it showed."""
        given = {record["name"] for record in self.warnings.read()}
        for finding in health.examine(self.past_steps, self.past_evals):
            if finding.name not in given:
                self.warnings.write({"step": self.step} | finding._asdict())
                print(f"WARNING after step {self.step}: {finding.text}.", file=sys.stderr, flush=True)

    def best_step(self) -> int | None:
        """The step with the best held-out figure on record, the first of equals; None where nothing could be scored."""
        name = f"eval/{self.task.metric}"
        scored = [record for record in self.evals.read() if record[name] is not None]
        return max(scored, key=lambda record: record[name])["step"] if scored else None

    def remember_scores(self) -> None:
        """Writes the judge's new scores, so that a resumed run knows those that it knew, and no other."""
        for record in self.judge.cache.take_fresh() if self.judge else []:
            self.judge_scores.write({"step": self.step} | record)

    def report(
        self,
        seconds: dict[str, float],
        draws: list[Draw],
        rollout: sampler.Rollout,
        chosen: list[int],
        advantages: np.ndarray,
        result: update.UpdateResult,
    ) -> None:
        """Writes the step's metrics and completions, of everything that was drawn, and prints its line."""
        stats = [draw.rollout.stats for draw in draws]
        num_tokens, num_rows = sum(one.num_tokens for one in stats), len(draws) * advantages.size
        num_trained = round(float(rollout.mask.sum()))
        train_s = sum(seconds.get(phase, 0.0) for phase in ("reward", "judge", "ref", "update"))
        self.recent.append(seconds["step"])
        rewards, filled = ([getattr(draw.rewards, name) for draw in draws] for name in ("total", "filled"))
        judged = [draw.rewards.judgement for draw in draws if draw.rewards.judgement is not None]
        judge_s = sum(one.stats.seconds for one in judged)
        num_judged = sum(one.stats.num_evaluations for one in judged)
        num_scores = sum(one.scores.size for one in judged)
        num_groups = len(draws) * self.config.batch
        num_signal = int(has_signal(advantages_of(self.config, draws, list(range(num_groups)))).sum())
        any_readable = np.isfinite(np.concatenate(rewards)).any()
        metrics: dict[str, Any] = {
            "step": self.step,
            "loss": result.loss,
            "reward/mean": evaluate.mean(np.concatenate(rewards)),
            "reward/std": float(np.concatenate(filled).std(axis=1, ddof=1).mean()) if any_readable else None,
            "reward/zero_std_frac": 1 - num_signal / num_groups,
            **{
                f"reward/{name}": evaluate.mean(np.concatenate([draw.rewards.components[name] for draw in draws]))
                for name in draws[0].rewards.components
            },
            "sampling/draws": len(draws),
            "sampling/signal_groups": num_signal,
            "sampling/unused_frac": 1 - advantages.size / num_rows,
            "rollout/s": seconds["rollout"],
            "rollout/tok_s": num_tokens / seconds["rollout"],
            "prefill/s": sum(one.prefill_s for one in stats),
            "decode/s": sum(one.decode_s for one in stats),
            "reward/s": seconds["reward"],
            "judge/s": seconds.get("judge", 0.0),
            "judge/crit_eval_s": num_judged / judge_s if num_judged else None,
            "judge/unparsed": sum(one.unparsed for one in judged) if judged else None,
            "judge/unparsed_frac": sum(one.unparsed for one in judged) / num_scores if judged else None,
            "judge/mass": evaluate.mean(np.array([one.stats.mass for one in judged])),
            "judge/cached": sum(one.stats.num_cached for one in judged) if judged else None,
            "ref/s": seconds.get("ref", 0.0),
            "update/s": seconds["update"],
            "update/tok_s": num_trained / seconds["update"] if num_trained else None,
            "train/s": train_s,
            "train/tok_s": num_trained / train_s,
            "other/s": seconds["other"],
            "step/s": seconds["step"],
            "step_avg_last10/s": sum(self.recent) / len(self.recent),
            "kl": result.means["kl"],
            "entropy": result.means["entropy"],
            "clip_frac": result.means["clip_frac"],
            "grad_norm": result.grad_norm,
            "loss_scale": self.learner.loss_scale.value,
            "lr": result.lr,
            "update/kl": result.moved,
            "update/rate": result.rate,
            "update/repeats": result.repeats,
            "skipped": result.skipped,
            "skipped_total": self.learner.num_skipped,
            "completion/mean_tokens": num_tokens / num_rows,
            "completion/truncated_frac": sum(d.rollout.finish_reasons.count("length") for d in draws) / num_rows,
            "mismatch/logprob_abs_mean": result.means["gap"],
            "mismatch/logprob_abs_max": result.means["gap_max"],
            "mismatch/ratio_mean": result.means["trust"],
            "mismatch/ratio_max": result.means["trust_max"],
            "mismatch/over_cap_frac": result.means["over_cap"],
            "pad_frac": result.pad_frac,
            "forwards_per_completion": self.learner.num_forwards / advantages.size,
            "mem/peak_gb": mx.get_peak_memory() / 1e9,
            "mem/cache_gb": max(one.cache_bytes for one in stats) / 1e9,
        }
        metrics = {name: value if value is None or math.isfinite(value) else None for name, value in metrics.items()}
        self.metrics.write(metrics)
        self.past_steps.append(metrics)
        trained = dict(zip(chosen, advantages.tolist(), strict=True))
        for number, draw in enumerate(draws):
            for row, record in enumerate(self.completions(draw, number * self.config.batch)):
                values = trained.get(record["group"])
                advantage = None if values is None else values[row % self.config.groups]
                self.rollouts.write(record | {"advantage": advantage})
        self.remember_scores()
        print(telemetry.console_line(metrics, self.config.steps), flush=True)
        if result.skipped:
            print(f"step {self.step}: the gradient was not finite; the step changed nothing", file=sys.stderr)
        self.warn()

    def completions(self, draw: Draw, first_group: int) -> Iterator[dict[str, Any]]:
        """What is recorded of each completion, of groups numbered from `first_group`, but its advantage."""
        rollout, rewards, judged = draw.rollout, draw.rewards, draw.rewards.judgement
        ids, lengths = np.array(rollout.completion_ids).tolist(), np.array(rollout.mask).sum(-1).astype(int)
        logprobs = np.array(rollout.logprobs).astype("<f2")  # within 0.05% or 3e-8
        total = rewards.total.reshape(-1)
        for row, completion in enumerate(rewards.completions):
            group = row // self.config.groups
            example = draw.examples[group]
            scores = None
            if judged is not None:
                scores = [None if np.isnan(s) else round(float(s), 4) for s in judged.scores[row]]
            yield {
                "step": self.step,
                "group": first_group + group,
                "prompt": example["prompt"],
                "answer": None if example.get("answer") is None else str(example["answer"]),  # a user's may be anything
                "category": example.get("category"),
                "completion": completion,
                "ids": ids[row][: lengths[row]],
                "logprobs": base64.b64encode(logprobs[row, : lengths[row]].tobytes()).decode(),
                "reward": None if np.isnan(total[row]) else float(total[row]),
                "rewards": {n: None if np.isnan(v[row]) else float(v[row]) for n, v in rewards.components.items()},
                "judge_scores": scores,
                "finish_reason": rollout.finish_reasons[row],
            }

    def summary(self) -> None:
        """Repeats what was warned of, and compares the first and the last evaluation."""
        for warning in self.warnings.read():
            print(f"warned after step {warning['step']}: {warning['name']}")
        records = self.evals.read()
        if len(records) > 1:
            print(telemetry.comparison(records[0], records[-1]))


def publish(run_dir: Path, state: checkpoint.State) -> None:
    """Makes `adapter` that of the newest checkpoint, and `adapter-best` too where it is the best so far."""
    checkpoint.copy_adapter(run_dir, state.step, "adapter")
    if state.extra["best_step"] == state.step:
        checkpoint.copy_adapter(run_dir, state.step, "adapter-best")


def evaluation_is_due(config: Config, step: int, run_dir: Path) -> bool:
    """Whether a step is one to be evaluated after, and the run's record does not have it."""
    if not config.eval_every or (step % config.eval_every and step != config.steps):
        return False
    lines = (run_dir / "eval.jsonl").read_text().splitlines()
    return not any(json.loads(line)["step"] == step for line in lines)


# ---- the command


def main(argv: list[str] | None = None) -> None:
    try:
        args = settings.parse(sys.argv[1:] if argv is None else argv)
        flags = {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if getattr(args, f.name) is not None}
        if args.resume and args.run_dir:
            raise ValueError(f"--run-dir {args.run_dir}: a resumed run stays in its directory; leave one of them out")
        config, choice = settings.resolve(flags, args.config, args.resume)
        if gpu.on_gpu():
            mx.set_cache_limit(10**9)  # else MLX keeps every freed buffer, which a 16 GB machine cannot spare
        print(choice, file=sys.stderr if args.print_config else sys.stdout, flush=True)
        if args.print_config:
            print(settings.as_yaml(config), end="")
            return
        state = checkpoint.load(args.resume) if args.resume else None
        if state:
            publish(Path(args.resume), state)  # the process may have been killed before it did
        if state and state.step >= config.steps and not evaluation_is_due(config, state.step, Path(args.resume)):
            print(f"{args.resume} is finished: {state.step} of {config.steps} steps are done")
            return
        run_dir = Path(args.resume) if args.resume else settings.choose_run_dir(config, args.run_dir)
        run = Run(config, run_dir)
        if state:
            run.restore(state)
            if "rollout_batch_size" in flags:  # more, too, than memory had left
                run.batch_size.rows = config.rollout_batch_size
            del state  # it would hold the old masters as long as the run lasts
        # only now that everything is loaded: a mistake leaves no directory behind
        if args.resume:
            settings.record_changes(config, run_dir, run.step)
            settings.write(config, run_dir)
        else:
            run_dir = run.dir = settings.make_run_dir(config, run_dir, args.run_dir)
        run.open()
        print(
            f"run: {run_dir}, {sum(a.size for a in run.learner.trainable.values()):,} trainable parameters", flush=True
        )
        print(run.memory, flush=True)
        print(telemetry.CONSOLE_COLUMNS, flush=True)
        with _stoppable(run):
            train(config, run)
        run.summary()
        print(f"adapter: {run_dir / 'adapter'}")
        if (best := run.best_step()) is not None:
            print(f"best: {run_dir / 'adapter-best'}, {f'after {best} steps' if best else 'before training'}")
    except (ValueError, OSError) as error:
        telemetry.fail(error)
    except KeyboardInterrupt:  # while something is loaded; `_stoppable` answers those of the steps
        print("\nstopped before the first step", file=sys.stderr)
        sys.exit(130)


@contextlib.contextmanager
def _stoppable(run: Run) -> Any:
    """
    Ctrl-C, a reward that fails or memory that runs out saves the run as it was after its last whole step and says how
    to go on.

    No copy of that state is kept, which would take as much memory as the state. While a step makes its changes, Ctrl-C
    waits for its end; a second one does not, and leaves the newest checkpoint.
    """

    def on_ctrl_c(*_: Any) -> None:
        if run.learner.whole or run.stopping:
            raise KeyboardInterrupt
        run.stopping = True
        print("\nthe step is being finished; Ctrl-C again gives it up", file=sys.stderr)

    before = signal.signal(signal.SIGINT, on_ctrl_c)
    try:
        yield
    except (KeyboardInterrupt, ValueError, RuntimeError, MemoryError) as error:
        what = "" if isinstance(error, KeyboardInterrupt) else f"{str(error) or type(error).__name__}; "
        if run.learner.whole:
            run.save()
            said = f"{what}saved after step {run.step}, " if what else f"stopped after step {run.step}; "
            said += _go_on(run, error)
        else:
            said = f"{what}step {run.step + 1} is lost; {_newest(run, error)}"
        if isinstance(error, ValueError) or memory.is_out_of_memory(error):
            raise ValueError(said) from error
        print(f"\n{said}", file=sys.stderr)
        if what:  # a mistake of ours or of MLX's, to be seen whole
            raise
        sys.exit(130)
    except OSError as error:  # the disk is full, or gone
        raise OSError(f"{error}; {_newest(run, error, 'make room and ')}") from error
    finally:
        signal.signal(signal.SIGINT, before)


def _go_on(run: Run, error: BaseException) -> str:
    """
    The command that goes on, or begins again where nothing was saved.

    Where memory ran out in the update, it takes less: rollouts and judges see to it themselves.
    """
    less = ""
    if memory.is_out_of_memory(error) and not isinstance(error, ValueError):  # those are of the user's rewards
        budget, longest = run.config.train_token_budget // 2, max(map(len, run.prompt_ids)) + run.config.max_tokens
        less = f" --train-token-budget {budget}" if budget >= longest else " --checkpoint-layers on"
    if checkpoint.saved(run.dir):
        return f"go on with: uv run train.py --resume {shlex.quote(str(run.dir))}{less}"
    return f"begin again with: uv run train.py --config {shlex.quote(str(run.dir / 'config.yaml'))}{less}"


def _newest(run: Run, error: BaseException, first: str = "") -> str:
    """What a run that stopped inside a step has left, and how to go on from there, or to begin again."""
    if saved := checkpoint.saved(run.dir):
        return f"{saved[-1].name} is whole, {first}{_go_on(run, error)}"
    return f"nothing was saved in {run.dir}, {first}{_go_on(run, error)}"


if __name__ == "__main__":
    main()
