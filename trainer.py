"""
How a run starts and stops, from Python or from the command line, with one seed or several.

Users import `Trainer` from train.py, which also has the loop that `run_steps` runs. This file does
not cover what a run holds and saves (run.py), where settings come from (settings/), or what they
mean (config.py).
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
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sampler
from config import SETTINGS, Config
from disk import checkpoint, model_choice, places, run_files
from flags import flag_of, os_error_line, parse_setting
from forecast import trial
from machine import link, memory, world
from machine.output import guard_output
from prompts import chat_template, data
from reporting import trackers
from reporting.console import console_columns, print_line, print_warning
from reporting.journal import evaluation_is_due
from rewards import functions
from run import GrpoRun, SftRun, make_run
from settings.sources import (
    LATER,
    command_line,
    files_of,
    given_settings,
    refuse_unknown,
    resolve_settings,
    to_yaml,
)

# the type of `train.train`, which runs a run's steps and yields each step's figures
Loop = Callable[[Any], Iterator[dict[str, Any]]]


# ---- what a run is made from


def settings_from_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """
    The settings in the form that flags have.

    A function becomes the name by which it can be imported, and rows become a file in the cache.
    """

    def flag_value(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [flag_value(element) for element in value]
        if callable(value):
            return functions.spec_of(value)
        if isinstance(value, Path):
            return str(value)
        return value

    refuse_unknown(settings)
    for name in ("data", "eval_data"):
        if not isinstance(settings.get(name, ""), (str, Path, type(None))):
            settings[name], notes = data.cache_rows(settings[name])
            for line in notes:
                print_line(line)
    return {name: flag_value(value) for name, value in settings.items()}


class RunSpec(NamedTuple):
    """The description of a run to start or to resume."""

    config: Config
    state: checkpoint.State | None  # the checkpoint to resume from
    path: str  # the run's directory
    run_dir: str | None  # the directory that the user named
    allow_changes: bool
    flags: dict[str, Any]

    @property
    def is_finished(self) -> bool:
        """Whether all steps and the last evaluation are done."""
        if self.state is None or self.state.step < self.config.optimizer.steps:
            return False
        evaluations = run_files.JsonLines(Path(self.path) / "eval.jsonl").read()
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
    The settings, the checkpoint to resume from, and the directory of the run.

    It creates no directory. Rank 0 reads the files, and the other ranks get the result from it.
    """

    def read_files() -> list[Any]:
        config, choice = resolve_settings(flags, recipe, resume, model_choice.choose_model)
        trackers.check_trackers(config.records.report_to)
        print_line(choice)
        settings = config.to_flags()
        if resume is None:
            path = run_files.choose_run_dir(config.data.task, run_dir)
            return [settings, None, str(path)]
        return [settings, load_checkpoint(Path(resume), config, allow_changes), resume]

    settings, state, path = world.on_rank0(read_files)
    if state:
        state = checkpoint.State(*state)
    config = Config.from_flags(**settings)
    return RunSpec(config, state, path, run_dir, allow_changes, flags)


def load_checkpoint(path: Path, config: Config, allow_changes: bool) -> checkpoint.State:
    """Locks a run's directory, loads its newest checkpoint, and checks it against the settings."""
    settings = config.to_flags()
    run_files.acquire(path)
    state = checkpoint.load(path)
    named_files = files_of(settings)  # a flag may name a file's new location
    state = checkpoint.relocate_state(state, places.find_moves(path, named_files))
    fixed = {name: value for name, value in settings.items() if not SETTINGS[name].later}
    checkpoint.check_changes(path, state, fixed, allow_changes)
    checkpoint.publish(path, state)  # a killed process may not have reached this call
    return state


def open_run(spec: RunSpec) -> GrpoRun | SftRun:
    """
    Makes the run, restores its checkpoint, and opens its directory and logs.

    Raises a one-line ValueError for a user's mistake; a new run then leaves no directory behind.
    """
    if not gc.get_freeze_count():
        # Freeze once, before a model exists: otherwise each garbage collection would scan all
        # imported modules.
        gc.freeze()
    state = spec.state
    run = make_run(spec.config, Path(spec.path))
    if state:
        run.restore(state)
        if "rollout_batch_size" in spec.flags:
            # the flag may exceed the reduced size that the checkpoint recorded
            run.batch_size.rows = run.sizes.rollout_batch_size
    run.refuse_too_large()  # after restoring, because a checkpoint may have reduced the sizes
    if state:
        # The caller holds `spec`: without this, the checkpoint's copy of the master weights would
        # stay in memory for the whole run.
        state.trainable.clear()
        state.optimizer.clear()

    # created only after everything has loaded, so that a user's mistake leaves no directory behind
    run.dir = Path(world.on_rank0(lambda: prepare_directory(run, spec)))
    run.holds_lock = True  # until the loop ends
    run.open()
    num_trainable = sum(array.size for array in run.learner.trainable.values())
    print_line(f"run: {run.dir}, {num_trainable:,} trainable parameters")
    print_line(run.memory)
    print_line(console_columns(run.config))
    return run


def prepare_directory(run: GrpoRun | SftRun, spec: RunSpec) -> str:
    """
    Creates a new run's directory, or writes a resumed run's settings into its existing directory.

    Returns the directory's path.
    """
    state = spec.state
    settings_text = to_yaml(run.config, run.sizes)
    files = files_of(run.config.to_flags())
    if not state:
        return str(run_files.make_run_dir(settings_text, run.dir, spec.run_dir, files))

    checkpoint.check_changes(run.dir, state, run.sources, spec.allow_changes)
    for name, value in run.config.to_flags(run.sizes).items():
        old_value = state.extra["settings"].get(name, value)
        if value != old_value:
            print_line(f"after step {state.step}: {flag_of(name)} {value} (was {old_value!r})")
    run_files.write_settings(settings_text, run.dir, files)
    return str(run.dir)


# ---- what a run from Python does


def run_steps(
    run: GrpoRun | SftRun, loop: Loop, *, stop_if_hopeless: bool = False
) -> Generator[dict[str, Any], None, None]:
    """
    Runs the loop, yields each step's figures, and prints a summary at the end.

    If the caller leaves the loop early, the run is saved. stop_if_hopeless: see `Trainer.steps`.
    """
    if not run.holds_lock and world.is_first():
        run_files.acquire(run.dir)
    first_steps: list[dict[str, Any]] = []
    try:
        with guard_output(is_log=True), with_live_display(run), save_on_interrupt(run):
            for figures in loop(run):
                yield figures
                if stop_if_hopeless and len(first_steps) < trial.TRY_STEPS:
                    first_steps.append(figures)
                    refuse_hopeless(run, first_steps)
    except GeneratorExit:
        run.save()
        print_line(f"saved after step {run.step}: {run.dir}")
        raise
    finally:
        run_files.release(run.dir)
        run.holds_lock = False
    if world.is_first():
        with guard_output(is_log=True):
            run.journal.print_summary()


def refuse_hopeless(run: GrpoRun | SftRun, first_steps: list[dict[str, Any]]) -> None:
    """Raises ValueError, which says what to change, if the first steps show no signal."""
    evaluation_seconds = 0.0
    if run.journal.evaluations:
        evaluation_seconds = run.journal.evaluations[0]["eval/s"]
    advice = world.on_rank0(
        lambda: trial.explain_hopeless(run.config, first_steps, evaluation_seconds, run.dir)
    )
    if advice:
        raise ValueError(
            f"no group of the first {len(first_steps)} steps has a signal, so the run learns "
            f"nothing: {advice}; --no-look goes on all the same"
        )


def sample_completions(
    run: GrpoRun | SftRun, prompts: Sequence[Any], n: int, temp: float | None
) -> list[list[str]]:
    """`n` completions of each prompt; see `Trainer.sample`. temp: None means the run's --temp."""
    settings = run.config.sampling
    if getattr(run, "toolbox", None):
        command = command_line(run.config.to_flags(), "chat.py")
        raise ValueError(
            "a run with tools answers in turns, which this cannot sample; use "
            f"{command} --run {run.dir} --prompt TEXT"
        )
    temperature = settings.temp if temp is None else temp
    params = run.sampling._replace(temperature=temperature)
    if n < 1 or not 0 <= temperature < math.inf:
        raise ValueError(
            f"n is {n} and temp {temperature}; n must be at least 1, temp at least 0 and finite"
        )

    is_one_text = isinstance(prompts, str)
    if is_one_text or isinstance(next(iter(prompts), None), dict):
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


# ---- how a run is shown and stopped


@contextlib.contextmanager
def with_live_display(run: Any) -> Iterator[None]:
    """
    Keeps a run's live status line, page and trackers up to date inside the block.

    At the end, the page is written last.
    """
    from reporting import page  # imported here because nothing else needs a page

    if world.is_first():
        run.report = page.LivePage(run.dir, print_warning)
    try:
        with run.journal:
            yield
    finally:
        # a user who does not want to wait for the page may press Ctrl-C
        with contextlib.suppress(KeyboardInterrupt):
            if run.report is not None:
                run.report.update(at_the_end=True)


@contextlib.contextmanager
def save_on_interrupt(run: Any) -> Iterator[None]:
    """
    Saves the run after its last complete step on Ctrl-C, SIGTERM, an error or a lack of memory.

    A message says how to continue. The run keeps no second copy of all weights, because that would
    double the memory. So a Ctrl-C takes effect only after the step that is changing the state. A
    second Ctrl-C ends the run at once, and then only the newest checkpoint is left. With adapters,
    a step that fails halfway is undone.

    If there are several ranks, only the first saves. Raises ValueError if the run could continue
    with less memory or after the user corrects a mistake, and OSError if the disk failed.
    """

    def on_signal(number: int, *_: object) -> None:
        if run.is_whole or run.stopping:
            link.raise_interrupt(number)
        run.stopping = True
        if number == signal.SIGINT:
            print_warning("\nfinishing this step; press Ctrl-C again to abandon it")

    run.stopping = False
    old_handlers = {number: signal.signal(number, on_signal) for number in link.ending_signals()}
    try:
        yield
    except run_files.DirectoryReplaced:  # nothing may be saved in that directory
        raise
    except OSError as error:
        advice = ""
        if error.errno in (None, errno.ENOSPC, errno.EDQUOT):  # MLX gives no error number
            advice = "free some space and "
        newest = _explain_newest_checkpoint(run, error, advice)
        raise OSError(f"{os_error_line(error)}; {newest}") from error
    except (KeyboardInterrupt, Exception) as error:
        for number in old_handlers:
            # another Ctrl-C must not interrupt the saving of the run
            signal.signal(number, signal.SIG_IGN)
        if not world.is_first():
            if memory.should_try_smaller(error):
                raise ValueError(str(error)) from error
            raise
        memory.drain_gpu()
        run.restore_last_step()
        message = save_after_error(run, error)
        if isinstance(error, ValueError) or memory.should_try_smaller(error):
            raise ValueError(message) from error
        print_warning(f"\n{message}")
        raise  # a bug in Gwen or in MLX ends with its traceback
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def save_after_error(run: Any, error: BaseException) -> str:
    """
    Saves a run that stopped, unless it stopped inside a step.

    Returns a message that says what happened and how to continue. Raises OSError if the run cannot
    be saved.
    """
    cause = describe_cause(error)
    if not run.is_whole:
        lost_step = run.boundary[0] + 1
        newest = _explain_newest_checkpoint(run, error)
        return f"{cause}step {lost_step} is lost; {newest}"

    try:
        run.save()
    except (OSError, RuntimeError) as failure:
        newest = _explain_newest_checkpoint(run, error)
        raise OSError(
            f"{cause}step {run.step} could not be saved: {failure}; {newest}"
        ) from failure
    how_to_continue = _resume_command(run, error)
    if cause:
        return f"{cause}saved after step {run.step}, {how_to_continue}"
    return f"stopped after step {run.step}; {how_to_continue}"


def describe_cause(error: BaseException) -> str:
    """The cause of a run's stop, followed by "; "; "" for Ctrl-C."""
    if memory.is_watchdog_error(error):
        return (
            "macOS stopped the GPU because its work held up the display; let the display sleep "
            "while it trains (pmset displaysleepnow), or let less be done at once; "
        )
    if isinstance(error, KeyboardInterrupt):
        return ""
    text = str(error) or type(error).__name__
    return f"{text}; "


def _resume_command(run: Any, error: BaseException) -> str:
    """
    The command that continues the run, or that starts it over if nothing was saved.

    If memory ran out, the command sets a size smaller than the one that failed.
    """
    smaller_flag = ""
    # a ValueError about memory comes from the user's reward function
    if memory.should_try_smaller(error) and not isinstance(error, ValueError):
        smaller_flag = _choose_smaller(run, error)
        if not smaller_flag:
            return "start over with a smaller model or a lower --max-tokens"
        smaller_flag = f" {smaller_flag}"

    is_saved = bool(checkpoint.saved_checkpoints(run.dir))
    flags = run.config.to_flags()
    if functions.names_functions_of_this_program(flags):
        if is_saved:
            return f"continue in this program with: Trainer.resume({str(run.dir)!r})"
        return "start over"
    command = command_line(flags)
    if is_saved:
        return f"continue with: {command} --resume {shlex.quote(str(run.dir))}{smaller_flag}"
    config_path = shlex.quote(str(run.dir / "config.yaml"))
    return f"start over with: {command} --config {config_path}{smaller_flag}"


def _choose_smaller(run: Any, error: BaseException) -> str:
    """The flag that makes the failed phase need less of the GPU; "" if no such flag is left."""
    phase = run.journal.phase
    sampling = run.config.sampling
    is_sampled = run.config.objective.loss_type != "sft"
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
    # recomputing layers saves memory, but not the GPU's time
    has_layers_left = run.sizes.checkpoint_layers < run.model.config.num_hidden_layers
    if has_layers_left and memory.is_out_of_memory(error):
        return "--checkpoint-layers on"
    return ""


def _explain_newest_checkpoint(run: Any, error: BaseException, advice: str = "") -> str:
    """
    A text that names a run's newest checkpoint after a stop inside a step, and how to continue.

    advice: what the user should do before running the command.
    """
    saved = checkpoint.saved_checkpoints(run.dir)
    newest = f"nothing was saved in {run.dir}"
    if saved:
        newest = f"{saved[-1].name} is intact"
    return f"{newest}, {advice}{_resume_command(run, error)}"


# ---- the command


def run_command(args: argparse.Namespace, loop: Loop) -> None:
    """
    Does what the flags of `train.py` say.

    If there are several ranks, only the first reads and writes files.
    """
    flags = given_settings(args)
    if args.allow_changes and not args.resume:
        raise ValueError("--allow-changes works with --resume only; name the run with --resume")
    if args.resume and args.run_dir:
        raise ValueError(
            f"--run-dir {args.run_dir}: a resumed run stays in its directory; leave out --run-dir "
            "or --resume"
        )
    if args.from_trl:
        print_converted_recipe(args.from_trl, flags)
        return

    resume = args.resume
    if resume is True:
        steps = parse_setting(SETTINGS["steps"], args.steps) if args.steps else None
        resume = world.on_rank0(lambda: checkpoint.newest_unfinished(steps))
    if args.print_config:
        config, choice = resolve_settings(flags, args.config, resume, model_choice.choose_model)
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
                "--seeds does not go with --resume; to continue seeds, repeat their command with "
                "its --run-dir"
            )
        directory = train_seeds(args, flags, loop)

    report = directory / "report.html"
    if args.open and world.is_first() and report.is_file():
        from reporting import page

        page.open_page(report)


def print_converted_recipe(path: str, flags: dict[str, Any]) -> None:
    """Prints a file's TRL settings as a recipe. Raises ValueError if other settings are given."""
    from settings import from_trl

    recipe = from_trl.convert_recipe(path)
    if flags:
        names = ", ".join(map(flag_of, flags))
        raise ValueError(
            f"--from-trl goes alone; write what it prints to FILE, and set {names} with "
            "--config FILE"
        )
    print(recipe, end="")


def keep_mac_awake() -> None:
    """
    Keeps a Mac from sleeping until this process ends.

    The display may sleep; while it does, macOS does not stop work that occupies the GPU for long.
    """
    command = ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
    # It gets a session of its own, so that Ctrl-C does not end it: the run still saves after that.
    subprocess.Popen(command, start_new_session=True)


def train_to_end(spec: RunSpec, loop: Loop, *, stop_if_hopeless: bool) -> Path:
    """
    Trains a run to its last step, unless it is finished. Returns its directory.

    stop_if_hopeless: stop a new run if its first steps show no signal.
    """
    if world.on_rank0(lambda: spec.is_finished):
        num_done = spec.state.step if spec.state else 0
        num_steps = spec.config.optimizer.steps
        print(f"{spec.path} is finished: {num_done} of {num_steps} steps are done", flush=True)
        return Path(spec.path)

    is_new = spec.state is None
    run = open_run(spec)
    try:
        for _ in run_steps(run, loop, stop_if_hopeless=stop_if_hopeless and is_new):
            pass
    except KeyboardInterrupt:  # rank 0 has said how to continue
        if not world.is_first():
            raise
        sys.exit(130)
    return run.dir


def train_seeds(args: argparse.Namespace, flags: dict[str, Any], loop: Loop) -> Path:
    """
    Trains one run per seed, each in a `seed-N` directory inside one common directory.

    Continues the runs that the common directory already holds. Writes a page about all seeds.
    Returns the common directory.
    """
    from reporting import page, seeds

    config, _ = resolve_settings(flags, args.config, None, model_choice.choose_model)
    first = config.sampling.seed
    numbers = args.seeds if isinstance(args.seeds, list) else range(first, first + args.seeds)

    def choose_home() -> str:
        return args.run_dir or str(run_files.choose_run_dir(config.data.task, None))

    home = Path(world.on_rank0(choose_home))
    if (home / "config.yaml").is_file():
        raise ValueError(f"--run-dir {home} is one run; give --seeds another directory")
    old_paths = world.on_rank0(lambda: find_seed_runs(home, config))
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
                "continue the remaining seeds with: the same command and --run-dir "
                f"{shlex.quote(str(home))}",
                file=sys.stderr,
            )
            raise

    if world.is_first():
        groups = seeds.load_seed_groups([home])
        print(*seeds.describe_seed_groups(groups), sep="\n")
        print(f"page: {page.write_page(home)}")
    return home


def find_seed_runs(home: Path, config: Config) -> list[str]:
    """
    The paths of the seeds' runs in a directory.

    Raises ValueError if one has different settings, other than its seed or its sizes.
    """
    paths = sorted(path.parent for path in home.glob("seed-*/config.yaml"))
    for path in paths:
        settings = run_files.load_settings(str(path))
        for name, value in config.to_flags().items():
            is_compared = name != "seed" and not SETTINGS[name].later
            is_set = value not in (None, "auto")
            if is_compared and is_set and settings.get(name) != value:
                raise ValueError(
                    f"{path} has {flag_of(name)} {settings.get(name)}, not {value}; give another "
                    "--run-dir"
                )
    return [str(path) for path in paths]
