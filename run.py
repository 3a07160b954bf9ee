"""
A run: everything that outlives a step, its state for a checkpoint, and what happens when it is stopped.

What is left out: the algorithm (train.py), logs and console lines (reporting/), the run directory (run_files.py).
"""

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

import checkpoint
import curriculum
import dispatch
import evaluate
import gpu
import gwen
import lora
import preflight
import sampler
import tasks
import update
from config import Config
from problems import rewards
from problems.examples import Example, spread
from reporting.console import warn
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
    """Whether a frozen copy of the model is needed: for the KL term or the judge of a run that trains all weights."""
    judges = {config.judge_model} if task.rubric else set()
    judges |= {config.eval_judge_model or config.judge_model} if task.witness and config.eval_every else set()
    judges_itself = judges & {"", config.model} and not config.judge_url
    return not config.lora_rank and bool(config.beta or judges_itself)


def refuse_other_tensors(state: checkpoint.State, trainable: dict[str, mx.array], dtype: str, run_dir: Path) -> None:
    """ValueError when a checkpoint is of other tensors, or of a model in another type, than the run that resumes it."""
    shapes, ours = ({name: array.shape for name, array in arrays.items()} for arrays in (state.trainable, trainable))
    if shapes != ours:
        raise ValueError(f"--resume {run_dir}: the checkpoint's tensors do not match this configuration")
    if dtype != state.extra["dtype"]:
        raise ValueError(f"--resume {run_dir}: it ran in {state.extra['dtype']}, not {dtype}; set GWEN_DTYPE to that")


# ---- a run that is stopped


@contextlib.contextmanager
def stoppable(run: Run) -> Iterator[None]:
    """
    On Ctrl-C, a failing reward or a lack of memory, saves the run after its last whole step and says how to continue.

    No copy of that state exists: it would double the memory. So Ctrl-C waits while a step changes the state; a second
    Ctrl-C does not wait, and only the newest checkpoint is left.
    """

    def on_ctrl_c(*_: object) -> None:
        if run.is_whole or run.stopping:
            raise KeyboardInterrupt
        run.stopping = True
        warn("\nfinishing this step; press Ctrl-C again to abandon it")

    before = signal.signal(signal.SIGINT, on_ctrl_c)
    try:
        yield
    except (KeyboardInterrupt, ValueError, RuntimeError, MemoryError) as error:
        what = "" if isinstance(error, KeyboardInterrupt) else f"{str(error) or type(error).__name__}; "
        if gpu.is_watchdog(error):
            what = (
                "macOS stopped the GPU because its work held up the display; let the display sleep while it trains "
                "(pmset displaysleepnow), or let less be done at once; "
            )
        if run.is_whole:
            run.save()
            said = f"{what}saved after step {run.step}, " if what else f"stopped after step {run.step}; "
            said += _go_on(run, error)
        else:
            said = f"{what}step {run.step + 1} is lost; {_newest(run, error)}"
        if isinstance(error, ValueError) or gpu.is_out_of_memory(error) or gpu.is_watchdog(error):
            raise ValueError(said) from error
        warn(f"\n{said}")
        if what:  # a bug of ours or of MLX's: show the traceback
            raise
        sys.exit(130)
    except OSError as error:  # the disk is full or gone
        raise OSError(f"{error}; {_newest(run, error, 'free some space and ')}") from error
    finally:
        signal.signal(signal.SIGINT, before)


def _go_on(run: Run, error: BaseException) -> str:
    """
    The command that continues the run, or starts over if nothing was saved.

    If the update ran out of memory, the command asks for less; rollouts and judges back off by themselves.
    """
    less = ""
    too_much = gpu.is_out_of_memory(error) or gpu.is_watchdog(error)
    if too_much and not isinstance(error, ValueError):  # a ValueError is the user's reward's
        budget, longest = run.config.train_token_budget // 2, max(map(len, run.prompt_ids)) + run.config.max_tokens
        less = f" --train-token-budget {budget}" if budget >= longest else " --checkpoint-layers on"
    if checkpoint.saved(run.dir):
        return f"continue with: uv run train.py --resume {shlex.quote(str(run.dir))}{less}"
    return f"start over with: uv run train.py --config {shlex.quote(str(run.dir / 'config.yaml'))}{less}"


def _newest(run: Run, error: BaseException, first: str = "") -> str:
    """Names the newest checkpoint of a run that stopped inside a step, and how to continue or start over."""
    if saved := checkpoint.saved(run.dir):
        return f"{saved[-1].name} is intact, {first}{_go_on(run, error)}"
    return f"nothing was saved in {run.dir}, {first}{_go_on(run, error)}"
