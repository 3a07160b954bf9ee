"""
A run: everything that outlives a step, and the state that a checkpoint saves.

This file does not cover the algorithm (train.py), how a run starts and stops (trainer.py), logs and
console lines (reporting/), or a run's files (disk/run_files.py).
"""

import functools
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlx.utils import tree_flatten

import gwen
import judge
import lora
import sampler
import tasks
import update
from config import Config, Sizes
from disk import checkpoint, model_choice, run_files
from disk.eval_record import evaluation_line
from disk.run_files import START
from evaluation import evaluate
from forecast import memory_estimate
from judging import rubrics
from machine import alive, link, memory, world
from machine.memory import BatchSize
from prompts import chat_template
from prompts.examples import Example, spread_evenly
from prompts.held_out import warn_of_few_held_out
from reporting import health
from reporting.console import print_line, print_warning
from reporting.journal import Journal, evaluation_is_due
from rewards import functions, rewards
from step import objectives
from step.loss import StepLoss
from step.rows import USUAL_ROWS
from step.sample import Sample, sample_from_conversation
from tasks import draws
from tools import episodes
from tools.toolbox import make_toolbox

if TYPE_CHECKING:
    from reporting import page
    from step.teacher import Teacher

T = TypeVar("T")
# Seconds after which a run is saved for the first time, whatever --save-every says.
FIRST_SAVE = 300.0
# The learner's attributes whose key in a checkpoint differs from the attribute's name. The key
# "rate" is kept so that runs of earlier versions can be resumed.
CHECKPOINT_KEYS = {"lr_scale": "rate"}


class Run:
    """The parts of every run: model, adapters, learner, journal, and state between two steps."""

    learner: update.Learner
    journal: Journal
    report: "page.LivePage | None" = None  # the page, while the loop runs
    demand: memory_estimate.RunDemand  # the facts that decide how much memory the run needs
    longest: int  # number of positions in the longest row that it may train on
    sizes: Sizes
    batch_size: BatchSize  # number of rows that it samples at once
    shared_messages: list[dict[str, Any]]  # messages that all prompts begin with
    # the model before training, if disabling adapters does not restore it
    base: gwen.Model | None = None
    custom = objectives.CustomObjective()  # a user's own loss and advantage
    judge: rubrics.Grader | None = None
    teacher: "Teacher | None" = None
    boundary: tuple[int, int]  # the last logged step, and the learner's changes by then
    saved_step: int = 0  # the step of the newest checkpoint
    saved_best: int | None = None  # the best step that the newest checkpoint records
    least_budget: int | None = None  # the token budget after memory ran out in an update
    holds_lock: bool = False  # whether this process has locked the directory
    clock_now = staticmethod(time.monotonic)
    _last_state: dict[str, Any] | None = None  # see `end_step`

    def __init__(self, config: Config, run_dir: Path):
        """Raises ValueError if the model or initial adapter does not load, or if they mismatch."""
        self.config = config
        self.dir = run_dir
        self.step = 0
        self.started_at = self.clock_now()
        self.stopping = False  # Ctrl-C was pressed inside a step

        chat_template.set_template_date(world.on_rank0(lambda: run_files.start_date(run_dir)))
        model_choice.refuse_packed(config.model.name)
        settings = config.sampling
        self.model, self.tokenizer = gwen.load(config.model.name, end_tokens=settings.end_tokens)
        self.sampling = self._make_sampling_params()
        self.sources = self._digest_model()
        if config.model.lora_rank:
            self._add_adapters()

    def _make_sampling_params(self) -> sampler.SamplingParams:
        """The parameters by which a rollout samples and ends completions."""
        settings = self.config.sampling
        end_ids = self.model.config.end_ids
        pad_candidates = (self.tokenizer.pad_token_id, *end_ids)
        pad_id = next((id_ for id_ in pad_candidates if id_ is not None), 0)
        return sampler.SamplingParams(
            max_tokens=settings.max_tokens,
            temperature=settings.temp,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            eos_ids=end_ids,
            pad_id=pad_id,
            stop=sampler.Stop(settings.stop, self.tokenizer) if settings.stop else None,
        )

    def _digest_model(self) -> dict[str, str]:
        """Digests of the run's inputs, by name. A resumed run compares them."""
        with alive.show_activity("reading the weights for their digest"):
            model_digest = checkpoint.digest_of_model(self.model)
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        sources = {
            "base model": model_digest,
            "tokenizer": checkpoint.digest_of(vocabulary),
            "chat template": checkpoint.digest_of(self.tokenizer.chat_template),
        }
        other_end_ids = self.model.config.other_end_ids
        if other_end_ids:
            sources["other end tokens"] = checkpoint.digest_of(sorted(other_end_ids))
        return sources

    def _add_adapters(self) -> None:
        """Adds new adapters to the model; with --init-adapter, they take that adapter's values."""
        settings = self.config.model
        initial = None
        if settings.init_adapter:
            # a resumed run uses its own copy, because the original may have been trained further
            own_copy = self.dir / START
            path = str(own_copy) if own_copy.is_dir() else settings.init_adapter
            with model_choice.blame_flag("--init-adapter", "--adapter"):
                initial = world.on_rank0(lambda: lora.read_adapter_for_model(self.model, path))
                if not own_copy.is_dir():
                    model_choice.warn_of_other_base(path, settings.name, "--init-adapter")
        lora.apply(
            self.model,
            settings.lora_rank,
            settings.lora_scale,
            settings.lora_targets,
            self.config.sampling.seed,
        )
        if initial is not None:
            scale, matrices = initial
            lora.start_from(self.model, scale, matrices)

    def choose_sizes(
        self,
        lengths: list[int],
        rubric: Path | None = None,
        most_rows: int = USUAL_ROWS,
        response_length: int | None = None,
    ) -> None:
        """
        Decides the sizes of the run, and makes its loss and its learner.

        If there are several machines, all use sizes for which each has the memory.

        lengths: the number of tokens in each prompt, or in each conversation that is learned.
        rubric: the judge's rubric.
        most_rows: the maximum number of rows in a rollout or an evaluation.
        response_length: the maximum number of tokens after a prompt; None means --max-tokens.

        Raises ValueError, on every machine, if the machines differ in code, MLX version, type or
        sources.
        """
        dtype = self.model.head_weight.dtype
        if world.size() > 1:
            facts = {
                "Gwen": link.code_checksum(),
                "MLX": version("mlx"),
                "GWEN_DTYPE": str(dtype),
            }
            link.refuse_differences(facts | self.sources)
        self.demand = memory_estimate.RunDemand(
            self.model.config,
            dtype,
            self.config,
            lengths,
            rubric,
            response_length,
        )
        local_sizes = memory_estimate.choose_sizes(self.demand, most_rows)
        self.sizes = memory_estimate.agree_on_sizes(local_sizes)
        loss = StepLoss(self.config, self.sizes, self.custom.loss)
        self.learner = update.Learner(self.model, self.config, loss, self.base)

    @property
    def memory(self) -> str:
        """The console line about the memory that the run needs."""
        return memory_estimate.memory_line(self.demand, self.sizes)

    def refuse_too_large(self) -> None:
        """Raises ValueError on every machine if one lacks memory and --over-memory is off."""
        reasons = world.all_gather(memory_estimate.explain_misfit(self.demand, self.sizes))
        reason = next(filter(None, reasons), "")
        if reason and not self.config.optimizer.over_memory:
            raise ValueError(f"{reason}; --over-memory trains all the same")

    def open(self) -> None:
        """Opens the logs, and copies --init-adapter's adapter into the run's directory."""
        own_copy = self.dir / START
        if world.is_first() and self.config.model.init_adapter and not own_copy.is_dir():
            with lora.with_initial_weights(self.model):
                lora.save_adapter(self.model, own_copy, self.config.model.name)
        has_paid_judge = self.judge is not None and self.judge.is_paid
        self.journal = Journal(self.config, self.dir, self.step, keep_scores=has_paid_judge)

    # ---- evaluating and saving

    def evaluate(self) -> None:
        """Evaluates the held-out data, and logs the result."""
        raise NotImplementedError

    def evaluate_if_due(self) -> bool:
        """
        Evaluates before the first step, every `eval_every` steps and after the last one.

        It skips an evaluation that is already in the log. Returns True if this step is the best so
        far and no checkpoint records that; the caller then saves, whatever `save_every` says.
        """
        if evaluation_is_due(self.config, self.step, self.journal.evaluations):
            self.journal.begin("evaluating")
            self.evaluate()
            print_line(evaluation_line(self.journal.evaluations[-1]))
        return self.journal.best_step == self.step != self.saved_best

    def save_is_due(self) -> bool:
        """
        Whether a checkpoint should be saved after this step.

        One is saved every `save_every` steps, after the last step, and once after `FIRST_SAVE`
        seconds.
        """
        is_unsaved = self.saved_step == self.journal.begun_at
        if is_unsaved and self.clock_now() - self.started_at >= FIRST_SAVE:
            return True
        is_last = self.step >= self.config.optimizer.steps
        return is_last or self.step % self.config.records.save_every == 0

    def update_page(self) -> None:
        """Writes the page if enough time has passed to make that cheap."""
        if self.report is not None:
            self.report.update()

    # ---- the state between two steps

    @property
    def is_whole(self) -> bool:
        """Whether nothing has changed since the last logged step, so that the run may be saved."""
        return self.boundary == (self.step, self.learner.num_changes)

    def end_step(self) -> None:
        """
        Marks the step as logged, so that the run may be saved. A pending Ctrl-C takes effect.

        A run with adapters, which are small, keeps this state and returns to it if the next step
        fails. A run that trains all weights returns to its newest checkpoint instead.
        """
        self._last_state = self.learner.state() if self.config.model.lora_rank else None
        # this is set last: from here on, a Ctrl-C returns to the state above
        self.boundary = (self.step, self.learner.num_changes)
        if self.stopping:
            raise KeyboardInterrupt

    def retry_within_memory(self, run_update: Callable[[], T]) -> T:
        """
        The result of `run_update`. If memory runs out, tries again with half the token budget.

        Each try begins with the same state. If macOS stopped the update's work on the GPU, the
        update is tried once more. After the weights have changed, only a run with adapters can try
        again. With several machines nothing is tried again, because all must use the same batches.
        """
        was_stopped = False
        while world.size() == 1 and self.sizes.train_token_budget // 2 >= self.longest:
            reason = "out of memory"
            try:
                results = memory.try_within_memory(run_update)
                if results:
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
        return run_update()

    def restore_last_step(self) -> None:
        """Undoes an unfinished step of a run with adapters."""
        if self._last_state and self.boundary[0] == self.step:
            self.learner.load_state(self._last_state)

    # ---- checkpoints

    def checkpoint_extra(self) -> dict[str, Any]:
        """The small values in a checkpoint."""
        counts = {}
        for name in update.COUNTS:
            key = CHECKPOINT_KEYS.get(name, name)
            counts[key] = getattr(self.learner, name)
        return {
            "dtype": str(self.model.head_weight.dtype),
            "loss_scale": self.learner.loss_scale._asdict(),
            **counts,
            "best_step": self.journal.best_step,
            "least_budget": self.least_budget,
            "settings": self.config.to_flags(self.sizes),
            "sources": self.sources,
        }

    def state(self) -> checkpoint.State:
        """The state between two steps, for a checkpoint."""
        assert self.is_whole, f"step {self.step + 1} is unfinished"
        moments = dict(tree_flatten(self.learner.optimizer.state))
        return checkpoint.State(self.step, self.learner.trainable, moments, self.checkpoint_extra())

    def restore(self, state: checkpoint.State) -> None:
        """Returns to a checkpoint's state. Raises ValueError if its tensors do not fit the run."""
        dtype = str(self.model.head_weight.dtype)
        checkpoint.check_tensors(state, self.learner.trainable, dtype, self.dir)
        extra = state.extra
        learner_state: dict[str, Any] = {}
        for name in update.COUNTS:
            learner_state[name] = extra[CHECKPOINT_KEYS.get(name, name)]
        learner_state["trainable"] = dict(state.trainable)
        learner_state["moments"] = state.optimizer
        learner_state["loss_scale"] = update.LossScale(**extra["loss_scale"])
        self.learner.load_state(learner_state)

        self.least_budget = extra.get("least_budget")
        token_budget = self.sizes.train_token_budget
        if self.least_budget:
            token_budget = min(token_budget, self.least_budget)
        self.sizes = self.sizes._replace(train_token_budget=token_budget)
        self.step = state.step
        self.saved_step = state.step
        self.saved_best = extra["best_step"]
        self.end_step()

    def save(self) -> None:
        """Saves a checkpoint and the adapter; rank 0 writes them."""
        self.saved_step = self.step
        self.saved_best = self.journal.best_step
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
    """A GRPO run. It adds the task, its prompts, the judges and the teacher."""

    def __init__(self, config: Config, run_dir: Path):
        # the task comes first, because most of a user's mistakes can be found without a model
        self.task = self._make_task(config, run_dir)
        surprises = self._try_rewards(config)
        self.custom = objectives.load_custom_objective(config)
        examples = self.task.train or self.task.held_out
        self.shared_messages, _ = chat_template.shared_opening(examples)
        print_lines([*self.task.notes, *surprises])

        super().__init__(config, run_dir)
        self.toolbox = make_toolbox(
            config, self.task.tools, self.task.environments, self.tokenizer, self.model.config
        )
        self.sources |= digest_sources(config, self.task)
        self._try_environments(examples)
        if self._needs_second_model():
            end_tokens = config.sampling.end_tokens
            self.base, _ = gwen.load(config.model.name, end_tokens=end_tokens)

        # made-up problems are made during the run; until then, the lengths of the held-out problems
        # stand in for theirs
        self.prompt_ids = self._render_prompts(examples)
        self.prompts = draws.EpochPrompts(config, self.task.train, self.prompt_ids)
        if self.task.problems is not None:
            self.prompts = draws.EndlessPrompts(config, self.task.problems, self._render_prompts)
        held_out: list[Example] = []
        if config.evaluation.every:
            held_out = spread_evenly(self.task.held_out, config.evaluation.limit)
        self._render_prompts(
            held_out, "held-out prompt"
        )  # only to refuse prompts that are too long
        print_lines(warn_of_held_out(config, self.task.train, held_out))

        witness_rubric = self.task.witness if held_out else None
        self.judge, self.witness = judge.make_graders(
            config, self.task.rubric, witness_rubric, self.base or self.model, self.tokenizer
        )

        prompt_lengths = [len(ids) for ids in self.prompt_ids]
        longest_prompt = max(prompt_lengths)
        response_length = config.sampling.max_tokens
        if self.toolbox:  # tools and environments add tokens that the model does not write
            response_length = self.toolbox.context - longest_prompt
        self.longest = longest_prompt + response_length
        num_rollout_rows = config.sampling.batch * config.sampling.groups
        self.choose_sizes(
            prompt_lengths,
            rubric=self.task.rubric or witness_rubric,
            most_rows=max(num_rollout_rows, len(held_out)),
            response_length=response_length,
        )
        self.batch_size = BatchSize(self.sizes.rollout_batch_size)
        if config.objective.teacher:
            self._add_teacher(examples)
        self.end_step()

    def _make_task(self, config: Config, run_dir: Path) -> tasks.Task:
        """The task. Raises ValueError if it has nothing to train on."""
        with alive.show_activity("reading the data"):
            held_out_before = world.on_rank0(lambda: tasks.read_held_out(run_dir))
            task = tasks.make_task(config, held_out_keys=held_out_before)
        if not task.train and task.problems is None:
            raise ValueError(f"--task {task.name} has nothing to train on; it is for evaluate.py")
        return task

    def _try_rewards(self, config: Config) -> list[str]:
        """Calls the rewards on made-up completions. Returns a line for each surprising result."""
        from rewards import audit

        def find_surprises() -> list[str]:
            return list(audit.first_surprises(self.task, config.data.reward_gate))

        with alive.show_activity("trying the rewards"):
            return world.on_rank0(find_surprises)

    def _try_environments(self, examples: list[Example]) -> None:
        """
        Makes and resets two of each environment.

        This shows mistakes before the run has a directory.
        """
        if not self.toolbox or not self.task.environments:
            return
        first_examples = {}
        for example in reversed(examples):
            first_examples[self.toolbox.environment_name(example)] = example
        rows = [example for example in first_examples.values() for _ in range(2)]
        groups = [row // 2 for row in range(len(rows))]
        episodes.Episodes(self.toolbox, rows, groups, "trial")

    def _needs_second_model(self) -> bool:
        """Whether the run needs the model before training and has no adapters to disable."""
        config = self.config
        if config.model.lora_rank:
            return False
        uses_witness = self.task.witness is not None and config.evaluation.every > 0
        has_grader = self.task.rubric is not None or uses_witness
        judges_itself = has_grader and config.judges_itself
        teaches_itself = config.objective.teacher == "self"
        return bool(config.objective.beta or judges_itself or teaches_itself)

    def _add_teacher(self, examples: list[Example]) -> None:
        """Loads the teacher. Raises ValueError if it does not fit the student or the prompts."""
        from step.teacher import Teacher

        self.teacher = Teacher(
            self.config, self.model, self.tokenizer, self.base, self.sizes.train_token_budget
        )
        self.teacher.check_prompts(examples, self.prompt_ids)
        if self.config.objective.teacher != "self":
            self.sources["teacher model"] = checkpoint.digest_of_model(self.teacher.model)

    def _render_prompts(
        self, examples: list[Example], kind: str = "training prompt"
    ) -> list[list[int]]:
        """
        The ids of each prompt, rendered as in evaluations.

        For a conversation with tools, these are the ids of its beginning.
        """
        params = evaluate.EvalParams.from_config(self.config, toolbox=self.toolbox)
        context = self.model.config.max_position_embeddings
        bar = alive.Bar(examples, desc=f"{kind}s")
        return params.render_prompts(self.tokenizer, context, bar, kind)

    def open(self) -> None:
        super().open()
        if world.is_first() and self.config.data.path:
            tasks.record_held_out_keys(self.dir, self.task.held_out)

        grader_with_scores = self.judge or self.witness  # both share one cache of scores
        if grader_with_scores:
            recorded_scores = world.on_rank0(self.journal.judge_scores.read)
            grader_with_scores.load_scores(recorded_scores)
        graders = {"unreadable": self.judge, "unreadable witness": self.witness}
        for name, grader in graders.items():
            if grader is None:
                continue
            grader.warn = functools.partial(self._warn_of, name)
            if grader.is_paid:  # write each score at once, because the step may never finish
                grader.on_score = lambda: self.journal.write_scores(self.step, grader_with_scores)

    def _warn_of(self, name: str, text: str) -> None:
        self.journal.warn_once(self.step, health.Finding(name, text))

    def evaluate(self) -> None:
        """Evaluates the held-out problems, and logs the result."""
        params = evaluate.EvalParams.from_config(
            self.config, batch_size=self.batch_size, toolbox=self.toolbox
        )
        has_adapters = bool(self.config.model.lora_rank)
        reference = self.base
        if reference is None and has_adapters:
            reference = self.model
        record, answers = evaluate.evaluate_task(
            functools.partial(evaluate.answer_both, self.model, self.tokenizer),
            self.task,
            params,
            grader=self.judge if self.task.verifier is None else None,
            witness=self.witness,
            reference=reference,
        )
        self.journal.write_evaluation(self.step, record, answers)
        self.journal.write_scores(self.step, self.judge or self.witness)

    def end_step(self) -> None:
        self.prompts.commit()
        rewards.set_step(self.task.rewards, self.step, self.config.optimizer.steps)
        super().end_step()

    def checkpoint_extra(self) -> dict[str, Any]:
        extra = super().checkpoint_extra()
        extra["rollout_batch_size"] = self.batch_size.rows
        extra["prompts"] = self.prompts.state
        return extra

    def restore(self, state: checkpoint.State) -> None:
        extra = state.extra
        super().restore(state)
        self.batch_size.rows = min(self.batch_size.rows, extra["rollout_batch_size"])
        examples_name = self.config.data.path or "task's examples"
        # with --allow-changes the examples may differ; then they are drawn from the beginning
        if extra["sources"].get(examples_name) == self.sources[examples_name]:
            self.prompts.load_state(extra["prompts"])


class SftRun(Run):
    """A supervised fine-tuning run. It adds the conversations."""

    def __init__(self, config: Config, run_dir: Path):
        from prompts import chats

        path = config.data.path
        held_out_before = world.on_rank0(lambda: tasks.read_held_out(run_dir))
        train, all_held_out, notes = chats.load_chats(path, config.data.columns, held_out_before)
        print_lines(notes)
        if config.evaluation.every and not all_held_out:
            raise ValueError(
                f"--data {path} holds out no conversation; add some or set --eval-every 0"
            )
        self.shared_messages, _ = chat_template.shared_opening(train or all_held_out)

        super().__init__(config, run_dir)
        self.sources[path] = checkpoint.digest_of(*train, "held out", *all_held_out)
        self.all_held_out = all_held_out
        held_out = []
        if config.evaluation.every:
            held_out = spread_evenly(all_held_out, config.evaluation.limit)
        thinking = config.sampling.thinking
        self.train = chats.render_conversations(
            train, "training", self.tokenizer, self.model.config, thinking
        )
        self.held_out = chats.render_conversations(
            held_out, "held-out", self.tokenizer, self.model.config, thinking
        )
        print_lines(warn_of_held_out(config, train, held_out))

        conversations = self.train + self.held_out
        self.longest = max(len(row.ids) for rows in conversations for row in rows)
        lengths = []
        for rows in self.train:
            lengths.append(sum(len(row.ids) for row in rows))
        self.choose_sizes(lengths)
        self.end_step()

    def replies(self) -> list[Sample]:
        """The samples of the next step's conversations. Each conversation is a group."""
        settings = self.config.sampling
        indices = draws.epoch_indices(len(self.train), settings.batch, self.step, settings.seed)
        samples = []
        for group, index in enumerate(indices):
            for row in self.train[index]:
                samples.append(sample_from_conversation(*row, group))
        return samples

    def open(self) -> None:
        super().open()
        if world.is_first():
            tasks.record_held_out_keys(self.dir, self.all_held_out)

    def evaluate(self) -> None:
        """Measures the loss on the held-out replies, and logs it."""
        record = evaluate.evaluate_replies(
            self.model, self.learner.loss, self.held_out, self.sizes.train_token_budget
        )
        self.journal.write_evaluation(self.step, record, [])


def make_run(config: Config, run_dir: Path) -> GrpoRun | SftRun:
    """The run that the settings ask for."""
    if config.objective.loss_type == "sft":
        return SftRun(config, run_dir)
    return GrpoRun(config, run_dir)


def print_lines(lines: list[str]) -> None:
    for line in lines:
        print_line(line)


def warn_of_held_out(config: Config, train: list[Any], held_out: list[Any]) -> list[str]:
    """The warnings if few problems are held out, or if some of them are also trained on."""
    too_few = warn_of_few_held_out(len(held_out), config.to_flags())
    return [*too_few, *tasks.warm_start_contamination_warnings(config, train, held_out)]


def digest_sources(config: Config, task: tasks.Task) -> dict[str, str]:
    """
    Digests, by name, of the examples and of the files for rewards, judge, tools and teacher.

    A resumed run compares them.
    """
    objective = config.objective
    environments = [part.rpartition("=")[2] for part in config.tools.env.split(",")]
    specs = [config.data.verifier, *config.data.reward, *config.tools.tools, *environments]
    specs += [objective.loss_type, objective.advantage]

    digests = {}
    function_files = [functions.file_of(spec) for spec in specs]
    for name in [*function_files, objective.teacher_prompt, task.rubric, task.witness]:
        if name and Path(name).is_file():
            file = Path(name)
            digests[str(file)] = checkpoint.digest_of(file.read_bytes())
    for spec in specs:  # functions that a program defines, which have no file
        text = functions.source_of(spec)
        if text:
            digests[spec] = checkpoint.digest_of(text)

    mix = task.problems and task.problems.mix
    examples_name = config.data.path or "task's examples"
    digests[examples_name] = checkpoint.digest_of(mix, *task.train, "held out", *task.held_out)
    return digests
