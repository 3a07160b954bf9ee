"""
A run: everything that lasts from step to step, and what it writes.

What is left out: the algorithm, which is in train.py; what the figures are, in metrics.py; the directory's settings,
in run_files.py.
"""

import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

import checkpoint
import dispatch
import evaluate
import gpu
import gwen
import health
import judge
import lora
import preflight
import sampler
import tasks
import telemetry
import update
from config import Config
from examples import Example, spread
from groups import Draw
from metrics import Step, completion_records, step_metrics

MOST_ANSWERS = 512  # held-out problems whose answers are recorded at an evaluation, evenly spread over all


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
        self.sampling = sampler.params_of(config, eos_ids, pad_id)
        if config.lora_rank:
            lora.apply(self.model, config.lora_rank, config.lora_scale, config.lora_targets, config.seed)
        # a model whose own weights are trained needs a second one to stay what it was
        judges = {config.judge_model} if self.task.rubric else set()
        judges |= {config.eval_judge_model or config.judge_model} if self.task.witness and config.eval_every else set()
        judges_itself = judges & {"", config.model} and not config.judge_url
        needs_base = not config.lora_rank and (config.beta or judges_itself)
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
        if not gpu.on_gpu():
            usual = min(config.batch * config.groups, dispatch.USUAL_ROWS)
            config.rollout_batch_size = config.rollout_batch_size or usual
        elif not config.rollout_batch_size or config.share_prefix == "auto":
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
        self.recent.append(seconds["step"])
        learner = self.learner
        step = Step(
            self.step,
            seconds,
            draws,
            rollout,
            chosen,
            advantages,
            result,
            recent=self.recent,
            num_forwards=learner.num_forwards,
            num_skipped=learner.num_skipped,
            loss_scale=learner.loss_scale.value,
            peak_bytes=mx.get_peak_memory(),
        )
        figures = step_metrics(self.config, step)
        self.metrics.write(figures)
        self.past_steps.append(figures)
        for record in completion_records(self.config, step):
            self.rollouts.write(record)
        self.remember_scores()
        print(telemetry.console_line(figures, self.config.steps), flush=True)
        if result.skipped:
            print(f"step {self.step}: the gradient was not finite; the step changed nothing", file=sys.stderr)
        self.warn()

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
