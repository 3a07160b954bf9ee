"""
A run that is stopped, by Ctrl-C, a signal, an error or a lack of memory: saved after its last whole step.

Left out: what is saved (run.py, disk/checkpoint.py).
"""

import contextlib
import errno
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from typing import Any

from disk import checkpoint, run_files
from machine import memory, world
from reporting.console import warn


@contextlib.contextmanager
def stoppable(run: Any) -> Iterator[None]:
    """
    On Ctrl-C, SIGTERM, an error or a lack of memory, saves the run after its last whole step and says how to continue.

    No copy of all weights exists: it would double the memory. So Ctrl-C waits while a step changes the state; a second
    Ctrl-C does not wait, and only the newest checkpoint is left. Of several machines only the first does so; where
    another one spoils a step of adapters, it returns to the one before.
    """

    def on_ctrl_c(number: int, *_: object) -> None:
        if number == signal.SIGHUP:  # the terminal is gone, and a line to it would be an error
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        if run.is_whole or run.stopping:
            world.interrupt(number)
        run.stopping = True
        if number == signal.SIGINT:
            warn("\nfinishing this step; press Ctrl-C again to abandon it")

    run.stopping = False
    before = {number: signal.signal(number, on_ctrl_c) for number in world.endings()}
    try:
        yield
    except run_files.Replaced:  # nothing may be saved there
        raise
    except OSError as error:
        is_full = error.errno in (None, errno.ENOSPC, errno.EDQUOT)  # MLX gives no number
        raise OSError(f"{error}; {_newest(run, error, 'free some space and ' if is_full else '')}") from error
    except (KeyboardInterrupt, Exception) as error:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # an impatient Ctrl-C must not end what saves the run
        if not world.is_first():
            if memory.is_too_much(error):
                raise ValueError(str(error)) from error
            raise
        memory.drain()
        run.go_back()
        what = "" if isinstance(error, KeyboardInterrupt) else f"{str(error) or type(error).__name__}; "
        if memory.is_watchdog(error):
            what = (
                "macOS stopped the GPU because its work held up the display; let the display sleep while it trains "
                "(pmset displaysleepnow), or let less be done at once; "
            )
        if run.is_whole:
            try:
                run.save()
            except (OSError, RuntimeError) as failure:
                said = f"step {run.step} could not be saved: {failure}"
                raise OSError(f"{what}{said}; {_newest(run, error)}") from failure
            said = f"{what}saved after step {run.step}, " if what else f"stopped after step {run.step}; "
            said += _go_on(run, error)
        else:
            said = f"{what}step {run.boundary[0] + 1} is lost; {_newest(run, error)}"
        if isinstance(error, ValueError) or memory.is_too_much(error):
            raise ValueError(said) from error
        warn(f"\n{said}")
        raise  # after a bug of ours or of MLX's with its traceback
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _go_on(run: Any, error: BaseException) -> str:
    """
    The command that continues the run, or starts over if nothing was saved.

    If memory ran out, the command asks for less than what rollouts, judges and updates had backed off to.
    """
    less = ""
    if memory.is_too_much(error) and not isinstance(error, ValueError):  # a ValueError is the user's reward's
        budget = run.sizes.train_token_budget // 2
        if budget < run.longest and run.sizes.checkpoint_layers == run.model.config.num_hidden_layers:
            return "start over with a smaller model or a lower --max-tokens"
        less = f" --train-token-budget {budget}" if budget >= run.longest else " --checkpoint-layers on"
    if checkpoint.saved(run.dir):
        return f"continue with: uv run train.py --resume {shlex.quote(str(run.dir))}{less}"
    return f"start over with: uv run train.py --config {shlex.quote(str(run.dir / 'config.yaml'))}{less}"


def _newest(run: Any, error: BaseException, first: str = "") -> str:
    """Names the newest checkpoint of a run that stopped inside a step, and how to continue or start over."""
    saved = checkpoint.saved(run.dir)
    state = f"{saved[-1].name} is intact" if saved else f"nothing was saved in {run.dir}"
    return f"{state}, {first}{_go_on(run, error)}"
