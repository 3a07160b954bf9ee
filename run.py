"""
A run: everything that outlives a step, and its state for a checkpoint.

What is left out: the algorithm (train.py), logs and console lines (reporting/), the run directory (run_files.py).
"""

from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

import checkpoint
import curriculum
import dispatch
import distill
import evaluate
import gwen
import lora
import preflight
import sampler
import tasks
import update
from config import Config
from problems import rewards
from problems.examples import Example, spread
from reporting.journal import Journal


class Run:
    """The model and its learner, the task and its judges, and the run directory that records them."""

    def __init__(self, config: Config, run_dir: Path):
        self.config, self.dir = config, run_dir
        self.step = self.num_draws = 0  # steps done, and batches of prompts drawn for them
        self.task = tasks.make(config)
        self.model, self.tokenizer = gwen.load(config.model)
        eos_ids = self.model.config.eos_ids
        pad_id = next((i for i in (self.tokenizer.pad_token_id, *eos_ids) if i is not None), 0)
        self.sampling = sampler.params_of(config, eos_ids, pad_id)._replace(entropy=config.record_tokens > 0)
        if config.lora_rank:
            lora.apply(self.model, config.lora_rank, config.lora_scale, config.lora_targets, config.seed)
        self.base = gwen.load(config.model)[0] if needs_base(config, self.task) else None
        # problems that are still to be made are as long as those held out
        self.prompt_ids = self._render(self.task.train or self.task.held_out)
        self.prompts = curriculum.make(config, self.task, self.prompt_ids, self._render)
        held_out = spread(self.task.held_out, config.eval_limit) if config.eval_every else []
        self._render(held_out, "held-out prompt")
        before_training = (self.base or self.model, self.tokenizer)
        self.judge = evaluate.make_judge(config, self.task, *before_training)
        self.witness = evaluate.make_witness(config, self.task, self.judge, *before_training) if held_out else None
        self.learner = update.Learner(self.model, config, self.base)
        lengths = [len(ids) for ids in self.prompt_ids]
        self.batch_size = sampler.BatchSize(dispatch.settle(self.model, config, lengths, len(held_out)))
        demand = (self.model.config, self.model.head_weight.dtype, config, lengths)
        preflight.settle(*demand)  # replaces each `auto` in `config`, as `dispatch.settle` does above
        preflight.limit_cache(*demand)
        self.memory = preflight.line(*demand)
        preflight.refuse_teacher(*demand)
        self.teacher = self._make_teacher() if config.teacher else None
        self.stopping = False  # Ctrl-C was pressed inside a step
        self.end_step()

    def _render(self, examples: list[Example], kind: str = "training prompt") -> list[list[int]]:
        """The ids of every prompt. ValueError names a prompt that leaves no room for its completion."""
        return tasks.render(
            self.tokenizer,
            tqdm(examples, desc=f"{kind}s", leave=False, disable=None),
            max_tokens=self.config.max_tokens,
            context=self.model.config.max_position_embeddings,
            thinking=self.config.thinking,
            kind=kind,
        )

    def _make_teacher(self) -> distill.Teacher:
        """The teacher, checked against the prompts. ValueError where it cannot teach this student."""
        teacher = distill.Teacher(self.config, self.model, self.tokenizer, self.base)
        teacher.check(self.task.train or self.task.held_out, self.prompt_ids)
        return teacher

    def open(self) -> None:
        """Opens the logs, once the directory exists, and gives the judge its recorded scores."""
        is_paid = self.judge is not None and self.judge.is_paid
        self.journal = Journal(self.config, self.dir, self.task.metric, self.step, keep_scores=is_paid)
        if self.judge is not None:
            self.judge.cache.fill(self.journal.judge_scores.read())
            if is_paid:  # write at once: the step may never finish
                self.judge.on_score = lambda: self.journal.write_scores(self.step, self.judge)

    def evaluate(self) -> None:
        """Evaluates the held-out problems and logs the result."""
        config = self.config
        params = evaluate.EvalParams(
            config.max_tokens, self.batch_size, limit=config.eval_limit or None, thinking=config.thinking
        )
        record, answers = evaluate.evaluate(
            self.model,
            self.tokenizer,
            self.task,
            params,
            grader=self.judge if self.task.verifier is None else None,
            witness=self.witness,
            reference=self.base or (self.model if config.lora_rank else None),
        )
        self.journal.write_evaluation(self.step, record, answers)
        self.journal.write_scores(self.step, self.judge)

    # ---- the state between two steps

    @property
    def is_whole(self) -> bool:
        """Whether nothing has changed since the last logged step; only then may the run be saved."""
        return self._boundary == (self.step, self.learner.num_changes)

    def end_step(self) -> None:
        """Marks the step as logged: the run may be saved again, and a Ctrl-C that waited takes effect."""
        self._boundary = (self.step, self.learner.num_changes)
        rewards.tell_step(self.task.rewards, self.step)
        if self.stopping:
            raise KeyboardInterrupt

    def state(self) -> checkpoint.State:
        learner = self.learner
        assert self.is_whole, f"step {self.step + 1} is unfinished"
        extra = {
            "dtype": str(self.model.head_weight.dtype),
            "num_draws": self.num_draws,
            "loss_scale": learner.loss_scale._asdict(),
            "failures": learner.failures,
            "rate": learner.rate,
            "num_skipped": learner.num_skipped,
            "rollout_batch_size": self.batch_size.rows,
            "judge": self.judge and self.judge.state(),
            "prompts": self.prompts.state(),
            "best_step": self.journal.best_step(),
        }
        return checkpoint.State(self.step, learner.trainable, dict(tree_flatten(learner.optimizer.state)), extra)

    def restore(self, state: checkpoint.State) -> None:
        refuse_other_tensors(state, self.learner.trainable, str(self.model.head_weight.dtype), self.dir)
        learner, extra = self.learner, state.extra
        self.step, self.num_draws, learner.trainable = state.step, extra["num_draws"], state.trainable
        learner.optimizer.state = tree_unflatten(list(state.optimizer.items()))
        learner.loss_scale = update.LossScale(**extra["loss_scale"])
        learner.failures, learner.num_skipped = extra["failures"], extra["num_skipped"]
        learner.rate = extra["rate"]
        self.batch_size.rows = min(self.batch_size.rows, extra["rollout_batch_size"])
        if self.judge:
            self.judge.restore(extra["judge"])
        self.prompts.restore(extra["prompts"])
        update.install(self.model, learner.trainable)
        self.end_step()

    def save(self) -> None:
        state = self.state()
        checkpoint.save(self.dir, state, self.model, base=self.config.model, keep=self.config.keep)
        checkpoint.publish(self.dir, state)


def needs_base(config: Config, task: tasks.Task) -> bool:
    """Whether a run that trains all weights needs a frozen copy: for the KL term, the judge or as its own teacher."""
    judges = {config.judge_model} if task.rubric else set()
    judges |= {config.eval_judge_model or config.judge_model} if task.witness and config.eval_every else set()
    judges_itself = judges & {"", config.model} and not config.judge_url
    return not config.lora_rank and bool(config.beta or judges_itself or config.teacher == "self")


def refuse_other_tensors(state: checkpoint.State, trainable: dict[str, mx.array], dtype: str, run_dir: Path) -> None:
    """ValueError when a checkpoint is of other tensors, or of a model in another type, than the run that resumes it."""
    shapes, ours = ({name: array.shape for name, array in arrays.items()} for arrays in (state.trainable, trainable))
    if shapes != ours:
        raise ValueError(f"--resume {run_dir}: the checkpoint's tensors do not match this configuration")
    if dtype != state.extra["dtype"]:
        raise ValueError(f"--resume {run_dir}: it ran in {state.extra['dtype']}, not {dtype}; set GWEN_DTYPE to that")
