"""
What a run begins with: its settings, its directory, and the state of one that goes on.

Left out: where settings come from (settings/), the run itself (run.py).
"""

from pathlib import Path
from typing import Any, NamedTuple

import gwen
from config import SETTINGS, Config
from disk import checkpoint, run_files
from flags import flag_of
from machine import world
from problems import examples, rewards
from reporting.journal import evaluation_is_due
from settings.sources import as_yaml, joined, refuse_unknown, resolve


def as_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as flags hold them: a function by its name in its module, rows as a file of the cache."""
    for name in ("data", "eval_data"):
        if not isinstance(settings.get(name, ""), (str, Path)):
            settings[name] = examples.keep(settings[name])
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    if (held_out := settings.pop("eval_data", None)) is not None:
        settings["data"] = joined(settings.get("data"), held_out)
    refuse_unknown(settings)
    for name in ("loss_type", "advantage", "env"):
        if callable(settings.get(name)):
            settings[name] = rewards.spec_of(settings[name])
    for name in ("reward", "tools"):
        if (named := settings.get(name)) is not None:
            named = [named] if callable(named) or isinstance(named, str) else named
            settings[name] = [rewards.spec_of(one) if callable(one) else one for one in named]
    return settings


class Begun(NamedTuple):
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


def begin(
    flags: dict[str, Any],
    recipe: str | None = None,
    *,
    resume: str | None = None,
    run_dir: str | None = None,
    allow_changes: bool = False,
) -> Begun:
    """The settings, the state to go on from, and the directory of the run, which is not made yet."""

    def read() -> list[Any]:
        config, choice = resolve(flags, recipe, resume, gwen.choose_model)
        if config.records.report_to:
            from reporting import trackers

            trackers.check(config.records.report_to)
        print(choice, flush=True)
        settings = config.flat()
        if resume is None:
            return [settings, None, str(run_files.choose_run_dir(config.data.task, run_dir))]
        path = Path(resume)
        run_files.own(path)
        state = checkpoint.load(path)
        fixed = {name: value for name, value in settings.items() if not SETTINGS[name].later}
        changed = [*checkpoint.changes(path, state, fixed), *checkpoint.missing_steps(path, state)]
        checkpoint.refuse_changes(path, state, changed, allow_changes)
        checkpoint.publish(path, state)  # a killed process may not have got this far
        return [settings, state, resume]

    settings, state, path = world.first(read)
    state = checkpoint.State(*state) if state else None
    return Begun(Config.of(**settings), state, path, run_dir, allow_changes, flags)


def make_dir(run: Any, begun: Begun) -> str:
    """Makes the run's directory, or that of a resumed run ready to go on; returns its path."""
    state = begun.state
    if not state:
        return str(run_files.make_run_dir(as_yaml(run.config, run.sizes), run.dir, begun.run_dir))
    checkpoint.refuse_changes(run.dir, state, checkpoint.changes(run.dir, state, run.sources), begun.allow_changes)
    for name, value in run.config.flat(run.sizes).items():
        if value != (was := state.extra["settings"].get(name, value)):
            print(f"from step {state.step + 1} on: {flag_of(name)} {value} (was {was!r})", flush=True)
    run_files.write(as_yaml(run.config, run.sizes), run.dir)
    return str(run.dir)
