"""
How a run begins, from Python or from a command, one seed or several, and what happens when it is stopped.

`train.Trainer` is the one to import: it knows the loop. Left out: the loop (train.py), what a run holds and what is
saved of it (run.py), where settings come from and what they mean (settings/, config.py).
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

import gwen
import preflight
import sampler
from config import SETTINGS, Config
from disk import checkpoint, places, run_files
from flags import flag_of, os_error_line, parse_setting
from machine import link, memory, world
from machine.output import guard_output
from problems import chat_template, data, functions
from reporting import trackers
from reporting.console import console_columns, print_line, print_warning
from reporting.journal import evaluation_is_due
from settings.sources import (
    LATER,
    files_of,
    given_settings,
    refuse_unknown,
    resolve_settings,
    to_yaml,
)
from settings.sources import command_line as command_of

Steps = Iterator[dict[str, Any]]  # the figures of each


# ---- what it begins with


def settings_from_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as flags hold them: a function by its name in its module, rows as a file of the cache."""

    def spelled(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return list(map(spelled, value))
        return (
            functions.spec_of(value)
            if callable(value)
            else str(value)
            if isinstance(value, Path)
            else value
        )

    refuse_unknown(settings)
    for name in ("data", "eval_data"):
        if not isinstance(settings.get(name, ""), (str, Path, type(None))):
            settings[name], notes = data.cache_rows(settings[name])
            for line in notes:
                print_line(line)
    return {key: spelled(value) for key, value in settings.items()}


class RunSpec(NamedTuple):
    """A run that is to be made, or to go on."""

    config: Config
    state: checkpoint.State | None  # to go on from
    path: str  # its directory
    run_dir: str | None  # the directory that was asked for
    allow_changes: bool
    flags: dict[str, Any]

    @property
    def is_finished(self) -> bool:
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
    """The settings, the state to go on from, and the directory of the run, which is not made yet."""

    def read() -> list[Any]:
        config, choice = resolve_settings(flags, recipe, resume, gwen.choose_model)
        trackers.check_trackers(config.records.report_to)
        print_line(choice)
        settings = config.to_flags()
        if resume is None:
            return [settings, None, str(run_files.choose_run_dir(config.data.task, run_dir))]
        path = Path(resume)
        run_files.acquire(path)
        state = checkpoint.load(path)
        named = files_of(config.to_flags())  # a flag may say where a file went
        state = checkpoint.follow(state, places.find_moves(path, named))
        fixed = {name: value for name, value in settings.items() if not SETTINGS[name].later}
        checkpoint.check_changes(path, state, fixed, allow_changes)
        checkpoint.publish(path, state)  # a killed process may not have got this far
        return [settings, state, resume]

    settings, state, path = world.on_rank0(read)
    state = checkpoint.State(*state) if state else None
    return RunSpec(Config.from_flags(**settings), state, path, run_dir, allow_changes, flags)


# ---- a run from Python


class Trainer:
    """
    A run from Python, as in a notebook. `start` and `resume` make one; settings go by the names of their flags.

        trainer = Trainer.start(task="demo", steps=20, reward=my_reward)
        for figures in trainer.steps():
            print(figures["step"], figures["reward/mean"])

    A break or an interrupt ends the loop after a whole step, which is saved; `steps` or `fit` goes on from there.
    """

    config: Config
    dir: Path  # where it is recorded
    model: gwen.Model  # as it is now, with its adapters
    make: Callable[[Config, Path], Any]  # run.py's
    loop: Callable[[Any], Steps]  # train.py's

    def __init__(self, begun: RunSpec):
        """Raises ValueError in one line for what the user got wrong; no directory is left then."""
        if type(self) is Trainer:
            raise ImportError("trainer.Trainer has no loop; write: from train import Trainer")
        config, state, path = begun.config, begun.state, begun.path
        if (
            not gc.get_freeze_count()
        ):  # once, before there is a model: what imports left, which collections looked at
            gc.freeze()
        run = self.run = self.make(config, Path(path))
        if state:
            run.restore(state)
            if (
                "rollout_batch_size" in begun.flags
            ):  # may exceed what the checkpoint had backed off to
                run.batch_size.rows = run.sizes.rollout_batch_size
        run.refuse_too_large()  # with the sizes that a checkpoint has backed off to
        if state:
            state.trainable.clear()  # callers hold `begun`: the old masters would stay for the whole run
            state.optimizer.clear()
        # only after everything has loaded, so that a user's mistake leaves no directory behind
        run.dir = Path(world.on_rank0(lambda: self._make_dir(begun)))
        self.config, self.dir, self.model = run.config, run.dir, run.model
        self._is_owner = True  # until the loop ends
        run.open()
        print_line(
            f"run: {run.dir}, {sum(a.size for a in run.learner.trainable.values()):,} trainable parameters"
        )
        print_line(run.memory)
        print_line(console_columns(run.config))

    def _make_dir(self, begun: RunSpec) -> str:
        """Makes the run's directory, or that of a resumed run ready to go on; returns its path."""
        run, state = self.run, begun.state
        text = to_yaml(run.config, run.sizes)
        files = files_of(run.config.to_flags())
        if not state:
            return str(run_files.make_run_dir(text, run.dir, begun.run_dir, files))
        checkpoint.check_changes(run.dir, state, run.sources, begun.allow_changes)
        for name, value in run.config.to_flags(run.sizes).items():
            if value != (was := state.extra["settings"].get(name, value)):
                print_line(f"after step {state.step}: {flag_of(name)} {value} (was {was!r})")
        run_files.write_settings(text, run.dir, files)
        return str(run.dir)

    @classmethod
    def start(
        cls, recipe: str | None = None, *, run_dir: str | None = None, **settings: Any
    ) -> "Trainer":
        """
        A new run. recipe: YAML of settings, in place of the task's.

        `data` and `eval_data` may be rows as dictionaries, or a table of `datasets` or pandas. `reward` may be a
        function or a list of them. `loss_type` and `advantage` may be functions. A function stands at the top level of
        a notebook or module, where a resumed run finds it again.
        """
        return cls(make_run_spec(settings_from_arguments(settings), recipe, run_dir=run_dir))

    @classmethod
    def resume(
        cls, run_dir: str | Path, *, allow_changes: bool = False, **settings: Any
    ) -> "Trainer":
        """Goes on with a run; allow_changes: though its data, rewards or files changed."""
        return cls(
            make_run_spec(
                settings_from_arguments(settings), resume=str(run_dir), allow_changes=allow_changes
            )
        )

    def steps(self, *, looks: bool = False) -> Generator[dict[str, Any], None, None]:
        """
        Trains, and yields each step's figures, as in `metrics.jsonl`; after the last it prints the verdict.

        looks: raises ValueError, with what to change, once the first steps of a long run showed no signal; they are
        steps like any others, so that a look costs nothing.
        """
        if not self._is_owner and world.is_first():
            run_files.acquire(self.dir)
        seen: list[dict[str, Any]] = []
        try:
            with (
                guard_output(is_log=True),
                with_live_display(self.run),
                save_on_interrupt(self.run),
            ):
                for figures in self.loop(self.run):
                    yield figures
                    if looks and len(seen) < preflight.TRY_STEPS:
                        seen.append(figures)
                        self._refuse_hopeless(seen)
        except GeneratorExit:
            self.save()
            print_line(f"saved after step {self.run.step}: {self.dir}")
            raise
        finally:
            run_files.release(self.dir)
            self._is_owner = False
        if world.is_first():
            with guard_output(is_log=True):
                self.run.journal.print_summary()

    def _refuse_hopeless(self, seen: list[dict[str, Any]]) -> None:
        each = next((one["eval/s"] for one in self.run.journal.evaluations), 0.0)
        if change := world.on_rank0(
            lambda: preflight.explain_hopeless(self.config, seen, each, self.dir)
        ):
            said = f"no group of the first {len(seen)} steps has a signal, which teaches nothing: {change}"
            raise ValueError(f"{said}; --no-look goes on all the same")

    def fit(self, *, looks: bool = False) -> "Trainer":
        """Trains to the last step; looks: see `steps`."""
        for _ in self.steps(looks=looks):
            pass
        return self

    train = fit  # TRL's word

    def save(self) -> None:
        """Saves a checkpoint and the adapter."""
        self.run.save()

    def evaluate(self) -> dict[str, Any]:
        """The figures on what is held out, as in `eval.jsonl`; prints none of them."""
        journal = self.run.journal
        if not journal.evaluations or journal.evaluations[-1]["step"] != self.run.step:
            self.run.evaluate()
        return journal.evaluations[-1]

    def sample(
        self, prompts: Sequence[Any], n: int = 1, *, temp: float | None = None
    ) -> list[list[str]]:
        """
        `n` completions of each prompt, drawn as in training; temp 0: greedily.

        prompts: texts, before which stands what all of training's begin with, or chat messages, as they are; or one.
        """
        run, settings = self.run, self.config.sampling
        if getattr(run, "toolbox", None):
            ask = (
                f"{command_of(self.config.to_flags(), 'sampler.py')} --run {self.dir} --prompt TEXT"
            )
            raise ValueError(f"a run with tools answers in turns: {ask}")
        prompts = (
            [prompts]
            if isinstance(prompts, str) or isinstance(next(iter(prompts), 0), dict)
            else prompts
        )
        asked = [
            [*run.shared_messages, *chat_template.make_messages(one, None)]
            if isinstance(one, str)
            else one
            for one in prompts
        ]
        params = run.sampling._replace(temperature=settings.temp if temp is None else temp)
        if n < 1 or not 0 <= params.temperature < math.inf:
            raise ValueError(
                f"n is {n} and temp {params.temperature}; n must be at least 1, temp at least 0"
            )
        context = run.model.config.max_position_embeddings
        limits: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "context": context,
            "kind": "prompt",
        }
        examples = [{"prompt": prompt} for prompt in asked]
        ids = chat_template.encode_prompts(
            run.tokenizer, examples, thinking=settings.thinking, **limits
        )
        rollout = sampler.rollout(run.model, ids, params, group_size=n, key=settings.seed)
        texts = sampler.decode_texts(run.tokenizer, rollout, run.model.config.end_ids)
        return [texts[first : first + n] for first in range(0, len(texts), n)]


# ---- how it is seen and stopped


@contextlib.contextmanager
def with_live_display(run: Any) -> Iterator[None]:
    """Keeps the live line, the page and the trackers of a run up to date; the page has the last word."""
    from reporting import page  # here: nothing else needs a page

    if world.is_first():
        run.report = page.LivePage(run.dir, print_warning)
    try:
        with run.journal:
            yield
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # of somebody who does not want to wait
            if run.report is not None:
                run.report.update(at_the_end=True)


@contextlib.contextmanager
def save_on_interrupt(run: Any) -> Iterator[None]:
    """
    On Ctrl-C, SIGTERM, an error or a lack of memory, saves the run after its last whole step and says how to continue.

    No copy of all weights exists: it would double the memory. So Ctrl-C waits while a step changes the state; a second
    Ctrl-C does not wait, and only the newest checkpoint is left. Of several machines only the first does so; where
    another one spoils a step of adapters, it returns to the one before.
    """

    def on_ctrl_c(number: int, *_: object) -> None:
        if run.is_whole or run.stopping:
            link.raise_interrupt(number)
        run.stopping = True
        if number == signal.SIGINT:
            print_warning("\nfinishing this step; press Ctrl-C again to abandon it")

    run.stopping = False
    before = {number: signal.signal(number, on_ctrl_c) for number in link.ending_signals()}
    try:
        yield
    except run_files.DirectoryReplaced:  # nothing may be saved there
        raise
    except OSError as error:
        is_full = error.errno in (None, errno.ENOSPC, errno.EDQUOT)  # MLX gives no number
        newest = _explain_newest_checkpoint(run, error, "free some space and " if is_full else "")
        raise OSError(f"{os_error_line(error)}; {newest}") from error
    except (KeyboardInterrupt, Exception) as error:
        for number in before:
            signal.signal(
                number, signal.SIG_IGN
            )  # an impatient Ctrl-C must not end what saves the run
        if not world.is_first():
            if memory.should_try_smaller(error):
                raise ValueError(str(error)) from error
            raise
        memory.drain_gpu()
        run.restore_last_step()
        what = (
            ""
            if isinstance(error, KeyboardInterrupt)
            else f"{str(error) or type(error).__name__}; "
        )
        if memory.is_watchdog_error(error):
            what = (
                "macOS stopped the GPU because its work held up the display; let the display sleep while it trains "
                "(pmset displaysleepnow), or let less be done at once; "
            )
        if run.is_whole:
            try:
                run.save()
            except (OSError, RuntimeError) as failure:
                said = f"step {run.step} could not be saved: {failure}"
                raise OSError(
                    f"{what}{said}; {_explain_newest_checkpoint(run, error)}"
                ) from failure
            said = (
                f"{what}saved after step {run.step}, "
                if what
                else f"stopped after step {run.step}; "
            )
            said += _resume_command(run, error)
        else:
            said = f"{what}step {run.boundary[0] + 1} is lost; {_explain_newest_checkpoint(run, error)}"
        if isinstance(error, ValueError) or memory.should_try_smaller(error):
            raise ValueError(said) from error
        print_warning(f"\n{said}")
        raise  # after a bug of ours or of MLX's with its traceback
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _resume_command(run: Any, error: BaseException) -> str:
    """
    The command that continues the run, or starts over if nothing was saved.

    If memory ran out, the command asks for less than what rollouts, judges and updates had backed off to.
    """
    less = ""
    if memory.should_try_smaller(error) and not isinstance(
        error, ValueError
    ):  # a ValueError is the user's reward's
        if not (smaller := _smaller(run, error)):
            return "start over with a smaller model or a lower --max-tokens"
        less = f" {smaller}"
    how, flag, path, saved = "continue", "--resume", run.dir, checkpoint.saved_checkpoints(run.dir)
    if functions.uses_program_functions(run.config.to_flags()):
        return (
            f"{how} in this program with: Trainer.resume({str(path)!r})" if saved else "start over"
        )
    if not saved:
        how, flag, path = "start over", "--config", run.dir / "config.yaml"
    return f"{how} with: {command_of(run.config.to_flags())} {flag} {shlex.quote(str(path))}{less}"


def _smaller(run: Any, error: BaseException) -> str:
    """The flag with which the phase that failed asks less of the GPU at once; "" where none is left."""
    phase, sampling = run.journal.phase, run.config.sampling
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

    budget = run.sizes.train_token_budget // 2
    if budget >= run.longest:
        return f"--train-token-budget {budget}"
    has_layers_left = run.sizes.checkpoint_layers < run.model.config.num_hidden_layers
    # computing layers again takes less memory, and no less of the GPU's time
    return "--checkpoint-layers on" if has_layers_left and memory.is_out_of_memory(error) else ""


def _explain_newest_checkpoint(run: Any, error: BaseException, first: str = "") -> str:
    """Names the newest checkpoint of a run that stopped inside a step, and how to continue or start over."""
    saved = checkpoint.saved_checkpoints(run.dir)
    state = f"{saved[-1].name} is intact" if saved else f"nothing was saved in {run.dir}"
    return f"{state}, {first}{_resume_command(run, error)}"


# ---- the command


def run_command(args: argparse.Namespace, trainer: type[Trainer]) -> None:
    """The whole of it. Of several machines the first reads and writes files; the others follow it."""
    flags = given_settings(args)
    if args.allow_changes and not args.resume:
        raise ValueError("--allow-changes is for a run that goes on; name it with --resume")
    if args.resume and args.run_dir:
        raise ValueError(
            f"--run-dir {args.run_dir}: a resumed run stays in its directory; leave one of them out"
        )
    if args.from_trl:
        from settings import from_trl

        made = from_trl.convert_recipe(args.from_trl)
        if flags:
            raise ValueError(
                f"--from-trl goes alone; give {', '.join(map(flag_of, flags))} with --config OUR_FILE"
            )
        print(made, end="")
        return
    resume = args.resume
    if resume is True:
        steps = parse_setting(SETTINGS["steps"], args.steps) if args.steps else None
        resume = world.on_rank0(lambda: checkpoint.newest_unfinished(steps))
    if args.print_config:
        config, choice = resolve_settings(flags, args.config, resume, gwen.choose_model)
        print(choice, file=sys.stderr, flush=True)
        print(to_yaml(config), end="")
        return
    if args.wired_limit:
        os.environ[memory.WIRED_LIMIT] = args.wired_limit
    if (
        not args.let_sleep and platform.system() == "Darwin"
    ):  # the display may sleep, and then no watchdog guards it
        # a session of its own: Ctrl-C, after which a run still saves, must not end it
        subprocess.Popen(
            ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())], start_new_session=True
        )
    if args.seeds is None:
        begun = make_run_spec(
            flags,
            args.config,
            resume=resume,
            run_dir=args.run_dir,
            allow_changes=args.allow_changes,
        )
        written = train_to_end(begun, trainer, looks=not args.no_look) / "report.html"
    else:
        if resume:
            raise ValueError(
                "--seeds with --resume: to go on with seeds, repeat their command with its --run-dir"
            )
        written = train_seeds(args, flags, trainer) / "report.html"
    if args.open and world.is_first() and written.is_file():
        from reporting import page

        page.open_page(written)


def train_to_end(begun: RunSpec, trainer: type[Trainer], looks: bool) -> Path:
    """Trains a run to its end, unless it is there; its directory. looks: whether a new one without signal ends."""
    if world.on_rank0(lambda: begun.is_finished):
        said = (
            f"{begun.state.step} of {begun.config.optimizer.steps} steps are done"
            if begun.state
            else ""
        )
        print(f"{begun.path} is finished: {said}", flush=True)
        return Path(begun.path)
    trained = trainer(begun)
    try:
        trained.fit(looks=looks and begun.state is None)
    except KeyboardInterrupt:  # which the first machine has told
        if not world.is_first():
            raise
        sys.exit(130)
    return trained.dir


def train_seeds(args: argparse.Namespace, flags: dict[str, Any], trainer: type[Trainer]) -> Path:
    """
    Trains seed after seed, each in its `seed-N` of one directory, which is returned with a page of all of them. Where
    the directory holds some of them, it goes on.
    """
    from reporting import page, seeds

    config, _ = resolve_settings(flags, args.config, None, gwen.choose_model)
    first = config.sampling.seed
    numbers = args.seeds if isinstance(args.seeds, list) else range(first, first + args.seeds)
    home = Path(
        world.on_rank0(
            lambda: args.run_dir or str(run_files.choose_run_dir(config.data.task, None))
        )
    )
    if (home / "config.yaml").is_file():
        raise ValueError(f"--run-dir {home} is one run; give --seeds another directory")
    there = world.on_rank0(lambda: find_seed_runs(home, config))
    for number, seed in enumerate(numbers, 1):
        path = str(home / f"seed-{seed}")
        print(f"seed {seed}, {number} of {len(numbers)}", flush=True)
        if path in there:
            begun = make_run_spec({name: flags[name] for name in flags.keys() & LATER}, resume=path)
        else:
            begun = make_run_spec(flags | {"seed": seed}, args.config, run_dir=path)
        try:
            train_to_end(begun, trainer, looks=not args.no_look)
        except SystemExit:
            again = f"the same command, with --run-dir {shlex.quote(str(home))}"
            print(f"the seeds that are left: {again}", file=sys.stderr)
            raise
    if world.is_first():
        print(
            *seeds.describe_seed_groups(seeds.load_seed_groups([home])),
            f"page: {page.write_page(home)}",
            sep="\n",
        )
    return home


def find_seed_runs(home: Path, config: Config) -> list[str]:
    """The runs of seeds in a directory. ValueError where one has other settings, its seed and sizes aside."""
    found = sorted(path.parent for path in home.glob("seed-*/config.yaml"))
    for path in found:
        its = run_files.load_settings(str(path))
        for name, value in config.to_flags().items():
            is_set = name != "seed" and value not in (None, "auto") and not SETTINGS[name].later
            if is_set and its.get(name) != value:
                raise ValueError(
                    f"{path} has {flag_of(name)} {its.get(name)}, not {value}; give another --run-dir"
                )
    return list(map(str, found))
