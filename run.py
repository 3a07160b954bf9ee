"""
A run: everything that outlives a step, its state for a checkpoint, and what happens when it is stopped.

What is left out: the algorithm (train.py), logs and console lines (reporting/), the run directory (run_files.py).
"""

import contextlib
import dataclasses
import shlex
import signal
import sys
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

import adapters
import checkpoint
import dispatch
import evaluate
import gpu
import gwen
import lora
import preflight
import sampler
import tasks
import update
import world
from config import Config
from losses import distill
from problems import curriculum, rewards
from problems.examples import Example, spread
from reporting.console import CONSOLE_COLUMNS, warn
from reporting.journal import Journal, evaluation_is_due
from run_files import START


class Core:
    """What every run has: the model with its adapters, the learner, the journal, and the state between two steps."""

    columns = CONSOLE_COLUMNS
    learner: update.Learner
    journal: Journal
    memory: str  # what the run needs, for the console
    longest: int  # positions of the longest row that it may train

    def __init__(self, config: Config, run_dir: Path):
        """Raises ValueError if the model or the initial adapter cannot be loaded, or if they do not match."""
        self.config, self.dir, self.step = config, run_dir, 0
        self.stopping = False  # Ctrl-C was pressed inside a step
        self.model, self.tokenizer = gwen.load(config.model)
        self.compare()
        if not config.lora_rank:
            return
        begun = None
        if config.init_adapter:
            kept = run_dir / START  # on resume, our copy: the original may have been trained further
            path = str(kept) if kept.is_dir() else config.init_adapter
            begun = lora.Fused(*world.first(lambda: read_start(self.model, path)))
        lora.apply(self.model, config.lora_rank, config.lora_scale, config.lora_targets, config.seed)
        if begun is not None:
            lora.begin_with(self.model, begun)

    def compare(self) -> None:
        """Raises ValueError, on every machine, if one of several runs another program or has another model."""
        if world.size() > 1:
            weights = world.checksum([array for _, array in tree_flatten(self.model.parameters())])
            facts = {"MLX": version("mlx"), "GWEN_DTYPE": str(self.model.head_weight.dtype), "model": weights}
            world.compare({"Gwen": code_checksum()} | facts)

    def agree(self, prompt_ids: object) -> None:
        """
        Settles what each machine measured for itself by the least of all.

        prompt_ids: what the run trains on. Raises ValueError, on every machine, if one has other prompts.
        """
        config, layers = self.config, self.model.config.num_hidden_layers
        world.compare({"data": zlib.crc32(repr(prompt_ids).encode())} if world.size() > 1 else {})
        names = ("rollout_batch_size", "train_token_budget", "share_prefix", "checkpoint_layers")
        rows, budgets, sharing, counts = zip(*world.share([getattr(config, name) for name in names]), strict=True)
        config.rollout_batch_size, config.train_token_budget = min(rows), min(budgets)
        config.share_prefix = min(sharing)  # "auto", "off", "on"
        config.checkpoint_layers = max(
            counts, key=lambda count: dataclasses.replace(config, checkpoint_layers=count).num_checkpointed(layers)
        )

    def keep_start(self) -> None:
        """Keeps the adapter of --init-adapter in the run's directory, once that exists."""
        if world.is_first() and self.config.init_adapter and not (self.dir / START).is_dir():
            with lora.before_training(self.model):
                checkpoint.save_adapter(self.model, self.dir / START, self.config.model)

    def evaluate(self) -> None:
        """Evaluates what is held out and logs the result."""
        raise NotImplementedError

    def evaluate_if_due(self) -> bool:
        """
        Evaluates before the first step, every `eval_every` steps and after the last, unless the log already has it.

        True if this evaluation is the best so far: that step is saved regardless of `save_every`.
        """
        if not evaluation_is_due(self.config, self.step, self.journal.evaluations):
            return False
        self.journal.live.begin("evaluating")
        self.evaluate()
        return self.journal.best_step() == self.step

    # ---- the state between two steps

    @property
    def is_whole(self) -> bool:
        """Whether nothing has changed since the last logged step; only then may the run be saved."""
        return self._boundary == (self.step, self.learner.num_changes)

    def end_step(self) -> None:
        """Marks the step as logged: the run may be saved again, and a Ctrl-C that waited takes effect."""
        self._boundary = (self.step, self.learner.num_changes)
        self.learner.keep()
        if self.stopping:
            raise KeyboardInterrupt

    def go_back(self) -> None:
        """Undoes what another machine has left half done; see `update.Learner.keep`."""
        if not self.is_whole and self._boundary[0] == self.step:
            self.learner.go_back()

    def extra(self) -> dict[str, Any]:
        """The small values of a checkpoint."""
        return {
            "dtype": str(self.model.head_weight.dtype),
            "loss_scale": self.learner.loss_scale._asdict(),
            "failures": self.learner.failures,
            "rate": self.learner.rate,
            "num_skipped": self.learner.num_skipped,
            "best_step": self.journal.best_step(),
        }

    def state(self) -> checkpoint.State:
        assert self.is_whole, f"step {self.step + 1} is unfinished"
        learner = self.learner
        return checkpoint.State(self.step, learner.trainable, dict(tree_flatten(learner.optimizer.state)), self.extra())

    def restore(self, state: checkpoint.State) -> None:
        refuse_other_tensors(state, self.learner.trainable, str(self.model.head_weight.dtype), self.dir)
        learner, extra = self.learner, state.extra
        self.step, learner.trainable = state.step, state.trainable
        learner.optimizer.state = tree_unflatten(list(state.optimizer.items()))
        learner.loss_scale = update.LossScale(**extra["loss_scale"])
        learner.failures, learner.num_skipped = extra["failures"], extra["num_skipped"]
        learner.rate = extra["rate"]
        update.install(self.model, learner.trainable)
        self.end_step()

    def save(self) -> None:
        if not world.is_first():
            return
        state = self.state()
        checkpoint.save(self.dir, state, self.model, base=self.config.model, keep=self.config.keep)
        checkpoint.publish(self.dir, state)


class Run(Core):
    """A GRPO run: the task, its prompts, the judges and the teacher besides."""

    def __init__(self, config: Config, run_dir: Path):
        self.task = tasks.make(config)  # first: it takes no model to find what is wrong
        refuse_lone_rewards(config, self.task)
        super().__init__(config, run_dir)
        self.num_draws = 0  # batches of prompts drawn for the steps done
        eos_ids = self.model.config.eos_ids
        pad_id = next((i for i in (self.tokenizer.pad_token_id, *eos_ids) if i is not None), 0)
        self.sampling = sampler.params_of(config, eos_ids, pad_id)._replace(entropy=config.record_tokens > 0)
        self.base = gwen.load(config.model)[0] if needs_base(config, self.task) else None
        # problems are made as the run goes on; those held out stand in for their lengths
        self.prompt_ids = self._render(self.task.train or self.task.held_out)
        self.prompts = curriculum.make(config, self.task, self.prompt_ids, self._render)
        held_out = spread(self.task.held_out, config.eval_limit) if config.eval_every else []
        self._render(held_out, "held-out prompt")
        before_training = (self.base or self.model, self.tokenizer)
        self.judge = evaluate.make_judge(config, self.task, *before_training)
        self.witness = evaluate.make_witness(config, self.task, self.judge, *before_training) if held_out else None
        self.learner = update.Learner(self.model, config, self.base)
        lengths = [len(ids) for ids in self.prompt_ids]
        self.batch_size = gpu.BatchSize(dispatch.settle(self.model, config, lengths, len(held_out)))
        demand = (self.model.config, self.model.head_weight.dtype, config, lengths)
        preflight.settle(*demand)  # replaces each `auto` in `config`, as `dispatch.settle` does above
        self.agree(self.prompt_ids)
        self.batch_size.rows = config.rollout_batch_size
        preflight.limit_cache(*demand)
        self.memory = preflight.line(*demand)
        self.longest = max(lengths) + config.max_tokens
        need = preflight.estimate(*demand, config.num_checkpointed(self.model.config.num_hidden_layers))
        self.teacher = self._make_teacher(on_disk=need.reading > 0) if config.teacher else None
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

    def _make_teacher(self, on_disk: bool) -> distill.Teacher:
        """The teacher, checked against the prompts. ValueError where it cannot teach this student."""
        teacher = distill.Teacher(self.config, self.model, self.tokenizer, self.base, on_disk)
        teacher.check(self.task.train or self.task.held_out, self.prompt_ids)
        return teacher

    def open(self) -> None:
        """Opens the logs, once the directory exists, and gives the judge its recorded scores."""
        self.keep_start()
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

    def end_step(self) -> None:
        rewards.tell_step(self.task.rewards, self.step)
        super().end_step()

    def extra(self) -> dict[str, Any]:
        return super().extra() | {
            "num_draws": self.num_draws,
            "rollout_batch_size": self.batch_size.rows,
            "judge": self.judge and self.judge.state(),
            "prompts": self.prompts.state(),
        }

    def restore(self, state: checkpoint.State) -> None:
        extra = state.extra
        super().restore(state)
        self.num_draws = extra["num_draws"]
        self.batch_size.rows = min(self.batch_size.rows, extra["rollout_batch_size"])
        if self.judge:
            self.judge.restore(extra["judge"])
        self.prompts.restore(extra["prompts"])


def read_start(model: gwen.Model, path: str) -> lora.Fused:
    """The adapter of --init-adapter, for a model without adapters. Raises ValueError if it is none for this model."""
    try:
        if adapters.kind_of(adapters.find(path)) == "full":
            raise ValueError(
                f"--adapter {path} holds a whole model; write it with lora.py --fuse, and give it as --model"
            )
        return lora.read(model, path)
    except ValueError as error:
        raise ValueError(str(error).replace("--adapter", "--init-adapter", 1)) from error


def refuse_lone_rewards(config: Config, task: tasks.Task) -> None:
    """Raises ValueError where rewards count and no other completion of a prompt is there to compare them with."""
    counted = [name for name, weight in task.reward_weights.items() if weight]
    if config.groups == 1 and config.loss_type != "distill" and counted:
        weights = ",".join(f"{name}=0" for name in counted)
        raise ValueError(
            f"--groups 1 leaves the reward {counted[0]} nothing to be compared with; set --groups 2 or more, or "
            f"--reward-weights {weights}"
        )


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


def code_checksum() -> int:
    """A number that tells this program from another version of it: of the modules that it has imported."""
    root = Path(__file__).parent
    files = {Path(getattr(module, "__file__", None) or "/") for module in list(sys.modules.values())}
    ours = sorted(file for file in files if root in (file.parent, file.parent.parent))
    return zlib.crc32(b"".join(file.read_bytes() for file in ours))


# ---- a run that is stopped


@contextlib.contextmanager
def stoppable(run: Core) -> Iterator[None]:
    """
    On Ctrl-C, a failing reward or a lack of memory, saves the run after its last whole step and says how to continue.

    No copy of that state exists: it would double the memory. So Ctrl-C waits while a step changes the state; a second
    Ctrl-C does not wait, and only the newest checkpoint is left. Of several machines only the first does so; where
    another one spoils a step of adapters, it returns to the one before.
    """

    def on_ctrl_c(number: int, *_: object) -> None:
        if run.is_whole or run.stopping:
            world.interrupt(number)
        run.stopping = True
        if number == signal.SIGINT:
            warn("\nfinishing this step; press Ctrl-C again to abandon it")

    before = {number: signal.signal(number, on_ctrl_c) for number in world.endings()}
    try:
        yield
    except (KeyboardInterrupt, ValueError, RuntimeError, MemoryError) as error:
        if not world.is_first():
            if gpu.is_out_of_memory(error) or gpu.is_watchdog(error):
                raise ValueError(str(error)) from error
            raise
        run.go_back()
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
        for number, handler in before.items():
            signal.signal(number, handler)


def _go_on(run: Core, error: BaseException) -> str:
    """
    The command that continues the run, or starts over if nothing was saved.

    If the update ran out of memory, the command asks for less; rollouts and judges back off by themselves.
    """
    less = ""
    too_much = gpu.is_out_of_memory(error) or gpu.is_watchdog(error)
    if too_much and not isinstance(error, ValueError):  # a ValueError is the user's reward's
        budget = run.config.train_token_budget // 2
        less = f" --train-token-budget {budget}" if budget >= run.longest else " --checkpoint-layers on"
    if checkpoint.saved(run.dir):
        return f"continue with: uv run train.py --resume {shlex.quote(str(run.dir))}{less}"
    return f"start over with: uv run train.py --config {shlex.quote(str(run.dir / 'config.yaml'))}{less}"


def _newest(run: Core, error: BaseException, first: str = "") -> str:
    """Names the newest checkpoint of a run that stopped inside a step, and how to continue or start over."""
    if saved := checkpoint.saved(run.dir):
        return f"{saved[-1].name} is intact, {first}{_go_on(run, error)}"
    return f"nothing was saved in {run.dir}, {first}{_go_on(run, error)}"
