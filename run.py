"""
A run: everything that outlives a step, and its state for a checkpoint.

What is left out: the algorithm (train.py), how a run begins and is stopped (trainer.py), logs and
console lines (reporting/), the run directory (disk/run_files.py).
"""

import functools
import math
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlx.utils import tree_flatten

import evaluate
import gwen
import judge
import lora
import preflight
import sampler
import tasks
import update
from config import Config, Sizes
from disk import checkpoint, run_files
from disk.run_files import START, evaluation_line
from judging import rubrics
from machine import alive, link, memory, world
from machine.memory import BatchSize
from problems import chat_template, episodes, functions, rewards
from problems.data import warn_of_few_held_out
from problems.examples import Example, spread_evenly
from reporting import health
from reporting.console import print_line, print_warning
from reporting.journal import Journal, evaluation_is_due
from step import objectives
from step.loss import StepLoss
from step.rows import USUAL_ROWS
from step.sample import Sample, sample_of_reply
from tasks import draws

if TYPE_CHECKING:
    from reporting import page
    from step.teacher import Teacher

T = TypeVar("T")
FIRST_SAVE = (
    300.0  # seconds after which a run is saved for the first time, whatever --save-every says
)


class Run:
    """What every run has: the model with its adapters, the learner, the journal, and the state between two steps."""

    learner: update.Learner
    journal: Journal
    report: "page.LivePage | None" = None  # the page, while the run goes
    _last_state: dict[str, Any] | None = None  # see `end_step`
    demand: preflight.RunDemand  # of memory
    longest: int  # positions of the longest row that it may train
    sizes: Sizes
    batch_size: BatchSize  # where it samples: rows at once
    shared_messages: list[dict[str, Any]]  # messages that all prompts begin with
    base: gwen.Model | None = (
        None  # the model before training, if disabling adapters does not restore it
    )
    custom = objectives.CustomObjective()  # a user's own loss and advantage
    judge: rubrics.Grader | None = None
    teacher: "Teacher | None" = None
    boundary: tuple[int, int]  # the last logged step, and the learner's changes by then
    saved_step: int = 0  # of the newest checkpoint
    saved_best: int | None = None  # the best step that it knew
    least_budget: int | None = None  # of tokens, after memory ran out in an update
    clock_now = staticmethod(time.monotonic)

    def __init__(self, config: Config, run_dir: Path):
        """Raises ValueError if the model or the initial adapter cannot be loaded, or if they do not match."""
        self.config, self.dir, self.step, self.begun = config, run_dir, 0, self.clock_now()
        chat_template.set_template_date(world.on_rank0(lambda: run_files.start_date(run_dir)))
        self.stopping = False  # Ctrl-C was pressed inside a step
        gwen.refuse_packed(config.model.name)
        end_tokens = config.sampling.end_tokens
        self.model, self.tokenizer = gwen.load(config.model.name, end_tokens=end_tokens)
        eos_ids, s = self.model.config.end_ids, config.sampling
        pad_id = next((i for i in (self.tokenizer.pad_token_id, *eos_ids) if i is not None), 0)
        stop = sampler.Stop(s.stop, self.tokenizer) if s.stop else None
        drawn = s.max_tokens, s.temp, s.top_p, s.top_k, s.min_p
        self.sampling = sampler.SamplingParams(*drawn, eos_ids, pad_id, stop=stop)
        with alive.show_activity("reading the weights for their digest"):
            digest = checkpoint.digest_of_model(self.model)
        self.sources = {  # what the run is made of: digests that a resume compares
            "base model": digest,
            "tokenizer": checkpoint.digest_of(sorted(self.tokenizer.get_vocab().items())),
            "chat template": checkpoint.digest_of(self.tokenizer.chat_template),
        }
        if other_ends := self.model.config.other_end_ids:
            self.sources["other end tokens"] = checkpoint.digest_of(sorted(other_ends))
        if config.model.lora_rank:
            self._add_adapters()

    def _add_adapters(self) -> None:
        """New ones; with --init-adapter they begin as that one."""
        settings, begun = self.config.model, None
        if settings.init_adapter:
            kept = (
                self.dir / START
            )  # on resume, our copy: the original may have been trained further
            path = str(kept) if kept.is_dir() else settings.init_adapter
            with gwen.blame_flag("--init-adapter", "--adapter"):
                begun = world.on_rank0(lambda: lora.read_for_model(self.model, path))
                if not kept.is_dir():
                    gwen.warn_of_other_base(path, settings.name, "--init-adapter")
        shape = settings.lora_rank, settings.lora_scale, settings.lora_targets
        lora.apply(self.model, *shape, self.config.sampling.seed)
        if begun is not None:
            lora.start_from(self.model, *begun)

    def choose_sizes(
        self,
        config: Config,
        lengths: list[int],
        rubric: Path | None = None,
        most_rows: int = USUAL_ROWS,
    ) -> None:
        """
        Decides the sizes of the run, on several machines the least of all, and its loss.

        lengths: of the rows that it trains, without completions. most_rows: of a rollout. Raises ValueError, on every
        machine, if one is made of something else.
        """
        if world.size() > 1:
            facts = {"MLX": version("mlx"), "GWEN_DTYPE": str(self.model.head_weight.dtype)}
            link.refuse_differences({"Gwen": link.code_checksum()} | facts | self.sources)
        demand = preflight.RunDemand(
            self.model.config, self.model.head_weight.dtype, config, lengths, rubric
        )
        self.sizes = preflight.agree_on_sizes(preflight.choose_sizes(demand, most_rows))
        self.demand = demand
        loss = StepLoss(self.config, self.sizes, self.custom.loss)
        self.learner = update.Learner(self.model, self.config, loss, self.base)

    @property
    def memory(self) -> str:
        """What the run needs, for the console."""
        return preflight.memory_line(self.demand, self.sizes)

    def refuse_too_large(self) -> None:
        """Raises ValueError, on every machine, if one has too little memory and --over-memory is not set."""
        reasons = world.all_gather(preflight.explain_misfit(self.demand, self.sizes))
        reason = next(filter(None, reasons), "")
        if reason and not self.config.optimizer.over_memory:
            raise ValueError(f"{reason}; --over-memory trains all the same")

    def open(self) -> None:
        """Opens the logs, and keeps the adapter of --init-adapter, once the directory exists."""
        if world.is_first() and self.config.model.init_adapter and not (self.dir / START).is_dir():
            with lora.with_initial_weights(self.model):
                lora.save_adapter(self.model, self.dir / START, self.config.model.name)
        is_paid = self.judge is not None and self.judge.is_paid
        self.journal = Journal(self.config, self.dir, self.step, keep_scores=is_paid)

    # ---- between two steps

    def evaluate(self) -> None:
        """Evaluates what is held out and logs the result."""
        raise NotImplementedError

    def evaluate_if_due(self) -> bool:
        """
        Evaluates before the first step, every `eval_every` steps and after the last, unless the log already has it.

        True if this step is the best so far and not saved as such: it is saved regardless of `save_every`.
        """
        if evaluation_is_due(self.config, self.step, self.journal.evaluations):
            self.journal.begin("evaluating")
            self.evaluate()
            print_line(evaluation_line(self.journal.evaluations[-1]))
        return self.journal.best_step == self.step != self.saved_best

    def save_is_due(self) -> bool:
        """Whether this step is saved: every `save_every`, the last one, and a first one after `FIRST_SAVE` seconds."""
        is_first = (
            self.saved_step == self.journal.begun_at and self.clock_now() - self.begun >= FIRST_SAVE
        )
        return (
            is_first
            or self.step >= self.config.optimizer.steps
            or self.step % self.config.records.save_every == 0
        )

    def update_page(self) -> None:
        """Writes the page, as often as that is cheap."""
        if self.report is not None:
            self.report.update()

    # ---- the state between two steps

    @property
    def is_whole(self) -> bool:
        """Whether nothing has changed since the last logged step; only then may the run be saved."""
        return self.boundary == (self.step, self.learner.num_changes)

    def end_step(self) -> None:
        """
        Marks the step as logged: the run may be saved again, and a Ctrl-C that waited takes effect.

        For what goes wrong in the next step this state is kept; only with adapters, which are small. A run that trains
        all weights goes back to its newest checkpoint.
        """
        self._last_state = self.learner.state() if self.config.model.lora_rank else None
        self.boundary = (
            self.step,
            self.learner.num_changes,
        )  # last: from here on a Ctrl-C goes back to what is kept
        if self.stopping:
            raise KeyboardInterrupt

    def retry_within_memory(self, learn: Callable[[], T]) -> T:
        """
        What `learn` returns. Where memory runs out, it learns again from the same state, with half of the token budget.

        So it does once where macOS stopped the GPU's work. After a change only with adapters; and not on several
        machines, whose batches are cut alike.
        """
        was_stopped = False
        while world.size() == 1 and self.sizes.train_token_budget // 2 >= self.longest:
            reason = "out of memory"
            try:
                if results := memory.try_within_memory(learn):
                    return results[0]
            except RuntimeError as error:
                self.restore_last_step()
                if was_stopped or not memory.is_watchdog_error(error) or not self.is_whole:
                    raise
                was_stopped = True
                reason = "macOS stopped the GPU's work"
            self.restore_last_step()
            if not self.is_whole:
                raise MemoryError("memory ran out while the weights changed")
            self.learner.num_forwards = 0
            self.least_budget = self.sizes.train_token_budget // 2
            self.sizes = self.sizes._replace(train_token_budget=self.least_budget)
            print_warning(
                f"update: {reason}, going on with --train-token-budget {self.least_budget}"
            )
        return learn()

    def restore_last_step(self) -> None:
        """Undoes what a step has left half done, with adapters."""
        if self._last_state and self.boundary[0] == self.step:
            self.learner.load_state(self._last_state)

    def checkpoint_extra(self) -> dict[str, Any]:
        """The small values of a checkpoint."""
        counts = {name: getattr(self.learner, name) for name in update.COUNTS}
        kept = {
            "dtype": str(self.model.head_weight.dtype),
            "loss_scale": self.learner.loss_scale._asdict(),
        }
        decided = {"best_step": self.journal.best_step, "least_budget": self.least_budget}
        return (
            kept
            | counts
            | decided
            | {"settings": self.config.to_flags(self.sizes), "sources": self.sources}
        )

    def state(self) -> checkpoint.State:
        assert self.is_whole, f"step {self.step + 1} is unfinished"
        learner = self.learner
        return checkpoint.State(
            self.step,
            learner.trainable,
            dict(tree_flatten(learner.optimizer.state)),
            self.checkpoint_extra(),
        )

    def restore(self, state: checkpoint.State) -> None:
        checkpoint.check_tensors(
            state, self.learner.trainable, str(self.model.head_weight.dtype), self.dir
        )
        kept = {name: state.extra[name] for name in update.COUNTS}
        kept |= {"trainable": dict(state.trainable), "moments": state.optimizer}
        self.learner.load_state(
            kept | {"loss_scale": update.LossScale(**state.extra["loss_scale"])}
        )
        self.least_budget = state.extra.get("least_budget")
        least = min(self.sizes.train_token_budget, self.least_budget or math.inf)
        self.sizes = self.sizes._replace(train_token_budget=int(least))
        self.step = self.saved_step = state.step
        self.saved_best = state.extra["best_step"]
        self.end_step()

    def save(self) -> None:
        self.saved_step, self.saved_best = self.step, self.journal.best_step
        if not world.is_first():
            return
        state = self.state()
        write_adapter = functools.partial(
            lora.save_adapter, self.model, base=self.config.model.name
        )
        with alive.show_activity("saving"):
            checkpoint.save(self.dir, state, write_adapter)
            checkpoint.publish(self.dir, state)


class GrpoRun(Run):
    """A GRPO run: the task, its prompts, the judges and the teacher besides."""

    def __init__(self, config: Config, run_dir: Path):
        with alive.show_activity("reading the data"):
            begun = world.on_rank0(lambda: tasks.read_held_out(run_dir))
            self.task = tasks.make_task(
                config, begun=begun
            )  # first: it takes no model to find what is wrong
        from problems import audit

        if not self.task.train and self.task.problems is None:
            raise ValueError(
                f"--task {self.task.name} has nothing to train on; it is for evaluate.py"
            )
        with alive.show_activity("trying the rewards"):
            surprises = world.on_rank0(
                lambda: list(audit.first_surprises(self.task, config.data.reward_gate))
            )
        self.custom = objectives.load_custom_objective(config)
        self.shared_messages, _ = chat_template.shared_opening(
            self.task.train or self.task.held_out
        )
        for line in (*self.task.notes, *surprises):
            print_line(line)
        super().__init__(config, run_dir)
        self.toolbox = episodes.make_toolbox(
            config, self.task.tools, self.task.environments, self.tokenizer, self.model.config
        )
        self.sources |= digest_sources(config, self.task)
        if (
            self.toolbox and self.task.environments
        ):  # one of each is made and reset, before a directory is
            examples = self.task.train or self.task.held_out
            some = {self.toolbox.environment_of(example): example for example in reversed(examples)}
            rows = [example for example in some.values() for _ in range(2)]
            episodes.Episodes(self.toolbox, rows, [row // 2 for row in range(len(rows))], "trial")
        graded = self.task.rubric is not None or (
            self.task.witness is not None and config.evaluation.every > 0
        )
        is_asked = (
            config.objective.beta
            or (graded and config.judges_itself)
            or config.objective.teacher == "self"
        )
        if is_asked and not config.model.lora_rank:  # else disabling adapters restores it
            self.base = gwen.load(config.model.name, end_tokens=config.sampling.end_tokens)[0]
        # problems are made as the run goes on; those held out stand in for their lengths
        self.prompt_ids = self._render(self.task.train or self.task.held_out)
        self.prompts = draws.EpochPrompts(config, self.task.train, self.prompt_ids)
        if self.task.problems is not None:
            self.prompts = draws.EndlessPrompts(config, self.task.problems, self._render)
        held_out = (
            spread_evenly(self.task.held_out, config.evaluation.limit)
            if config.evaluation.every
            else []
        )
        self._render(held_out, "held-out prompt")  # only to refuse what is too long
        for line in (
            *warn_of_few_held_out(len(held_out), config.to_flags()),
            *tasks.warn_of_contamination(config, self.task.train, held_out),
        ):
            print_line(line)
        criteria = self.task.rubric, self.task.witness if held_out else None
        self.judge, self.witness = judge.make_graders(
            config, *criteria, self.base or self.model, self.tokenizer
        )
        lengths = [len(ids) for ids in self.prompt_ids]
        if self.toolbox:  # what follows a prompt is more than what the model writes
            config = config.with_settings(max_tokens=self.toolbox.context - max(lengths))
        self.longest = max(lengths) + config.sampling.max_tokens
        most_rows = max(config.sampling.batch * config.sampling.groups, len(held_out))
        self.choose_sizes(config, lengths, next(filter(None, criteria), None), most_rows)
        self.batch_size = BatchSize(self.sizes.rollout_batch_size)
        if config.objective.teacher:
            from step.teacher import Teacher

            self.teacher = Teacher(
                self.config, self.model, self.tokenizer, self.base, self.sizes.train_token_budget
            )
            self.teacher.check_prompts(self.task.train or self.task.held_out, self.prompt_ids)
            if config.objective.teacher != "self":
                self.sources["teacher model"] = checkpoint.digest_of_model(self.teacher.model)
        self.end_step()

    def _render(self, examples: list[Example], kind: str = "training prompt") -> list[list[int]]:
        """The ids of prompts, as evaluations render them; of conversations with tools, of what these begin with."""
        params = evaluate.EvalParams.from_config(self.config, toolbox=self.toolbox)
        bar = alive.Bar(examples, desc=f"{kind}s")
        return params.render_prompts(
            self.tokenizer, self.model.config.max_position_embeddings, bar, kind
        )

    def open(self) -> None:
        super().open()
        if world.is_first() and self.config.data.path:
            tasks.write_held_out(self.dir, self.task.held_out)
        if keeper := self.judge or self.witness:  # they share what they know
            keeper.load_scores(
                world.on_rank0(self.journal.judge_scores.read)
            )  # their recorded scores
        for name, grader in {"unreadable": self.judge, "unreadable witness": self.witness}.items():
            if grader is not None:
                grader.warn = functools.partial(self._warn_of, name)
                if grader.is_paid:  # write at once: the step may never finish
                    grader.on_score = lambda: self.journal.write_scores(self.step, keeper)

    def _warn_of(self, name: str, text: str) -> None:
        self.journal.warn_once(self.step, health.Finding(name, text))

    def evaluate(self) -> None:
        """Evaluates the held-out problems and logs the result."""
        params = evaluate.EvalParams.from_config(
            self.config, batch_size=self.batch_size, toolbox=self.toolbox
        )
        record, answers = evaluate.evaluate(
            functools.partial(evaluate.answer_both, self.model, self.tokenizer),
            self.task,
            params,
            grader=self.judge if self.task.verifier is None else None,
            witness=self.witness,
            reference=self.base or (self.model if self.config.model.lora_rank else None),
        )
        self.journal.write_evaluation(self.step, record, answers)
        self.journal.write_scores(self.step, self.judge or self.witness)

    def end_step(self) -> None:
        self.prompts.commit()
        rewards.set_step(self.task.rewards, self.step, self.config.optimizer.steps)
        super().end_step()

    def checkpoint_extra(self) -> dict[str, Any]:
        return super().checkpoint_extra() | {
            "rollout_batch_size": self.batch_size.rows,
            "prompts": self.prompts.state,
        }

    def restore(self, state: checkpoint.State) -> None:
        extra = state.extra
        super().restore(state)
        self.batch_size.rows = min(self.batch_size.rows, extra["rollout_batch_size"])
        name = self.config.data.path or "task's examples"
        if extra["sources"].get(name) == self.sources[name]:  # else: see --allow-changes
            self.prompts.load_state(extra["prompts"])


class SftRun(Run):
    """A run of supervised fine-tuning: the conversations besides."""

    def __init__(self, config: Config, run_dir: Path):
        from problems import chats

        path = config.data.path
        begun = world.on_rank0(lambda: tasks.read_held_out(run_dir))
        train, held_out, notes = chats.load_chats(path, config.data.columns, begun)
        for line in notes:
            print_line(line)
        if config.evaluation.every and not held_out:
            raise ValueError(
                f"--data {path} holds out no conversation; add some or set --eval-every 0"
            )
        self.shared_messages, _ = chat_template.shared_opening(train or held_out)
        super().__init__(config, run_dir)
        self.sources[path] = checkpoint.digest_of(*train, "held out", *held_out)
        self.all_held_out = held_out
        how = self.tokenizer, self.model.config, config.sampling.thinking
        self.train = chats.render_conversations(train, "training", *how)
        held_out = (
            spread_evenly(held_out, config.evaluation.limit) if config.evaluation.every else []
        )
        self.held_out = chats.render_conversations(held_out, "held-out", *how)
        for line in (
            *warn_of_few_held_out(len(held_out), config.to_flags()),
            *tasks.warn_of_contamination(config, train, held_out),
        ):
            print_line(line)
        self.longest = max(len(row.ids) for rows in self.train + self.held_out for row in rows)
        self.choose_sizes(config, [sum(len(row.ids) for row in rows) for rows in self.train])
        self.end_step()

    def replies(self) -> list[Sample]:
        """The samples of the next step's conversations, each a group."""
        chosen = draws.epoch_indices(
            len(self.train), self.config.sampling.batch, self.step, self.config.sampling.seed
        )
        return [
            sample_of_reply(*row, group)
            for group, index in enumerate(chosen)
            for row in self.train[index]
        ]

    def open(self) -> None:
        super().open()
        if world.is_first():
            tasks.write_held_out(self.dir, self.all_held_out)

    def evaluate(self) -> None:
        record = evaluate.evaluate_replies(
            self.model, self.learner.loss, self.held_out, self.sizes.train_token_budget
        )
        self.journal.write_evaluation(self.step, record, [])


def make_run(config: Config, run_dir: Path) -> GrpoRun | SftRun:
    return (SftRun if config.objective.loss_type == "sft" else GrpoRun)(config, run_dir)


def digest_sources(config: Config, task: tasks.Task) -> dict[str, str]:
    """Of the examples, and of the files that reward, judge and teach: what a resumed run compares."""
    environments = [part.rpartition("=")[2] for part in config.tools.env.split(",")]
    specs = [config.data.verifier, *config.data.reward, *config.tools.tools, *environments]
    specs += [config.objective.loss_type, config.objective.advantage]
    names = [
        *map(functions.file_of, specs),
        config.objective.teacher_prompt,
        task.rubric,
        task.witness,
    ]
    files = [Path(name) for name in names if name]
    found = {str(file): checkpoint.digest_of(file.read_bytes()) for file in files if file.is_file()}
    found |= {
        spec: checkpoint.digest_of(text) for spec in specs if (text := functions.source_of(spec))
    }
    examples = checkpoint.digest_of(
        task.problems and task.problems.mix, *task.train, "held out", *task.held_out
    )
    return found | {config.data.path or "task's examples": examples}
