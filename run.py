"""
A run: everything that lasts longer than one step, and the state that a checkpoint saves.

The algorithm is in train.py, and trainer.py starts and stops runs. The logs and the output on the
console are in reporting/, and the files of a run are in disk/run_files.py.
"""

import copy
import functools
import shlex
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cpu_blas  # noqa: F401  (before mlx)
import numpy as np
from mlx.utils import tree_flatten

import gwen
import judge
import lora
import sampler
import tasks
import update
from config import Config, MemoryDependentSizes
from disk import checkpoint, model_choice, run_files
from disk.eval_record import format_evaluation_line
from disk.run_changes import HELD_OUT
from disk.run_files import START
from evaluation import score_task
from forecast import memory_estimate
from forecast.row_memory import USUAL_ROWS
from judging.grader import Grader
from machine import alive, link, memory, world
from machine.memory import BatchSize
from prompts import chat_template
from prompts.examples import Example, copy_as_json, pick_evenly_spaced, shorten_value
from prompts.held_out import warnings_of_few_held_out
from reporting import health
from reporting.console import print_line, print_line_to_stderr
from reporting.journal import Journal, evaluation_is_due
from rewards import functions, rewards
from step import effects, objectives, optimizers
from step.loss import StepLoss
from step.sample import Sample, mark_replayed_samples, sample_from_conversation
from tasks import curriculum, draws, replies
from tools import environment_state, episodes
from tools.toolbox import make_toolbox

if TYPE_CHECKING:
    from reporting import page
    from step.generation import Player
    from step.teacher import Teacher

T = TypeVar("T")
# a user's function that changes the samples of a step before the update
SamplesHook = Callable[[Any, list[Sample]], list[Sample]]
# a run is saved for the first time after at most this many seconds, whatever --save-every is
FIRST_SAVE = 300.0
# The attributes of the learner that have another name in a checkpoint. The old name "rate" is still
# used so that runs of earlier versions can be resumed.
CHECKPOINT_KEYS = {"lr_scale": "rate"}


class Run:
    """A run: the model, its adapters, the learner, the logs, and the state between two steps."""

    learner: update.Learner
    journal: Journal
    report: "page.LivePage | None" = None  # the page of the run; None outside the training loop
    demand: memory_estimate.RunDemand  # the facts that determine how much memory the run needs
    longest: int  # number of positions in the longest possible training row
    sizes: MemoryDependentSizes
    batch_size: BatchSize  # number of rows that are sampled at once
    shared_messages: list[dict[str, Any]]  # the messages with which every prompt begins

    # the model before training, if disabling adapters does not restore it
    base: gwen.Model | None = None
    custom = objectives.CustomObjective()  # a user's own loss and advantage functions
    judge: Grader | None = None
    teacher: "Teacher | None" = None
    source_files: tuple[Path, ...] = ()  # the user's files with code, rubrics and prompts
    # the last logged step, and the learner's `num_changes` after that step
    boundary: tuple[int, int]
    saved_step: int = 0  # the step of the newest checkpoint
    saved_best: int | None = None  # the best step so far, according to the newest checkpoint

    # the reduced token budget if memory ran out in an update, otherwise None
    least_budget: int | None = None
    on_samples: SamplesHook | None = None  # see `apply_samples_hook`
    # what `names_of_parts_set_in_python` returned when the run was last trained
    saved_parts: dict[str, str] = {}  # noqa: RUF012  (never changed in place)
    # what was changed when the run was resumed; None for a new run, and on all ranks except rank 0
    changes: list[dict[str, Any]] | None = None
    allow_changes: bool = False  # whether the data and files of a resumed run may have changed
    holds_lock: bool = False  # whether this process has locked the run directory
    clock_now = staticmethod(time.monotonic)
    _last_state: dict[str, Any] | None = None  # see `mark_step_complete_and_keep_state`

    def __init__(self, config: Config, run_dir: Path):
        """
        Loads the model, and adds its adapters.

        Raises ValueError if the model or the initial adapter cannot be loaded, or if the adapter
        does not fit the model.
        """
        optimizers.try_own_optimizer(config)
        self.config = config
        self.dir = run_dir
        self.step = 0
        self.started_at = self.clock_now()
        self.stopping = False  # whether Ctrl-C was pressed inside a step

        chat_template.set_template_date(
            world.compute_on_rank0(lambda: run_files.start_date_or_today(run_dir))
        )
        model_choice.refuse_quantized_model(config.model.name)
        settings = config.sampling
        self.model, self.tokenizer = gwen.load(config.model.name, end_tokens=settings.end_tokens)
        self.sampling = self._make_sampling_params()
        self.sources = self._digest_model_and_tokenizer()
        if config.model.lora_rank:
            self._add_adapters()

    def _make_sampling_params(self) -> sampler.SamplingParams:
        """The settings for sampling completions and for recognizing their ends."""
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
            stop=sampler.StopTexts(settings.stop, self.tokenizer) if settings.stop else None,
        )

    @property
    def training_sampling_params(self) -> sampler.SamplingParams:
        """The settings for sampling a step's completions, with entropies if `on_samples` is set."""
        return self.sampling._replace(entropy=self.on_samples is not None)

    def _digest_model_and_tokenizer(self) -> dict[str, str]:
        """
        Digests of the model's weights, tokenizer and chat template, and of added end tokens.

        Added end tokens are those of --end-tokens, and those that Gwen recognizes although the
        model's files do not name them as ends.

        A resumed run compares these digests with those in its checkpoint.
        """
        with alive.show_activity("reading the weights for their digest"):
            model_digest = checkpoint.digest_of_config_and_weights(self.model)
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        sources = {
            "base model": model_digest,
            "tokenizer": checkpoint.digest_of_reprs(vocabulary),
            "chat template": checkpoint.digest_of_reprs(self.tokenizer.chat_template),
        }
        other_end_ids = self.model.config.other_end_ids
        if other_end_ids:
            sources["other end tokens"] = checkpoint.digest_of_reprs(sorted(other_end_ids))
        return sources

    def _add_adapters(self) -> None:
        """Adds new adapters to the model, with the values of --init-adapter if that flag is set."""
        settings = self.config.model
        initial = None
        if settings.init_adapter:
            # a resumed run reads its own copy, because the original may have changed meanwhile
            own_copy = self.dir / START
            path = str(own_copy) if own_copy.is_dir() else settings.init_adapter
            with model_choice.replace_flag_in_errors("--init-adapter", "--adapter"):
                initial = world.compute_on_rank0(
                    lambda: lora.read_adapter_for_model(self.model, path)
                )
                if not own_copy.is_dir():
                    model_choice.warn_of_different_base(path, settings.name, "--init-adapter")
        lora.apply(
            self.model,
            settings.lora_rank,
            settings.lora_scale,
            settings.lora_targets,
            self.config.sampling.seed,
            settings.lora_layers,
        )
        if initial is not None:
            scale, matrices = initial
            lora.initialize_adapters(self.model, scale, matrices)

    def choose_sizes_and_make_learner(
        self,
        lengths: list[int],
        rubric: Path | None = None,
        most_rows: int = USUAL_ROWS,
        response_length: int | None = None,
    ) -> None:
        """
        Chooses batch sizes that fit the available memory, and makes the loss and the learner.

        If there are several machines, all use the same sizes, which fit the memory of each machine.

        lengths: the number of tokens in each prompt, or in each conversation to learn.
        rubric: the judge's rubric.
        most_rows: the maximum number of rows in a rollout or an evaluation.
        response_length: the maximum number of tokens after a prompt; None stands for --max-tokens.

        Raises ValueError, on every machine, if the machines have different code, MLX versions,
        data types or inputs.
        """
        dtype = self.model.head_weight.dtype
        if world.size() > 1:
            facts = {
                "Gwen": link.imported_code_checksum(),
                "MLX": version("mlx"),
                "GWEN_DTYPE": str(dtype),
            }
            link.raise_if_machines_differ(facts | self.sources)
        self.demand = memory_estimate.RunDemand(
            self.model.config,
            dtype,
            self.config,
            lengths,
            rubric,
            response_length,
        )
        local_sizes = memory_estimate.choose_sizes(self.demand, most_rows)
        self.sizes = memory_estimate.agree_on_sizes_across_ranks(local_sizes)
        loss = StepLoss(self.config, self.sizes, self.custom.loss)
        self.learner = update.Learner(self.model, self.config, loss, self.base)

    @property
    def training_only_sources(self) -> set[str]:
        """The names of those `sources` that do not affect what an evaluation measures."""
        return names_of_training_only_sources(self.config)

    @property
    def memory_line(self) -> str:
        """The line for the console that says how much memory the run needs."""
        return memory_estimate.format_memory_line(self.demand, self.sizes)

    def raise_if_memory_is_short(self) -> None:
        """Raises ValueError if a machine has too little memory, unless --over-memory is set."""
        reasons = world.all_gather(memory_estimate.explain_memory_misfit(self.demand, self.sizes))
        reason = next(filter(None, reasons), "")
        if reason and not self.config.optimizer.over_memory:
            raise ValueError(f"{reason}; to train anyway, use --over-memory")

    def open_logs_and_save_inputs_for_resume(self) -> None:
        """Opens the logs, and copies the adapter of --init-adapter into the run directory."""
        own_copy = self.dir / START
        if world.is_first() and self.config.model.init_adapter and not own_copy.is_dir():
            with lora.use_initial_weights(self.model):
                lora.save_adapter_or_full_weights(self.model, own_copy, self.config.model.name)
        has_paid_judge = self.judge is not None and self.judge.is_paid
        self.journal = Journal(
            self.config, self.dir, self.step, keep_scores=has_paid_judge, changes=self.changes
        )

    def apply_samples_hook(self, samples: list[Sample]) -> list[Sample]:
        """
        The samples for the update: those that the user's `on_samples` returns, or else `samples`.

        samples: all samples of the step, with their rewards and advantages.

        The hook may leave samples out, change their advantages, or add samples of earlier steps.
        Samples of earlier steps are marked as replayed, so that their importance ratios are
        relative to the policy that wrote them. The logs describe the generated samples, even if the
        hook changes them. With several machines, the hook is called on each of them and must return
        the same samples everywhere.

        Raises ValueError if the hook fails or returns anything but a list of samples.
        """
        if self.on_samples is None:
            return samples
        label = "Trainer.on_samples"
        chosen = functions.call_or_raise_with_location(label, self.on_samples, self, list(samples))
        is_list = isinstance(chosen, list) and all(isinstance(row, Sample) for row in chosen)
        if not is_list or not chosen:
            raise ValueError(
                f"{label} returned {shorten_value(chosen)}; return a list of at least one sample, "
                "such as the list that it received"
            )
        for sample in chosen:
            if not np.isfinite(sample.advantage).all():
                raise ValueError(
                    f"{label} returned a sample with the advantage {sample.advantage}; "
                    "all advantages must be finite"
                )
        return mark_replayed_samples(chosen, samples)

    def names_of_parts_set_in_python(self) -> dict[str, str]:
        """The names of the objects that only a Python program can set, by attribute."""
        if self.on_samples is None:
            return {}
        return {"on_samples": functions.function_name_with_arguments(self.on_samples)}

    def compare_saved_parts_and_prepare_to_train(self) -> None:
        """
        Compares the objects that Python sets with those of a resumed run, and records them.

        Raises ValueError if a resumed run lacks an object that it used in training before, unless
        `allow_changes` is true.
        """
        current = self.names_of_parts_set_in_python()
        for place, name in self.saved_parts.items():
            if current.get(place) != name and not self.allow_changes:
                current_name = current.get(place, "not set")
                raise ValueError(
                    f"--resume {self.dir}: this run was trained with {name} as {place}, but now "
                    f"{place} is {current_name}; to use {name}, call Trainer.resume in Python, and "
                    f"{functions.advice_to_set_parts({place: name})}; to continue without {name}, "
                    "add --allow-changes (in Python, allow_changes=True)"
                )
        for place in self.saved_parts | current:
            was = self.saved_parts.get(place, "not set")
            name = current.get(place, "not set")
            if name != was:
                print_line(f"after step {self.step}: {place} is {name} (was {was})")
        self.saved_parts = current

    # ---- evaluating and saving

    def evaluate(self) -> None:
        """Evaluates the model on the held-out data, and logs the result."""
        raise NotImplementedError

    def evaluate_if_due_and_tell_if_best(self) -> bool:
        """
        Evaluates before the first step, every `eval_every` steps and after the last step.

        An evaluation that is already in the log is not repeated. Returns whether this step is the
        best so far but has not been saved as the best; if so, the caller saves the run.
        """
        evaluations = self.journal.comparable_evaluations
        is_due = evaluation_is_due(self.config, self.step, evaluations)
        if is_due or self.journal.needs_evaluation_after_change:
            self.journal.show_and_remember_phase("evaluating")
            self.evaluate()
            print_line(format_evaluation_line(self.journal.evaluations[-1]))
        is_best = self.step == self.journal.best_step
        return is_best and self.step != self.saved_best

    def save_is_due(self) -> bool:
        """
        Whether a checkpoint should be saved after this step.

        A checkpoint is saved every `save_every` steps and after the last step. The first checkpoint
        is saved, at the latest, after the first step that ends `FIRST_SAVE` or more seconds after
        the start.
        """
        is_unsaved = self.saved_step == self.journal.begun_at
        if is_unsaved and self.clock_now() - self.started_at >= FIRST_SAVE:
            return True
        is_last = self.step >= self.config.optimizer.steps
        return is_last or self.step % self.config.records.save_every == 0

    def update_page_if_due(self) -> None:
        """Writes the page of the run if enough time has passed since it was last written."""
        if self.report is not None:
            self.report.write_if_due()

    # ---- the state between two steps

    @property
    def can_be_saved(self) -> bool:
        """Whether the run can be saved, because nothing has changed since the last logged step."""
        return self.boundary == (self.step, self.learner.num_changes)

    def mark_step_complete_and_keep_state(
        self, metrics_for_curriculum: dict[str, Any] | None = None
    ) -> None:
        """
        Marks the step as complete, so that the run can be saved.

        A run with adapters, which are small, keeps a copy of its state, and returns to the copy if
        the next step fails. A run that trains all weights returns to its newest checkpoint instead.

        metrics_for_curriculum: the metrics of the step, which a user's own `prompts` object may
        read; None if no step was trained.

        Raises KeyboardInterrupt if Ctrl-C was pressed during the step.
        """
        self._last_state = self.learner.state() if self.config.model.lora_rank else None
        # set only after the copy exists: from here on, a failed step returns to the copy
        self.boundary = (self.step, self.learner.num_changes)
        if self.stopping:
            raise KeyboardInterrupt

    def update_with_memory_retries(self, run_update: Callable[[], T]) -> T:
        """
        Calls `run_update` and returns its result. If memory runs out, retries with smaller batches.

        Each attempt begins with the same state, and has half the token budget of the previous one.
        If macOS stops the GPU's work, the update is also retried, but only once. If the weights
        have already changed, only a run with adapters can retry. With several machines, there are
        no retries, because all machines must use the same batches.
        """
        was_stopped = False
        while world.size() == 1 and self.sizes.train_token_budget // 2 >= self.longest:
            reason = "out of memory"
            try:
                results = memory.try_within_memory(run_update)
                if results:
                    return results[0]
            except RuntimeError as error:
                self.undo_unfinished_step()
                if was_stopped or not memory.is_watchdog_error(error) or not self.can_be_saved:
                    raise
                was_stopped = True
                reason = "macOS stopped the work on the GPU"
            self.undo_unfinished_step()
            if not self.can_be_saved:
                raise MemoryError("memory ran out while the weights were being changed")
            self.learner.num_forwards = 0
            self.least_budget = self.sizes.train_token_budget // 2
            self.sizes = self.sizes._replace(train_token_budget=self.least_budget)
            print_line_to_stderr(
                f"update: {reason}; the run continues with --train-token-budget {self.least_budget}"
            )
        return run_update()

    def undo_unfinished_step(self) -> None:
        """Restores the state before an unfinished step. Does nothing in a run without adapters."""
        if self._last_state and self.boundary[0] == self.step:
            self.learner.load_state(self._last_state)

    # ---- checkpoints

    def extra_checkpoint_values(self) -> dict[str, Any]:
        """The values that a checkpoint stores in addition to the tensors and the step."""
        counts = {}
        for name in update.COUNTS:
            key = CHECKPOINT_KEYS.get(name, name)
            counts[key] = getattr(self.learner, name)
        return {
            "dtype": str(self.model.head_weight.dtype),
            "loss_scale": self.learner.loss_scale._asdict(),
            "optimizer": type(self.learner.optimizer).__name__,
            **counts,
            "best_step": self.journal.best_step,
            "least_budget": self.least_budget,
            "settings": self.config.to_flags(self.sizes),
            "sources": self.sources,
            # until a resumed run trains, Python may not have set the saved parts again
            "program_parts": self.saved_parts | self.names_of_parts_set_in_python(),
        }

    def checkpoint_state(self) -> checkpoint.TrainingState:
        """The state of the run after a complete step, for a checkpoint."""
        assert self.can_be_saved, f"step {self.step + 1} is unfinished"
        moments = dict(tree_flatten(self.learner.optimizer.state))
        return checkpoint.TrainingState(
            self.step, self.learner.trainable, moments, self.extra_checkpoint_values()
        )

    def restore_checkpoint_state(self, state: checkpoint.TrainingState) -> None:
        """Restores a checkpoint's state. Raises ValueError if its tensors do not fit the run."""
        dtype = str(self.model.head_weight.dtype)
        checkpoint.refuse_different_tensors(state, self.learner.trainable, dtype, self.dir)
        extra = state.extra
        optimizers.refuse_other_optimizer_state(
            self.learner.optimizer, state.optimizer, extra.get("optimizer"), self.dir
        )
        learner_state: dict[str, Any] = {}
        for name in update.COUNTS:
            learner_state[name] = extra.get(CHECKPOINT_KEYS.get(name, name), 0)
        learner_state["trainable"] = dict(state.trainable)
        learner_state["moments"] = state.optimizer
        learner_state["loss_scale"] = update.LossScale(**extra["loss_scale"])
        self.learner.load_state(learner_state)

        self.saved_parts = extra.get("program_parts", {})
        self.least_budget = extra.get("least_budget")
        token_budget = self.sizes.train_token_budget
        if self.least_budget:
            token_budget = min(token_budget, self.least_budget)
        self.sizes = self.sizes._replace(train_token_budget=token_budget)
        self.step = state.step
        self.saved_step = state.step
        self.saved_best = extra["best_step"]
        self.mark_step_complete_and_keep_state()

    def save(self) -> None:
        """Saves a checkpoint and the adapter. Only rank 0 writes files."""
        self.saved_step = self.step
        self.saved_best = self.journal.best_step
        if not world.is_first():
            return
        state = self.checkpoint_state()
        write_adapter = functools.partial(
            lora.save_adapter_or_full_weights, self.model, base_name=self.config.model.name
        )
        with alive.show_activity("saving"):
            checkpoint.save_and_remove_old(self.dir, state, write_adapter)
            checkpoint.copy_adapter_and_update_best(self.dir, state)


class GrpoRun(Run):
    """
    A GRPO run, which trains on the prompts of a task.

    If the settings ask for them, the run also has a judge and a teacher.
    """

    # the states of the environments after the last complete step
    environment_states: environment_state.States
    # class attributes that no checkpoint saves, by name; None after the warning about them
    _class_values: dict[str, str] | None
    _saved_prompts_state: Any = None  # the state of `prompts` in the checkpoint of a resumed run
    _reported_number_of_prompts = False
    _reported_effects: list[str] = []  # noqa: RUF012  (never changed in place)

    def __init__(self, config: Config, run_dir: Path):
        # the task is made before the model is loaded, because most mistakes are found in the task
        self.task = self._make_task(config, run_dir)
        surprises = try_rewards_and_describe_surprises(config, self.task)
        self.custom = objectives.load_and_try_custom_objective(config)
        examples = self.task.train or self.task.held_out
        self.shared_messages, _ = chat_template.shared_opening_and_num_systems(examples)
        print_lines([*self.task.notes, *surprises, *self.custom.notes])

        super().__init__(config, run_dir)
        self.toolbox = make_toolbox(
            config, self.task.tools, self.task.environments, self.tokenizer, self.model.config
        )
        self.player = self._make_player(config)
        self.sources |= digest_data_and_source_files(config, self.task)
        self.source_files = tuple(list_code_rubric_and_prompt_files(config, self.task))
        environment_state.record_or_restore_first_states(self.task.environments)
        self._try_environments(examples)
        environment_state.record_or_restore_first_states(self.task.environments)
        self._class_values = environment_state.unsaved_class_attribute_values(
            self.task.environments
        )
        if self._needs_copy_of_base_model():
            end_tokens = config.sampling.end_tokens
            self.base, _ = gwen.load(config.model.name, end_tokens=end_tokens)

        # If a task makes up its training problems during the run, their lengths are not known yet.
        # Then the lengths of the held-out problems are used instead.
        self.prompt_ids = self.encode_prompts(examples)
        self.prompts = draws.EpochPrompts(config, self.task.train, self.prompt_ids)
        if self.task.problems is not None:
            self.prompts = draws.EndlessPrompts(config, self.task.problems, self.encode_prompts)
        held_out: list[Example] = []
        if config.evaluation.every:
            held_out = pick_evenly_spaced(self.task.held_out, config.evaluation.limit)
        # called only because it raises ValueError if a held-out prompt is too long
        self.encode_prompts(held_out, "held-out prompt")
        print_lines(held_out_warnings(config, self.task.train, held_out))

        witness_rubric = self.task.witness if held_out else None
        self.judge, self.witness = judge.make_judge_and_witness(
            config, self.task.rubric, witness_rubric, self.base or self.model, self.tokenizer
        )

        prompt_lengths = [len(ids) for ids in self.prompt_ids]
        longest_prompt = max(prompt_lengths)
        response_length = config.sampling.max_tokens
        conversations = self.toolbox or self.player
        if conversations:  # the results of tools add tokens that the model does not write
            response_length = conversations.context - longest_prompt
        self.longest = longest_prompt + response_length
        num_rollout_rows = config.sampling.batch * config.sampling.groups
        self.choose_sizes_and_make_learner(
            prompt_lengths,
            rubric=self.task.rubric or witness_rubric,
            most_rows=max(num_rollout_rows, len(held_out)),
            response_length=response_length,
        )
        self.batch_size = BatchSize(self.sizes.rollout_batch_size)
        if config.objective.teacher:
            self._load_and_check_teacher(examples)
        self.mark_step_complete_and_keep_state()

    def _make_player(self, config: Config) -> "Player | None":
        """
        The player that lets the harness of --env-server play episodes; None without that flag.

        The task has already started the harness.
        """
        if self.task.harness is None:
            return None
        from step.player import HarnessPlayer

        return HarnessPlayer(self.task.harness, config, self.tokenizer, self.model.config)

    def _make_task(self, config: Config, run_dir: Path) -> tasks.Task:
        """Makes the task. Raises ValueError if the task has no training data."""
        with alive.show_activity("reading the data"):
            held_out_before = world.compute_on_rank0(lambda: tasks.read_held_out_keys(run_dir))
            task = tasks.make_task(config, held_out_keys=held_out_before)
        if not task.train and task.problems is None:
            raise ValueError(
                f"--task {task.name} has no training data; use this task only with evaluate.py"
            )
        return task

    def _try_environments(self, examples: list[Example]) -> None:
        """
        Makes two instances of each environment, and resets them.

        This finds mistakes in the environments before the run directory is created.
        """
        if not self.toolbox or not self.task.environments:
            return
        first_examples = {}
        for example in reversed(examples):
            first_examples[self.toolbox.find_environment_name(example)] = example
        rows = [example for example in first_examples.values() for _ in range(2)]
        groups = [row // 2 for row in range(len(rows))]
        episodes.Episodes(self.toolbox, rows, groups, "trial")

    def _needs_copy_of_base_model(self) -> bool:
        """Whether the run needs a second copy of the model, with the weights before training."""
        config = self.config
        if config.model.lora_rank:
            return False
        uses_witness = self.task.witness is not None and config.evaluation.every > 0
        has_grader = self.task.rubric is not None or uses_witness
        judges_with_base_model = has_grader and config.judges_with_base_model
        teaches_itself = config.objective.teacher == "self"
        return bool(config.objective.beta or judges_with_base_model or teaches_itself)

    def _load_and_check_teacher(self, examples: list[Example]) -> None:
        """
        Loads the teacher, and checks that it can read all prompts.

        Raises ValueError if the teacher does not fit the student, or cannot read a prompt.
        """
        from step.teacher import Teacher

        self.teacher = Teacher(
            self.config, self.model, self.tokenizer, self.base, self.sizes.train_token_budget
        )
        self.teacher.refuse_prompts_unfit_for_teacher(examples, self.prompt_ids)
        if self.config.objective.teacher != "self":
            self.sources["teacher model"] = checkpoint.digest_of_config_and_weights(
                self.teacher.model
            )

    def encode_prompts(
        self, examples: list[Example], kind: str = "training prompt"
    ) -> list[list[int]]:
        """
        The token ids of each example's prompt, encoded in the same way as in evaluations.

        With tools, the prompt includes the schemas of the tools.

        kind: the name for a prompt in error messages, such as "training prompt".
        """
        params = score_task.EvalParams.from_config(
            self.config, toolbox=self.toolbox, player=self.player
        )
        context = self.model.config.max_position_embeddings
        bar = alive.Bar(examples, desc=f"{kind}s")
        return params.encode_prompts(self.tokenizer, context, bar, kind)

    def open_logs_and_save_inputs_for_resume(self) -> None:
        super().open_logs_and_save_inputs_for_resume()
        if world.is_first() and self.config.data.path:
            tasks.record_held_out_keys_once(self.dir, self.task.held_out)
        if self.toolbox:
            self.journal.tool_names = self.toolbox.tool_names
        self._connect_graders_to_journal()

    def _connect_graders_to_journal(self) -> None:
        """Lets the graders read scores from the journal, and write scores and warnings to it."""
        # the judge and the witness share one cache of scores
        grader_with_scores = self.judge or self.witness
        if grader_with_scores:
            recorded_scores = world.compute_on_rank0(self.journal.judge_scores.read)
            grader_with_scores.replace_cached_scores(recorded_scores)
        graders = {"unreadable": self.judge, "unreadable witness": self.witness}
        for name, grader in graders.items():
            if grader is None:
                continue
            grader.warn = functools.partial(self._warn_once_about, name)
            if grader.is_paid:  # write each score at once, so that it is not lost if the step fails
                grader.on_score = lambda: self.journal.write_new_judge_scores(
                    self.step, grader_with_scores
                )

    def _warn_once_about(self, finding_name: str, text: str) -> None:
        """Prints and logs a warning, unless one with the same name was printed before."""
        self.journal.warn_once(self.step, health.RunWarning(finding_name, text))

    def evaluate(self) -> None:
        """
        Evaluates the model on the held-out problems, and logs the result.

        Afterwards, the environments are in the same states as before.
        """
        params = score_task.EvalParams.from_config(
            self.config,
            batch_size=self.batch_size,
            toolbox=self.toolbox,
            player=self.player,
        )
        has_adapters = bool(self.config.model.lora_rank)
        reference = self.base
        if reference is None and has_adapters:
            reference = self.model
        try:
            record, answers = score_task.evaluate_task(
                functools.partial(score_task.answer_sampled_and_greedy, self.model, self.tokenizer),
                self.task,
                params,
                grader=self.judge if self.task.verifier is None else None,
                witness=self.witness,
                reference=reference,
            )
        finally:
            environment_state.set_states(self.task.environments, self.environment_states)
        self.journal.record_evaluation_and_update_best(self.step, record, answers)
        self.journal.write_new_judge_scores(self.step, self.judge or self.witness)

    @property
    def prompts(self) -> draws.EpochPrompts:
        """The object that draws the prompts of each step."""
        return self._prompts

    @prompts.setter
    def prompts(self, prompts: draws.EpochPrompts) -> None:
        """
        Sets the object that draws the prompts, which may be a user's own.

        In a resumed run, an object of the same class as before receives its saved state. Raises
        ValueError if the object lacks a method, or cannot restore its state.
        """
        curriculum.refuse_unusable_curriculum(prompts)
        self._prompts = prompts
        name = self.names_of_parts_set_in_python().get("run.prompts")
        is_same = name is not None and self.saved_parts.get("run.prompts") == name
        if is_same and self._saved_prompts_state is not None:
            functions.call_or_raise_with_location(
                "run.prompts.load_state",
                prompts.load_state,
                copy.deepcopy(self._saved_prompts_state),
            )
            print_line(
                f"run.prompts is {name}, with its state after step {self.step}: "
                f"{shorten_value(prompts.state)}"
            )

    @property
    def _has_custom_curriculum(self) -> bool:
        """Whether a user's own object draws the prompts."""
        return type(self.prompts) not in (draws.EpochPrompts, draws.EndlessPrompts)

    def draw_prompts(self) -> draws.Draw:
        """
        The examples of the next step, and the token ids of their prompts.

        If the task's problems are endless, this call makes new ones. Raises ValueError if a user's
        own object draws invalid prompts.
        """
        if not self._has_custom_curriculum:
            return self.prompts.next_prompts(self.step)
        is_encoded_later = self.toolbox or self.player
        examples, prompt_ids = curriculum.draw_checked_prompts(
            self.prompts, self.step, None if is_encoded_later else self.encode_prompts
        )
        line = curriculum.describe_unusual_prompt_count(
            len(examples), self.config.sampling.batch, self.step
        )
        if line and not self._reported_number_of_prompts:
            print_line(line)
            self._reported_number_of_prompts = True
        return examples, prompt_ids

    def names_of_parts_set_in_python(self) -> dict[str, str]:
        parts = super().names_of_parts_set_in_python()
        if self._has_custom_curriculum:
            parts["run.prompts"] = type(self.prompts).__qualname__
        return parts

    def compare_saved_parts_and_prepare_to_train(self) -> None:
        super().compare_saved_parts_and_prepare_to_train()
        self._saved_prompts_state = None
        self._report_settings_without_effect()
        # an interrupted step or another run of this process may have changed the states
        environment_state.set_states(self.task.environments, self.environment_states)

    def _report_settings_without_effect(self) -> None:
        """
        Prints and records which settings of the loss do not change the training.

        The lines depend on `on_samples`, which the user may set until training begins, so they are
        printed only then. If training continues later, they are printed again only if they have
        changed.
        """
        may_replay = self.on_samples is not None
        ineffective = effects.describe_loss_settings_without_effect(
            self.config, self.custom.loss, may_replay=may_replay
        )
        lines = list(ineffective)
        if may_replay:
            lines += effects.describe_settings_affecting_only_replay(self.config, self.custom.loss)
        if lines != self._reported_effects:
            print_lines(lines)
        self._reported_effects = lines
        if ineffective:
            self.journal.record_warning_once(
                self.step, health.RunWarning("settings without effect", "; ".join(ineffective))
            )

    def mark_step_complete_and_keep_state(
        self, metrics_for_curriculum: dict[str, Any] | None = None
    ) -> None:
        if self._has_custom_curriculum:
            curriculum.observe_and_commit(self.prompts, metrics_for_curriculum)
        else:
            self.prompts.commit()
        self.environment_states = environment_state.collect_states(self.task.environments)
        rewards.set_step_of_user_rewards(self.task.rewards, self.step, self.config.optimizer.steps)
        super().mark_step_complete_and_keep_state(metrics_for_curriculum)

    def extra_checkpoint_values(self) -> dict[str, Any]:
        extra = super().extra_checkpoint_values()
        extra["rollout_batch_size"] = self.batch_size.rows
        state = self.prompts.state
        if "run.prompts" in self.saved_parts.keys() - self.names_of_parts_set_in_python().keys():
            state = self._saved_prompts_state  # the run was resumed, but not trained
        extra["prompts"] = copy_as_json("run.prompts.state is", state)
        if self.environment_states:
            extra["environments"] = self.environment_states
        self._warn_once_of_lost_environment_state()
        return extra

    def _warn_once_of_lost_environment_state(self) -> None:
        """
        Warns once if an environment changes an attribute of its class.

        A checkpoint saves such attributes only through the `get_state` method of the class.
        """
        if self._class_values is None:
            return
        values = environment_state.unsaved_class_attribute_values(self.task.environments)
        text = environment_state.warning_of_lost_state(self._class_values, values)
        if text:
            self._class_values = None
            print_line_to_stderr(f"WARNING: {text}")

    def restore_checkpoint_state(self, state: checkpoint.TrainingState) -> None:
        extra = state.extra
        environment_state.set_states(self.task.environments, extra.get("environments", {}))
        super().restore_checkpoint_state(state)
        self.batch_size.rows = min(self.batch_size.rows, extra["rollout_batch_size"])
        examples_name = self.config.data.path or "task's examples"
        # With --allow-changes, the examples may have changed. Then the run starts again with the
        # first example.
        if extra["sources"].get(examples_name) == self.sources[examples_name]:
            self._saved_prompts_state = extra["prompts"]
            if "run.prompts" not in self.saved_parts:
                self.prompts.load_state(extra["prompts"])


class SftRun(Run):
    """
    A run of supervised fine-tuning, which also holds the conversations to learn.

    If --verifier or --reward says how to score answers, evaluations also sample answers to the
    held-out prompts.
    """

    task: tasks.Task | None = None  # the held-out prompts to answer; None if there are none

    def __init__(self, config: Config, run_dir: Path):
        from prompts import chats

        path = config.data.path
        held_out_before = world.compute_on_rank0(lambda: tasks.read_held_out_keys(run_dir))
        train, all_held_out, self.task, notes = replies.load_conversations_and_task(
            config, held_out_before
        )
        if self.task is not None:
            notes = notes + try_rewards_and_describe_surprises(config, self.task)
        print_lines(notes)
        if config.evaluation.every and not all_held_out:
            raise ValueError(
                f"--data {path} has too few conversations to hold out one; add conversations or "
                "set --eval-every 0"
            )
        self.shared_messages, _ = chat_template.shared_opening_and_num_systems(
            train or all_held_out
        )

        super().__init__(config, run_dir)
        self.sources[path] = checkpoint.digest_of_reprs(*train, "held out", *all_held_out)
        self.sources |= digest_functions_and_files([config.optimizer.kind])
        self.sources[HELD_OUT] = checkpoint.digest_of_reprs(*all_held_out)
        self.all_held_out = all_held_out
        held_out = []
        if config.evaluation.every:
            held_out = pick_evenly_spaced(all_held_out, config.evaluation.limit)
        thinking = config.sampling.thinking
        self.train = chats.encode_conversations(
            train, "training", self.tokenizer, self.model.config, thinking
        )
        self.held_out = chats.encode_conversations(
            held_out, "held-out", self.tokenizer, self.model.config, thinking
        )
        num_answers = self._check_and_count_prompts_to_answer()
        if self.task is not None and num_answers is not None:
            self._record_sources_of_answer_scores(self.task)
        print_lines(held_out_warnings(config, train, held_out, num_answers))

        conversations = self.train + self.held_out
        self.longest = max(len(row.ids) for rows in conversations for row in rows)
        lengths = []
        for rows in self.train:
            lengths.append(sum(len(row.ids) for row in rows))
        self.choose_sizes_and_make_learner(lengths, most_rows=num_answers or USUAL_ROWS)
        self.batch_size = BatchSize(self.sizes.rollout_batch_size)
        self.mark_step_complete_and_keep_state()

    def _check_and_count_prompts_to_answer(self) -> int | None:
        """
        Checks the prompts that the model answers in an evaluation, and returns their number.

        Returns None if there are no such prompts. Raises ValueError if a prompt is too long.
        """
        config = self.config
        if self.task is None or not config.evaluation.every:
            return None
        problems = pick_evenly_spaced(self.task.held_out, config.evaluation.limit)
        params = score_task.EvalParams.from_config(config)
        params.encode_prompts(self.tokenizer, self.model.config.max_position_embeddings, problems)
        return len(problems)

    def _record_sources_of_answer_scores(self, task: tasks.Task) -> None:
        """Records the functions, files and answers on which the scores of answers depend."""
        data = self.config.data
        self.sources |= digest_functions_and_files([data.verifier, *data.reward])
        self.sources["held-out answers"] = checkpoint.digest_of_reprs(*task.held_out)
        self.source_files = tuple(list_code_rubric_and_prompt_files(self.config, task))

    def samples_for_next_step(self) -> list[Sample]:
        """The next step's conversations as samples. Each conversation is a group of its own."""
        settings = self.config.sampling
        indices = draws.epoch_indices(len(self.train), settings.batch, self.step, settings.seed)
        samples = []
        for group, index in enumerate(indices):
            for row in self.train[index]:
                samples.append(sample_from_conversation(*row, group))
        return samples

    def open_logs_and_save_inputs_for_resume(self) -> None:
        super().open_logs_and_save_inputs_for_resume()
        if world.is_first():
            tasks.record_held_out_keys_once(self.dir, self.all_held_out)

    def mark_step_complete_and_keep_state(
        self, metrics_for_curriculum: dict[str, Any] | None = None
    ) -> None:
        if self.task is not None:
            num_steps = self.config.optimizer.steps
            rewards.set_step_of_user_rewards(self.task.rewards, self.step, num_steps)
        super().mark_step_complete_and_keep_state(metrics_for_curriculum)

    def evaluate(self) -> None:
        """
        Measures the loss on the held-out replies, and logs the result.

        If answers can be scored, the model also answers the held-out prompts.
        """
        record = score_task.evaluate_loss_on_replies(
            self.model, self.learner.loss, self.held_out, self.sizes.train_token_budget
        )
        answers: list[dict[str, Any]] = []
        if self.task is not None:
            answers_record, answers = score_task.evaluate_task(
                functools.partial(score_task.answer_sampled_and_greedy, self.model, self.tokenizer),
                self.task,
                score_task.EvalParams.from_config(self.config, batch_size=self.batch_size),
                reference=self.model if self.config.model.lora_rank else None,
            )
            record = score_task.join_loss_and_answers(record, answers_record)
        self.journal.record_evaluation_and_update_best(self.step, record, answers)


def make_run(config: Config, run_dir: Path) -> GrpoRun | SftRun:
    """Makes a run of supervised fine-tuning for --loss-type sft, otherwise a GRPO run."""
    if config.objective.loss_type == "sft":
        return SftRun(config, run_dir)
    return GrpoRun(config, run_dir)


def try_rewards_and_describe_surprises(config: Config, task: tasks.Task) -> list[str]:
    """Calls the rewards with made-up completions. Returns a line for each surprising value."""
    from rewards import audit

    def describe_surprises() -> list[str]:
        """One line for each surprising value."""
        return list(audit.audit_user_rewards_and_verifier(task, config.data.reward_gate))

    with alive.show_activity("trying the rewards"):
        return world.compute_on_rank0(describe_surprises)


def print_lines(lines: list[str]) -> None:
    """Prints each line on the console."""
    for line in lines:
        print_line(line)


def held_out_warnings(
    config: Config, train: list[Any], held_out: list[Any], num_answers: int | None = None
) -> list[str]:
    """
    Warnings if few problems are held out, or if held-out problems occur in the training data.

    num_answers: the number of problems that the model answers in an evaluation; None means all.
    """
    num_problems = len(held_out) if num_answers is None else num_answers
    too_few = warnings_of_few_held_out(num_problems, config.to_flags())
    return [*too_few, *tasks.warm_start_contamination_warnings(config, train, held_out)]


def digest_data_and_source_files(config: Config, task: tasks.Task) -> dict[str, str]:
    """
    Digests of the examples and of the files for rewards, judge, tools and teacher, by name.

    A resumed run compares these digests with those in its checkpoint.
    """
    specs = list_possible_function_specs(config)
    objective = config.objective
    digests = digest_functions_and_files(
        specs,
        [
            objective.teacher_prompt,
            task.rubric,
            task.witness,
            *list_python_files_in_command(config.tools.env_server),
        ],
    )

    mix = task.problems and task.problems.mix
    examples_name = config.data.path or "task's examples"
    digests[examples_name] = checkpoint.digest_of_reprs(
        mix, *task.train, "held out", *task.held_out
    )
    digests[HELD_OUT] = checkpoint.digest_of_reprs(*task.held_out)
    return digests


def list_possible_function_specs(config: Config) -> list[str]:
    """The values of all settings that may name functions or classes of the user."""
    objective = config.objective
    environments = [part.rpartition("=")[2] for part in config.tools.env.split(",")]
    specs = [config.data.verifier, *config.data.reward, *config.tools.tools, *environments]
    return [*specs, objective.loss_type, objective.advantage, config.optimizer.kind]


def list_python_files_in_command(command: str) -> list[str]:
    """The Python files that a command names, such as the adapter of --env-server."""
    return [word for word in shlex.split(command) if word.endswith(".py")]


def list_code_rubric_and_prompt_files(config: Config, task: tasks.Task) -> list[Path]:
    """The user's files with functions, and the files of rubrics and of the teacher's prompt."""
    function_files = [
        functions.file_that_defines_function(spec) for spec in list_possible_function_specs(config)
    ]
    names = [
        *function_files,
        config.objective.teacher_prompt,
        task.rubric,
        task.witness,
        *list_python_files_in_command(config.tools.env_server),
    ]
    files = [Path(name) for name in names if name]
    return [file for file in dict.fromkeys(files) if file.is_file()]


def digest_functions_and_files(
    specs: list[str], files: Sequence[str | Path | None] = ()
) -> dict[str, str]:
    """
    Digests of the files that define the user's functions, and of other files, by path.

    specs: the functions as FILE.py:function. If the main program or a notebook defines a function,
    only the function's source code is digested.
    files: other files; those that do not exist are left out.
    """
    digests = {}
    function_files = [functions.file_that_defines_function(spec) for spec in specs]
    for name in [*function_files, *files]:
        if name and Path(name).is_file():
            file = Path(name)
            digests[str(file)] = checkpoint.digest_of_reprs(file.read_bytes())
    for spec in specs:
        text = functions.source_code_if_in_main_program(spec)
        if text:
            digests[spec] = checkpoint.digest_of_reprs(text)
    return digests


def names_of_training_only_sources(config: Config) -> set[str]:
    """
    The names of the data and files that have a digest but do not affect what evaluations measure.

    The training data is one of them, because the held-out problems have a digest of their own.
    """
    objective = config.objective
    training_specs = [objective.loss_type, objective.advantage, config.optimizer.kind]
    names = {config.data.path or "task's examples", "teacher model", objective.teacher_prompt}
    names |= {functions.file_that_defines_function(spec) for spec in training_specs} | set(
        training_specs
    )

    environments = [part.rpartition("=")[2] for part in config.tools.env.split(",")]
    measuring = [config.data.verifier, *config.data.reward, *config.tools.tools, *environments]
    return (
        names - {functions.file_that_defines_function(spec) for spec in measuring} - set(measuring)
    )
