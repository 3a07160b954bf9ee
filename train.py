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

import contextlib
import dataclasses
import math
import sys
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tqdm import tqdm

import checkpoint
import dispatch
import evaluate
import grpo
import gwen
import hub
import judge
import lora
import sampler
import settings
import tasks
import telemetry
from settings import Config


def train(config: Config, run: "Run") -> None:
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
                rollout_batch_size=run.batch_size,
                share_prefix=config.sharing,
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


def completion_logprobs(model: gwen.Model, batch: MicroBatch, config: Config) -> tuple[mx.array, mx.array]:
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


def learning_rate(config: Config, step: int) -> float:
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

    def __init__(self, config: Config, run_dir: Path):
        self.config, self.dir = config, run_dir
        self.step = 0
        self.task = settings.make_task(config)
        self.model, self.tokenizer = gwen.load(config.model)
        self.pad_id = next((i for i in (self.tokenizer.pad_token_id, *self.model.config.eos_ids) if i is not None), 0)
        if config.lora_rank:
            lora.apply(self.model, config.lora_rank, config.lora_scale, config.lora_targets, config.seed)
        # a model whose own weights are trained needs a second one to stay what it was
        needs_base = not config.lora_rank and (config.kl_coef or (self.task.rubric and not config.judge_model))
        self.base = gwen.load_model(hub.find(config.model)) if needs_base else None
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
        self.batch_size = self._settle_rollouts()
        self.recent: deque[float] = deque(maxlen=10)
        self.last_state = self.state()

    def _make_judge(self) -> judge.Judge:
        config = self.config
        assert self.task.rubric is not None
        model, tokenizer = (self.base or self.model), self.tokenizer
        if config.judge_model not in ("", config.model):
            model, tokenizer = gwen.load(config.judge_model)
        return judge.Judge(model, tokenizer, self.task.rubric, config.judge_chunk_size)

    def _settle_rollouts(self) -> sampler.BatchSize:
        """How rollouts are cut. What is `auto` on a GPU is measured here, and fixed in the configuration."""
        config = self.config
        if not config.rollout_batch_size or (config.share_prefix == "auto" and gwen.on_gpu()):
            num_held_out = len(self.task.held_out[: config.eval_limit or None]) if config.eval_every else 0
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
            "rollout_batch_size": self.batch_size.rows,
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
        self.batch_size.rows = min(self.batch_size.rows, state.extra["rollout_batch_size"])
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
            rollout_batch_size=self.batch_size,
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


# ---- the command


def main(argv: list[str] | None = None) -> None:
    try:
        args = settings.parse(sys.argv[1:] if argv is None else argv)
        flags = {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if getattr(args, f.name) is not None}
        if args.resume and args.run_dir:
            raise ValueError(f"--run-dir {args.run_dir}: a resumed run stays in its directory; leave one of them out")
        config, choice = settings.resolve(flags, args.config, args.resume)
        if gwen.on_gpu():
            mx.set_cache_limit(10**9)  # else MLX keeps every freed buffer, which a 16 GB machine cannot spare
        print(choice, file=sys.stderr if args.print_config else sys.stdout, flush=True)
        if args.print_config:
            print(settings.as_yaml(config), end="")
            return
        state = checkpoint.load(args.resume) if args.resume else None
        if state and state.step >= config.steps:
            print(f"{args.resume} is finished: {state.step} of {config.steps} steps are done")
            return
        run_dir = Path(args.resume) if args.resume else settings.choose_run_dir(config, args.run_dir)
        run = Run(config, run_dir)
        if state:
            run.restore(state)
            run.last_state = state
        settings.write(config, run_dir)  # only now that everything is loaded: a mistake leaves no directory behind
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
