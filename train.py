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

import argparse
import contextlib
import dataclasses
import difflib
import json
import math
import reprlib
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # before mlx
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import yaml
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tqdm import tqdm

import checkpoint
import evaluate
import grpo
import gwen
import judge
import lora
import sampler
import tasks
import telemetry


def train(config: "Config", run: "Run") -> None:
    """Runs the steps from `run.step` to `config.steps`; everything that lasts is in `run`."""
    model, task, clock = run.model, run.task, telemetry.PhaseClock()
    while run.step < config.steps:
        clock.end_step()  # evaluation and saving belong to no step
        mx.reset_peak_memory()
        step = run.step + 1
        indices = tasks.epoch_indices(len(task.train), config.batch, step - 1, config.seed)
        examples = [task.train[index] for index in indices]
        prompts = [run.prompt_ids[index] for index in indices]

        with clock.phase("rollout") as done:
            rollout = sampler.rollout(
                model,
                prompts,
                group_size=config.groups,
                max_tokens=config.max_tokens,
                temperature=config.temp,
                eos_ids=model.config.eos_ids,
                pad_id=run.pad_id,
                rollout_batch_size=config.rollout_batch_size,
                key=(config.seed << 32) + step,
                **config.support,
            )
            done(rollout.completion_ids)

        with clock.phase("judge") as done:
            rewards = reward_completions(run, examples, rollout)
            advantages = grpo.group_advantages(mx.array(rewards.filled, mx.float32), config.scale_rewards).reshape(-1)
            done(advantages)

        rows = [prompt for prompt in prompts for _ in range(config.groups)]
        batches = micro_batches(rows, rollout, config.train_token_budget)

        ref_logprobs = None
        if config.kl_coef:
            with clock.phase("ref") as done:
                ref_logprobs = reference_logprobs(run, batches, rollout)
                done(ref_logprobs)

        with clock.phase("update") as done:
            result = update(run, batches, rollout, advantages, ref_logprobs)
            done(run.trainable, run.optimizer.state)

        run.step = step
        # ---- everything below is reporting
        run.report(clock.end_step(), examples, rollout, rewards, advantages, result)
        if config.eval_every and (step % config.eval_every == 0 or step == config.steps):
            run.evaluate()
        if step % config.save_every == 0 or step == config.steps:
            run.save()
        run.last_state = run.state()


class Rewards(NamedTuple):
    """Rewards of one step, numpy float64."""

    total: np.ndarray  # (B, G); nan where the judge was unreadable
    filled: np.ndarray  # (B, G); there the group's mean, and 0 in a group without any
    components: dict[str, np.ndarray]  # name -> (N,), before weighting; nan where the judge was unreadable
    judgement: judge.Judgement | None
    completions: list[str]


def reward_completions(run: "Run", examples: list[tasks.Example], rollout: sampler.Rollout) -> Rewards:
    """
    Weighted sum of the task's verifiers and the judge, each called once.

    A completion that the judge could not read gets its group's mean, hence no advantage.
    """
    config, task = run.config, run.task
    completions = sampler.texts(run.tokenizer, rollout, run.model.config.eos_ids)
    repeated = [example for example in examples for _ in range(config.groups)]
    columns: dict[str, Any] = {
        name: [example.get(name) for example in repeated] for name in examples[0] if name != "prompt"
    }
    columns["num_tokens"] = np.array(rollout.mask).sum(-1).astype(int).tolist()
    prompts = [example["prompt"] for example in repeated]
    components: dict[str, np.ndarray] = {
        name: np.array(tasks.call_reward(name, reward, prompts, completions, columns))
        for name, reward in task.rewards.items()
    }
    judgement = None
    if run.judge is not None:
        judgement = run.judge.score([tasks.prompt_text(prompt) for prompt in prompts], completions)
        components["rubric"] = judgement.rewards
    total = sum(task.reward_weights[name] * values for name, values in components.items())
    total = np.asarray(total, dtype=np.float64).reshape(config.batch, config.groups)
    readable = np.isfinite(total)
    mean = np.where(readable, total, 0).sum(1, keepdims=True) / np.maximum(readable.sum(1, keepdims=True), 1)
    return Rewards(total, np.where(readable, total, mean), components, judgement, completions)


class MicroBatch(NamedTuple):
    """Rows that go through the model together, padded on the right; row i is row `rows[i]` of the step."""

    rows: mx.array  # (M,)
    tokens: mx.array  # (M, L) prompt and completion without the last token, which predicts nothing
    positions: mx.array  # (M, T) where in L each completion token is predicted
    completion_ids: mx.array  # (M, T)
    mask: mx.array  # (M, T)
    sampled_logprobs: mx.array  # (M, T) as the sampler recorded them
    num_tokens: int  # of the M * L positions that are not padding


def micro_batches(prompts: list[list[int]], rollout: sampler.Rollout, token_budget: int) -> list[MicroBatch]:
    """Rows ordered by length and cut where M * L would pass the budget; one row always fits."""
    ids, mask, logprobs = (np.array(x) for x in (rollout.completion_ids, rollout.mask, rollout.logprobs))
    num_tokens = mask.sum(-1).astype(int)
    lengths = num_tokens + [len(prompt) for prompt in prompts]
    groups: list[list[int]] = [[]]
    for row in np.argsort(lengths, kind="stable"):  # ascending: the row that joins is the longest
        if groups[-1] and (len(groups[-1]) + 1) * (lengths[row] - 1) > token_budget:
            groups.append([])
        groups[-1].append(int(row))
    batches = []
    for rows in groups:
        length, most = max(lengths[rows]) - 1, max(num_tokens[rows])
        tokens, positions = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), most), np.int32)
        for index, row in enumerate(rows):
            whole = [*prompts[row], *ids[row, : num_tokens[row]]]
            tokens[index, : len(whole) - 1] = whole[:-1]
            # completion token t stands at len(prompt) + t and is predicted one position earlier
            positions[index] = np.minimum(len(prompts[row]) - 1 + np.arange(most), length - 1)
        batches.append(
            MicroBatch(
                rows=mx.array(rows),
                tokens=mx.array(tokens),
                positions=mx.array(positions),
                completion_ids=mx.array(ids[rows, :most]),
                mask=mx.array(mask[rows, :most]),
                sampled_logprobs=mx.array(logprobs[rows, :most]),
                num_tokens=int((lengths[rows] - 1).sum()),
            )
        )
    return batches


def completion_logprobs(model: gwen.Model, batch: MicroBatch, config: "Config") -> tuple[mx.array, mx.array]:
    """Log-probabilities of the completion tokens given everything before them, and entropies, (M, T) each."""
    hidden = mx.take_along_axis(model.hidden(batch.tokens), batch.positions[:, :, None], axis=1)  # (M, T, C)
    return gwen.token_logprobs(
        hidden,
        model.head_weight,
        batch.completion_ids,
        temperature=config.temp,
        head="frozen" if config.lora_rank else "trained",
        support=config.support,
    )


def reference_logprobs(run: "Run", batches: list[MicroBatch], rollout: sampler.Rollout) -> mx.array:
    """Log-probabilities under the model that training began with, (N, T), without gradient."""
    model = run.base or run.model
    out = mx.zeros(rollout.logprobs.shape)
    with lora.disabled(model):
        for batch in batches:
            logprobs, _ = completion_logprobs(model, batch, run.config)
            out[batch.rows, : logprobs.shape[1]] = mx.stop_gradient(logprobs)
            mx.eval(out)
    return out


class UpdateResult(NamedTuple):
    """What one optimizer step did; Python numbers, means over the step's completion tokens."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool  # the gradient was not finite, so nothing changed
    pad_frac: float  # of the positions that went through the model
    means: dict[str, float]


def update(
    run: "Run", batches: list[MicroBatch], rollout: sampler.Rollout, advantages: mx.array, ref_logprobs: mx.array | None
) -> UpdateResult:
    """One AdamW step on the gradient of the whole step's loss, accumulated over its micro-batches."""
    config, model = run.config, run.model
    num_rows, num_items = rollout.mask.shape[0], int(rollout.stats.num_tokens)

    def objective(model: gwen.Model, batch: MicroBatch) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
        logprobs, entropy = completion_logprobs(model, batch, config)
        old_logprobs = mx.stop_gradient(logprobs) if config.old_logprobs == "step" else batch.sampled_logprobs
        loss, stats = grpo.policy_loss(
            logprobs,
            old_logprobs,
            advantages[batch.rows],
            batch.mask,
            ref_logprobs=None if ref_logprobs is None else ref_logprobs[batch.rows, : logprobs.shape[1]],
            loss=config.loss,
            level=config.level,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            max_tokens=config.max_tokens,
            num_items=num_items,
        )
        loss = loss * grpo.micro_batch_weight(config.loss, len(batch.rows), num_rows)
        gap = mx.abs(logprobs - batch.sampled_logprobs) * batch.mask
        num_tokens = batch.mask.sum()
        sums = {
            "kl": stats.kl * num_tokens,
            "clip_frac": stats.clip_frac * num_tokens,
            "entropy": (entropy * batch.mask).sum(),
            "gap": gap.sum(),
            "gap_max": gap.max(),
        }
        return loss * run.loss_scale.value, loss, sums

    grads: Any = None
    total_loss, totals = 0.0, dict.fromkeys(("kl", "clip_frac", "entropy", "gap", "gap_max"), 0.0)
    for batch in tqdm(batches, desc="update", leave=False, disable=None):
        (_, loss, sums), part = nn.value_and_grad(model, objective)(model, batch)
        part = tree_unflatten([(n, g.astype(mx.float32) / run.loss_scale.value) for n, g in tree_flatten(part)])
        grads = part if grads is None else tree_map(mx.add, grads, part)
        mx.eval(grads, loss, sums)  # wait: the next micro-batch may use this one's memory
        total_loss += loss.item()
        for name, value in sums.items():
            totals[name] = max(totals[name], value.item()) if name == "gap_max" else totals[name] + value.item()
    grads, norm = optim.clip_grad_norm(grads, config.max_grad_norm)
    grad_norm, lr = norm.item(), learning_rate(config, run.step)
    skipped = not (math.isfinite(grad_norm) and math.isfinite(total_loss))
    if not skipped:
        run.optimizer.learning_rate = lr
        run.trainable = dict(
            tree_flatten(run.optimizer.apply_gradients(grads, tree_unflatten(list(run.trainable.items()))))
        )
        install(model, run.trainable)
    run.loss_scale = run.loss_scale.after(skipped)
    most = totals.pop("gap_max")
    means = {name: value / num_items for name, value in totals.items()} | {"gap_max": most}
    num_positions = sum(batch.tokens.size for batch in batches)
    pad_frac = 1 - sum(batch.num_tokens for batch in batches) / num_positions
    return UpdateResult(total_loss, grad_norm, lr, skipped, pad_frac, means)


def install(model: gwen.Model, trainable: dict[str, mx.array]) -> None:
    """Puts the float32 masters into the model, rounded to the dtype in which the model holds each."""
    dtypes = {name: array.dtype for name, array in tree_flatten(model.trainable_parameters())}
    model.load_weights([(name, array.astype(dtypes[name])) for name, array in trainable.items()], strict=False)


def learning_rate(config: "Config", step: int) -> float:
    """Linear warm-up, then constant or half a cosine down to a tenth; `step` counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return config.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


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


# ---- a run: everything that lasts from step to step, and what it writes


class Run:
    """The model in training, its optimizer, task and judge, and the run directory that records them."""

    def __init__(self, config: "Config", run_dir: Path):
        self.config, self.dir = config, run_dir
        self.step = 0
        self.task = make_task(config)
        self.model, self.tokenizer = gwen.load(config.model)
        self.pad_id = next((i for i in (self.tokenizer.pad_token_id, *self.model.config.eos_ids) if i is not None), 0)
        if config.lora_rank:
            lora.apply(self.model, config.lora_rank, config.lora_scale, config.lora_targets, config.seed)
        # a model whose own weights are trained needs a second one to stay what it was
        needs_base = not config.lora_rank and (config.kl_coef or (self.task.rubric and not config.judge_model))
        self.base = gwen.load_model(gwen.find(config.model)) if needs_base else None
        self.prompt_ids = self._render(self.task.train, "training prompt")
        if config.eval_every:
            self._render(self.task.held_out[: config.eval_limit or None], "held-out prompt")
        self.judge = self._make_judge() if self.task.rubric else None
        self.trainable = {
            name: array.astype(mx.float32) for name, array in tree_flatten(self.model.trainable_parameters())
        }
        self.optimizer = optim.AdamW(config.lr, weight_decay=config.weight_decay, bias_correction=True)
        self.optimizer.init(tree_unflatten(list(self.trainable.items())))
        half = self.model.head_weight.dtype == mx.float16
        self.loss_scale = LossScale(2.0**15 if half else 1.0, dynamic=half)
        self.recent: deque[float] = deque(maxlen=10)
        self.last_state = self.state()

    def _make_judge(self) -> judge.Judge:
        config = self.config
        assert self.task.rubric is not None
        model, tokenizer = (self.base or self.model), self.tokenizer
        if config.judge_model not in ("", config.model):
            model, tokenizer = gwen.load(config.judge_model)
        return judge.Judge(model, tokenizer, self.task.rubric, config.judge_chunk_size)

    def open(self) -> None:
        """Creates the run directory's logs, and drops from them what came after the step the run goes on from."""
        self.metrics, self.rollouts, self.evals = (
            telemetry.JsonLines(self.dir / f"{name}.jsonl") for name in ("metrics", "rollouts", "eval")
        )
        for log in (self.metrics, self.rollouts, self.evals):
            log.cut_after(self.step)

    def _render(self, examples: list[tasks.Example], kind: str) -> list[list[int]]:
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
        """The run between two steps. Arrays are never changed in place, so holding them is enough."""
        extra = {
            "dtype": str(self.model.head_weight.dtype),
            "loss_scale": self.loss_scale._asdict(),
            "judge_chunk_size": self.judge and self.judge.chunk_size,
        }
        return checkpoint.State(self.step, dict(self.trainable), dict(tree_flatten(self.optimizer.state)), extra)

    def restore(self, state: checkpoint.State) -> None:
        shapes, ours = ({n: a.shape for n, a in arrays.items()} for arrays in (state.trainable, self.trainable))
        if shapes != ours:
            raise ValueError(f"--resume {self.dir}: the checkpoint's tensors are not those of this configuration")
        if (dtype := str(self.model.head_weight.dtype)) != state.extra["dtype"]:
            raise ValueError(
                f"--resume {self.dir}: it ran in {state.extra['dtype']}, not {dtype}; set GWEN_DTYPE to that"
            )
        self.step, self.trainable = state.step, state.trainable
        self.optimizer.state = tree_unflatten(list(state.optimizer.items()))
        self.loss_scale = LossScale(**state.extra["loss_scale"])
        if self.judge:
            self.judge.chunk_size = min(self.judge.chunk_size, state.extra["judge_chunk_size"] or self.judge.chunk_size)
        install(self.model, self.trainable)

    def save(self, state: checkpoint.State | None = None) -> None:
        checkpoint.save(self.dir, state or self.state())
        checkpoint.save_adapter(self.model, self.dir / "adapter")

    def evaluate(self) -> None:
        config = self.config
        record, _ = evaluate.evaluate(
            self.model,
            self.tokenizer,
            self.task,
            max_tokens=config.max_tokens,
            rollout_batch_size=config.rollout_batch_size,
            grader=self.judge if self.task.metric == "score" else None,
            limit=config.eval_limit or None,
            thinking=config.thinking,
        )
        self.evals.write({"step": self.step} | record)
        name = f"eval/{self.task.metric}"
        value, greedy = _three(record[name]), _three(record["eval/greedy"])
        print(f"{name} {value} | greedy {greedy} | {record['eval/num']} held-out problems", flush=True)

    def report(
        self,
        seconds: dict[str, float],
        examples: list[tasks.Example],
        rollout: sampler.Rollout,
        rewards: Rewards,
        advantages: mx.array,
        result: UpdateResult,
    ) -> None:
        """Writes the step's metrics and completions and prints its line."""
        num_tokens, num_rows = rollout.stats.num_tokens, rollout.mask.shape[0]
        train_s = sum(seconds.get(phase, 0.0) for phase in ("judge", "ref", "update"))
        self.recent.append(seconds["step"])
        judged = rewards.judgement
        metrics: dict[str, Any] = {
            "step": self.step,
            "loss": result.loss,
            "reward/mean": evaluate.mean(rewards.total),
            "reward/std": float(rewards.filled.std(axis=1, ddof=1).mean()),
            "reward/zero_std_frac": float((np.ptp(rewards.filled, axis=1) == 0).mean()),
            **{f"reward/{name}": evaluate.mean(values) for name, values in rewards.components.items()},
            "rollout/s": seconds["rollout"],
            "rollout/tok_s": num_tokens / seconds["rollout"],
            "prefill/s": rollout.stats.prefill_s,
            "decode/s": rollout.stats.decode_s,
            "judge/s": seconds["judge"],
            "judge/crit_eval_s": judged.stats.num_evaluations / judged.stats.seconds if judged else 0.0,
            "judge/unparsed": judged.unparsed if judged else 0,
            "ref/s": seconds.get("ref", 0.0),
            "update/s": seconds["update"],
            "update/tok_s": num_tokens / seconds["update"],
            "train/s": train_s,
            "train/tok_s": num_tokens / train_s,
            "other/s": seconds["other"],
            "step/s": seconds["step"],
            "step_avg_last10/s": sum(self.recent) / len(self.recent),
            "kl": result.means["kl"],
            "entropy": result.means["entropy"],
            "clip_frac": result.means["clip_frac"],
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "loss_scale": self.loss_scale.value,
            "lr": result.lr,
            "skipped": int(result.skipped),
            "completion/mean_tokens": num_tokens / num_rows,
            "completion/truncated_frac": rollout.finish_reasons.count("length") / num_rows,
            "mismatch/logprob_abs_mean": result.means["gap"],
            "mismatch/logprob_abs_max": result.means["gap_max"],
            "pad_frac": result.pad_frac,
            "forwards_per_completion": 2 if self.config.kl_coef else 1,
            "mem/peak_gb": mx.get_peak_memory() / 1e9,
            "mem/cache_gb": rollout.stats.cache_bytes / 1e9,
        }
        if not math.isfinite(result.loss):
            metrics["loss"] = None
        self.metrics.write(metrics)
        ids, lengths = np.array(rollout.completion_ids).tolist(), np.array(rollout.mask).sum(-1).astype(int)
        values, total = np.array(advantages).tolist(), rewards.total.reshape(-1)
        for row, completion in enumerate(rewards.completions):
            scores = (
                None if judged is None else [None if np.isnan(s) else round(float(s), 4) for s in judged.scores[row]]
            )
            record = {
                "step": self.step,
                "prompt": examples[row // self.config.groups]["prompt"],
                "completion": completion,
                "ids": ids[row][: lengths[row]],
                "reward": None if np.isnan(total[row]) else float(total[row]),
                "rewards": {n: None if np.isnan(v[row]) else float(v[row]) for n, v in rewards.components.items()},
                "judge_scores": scores,
                "advantage": values[row],
                "finish_reason": rollout.finish_reasons[row],
            }
            self.rollouts.write(record)
        print(telemetry.console_line(metrics, self.config.steps), flush=True)
        if result.skipped:
            print(f"step {self.step}: the gradient was not finite; the step changed nothing", file=sys.stderr)

    def summary(self) -> None:
        """Compares the first and the last evaluation, which know nothing of the training reward."""
        records = self.evals.read()
        if len(records) < 2:
            return
        first, last = records[0], records[-1]
        named = {"eval/accuracy": "held-out accuracy", "eval/score": "held-out score", "eval/greedy": "greedy"}
        named |= {key: key.removeprefix("eval/") for key in first if key.count("/") == 2}  # the score by criterion
        for key, label in named.items():
            if key in first:
                print(f"{label}: {_three(first[key])} before, {_three(last[key])} after {last['step']} steps")


def _three(value: float | None) -> str:
    """Three decimals; an evaluation of which nothing could be scored has none."""
    return "unreadable" if value is None else f"{value:.3f}"


# ---- settings: a flag wins over the recipe, the recipe over the default


def _flag(default: Any, text: str, **metadata: Any) -> Any:
    metadata = {"help": text, **metadata}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class Config:
    """Every setting of a run; each field is a flag, and `config.yaml` holds them all."""

    model: str = _flag("", "hub id, Hugging Face directory or `demo` (default: demo without a GPU)")
    task: str = _flag("", "demo, values or gsm8k: data, rewards and evaluation in one name")
    data: str = _flag("", "JSONL, parquet, CSV or hub dataset with a `prompt` column, instead of the task's prompts")
    columns: str = _flag("", "names of the data's columns, as prompt=question,answer=answer")
    rubric: str = _flag("", "rubric YAML, instead of the task's")
    reward: list[str] = _flag(list, "reward functions FILE.py:fn, instead of the task's", nargs="+")
    reward_weights: dict[str, float] = _flag(dict, "weights as correct=1,rubric=0.5, over the task's")
    batch: int = _flag(4, "B, prompts a step", low=1, high=2**16)
    groups: int = _flag(8, "G, completions a prompt", low=2, high=2**16)
    rollout_batch_size: int = _flag(0, "rows decoded at once; auto: all of a step, at most 64", low=1, auto=True)
    max_tokens: int = _flag(256, "most tokens of a completion", low=1)
    temp: float = _flag(1.0, "sampling temperature", low=0)
    top_p: float = _flag(1.0, "nucleus; the update uses the same support", low=1e-06, high=1.0)
    top_k: int = _flag(0, "most likely tokens kept; 0 keeps all", low=0)
    min_p: float = _flag(0.0, "least probability relative to the likeliest token", low=0, high=1.0)
    thinking: bool = _flag(False, "let models that can think before they answer")
    steps: int = _flag(100, "optimizer steps", low=1)
    lr: float = _flag(1e-4, "peak learning rate", low=0)
    lr_schedule: str = _flag("cosine", "after the warm-up", choices=("cosine", "constant"))
    warmup_steps: int = _flag(5, "steps of linear warm-up", low=0)
    weight_decay: float = _flag(0.0, "AdamW's weight decay", low=0)
    max_grad_norm: float = _flag(1.0, "the gradient is scaled down to this norm", low=1e-09)
    loss: str = _flag("dapo", "aggregation of the token losses", choices=grpo.LOSSES)
    level: str = _flag("token", "importance ratio per token or per sequence", choices=grpo.LEVELS)
    scale_rewards: str = _flag("group", "what advantages are divided by", choices=grpo.SCALES)
    clip_low: float = _flag(0.2, "the ratio is clipped at 1 - this", low=0)
    clip_high: float = _flag(0.2, "the ratio is clipped at 1 + this", low=0)
    kl_coef: float = _flag(0.0, "weight of the KL term against the model before training", low=0)
    old_logprobs: str = _flag(
        "step", "of the update's own forward pass, or of the sampler", choices=("step", "sampler")
    )
    train_token_budget: int = _flag(
        0, "most tokens in one micro-batch, with padding; auto: 2048 on a GPU, else 8192", low=1, auto=True
    )
    lora_rank: int = _flag(16, "0 trains all weights", low=0, high=2**12)
    lora_scale: float = _flag(2.0, "factor of the adapter's output, as in mlx_lm")
    lora_targets: list[str] = _flag(lambda: list(lora.TARGETS), "adapted projections", nargs="+", choices=lora.TARGETS)
    judge_model: str = _flag("", "another judge than the frozen base")
    judge_chunk_size: int = _flag(24, "evaluations at once; RUBRIC_JUDGE_BATCH_SIZE is its default", low=1)
    eval_every: int = _flag(20, "steps between evaluations; 0 never evaluates", low=0)
    eval_limit: int = _flag(0, "most held-out problems; 0 takes all", low=0)
    save_every: int = _flag(20, "steps between checkpoints", low=1)
    seed: int = _flag(0, "of prompts, sampling and adapters", low=0)

    @property
    def support(self) -> dict[str, Any]:
        """The truncations of the sampling distribution that are switched on."""
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return {name: getattr(self, name) for name, value in off.items() if getattr(self, name) != value}


def make_task(config: Config) -> tasks.Task:
    """The task with the pieces that the settings override. ValueError names the flag that is wrong."""
    task = tasks.load(config.task, data=config.data or None, columns=config.columns or None)
    if config.rubric:
        task = task._replace(rubric=Path(config.rubric))
    if config.reward:
        loaded = [tasks.load_reward(spec) for spec in config.reward]
        rewards = dict(loaded)
        if len(rewards) < len(loaded):
            raise ValueError(f"--reward {' '.join(config.reward)}: two rewards have the same name")
        if taken := sorted(rewards.keys() & {"mean", "std", "zero_std_frac"}):
            raise ValueError(f"--reward {taken[0]}: reward/{taken[0]} is a metric of its own; rename the function")
        rubric = {"rubric": task.reward_weights.get("rubric", 1.0)} if task.rubric else {}
        task = task._replace(rewards=rewards, reward_weights=dict.fromkeys(rewards, 1.0) | rubric)
    known = [*task.rewards, *(["rubric"] if task.rubric else [])]
    if unknown := [name for name in config.reward_weights if name not in known]:
        raise ValueError(f"--reward-weights {unknown[0]}: the rewards are {', '.join(known)}")
    weights = {name: config.reward_weights.get(name, task.reward_weights.get(name, 1.0)) for name in known}
    # a weight of 0 switches a reward off, so that nobody pays for judging that counts for nothing
    rewards = {name: reward for name, reward in task.rewards.items() if weights[name]}
    rubric_path = task.rubric if weights.get("rubric") else None
    if not rewards and rubric_path is None:
        raise ValueError("--reward-weights leave no reward; give one of them a weight other than 0")
    # what is wrong with a reward or a rubric is said here, before a model is loaded
    for name, reward in rewards.items():
        tasks.reward_columns(name, reward, tasks.reward_arguments(task.train))
    if rubric_path is not None:
        judge.load_rubric(rubric_path)
    if config.eval_every and not task.held_out:
        raise ValueError(f"--data {config.data} holds out no prompt to evaluate; add prompts or set --eval-every 0")
    if task.verifier is not None and all(example.get("answer") is None for example in task.held_out):
        task = task._replace(verifier=None, metric="score")  # a user's data without answers has no accuracy
    return task._replace(rewards=rewards, reward_weights=weights, rubric=rubric_path)


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of a command line; those that are settings are None where they were not given."""
    parser = telemetry.Parser("train.py", str(__doc__).split("\n")[1])
    parser.add_argument("--config", metavar="FILE", help="recipe; a run's `config.yaml` repeats it")
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is recorded (default: runs/TASK-TIME)")
    parser.add_argument("--print-config", action="store_true", help="prints every setting as YAML and ends")
    parser.add_argument("--resume", metavar="DIR", help="goes on with the run in DIR from its newest checkpoint")
    for field in dataclasses.fields(Config):
        options: dict[str, Any] = {"help": field.metadata["help"], "default": None}
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            converters: dict[Any, Any] = {int: int, float: float, dict[str, float]: _weights}
            options["type"] = _size if "auto" in field.metadata else converters.get(field.type)
        options |= {key: field.metadata[key] for key in ("choices", "nargs") if key in field.metadata}
        parser.add_argument("--" + field.name.replace("_", "-"), **options)
    return parser.parse_args(argv)


def _size(text: str) -> int | str:
    """A whole number, or "auto"."""
    return text if text == "auto" else int(text)


def _weights(text: str) -> dict[str, float]:
    """ "correct=1,rubric=0.5" as a dictionary."""
    weights = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            weights[name.strip()] = float(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=NUMBER; write correct=1,rubric=0.5") from error
    return weights


def resolve(flags: dict[str, Any], config_path: str | None, resume: str | None) -> tuple[Config, str]:
    """
    Default < recipe < environment < flag, checked, and a line that says which model was taken and why.

    A resumed run keeps its settings, but for how long it goes on and how often it looks and saves.
    """
    if resume:
        if config_path:
            raise ValueError(f"--config {config_path} cannot change a resumed run; start a new one")
        if not (Path(resume) / "config.yaml").is_file():
            raise ValueError(f"--resume {resume}: no config.yaml there; give the directory of a run")
        fixed = flags.keys() - {"steps", "save_every", "eval_every", "eval_limit"}
        if fixed:
            raise ValueError(f"--{sorted(fixed)[0].replace('_', '-')} cannot change in a resumed run; start a new one")
        config = _checked(load_recipe(Path(resume) / "config.yaml") | flags)
        return config, f"model: {config.model}, as before; task: {config.task}"
    recipe = load_recipe(Path(config_path)) if config_path else _task_recipe(flags.get("task"))
    _checked(recipe | _environment() | flags)  # before a model is chosen, which may take a download
    model, why = gwen.choose_model((recipe | flags).get("model"))
    task = (recipe | flags).get("task") or ("demo" if model == "demo" else "values")
    if not config_path:
        recipe = _task_recipe(task)
    config = _checked(recipe | _environment() | flags | {"model": model, "task": task})
    return config, f"model: {model}, {why}; task: {task}"


def _task_recipe(task: str | None) -> dict[str, Any]:
    """The defaults of a task, from `recipes/`; none for no task and for one that does not exist."""
    path = Path(__file__).parent / "recipes" / f"{task}.yaml"
    return load_recipe(path) if path.is_file() else {}


def _environment() -> dict[str, int]:
    """The judge's chunk size, where the environment sets it."""
    size = judge.chunk_size_of_environment()
    return {} if size is None else {"judge_chunk_size": size}


def load_recipe(path: Path) -> dict[str, Any]:
    """The settings of a YAML file. ValueError names an unknown key with the nearest known one."""
    held = judge.load_yaml(path, f"--config {path}")
    if not isinstance(held, dict):
        raise ValueError(f"--config {path} holds no settings; it needs lines like `batch: 8`")
    names = [field.name for field in dataclasses.fields(Config)]
    for key in held:
        if key not in names:
            near = difflib.get_close_matches(str(key)[:40], names, 1, 0.0)[0]
            raise ValueError(f"--config {path}: unknown setting {reprlib.repr(key)}; did you mean {near!r}?")
    return held


def _checked(settings: dict[str, Any]) -> "Config":
    """A configuration whose every value has the right type and lies in its range."""
    words: dict[Any, str] = {
        int: "a whole number",
        float: "a finite number (in YAML 1.0e-4, not 1e-4)",
        str: "a text",
        bool: "true or false",
        list[str]: "a list of texts",
        dict[str, float]: "finite numbers by name",
    }
    automatic = {field.name for field in dataclasses.fields(Config) if "auto" in field.metadata}
    settings = {name: value for name, value in settings.items() if name not in automatic or value != "auto"}
    for field in dataclasses.fields(Config):
        if field.name not in settings:
            continue
        value, flag = settings[field.name], "--" + field.name.replace("_", "-")
        if not _is_a(value, field.type):
            raise ValueError(f"{flag} is {reprlib.repr(value)}; it must be {words[field.type]}")
        low, high = field.metadata.get("low"), field.metadata.get("high", 2**31 if field.type is int else None)
        if low is not None and value < low:
            raise ValueError(f"{flag} is {value}; it must be at least {low}")
        if high is not None and value > high:
            raise ValueError(f"{flag} is {reprlib.repr(value)}; it must be at most {high}")
        choices = field.metadata.get("choices")
        for one in value if isinstance(value, list) else [value]:
            if choices and one not in choices:
                raise ValueError(f"{flag} is {one!r}; it must be one of {', '.join(choices)}")
    config = Config(**settings)
    config.rollout_batch_size = config.rollout_batch_size or min(config.batch * config.groups, 64)
    config.train_token_budget = config.train_token_budget or (2048 if gwen.on_gpu() else 8192)
    if config.temp == 0:
        raise ValueError("--temp is 0; training needs completions that differ, so it must be more than 0")
    if config.lora_rank and not config.lora_targets:
        raise ValueError(f"--lora-targets is empty; name some of {', '.join(lora.TARGETS)}, or set --lora-rank 0")
    return config


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a setting has the type of its field. A bool is no number here, and numbers are finite."""
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e300  # so written, it refuses nan and huge integers
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if kind == dict[str, float]:
        return isinstance(value, dict) and all(isinstance(k, str) and _is_a(v, float) for k, v in value.items())
    return type(value) is kind


def choose_run_dir(config: "Config", asked: str | None) -> Path:
    """Where a new run will be recorded. ValueError when something is there already."""
    path = Path(asked or Path("runs") / f"{config.task}-{time.strftime('%Y%m%d-%H%M%S')}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"--run-dir {path} exists; give another, or --resume it")
    return path


def write_settings(config: "Config", run_dir: Path) -> None:
    """Makes the run directory, with `config.yaml` and `env.json`. ValueError when it cannot be written."""
    environment = json.dumps(telemetry.environment(cpu_blas.description), indent=2)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        telemetry.replace_text(run_dir / "config.yaml", yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
        telemetry.replace_text(run_dir / "env.json", environment + "\n")
    except OSError as error:
        raise ValueError(
            f"the run directory {run_dir} cannot be written ({error.strerror}); make room there or choose another"
        ) from error


def main(argv: list[str] | None = None) -> None:
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        flags = {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if getattr(args, f.name) is not None}
        if args.resume and args.run_dir:
            raise ValueError(f"--run-dir {args.run_dir}: a resumed run stays in its directory; leave one of them out")
        config, choice = resolve(flags, args.config, args.resume)
        if gwen.on_gpu():
            mx.set_cache_limit(10**9)  # else MLX keeps every freed buffer, which a 16 GB machine cannot spare
        print(choice, file=sys.stderr if args.print_config else sys.stdout, flush=True)
        if args.print_config:
            print(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False), end="")
            return
        state = checkpoint.load(args.resume) if args.resume else None
        if state and state.step >= config.steps:
            print(f"{args.resume} is finished: {state.step} of {config.steps} steps are done")
            return
        run_dir = Path(args.resume) if args.resume else choose_run_dir(config, args.run_dir)
        run = Run(config, run_dir)
        if state:
            run.restore(state)
            run.last_state = state
        write_settings(config, run_dir)  # only now that everything is loaded: a mistake leaves no directory behind
        run.open()
        print(f"run: {run_dir}, {sum(a.size for a in run.trainable.values()):,} trainable parameters", flush=True)
        with _stoppable(run):
            if config.eval_every and run.step == 0 and not run.evals.read():
                run.evaluate()
            train(config, run)
        run.summary()
        print(f"adapter: {run_dir / 'adapter'}")
    except (ValueError, OSError) as error:
        telemetry.fail(error)


@contextlib.contextmanager
def _stoppable(run: Run) -> Any:
    """Ctrl-C, or a reward that fails, saves the run as it was after its last whole step and says how to go on."""
    go_on = f"go on with: uv run train.py --resume {run.dir}"
    try:
        yield
    except (KeyboardInterrupt, ValueError) as error:
        run.restore(run.last_state)
        run.save()
        if isinstance(error, ValueError):
            raise ValueError(f"{error}; saved after step {run.step}, {go_on}") from error
        print(f"\nstopped after step {run.step}; {go_on}", file=sys.stderr)
        sys.exit(130)
    except OSError as error:  # the disk is full, or gone
        last = [path.name for path in checkpoint.saved(run.dir)][-1:]
        kept = f"{last[0]} is whole, make room and {go_on}" if last else f"nothing was saved in {run.dir}, make room"
        raise OSError(f"{error}; {kept}") from error


if __name__ == "__main__":
    main()
