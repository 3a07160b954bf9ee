"""
What a run left in its directory, for the commands that use it: `--run runs/NAME [--step N]`.

What is left out: writing it, which is in train.py, and going on with it, in checkpoint.py.
"""

from pathlib import Path
from typing import Any

import config
import telemetry


def add_flags(parser: telemetry.Parser) -> None:
    """The flags that name a run and a step of it."""
    parser.add_argument("--run", metavar="DIR", help="a run, whose model, adapter and settings are taken")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="its checkpoint after step N, 0 is before training (default: newest)",
    )


def check(run: str | None, step: int | None, adapter: str | None) -> None:
    """ValueError for flags that contradict each other."""
    if step is not None and run is None:
        raise ValueError(f"--step {step} is a step of a run; name it with --run")
    if run is not None and adapter is not None:
        raise ValueError(f"--adapter {adapter} and --run {run}, which has its own; leave one of them out")


def config_file(run: str) -> Path:
    """The settings of a run. ValueError where there is no run."""
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"--run {run}: no config.yaml there; give the directory of a run")
    return path


def settings_of(run: str) -> dict[str, Any]:
    """The settings of a run by name, as its file has them, for commands that need a few. ValueError without a model."""
    held = config.load_yaml(config_file(run), f"--run {run}: config.yaml")
    if not isinstance(held, dict) or not held.get("model"):
        raise ValueError(f"--run {run}: its config.yaml names no model; give the directory of a run")
    return held


def adapter_of(run: str, step: int | None) -> str | None:
    """
    Where a run's adapter lies: the newest, or that of the checkpoint after `step`; None for 0, before training.

    Raises ValueError where nothing was saved yet, and with the steps that there are.
    """
    if step == 0:
        return None
    folder = Path(run) / "checkpoints"
    path = Path(run) / "adapter" if step is None else folder / f"step-{step:06d}" / "adapter"
    if (path / "adapter_config.json").is_file():
        return str(path)
    saved = [int(name.parent.name.removeprefix("step-")) for name in sorted(folder.glob("step-*/adapter"))]
    if step is None:
        raise ValueError(f"--run {run} has saved no adapter yet; --step 0 is the model before training")
    raise ValueError(f"--step {step}: {run} has the steps {', '.join(map(str, sorted({0, *saved})))}")
