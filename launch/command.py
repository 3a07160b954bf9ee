"""
The command of train.py: one run, or one for each of several seeds.

Left out: what its flags mean (config.py, settings/).
"""

import argparse
import contextlib
import functools
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import gwen
import preflight
from config import SETTINGS
from disk import checkpoint, run_files
from flags import flag_of
from launch.begin import Begun, begin
from launch.trainer import Trainer
from machine import memory, world
from settings.sources import as_yaml, given, resolve


def command(args: argparse.Namespace, trainer: type[Trainer]) -> None:
    """The whole of it. Of several machines the first reads and writes files; the others follow it."""
    flags = given(args)
    if args.allow_changes and not args.resume:
        raise ValueError("--allow-changes is for a run that goes on; name it with --resume")
    if args.resume and args.run_dir:
        raise ValueError(f"--run-dir {args.run_dir}: a resumed run stays in its directory; leave one of them out")
    resume = args.resume
    if resume is True:
        resume = world.first(lambda: checkpoint.newest_unfinished(args.steps))
    if args.print_config:
        config, choice = resolve(flags, args.config, resume, gwen.choose_model)
        print(choice, file=sys.stderr, flush=True)
        print(as_yaml(config), end="")
        return
    if args.wired_limit:
        os.environ[memory.WIRED_LIMIT] = args.wired_limit
    if not args.let_sleep:
        from machine import power

        power.keep_awake()
    if args.seeds is None:
        begun = begin(flags, args.config, resume=resume, run_dir=args.run_dir, allow_changes=args.allow_changes)
        written = complete(begun, trainer, looks=not args.no_look) / "report.html"
    else:
        if resume:
            raise ValueError("--seeds with --resume: to go on with seeds, repeat their command with its --run-dir")
        written = train_seeds(args, flags, trainer) / "report.html"
    if args.open and world.is_first() and written.is_file():
        from reporting import page

        page.show(written)


def complete(begun: Begun, trainer: type[Trainer], looks: bool) -> Path:
    """Trains a run to its end, unless it is there; its directory. looks: whether a new one without signal ends."""
    if world.first(lambda: begun.is_finished):
        if world.is_first():
            said = f"{begun.state.step} of {begun.config.optimizer.steps} steps are done" if begun.state else ""
            print(f"{begun.path} is finished: {said}", flush=True)
        return Path(begun.path)
    trained = trainer(begun)
    try:
        fit(trained, looks and begun.state is None)
    except KeyboardInterrupt:  # which the first machine has told
        if not world.is_first():
            raise
        sys.exit(130)
    if world.is_first():
        trained.run.journal.print_summary()
    return trained.dir


def fit(trained: Trainer, looks: bool) -> None:
    """
    Trains to the last step. looks: raises ValueError, with what to change, once the first steps of a long run showed
    no signal; they are steps like any others, so that a look costs nothing.
    """
    seen: list[dict[str, Any]] = []

    def hopeless() -> str:
        each = next((one["eval/s"] for one in trained.run.journal.evaluations), 0.0)
        return preflight.hopeless(trained.config, seen, each, trained.dir)

    with contextlib.closing(trained.steps()) as steps:
        for figures in steps:
            if not looks or len(seen) == preflight.TRY_STEPS:
                continue
            seen.append(figures)
            if change := world.first(hopeless):
                break
        else:
            return
    again = f"uv run train.py --resume {shlex.quote(str(trained.dir))} goes on all the same, --no-look from the start"
    raise ValueError(f"no group of the first {len(seen)} steps has a signal, which teaches nothing: {change}; {again}")


def train_seeds(args: argparse.Namespace, flags: dict[str, Any], trainer: type[Trainer]) -> Path:
    """
    Trains seed after seed, each in its `seed-N` of one directory, which is returned with a page of all of them. Where
    the directory holds some of them, it goes on.
    """
    from reporting import page, seeds

    config, _ = resolve(flags, args.config, None, gwen.choose_model)
    first = config.sampling.seed
    numbers = args.seeds if isinstance(args.seeds, list) else range(first, first + args.seeds)
    home = Path(world.first(lambda: args.run_dir or str(run_files.choose_run_dir(config.data.task, None))))
    if (home / "config.yaml").is_file():
        raise ValueError(f"--run-dir {home} is one run; give --seeds another directory")
    common = {name: value for name, value in config.flat().items() if name != "seed"}
    for path in world.first(lambda: sorted(map(str, home.glob("seed-*")))):
        is_a_run_of(path, common)  # or it says what differs
    for number, seed in enumerate(numbers, 1):
        path = str(home / f"seed-{seed}")
        if world.is_first():
            print(f"seed {seed}, {number} of {len(numbers)}", flush=True)
        if world.first(functools.partial(is_a_run_of, path, config.but(seed=seed).flat())):
            begun = begin({name: value for name, value in flags.items() if SETTINGS[name].later}, resume=path)
        else:
            begun = begin(flags | {"seed": seed}, args.config, run_dir=path)
        try:
            complete(begun, trainer, looks=not args.no_look)
        except SystemExit:
            again = f"the same command, with --run-dir {shlex.quote(str(home))}"
            print(f"the seeds that are left: {again}", file=sys.stderr)
            raise
    if world.is_first():
        print(*seeds.lines(seeds.load([home])), f"page: {page.write(home)}", sep="\n")
    return home


def is_a_run_of(path: str, settings: dict[str, Any]) -> bool:
    """Whether a directory holds a run with these settings, sizes aside. ValueError where it holds one with others."""
    if not (Path(path) / "config.yaml").is_file():
        return False
    its = run_files.settings_of(path)
    for name, value in settings.items():
        if value not in (None, "auto") and its.get(name) != value and not SETTINGS[name].later:
            raise ValueError(f"{path} has {flag_of(name)} {its.get(name)}, not {value}; give another --run-dir")
    return True
