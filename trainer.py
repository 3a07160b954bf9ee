"""
Starts, resumes and stops runs, from Python or from the command line, with one seed or several.

Users import `Trainer` from train.py, which also contains the training loop. run.py contains the
state that a run saves. config.py defines the settings, and the files in settings/ read them.
"""

import argparse
import contextlib
import errno
import gc
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.optimizers as optim

import gwen
import lora
import sampler
from config import SETTINGS, Config
from disk import (
    checkpoint,
    model_card,
    model_choice,
    places,
    publish,
    run_changes,
    run_files,
)
from flags import describe_os_error, flag_of, parse_setting
from forecast import time_estimate, trial
from machine import link, memory, world
from machine.output import guard_output
from prompts import chat_template, data
from reporting import trackers
from reporting.console import describe_console_columns, print_line, print_line_to_stderr
from reporting.journal import evaluation_is_due
from rewards import functions
from run import GrpoRun, SftRun, make_run
from settings.sources import (
    LATER,
    command_prefix_with_extras,
    list_existing_files,
    refuse_unknown_settings,
    resolve_settings,
    settings_from_flags,
    to_yaml,
)

# the type of the function `train.train`, which trains a run and yields the metrics of each step
Loop = Callable[[Any], Iterator[dict[str, Any]]]


# ---- making a run


def convert_arguments_and_cache_data(arguments: dict[str, Any]) -> dict[str, Any]:
    """
    Converts Python arguments to values that flags can have.

    A function is converted to the name by which it can be imported. Rows in `data` or `eval_data`
    are written to a file in the cache, and replaced by the path of this file.
    """

    def to_flag_value(value: Any) -> Any:
        """Converts a function to its name, and a path to a string. Other values stay the same."""
        if isinstance(value, (list, tuple)):
            return [to_flag_value(element) for element in value]
        if callable(value):
            return functions.spec_of_function(value)
        if isinstance(value, Path):
            return str(value)
        return value

    refuse_unknown_settings(arguments)
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, optim.Optimizer):
        name = type(optimizer).__name__
        raise ValueError(
            f"optimizer is a {name} object, which a resumed run could not make again; define a "
            f"function that makes it, def make_optimizer(learning_rate): return {name}"
            "(learning_rate), and pass optimizer=make_optimizer"
        )
    for name in ("data", "eval_data"):
        if not isinstance(arguments.get(name, ""), (str, Path, type(None))):
            arguments[name], notes = data.write_rows_to_cache_file(arguments[name])
            for line in notes:
                print_line(line)
    return {name: to_flag_value(value) for name, value in arguments.items()}


class RunSpec(NamedTuple):
    """Everything that is needed to start or resume a run."""

    config: Config
    state: checkpoint.TrainingState | None  # the checkpoint to resume from; None for a new run
    path: str  # the path of the run directory
    run_dir: str | None  # the run directory that the user asked for; None if the user named none
    allow_changes: bool
    flags: dict[str, Any]

    @property
    def is_finished(self) -> bool:
        """Whether all steps and the last evaluation have been completed."""
        if self.state is None or self.state.step < self.config.optimizer.steps:
            return False
        evaluations = run_files.JsonLinesLog(Path(self.path) / "eval.jsonl").read()
        return not evaluation_is_due(self.config, self.state.step, evaluations)


def make_run_spec(
    flags: dict[str, Any],
    recipe: str | None = None,
    *,
    resume: str | None = None,
    run_dir: str | None = None,
    allow_changes: bool = False,
) -> RunSpec:
    """
    Resolves the settings, loads the checkpoint to resume from, and chooses the run directory.

    This function creates no directory. Rank 0 reads the files, and sends the results to the other
    ranks.

    Raises ValueError if a user's file starts this run while Gwen is importing that file.
    """
    functions.refuse_to_start_run_during_import()

    def resolve_settings_and_load_checkpoint() -> list[Any]:
        """Returns the flags, the checkpoint (None for a new run) and the path of the run."""
        config, choice = resolve_settings(
            flags, recipe, resume, model_choice.choose_model_and_reason
        )
        trackers.check_tracker_packages_and_keys(config.records.report_to)
        print_line(choice)
        settings = config.to_flags()
        if resume is None:
            path = run_files.choose_unused_run_dir(config.data.task, run_dir)
            return [settings, None, str(path)]
        return [settings, lock_run_and_load_checkpoint(Path(resume), config, allow_changes), resume]

    settings, state, path = world.compute_on_rank0(resolve_settings_and_load_checkpoint)
    if state:
        state = checkpoint.TrainingState(*state)
    config = Config.from_flags(**settings)
    return RunSpec(config, state, path, run_dir, allow_changes, flags)


def lock_run_and_load_checkpoint(
    path: Path, config: Config, allow_changes: bool
) -> checkpoint.TrainingState:
    """
    Locks the run directory, loads the newest checkpoint, and compares it with the settings.

    Raises ValueError if the checkpoint was made with other settings, unless `allow_changes` is
    true.
    """
    settings = config.to_flags()
    run_files.lock_run_dir(path)
    state = checkpoint.load(path)
    named_files = list_existing_files(settings)  # a flag may name the new path of a moved file
    state = checkpoint.copy_with_new_paths(
        state, places.find_and_print_moved_paths(path, named_files)
    )
    fixed = {name: value for name, value in settings.items() if not SETTINGS[name].later}
    checkpoint.refuse_or_report_changes(path, state, fixed, allow_changes)
    # needed if the process was killed before it copied the adapter of this checkpoint
    checkpoint.copy_adapter_and_update_best(path, state)
    return state


def make_or_restore_run_and_open_dir(spec: RunSpec) -> GrpoRun | SftRun:
    """
    Makes the run, restores its checkpoint if there is one, and opens its directory and logs.

    Raises ValueError with a one-line message if the user made a mistake. In this case, no directory
    is created for a new run.
    """
    if not gc.get_freeze_count():
        # Exclude all imported modules from garbage collection, which would otherwise scan them
        # each time. This is done only once, before a model exists.
        gc.freeze()
    state = spec.state
    run = make_run(spec.config, Path(spec.path))
    run.allow_changes = spec.allow_changes
    if state:
        run.restore_checkpoint_state(state)
        if "rollout_batch_size" in spec.flags:
            # the flag may ask for more rows than the reduced number in the checkpoint
            run.batch_size.rows = run.sizes.rollout_batch_size
    # checked only now, because the restored checkpoint may have brought smaller batch sizes
    run.raise_if_memory_is_short()
    if state:
        # The caller keeps `spec`, so the checkpoint's master weights and moments would otherwise
        # stay in memory for the whole run.
        state.trainable.clear()
        state.optimizer.clear()

    # The directory is created only after everything has been loaded, so that a user's mistake
    # leaves no directory behind.
    run.dir = Path(world.compute_on_rank0(lambda: create_or_update_run_dir(run, spec)))
    run.holds_lock = True  # the lock is kept until the training loop ends
    run.open_logs_and_save_inputs_for_resume()
    only_here = functions.explain_why_no_other_program_can_resume(run.config.to_flags())
    if only_here:
        print_line(only_here)
    num_trainable = sum(array.size for array in run.learner.trainable.values())
    print_line(f"run: {run.dir}, {num_trainable:,} trainable parameters")
    print_line(run.memory_line)
    print_line(time_estimate.format_phase_times_and_advice(run.demand))
    print_line(describe_console_columns(run.config))
    return run


def create_or_update_run_dir(run: GrpoRun | SftRun, spec: RunSpec) -> str:
    """
    Creates the directory of a new run, or updates the settings in the directory of a resumed run.

    Returns the path of the directory. Raises ValueError if the data or files of a resumed run have
    changed, unless `spec.allow_changes` is true.
    """
    state = spec.state
    settings_text = to_yaml(run.config, run.sizes)
    files = list_existing_files(run.config.to_flags())
    if not state:
        run_dir = run_files.create_locked_run_dir(
            settings_text, run.dir, spec.run_dir, files, run.source_files
        )
        return str(run_dir)

    # the digest of the data covers the held-out problems, so a change would be reported twice
    sources = {name: digest for name, digest in run.sources.items() if name != run_changes.HELD_OUT}
    checkpoint.refuse_or_report_changes(run.dir, state, sources, spec.allow_changes)
    for name, value in run.config.to_flags(run.sizes).items():
        old_value = state.extra["settings"].get(name, value)
        if value != old_value:
            print_line(f"after step {state.step}: {flag_of(name)} {value} (was {old_value!r})")
    changes = run_changes.find_earlier_and_new_changes(
        run.dir,
        state.step,
        before=(state.extra["settings"], state.extra["sources"]),
        now=(run.config.to_flags(run.sizes), run.sources),
        training_only=run.training_only_sources,
    )
    run.changes = changes
    comments = run_changes.format_yaml_comments(changes)
    run_files.write_settings_facts_and_code(
        comments + settings_text, run.dir, files, run.source_files, state.step
    )
    return str(run.dir)


# ---- training and sampling


def run_steps(
    run: GrpoRun | SftRun, loop: Loop, *, stop_if_hopeless: bool = False
) -> Generator[dict[str, Any], None, None]:
    """
    Runs the training loop, yields the metrics of each step, and prints a summary at the end.

    If the caller leaves the loop early, the run is saved. stop_if_hopeless: see `Trainer.steps`.
    """
    if not run.holds_lock and world.is_first():
        run_files.lock_run_dir(run.dir)
    if run.learner.optimizer is not run.learner.configured_optimizer:
        name = type(run.learner.optimizer).__name__
        print_line_to_stderr(
            f"the optimizer was replaced by {name}; the run sets the learning rate of {name}, but "
            f"config.yaml does not name {name}, and a resumed run would not use it; pass "
            "optimizer= to Trainer.start instead"
        )
    first_steps: list[dict[str, Any]] = []
    try:
        run.compare_saved_parts_and_prepare_to_train()
        with (
            guard_output(is_log=True),
            with_live_page_and_trackers(run),
            save_on_interrupt_or_error(run),
        ):
            for figures in loop(run):
                yield figures
                if stop_if_hopeless and len(first_steps) < trial.TRY_STEPS:
                    first_steps.append(figures)
                    raise_if_long_run_has_no_signal(run, first_steps)
    except GeneratorExit:
        run.save()
        line = f"saved after step {run.step}: {run.dir}"
        if run.step < run.config.optimizer.steps:
            line += f"; {_explain_how_to_continue(run)}"
        print_line(line)
        raise
    finally:
        run_files.unlock_run_dir(run.dir)
        run.holds_lock = False
    if world.is_first():
        with guard_output(is_log=True):
            run.journal.print_summary()


def raise_if_long_run_has_no_signal(
    run: GrpoRun | SftRun, first_steps: list[dict[str, Any]]
) -> None:
    """Raises ValueError, with advice, if no rewards differ within any group in the first steps."""
    evaluation_seconds = 0.0
    if run.journal.evaluations:
        evaluation_seconds = run.journal.evaluations[0]["eval/s"]
    advice = world.compute_on_rank0(
        lambda: trial.advise_if_long_run_has_no_signal(
            run.config, first_steps, evaluation_seconds, run.dir
        )
    )
    if advice:
        raise ValueError(
            f"in the first {len(first_steps)} steps, the rewards did not differ within any "
            f"group, so the model learned nothing; {advice}; to train anyway, use --no-look"
        )


def sample_completions(
    run: GrpoRun | SftRun, prompts: Sequence[Any], n: int, temp: float | None
) -> list[list[str]]:
    """
    Samples `n` completions of each prompt (see `Trainer.sample`).

    temp: the temperature; None stands for the run's --temp.
    """
    settings = run.config.sampling
    if getattr(run, "player", None):
        raise ValueError(
            "`sample` cannot sample from a run with --env-server, because its harness writes the "
            "prompts and answers the turns; use `evaluate`"
        )
    if getattr(run, "toolbox", None):
        command = command_prefix_with_extras(run.config.to_flags(), "chat.py")
        raise ValueError(
            "`sample` cannot sample from a run with tools, because its answers have several turns; "
            f"use {command} --run {run.dir} --prompt TEXT"
        )
    temperature = settings.temp if temp is None else temp
    params = run.sampling._replace(temperature=temperature)
    if n < 1 or not 0 <= temperature < math.inf:
        raise ValueError(
            f"n is {n} and temp is {temperature}; n must be at least 1, and temp must be finite "
            "and at least 0"
        )

    is_text = isinstance(prompts, str)
    if is_text or isinstance(next(iter(prompts), None), dict):
        prompts = [prompts]
    examples = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = [*run.shared_messages, *chat_template.make_messages(prompt, None)]
        examples.append({"prompt": prompt})
    prompt_ids = chat_template.encode_prompts(
        run.tokenizer,
        examples,
        max_tokens=settings.max_tokens,
        context=run.model.config.max_position_embeddings,
        thinking=settings.thinking,
        kind="prompt",
    )
    rollout = sampler.rollout(run.model, prompt_ids, params, group_size=n, key=settings.seed)
    texts = sampler.decode_texts(run.tokenizer, rollout, run.model.config.end_ids)
    return [texts[first : first + n] for first in range(0, len(texts), n)]


def write_peft_adapter_or_full_model(run: GrpoRun | SftRun, directory: Path) -> None:
    """
    Writes the trained model (see `Trainer.save_model`). Only rank 0 writes files.

    All files are written elsewhere first, so that an error leaves no incomplete model.
    """
    if not world.is_first():
        return
    name = run.config.model.name
    with publish.make_temporary_directory_beside(directory) as scratch:
        result = Path(scratch) / "result"
        if run.config.model.lora_rank:
            adapter = Path(scratch) / "adapter"
            lora.save_adapter_or_full_weights(run.model, adapter, name)
            publish.write_peft_files(adapter, result, name, run.tokenizer, run.dir, run.step)
            content = f"an adapter for {name} in PEFT format"
        else:
            gwen.save(run.model, result, run.tokenizer)
            publish.write_model_card(result, run.dir, run.step, "transformers")
            content = "the whole model"
        publish.move_files_into(result, directory)
    print_line(f"{directory}: {content}, after step {run.step}")


def push_to_hub(
    run: GrpoRun | SftRun, repo_id: str, *, private: bool, commit_message: str
) -> str | None:
    """
    Uploads the trained model, and returns its address (see `Trainer.push_to_hub`).

    Only rank 0 uploads, and other ranks return None.
    """
    name = run.config.model.name
    is_on_hub = model_card.publishable_name(name) == name and "/" in name
    if run.config.model.lora_rank and not is_on_hub:
        raise ValueError(
            f"push_to_hub: the base model {name} is not on the hub, so nobody could load the "
            "adapter; merge both with export.py --fuse, and upload the result with hf upload"
        )
    if not world.is_first():
        return None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_peft_adapter_or_full_model(run, folder)
        address = publish.upload_to_hub(
            folder, repo_id, private=private, commit_message=commit_message
        )
    print_line(f"uploaded to {address}")
    return address


# ---- showing and stopping a run


@contextlib.contextmanager
def with_live_page_and_trackers(run: Any) -> Iterator[None]:
    """
    Inside the `with` block, updates the run's status line, page and experiment trackers.

    At the end of the block, the page is written after everything else.
    """
    from reporting import page  # imported here because only this function needs it

    if world.is_first():
        run.report = page.LivePage(run.dir, print_line_to_stderr)
    try:
        with run.journal:
            yield
    finally:
        # a user who does not want to wait for the page can press Ctrl-C
        with contextlib.suppress(KeyboardInterrupt):
            if run.report is not None:
                run.report.write_if_due(at_the_end=True)


@contextlib.contextmanager
def save_on_interrupt_or_error(run: Any) -> Iterator[None]:
    """
    Saves the run if Ctrl-C, SIGTERM or an error stops the training inside the `with` block.

    The run is saved as it was after the last complete step, and a message says how to continue. A
    run that trains all weights cannot undo a step, because it keeps no second copy of the weights,
    which would double the memory. So once a step has begun to change the weights, Ctrl-C takes
    effect only after this step. A second Ctrl-C stops the run at once. In a run with adapters,
    which keeps a copy of its small state, a step that was stopped is undone before the run is
    saved. In other runs, if the step had begun to change the weights, only the newest checkpoint is
    left.

    If there are several ranks, only rank 0 saves. Raises ValueError if the user can continue the
    run with less memory or after correcting a mistake. Raises OSError if the disk failed.
    """

    def interrupt_now_or_after_step(number: int, *_: object) -> None:
        """Raises KeyboardInterrupt if the run can be saved now, or if this is the second signal."""
        if run.can_be_saved or run.stopping:
            link.raise_keyboard_interrupt(number)
        run.stopping = True
        if number == signal.SIGINT:
            print_line_to_stderr(
                "\nthe run stops after this step; press Ctrl-C again to abandon the step"
            )

    run.stopping = False
    old_handlers = {
        number: signal.signal(number, interrupt_now_or_after_step)
        for number in link.signals_that_end_run()
    }
    try:
        yield
    except run_files.RunDirReplacedError:  # the directory belongs to another run now
        raise
    except OSError as error:
        advice = ""
        if error.errno in (None, errno.ENOSPC, errno.EDQUOT):  # errors from MLX have no errno
            advice = "free some space and "
        newest = _describe_newest_checkpoint_and_resuming(run, error, advice)
        raise OSError(f"{describe_os_error(error)}; {newest}") from error
    except (KeyboardInterrupt, Exception) as error:
        for number in old_handlers:
            # another Ctrl-C must not interrupt the run while it is being saved
            signal.signal(number, signal.SIG_IGN)
        if not world.is_first():
            if memory.should_retry_with_less_work(error):
                raise ValueError(str(error)) from error
            raise
        memory.wait_for_gpu_and_free_buffers()
        run.undo_unfinished_step()
        message = save_and_describe_stop(run, error)
        if isinstance(error, ValueError) or memory.should_retry_with_less_work(error):
            # one traceback, which begins here and ends where the error was raised
            raise ValueError(message).with_traceback(error.__traceback__) from None
        print_line_to_stderr(f"\n{message}")
        raise  # a bug in Gwen or in MLX is shown with its traceback
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def exit_on_termination() -> Iterator[None]:
    """
    Inside the `with` block, a signal such as SIGTERM ends the program without a traceback.

    By then, the run has been saved, and a message has said how to continue. The exit status is 128
    plus the number of the signal, as in a shell. Ctrl-C still raises KeyboardInterrupt.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:
            raise
        number = signal.Signals[str(interrupt.args[0])]
        raise SystemExit(128 + number) from None


def save_and_describe_stop(run: Any, error: BaseException) -> str:
    """
    Saves a run that has stopped. If an unfinished step has changed it, the run is not saved.

    Returns a message that says what happened, and how to continue from this state or from the
    newest checkpoint. Raises OSError if the run cannot be saved.
    """
    cause = describe_cause_of_stop(error)
    if not run.can_be_saved:
        lost_step = run.boundary[0] + 1
        newest = _describe_newest_checkpoint_and_resuming(run, error)
        return f"{cause}step {lost_step} was not completed and is lost; {newest}"

    try:
        run.save()
    except (OSError, RuntimeError) as failure:
        newest = _describe_newest_checkpoint_and_resuming(run, error)
        raise OSError(
            f"{cause}step {run.step} could not be saved: {failure}; {newest}"
        ) from failure
    how_to_continue = _explain_how_to_continue(run, error)
    if cause:
        return f"{cause}saved after step {run.step}, {how_to_continue}"
    return f"stopped after step {run.step}; {how_to_continue}"


def describe_cause_of_stop(error: BaseException) -> str:
    """The reason why a run stopped, followed by "; "; empty for Ctrl-C."""
    if memory.is_watchdog_error(error):
        return (
            "macOS stopped the work on the GPU because it blocked the display for too long; turn "
            "the display off during the training (pmset displaysleepnow), or use smaller batches; "
        )
    if isinstance(error, KeyboardInterrupt):
        return ""
    text = str(error) or type(error).__name__
    return f"{text}; "


def _explain_how_to_continue(run: Any, error: BaseException | None = None) -> str:
    """
    Advice with the command that continues the run, or starts it over if nothing was saved.

    error: the error that stopped the run; None if the program left the loop over the steps.

    If memory ran out, the command contains a flag with which the run needs less memory. If a user's
    function failed, the advice is to correct the function first, and a command that resumes the run
    contains --allow-changes, so that the run accepts the corrected file.
    """
    smaller_flag = ""
    correct_first = ""
    allow_flag = ""
    if error is not None:
        # a ValueError about memory was raised by the user's reward function
        if memory.should_retry_with_less_work(error) and not isinstance(error, ValueError):
            smaller_flag = _flag_that_needs_less_memory(run, error)
            if not smaller_flag:
                return "start over with a smaller model or a lower --max-tokens"
            smaller_flag = f" {smaller_flag}"
        if functions.is_caused_by_user_code(error):
            correct_first = "correct the function and "
            allow_flag = " --allow-changes"

    is_saved = bool(checkpoint.list_checkpoints(run.dir))
    flags = run.config.to_flags()
    place = functions.only_place_that_has_functions(flags)
    parts = run.names_of_parts_set_in_python()
    if place or parts:
        return correct_first + _explain_how_to_continue_in_python(
            run, parts, smaller_flag, place or "Python", allows_changes=bool(allow_flag)
        )
    command = command_prefix_with_extras(flags)
    if is_saved:
        resume = f"--resume {shlex.quote(str(run.dir))}{smaller_flag}{allow_flag}"
        return f"{correct_first}continue with: {command} {resume}"
    config_path = shlex.quote(str(run.dir / "config.yaml"))
    return f"{correct_first}start over with: {command} --config {config_path}{smaller_flag}"


def _explain_how_to_continue_in_python(
    run: Any,
    parts: dict[str, str],
    smaller_flag: str,
    place: str,
    *,
    allows_changes: bool,
) -> str:
    """
    Advice for a run that train.py cannot resume, because only a Python program can set its parts.

    parts: the names of the objects that the program sets, by attribute of the trainer.
    smaller_flag: a flag with which the run needs less memory, or "".
    place: what can continue the run: "this process", "this program" or "Python".
    allows_changes: whether the resumed run must accept a function that has changed.
    """
    if not checkpoint.list_checkpoints(run.dir):
        return "start over"
    arguments = [repr(str(run.dir))]
    if smaller_flag:
        flag_name, text = smaller_flag.removeprefix(" --").split()
        name = flag_name.replace("-", "_")
        value = text if text.isdigit() else repr(text)
        arguments.append(f"{name}={value}")
    if allows_changes:
        arguments.append("allow_changes=True")
    call = f"Trainer.resume({', '.join(arguments)})"
    if not parts:
        return f"continue in {place} with: {call}"
    return f"continue in {place}: call {call}, and {functions.advice_to_set_parts(parts)}"


def _flag_that_needs_less_memory(run: Any, error: BaseException) -> str:
    """The flag with which the failed phase needs less memory or GPU time; "" if there is none."""
    phase = run.journal.phase
    sampling = run.config.sampling
    is_sampled = run.config.objective.loss_type != "sft" or run.task is not None
    if is_sampled and phase in ("rollout", "evaluating"):
        most_rows = sampling.batch * sampling.groups
        if phase == "evaluating":
            most_rows = run.config.evaluation.limit or len(run.task.held_out)
        rows = min(run.batch_size.rows, most_rows) // 2
        return f"--rollout-batch-size {rows}" if rows else ""
    if phase == "judge":
        chunk_size = run.config.judge.chunk_size // 2
        return f"--judge-chunk-size {chunk_size}" if chunk_size else ""

    token_budget = run.sizes.train_token_budget // 2
    if token_budget >= run.longest:
        return f"--train-token-budget {token_budget}"
    # recomputing layers saves memory, but not GPU time
    has_layers_left = run.sizes.checkpoint_layers < run.model.config.num_hidden_layers
    if has_layers_left and memory.is_out_of_memory(error):
        return "--checkpoint-layers on"
    return ""


def _describe_newest_checkpoint_and_resuming(
    run: Any, error: BaseException, advice: str = ""
) -> str:
    """
    A message that names the newest checkpoint of a stopped run, and says how to continue.

    advice: what the user should do before continuing, such as "free some space and ".
    """
    saved = checkpoint.list_checkpoints(run.dir)
    newest = f"nothing was saved in {run.dir}"
    if saved:
        newest = f"the checkpoint {saved[-1].name} is intact"
    return f"{newest}, {advice}{_explain_how_to_continue(run, error)}"


# ---- the command train.py


def run_train_command(args: argparse.Namespace, loop: Loop) -> None:
    """
    Runs the command `train.py` with the given flags.

    If there are several ranks, only rank 0 reads and writes files.
    """
    flags = settings_from_flags(args)
    if args.allow_changes and not args.resume:
        raise ValueError("--allow-changes works only with --resume; add --resume RUN_DIR")
    if args.resume and args.run_dir:
        raise ValueError(
            f"--run-dir {args.run_dir}: a resumed run stays in its own directory; remove either "
            "--run-dir or --resume"
        )
    if args.from_trl:
        print_recipe_from_trl(args.from_trl, flags)
        return

    resume = args.resume
    if resume is True:
        steps = parse_setting(SETTINGS["steps"], args.steps) if args.steps else None
        resume = world.compute_on_rank0(lambda: checkpoint.choose_and_print_run_to_resume(steps))
    if args.print_config:
        config, choice = resolve_settings(
            flags, args.config, resume, model_choice.choose_model_and_reason
        )
        print(choice, file=sys.stderr, flush=True)
        print(to_yaml(config), end="")
        return

    if args.wired_limit:
        os.environ[memory.WIRED_LIMIT] = args.wired_limit
    if not args.let_sleep and platform.system() == "Darwin":
        keep_mac_awake()
    if args.seeds is None:
        spec = make_run_spec(
            flags,
            args.config,
            resume=resume,
            run_dir=args.run_dir,
            allow_changes=args.allow_changes,
        )
        directory = train_to_end(spec, loop, stop_if_hopeless=not args.no_look)
    else:
        if resume:
            raise ValueError(
                "--seeds cannot be used with --resume; to continue the runs of several seeds, "
                "repeat their command with the same --run-dir"
            )
        directory = train_one_run_per_seed(args, flags, loop)

    report = directory / "report.html"
    if args.open and world.is_first() and report.is_file():
        from reporting import page

        page.open_page_in_browser(report)


def print_recipe_from_trl(path: str, flags: dict[str, Any]) -> None:
    """Prints the TRL settings in a file as a recipe. Raises ValueError if other flags are set."""
    from settings import from_trl

    recipe = from_trl.convert_trl_file(path)
    if flags:
        names = ", ".join(map(flag_of, flags))
        raise ValueError(
            f"--from-trl cannot be used together with {names}; write its output to a FILE, and "
            f"then use --config FILE with {names}"
        )
    print(recipe, end="")


def keep_mac_awake() -> None:
    """
    Prevents the Mac from sleeping until this process ends.

    The display may still sleep. This is an advantage: macOS stops work that blocks the display by
    occupying the GPU for too long, but not while the display sleeps.
    """
    command = ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
    # caffeinate runs in a session of its own, so that Ctrl-C does not end it while the run is saved
    subprocess.Popen(command, start_new_session=True)


def train_to_end(spec: RunSpec, loop: Loop, *, stop_if_hopeless: bool) -> Path:
    """
    Trains a run to its last step, unless the run is finished already. Returns the run directory.

    stop_if_hopeless: see `Trainer.steps`; a resumed run is never stopped for this reason.
    """
    if world.compute_on_rank0(lambda: spec.is_finished):
        num_done = spec.state.step if spec.state else 0
        num_steps = spec.config.optimizer.steps
        print_line(f"the run {spec.path} is finished: {num_done} of {num_steps} steps are done")
        return Path(spec.path)

    is_new = spec.state is None
    run = make_or_restore_run_and_open_dir(spec)
    try:
        for _ in run_steps(run, loop, stop_if_hopeless=stop_if_hopeless and is_new):
            pass
    except KeyboardInterrupt:  # rank 0 has printed how to continue
        if not world.is_first():
            raise
        sys.exit(130)
    return run.dir


def train_one_run_per_seed(args: argparse.Namespace, flags: dict[str, Any], loop: Loop) -> Path:
    """
    Trains one run per seed, and writes a page about all seeds. Returns the common directory.

    The run for the seed N is in the subdirectory `seed-N` of the common directory. Runs that
    already exist in the common directory are continued.
    """
    from reporting import page, seeds

    config, _ = resolve_settings(flags, args.config, None, model_choice.choose_model_and_reason)
    first = config.sampling.seed
    numbers = args.seeds if isinstance(args.seeds, list) else range(first, first + args.seeds)

    def choose_common_dir() -> str:
        """The directory in --run-dir, or a new name if --run-dir is not set."""
        return args.run_dir or str(run_files.choose_unused_run_dir(config.data.task, None))

    home = Path(world.compute_on_rank0(choose_common_dir))
    if (home / "config.yaml").is_file():
        raise ValueError(
            f"--run-dir {home} is the directory of a single run; use another --run-dir for --seeds"
        )
    old_paths = world.compute_on_rank0(lambda: find_and_check_seed_runs(home, config))
    for position, seed in enumerate(numbers, 1):
        path = str(home / f"seed-{seed}")
        print(f"seed {seed}, {position} of {len(numbers)}", flush=True)
        if path in old_paths:
            changed = {name: flags[name] for name in flags.keys() & LATER}
            spec = make_run_spec(changed, resume=path)
        else:
            spec = make_run_spec(flags | {"seed": seed}, args.config, run_dir=path)
        try:
            train_to_end(spec, loop, stop_if_hopeless=not args.no_look)
        except SystemExit:
            print(
                "to continue with the remaining seeds, run the same command with --run-dir "
                f"{shlex.quote(str(home))}",
                file=sys.stderr,
            )
            raise

    if world.is_first():
        groups = seeds.load_seed_groups([home])
        for line in seeds.describe_spreads_and_differences(groups):
            print_line(line)
        print(f"page: {page.write_page(home)}")
    return home


def find_and_check_seed_runs(common_dir: Path, config: Config) -> list[str]:
    """
    The paths of all runs in the subdirectories `seed-N` of a common directory.

    Raises ValueError if a setting of a run differs from `config`, except for the seed and settings
    that a resumed run may change.
    """
    paths = sorted(path.parent for path in common_dir.glob("seed-*/config.yaml"))
    for path in paths:
        settings = run_files.load_settings(str(path))
        for name, value in config.to_flags().items():
            is_compared = name != "seed" and not SETTINGS[name].later
            is_set = value not in (None, "auto")
            if is_compared and is_set and settings.get(name) != value:
                raise ValueError(
                    f"the run {path} has {flag_of(name)} {settings.get(name)}, not {value}; use "
                    "another --run-dir"
                )
    return [str(path) for path in paths]
