"""
Calls the callbacks of a Python program at the events of a run.

The events have the same names as in Hugging Face's trainers. A callback is an object with any of
the methods in EVENTS. Each method is called as `on_step_end(args, state, control, **kwargs)`, so a
`transformers.TrainerCallback` works too.

This file does not cover experiment trackers (trackers.py).
"""

import contextlib
import inspect
from collections.abc import Generator, Iterable
from types import SimpleNamespace
from typing import Any

from prompts.examples import did_you_mean
from reporting.console import print_line

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_step_begin",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
    "on_train_end",
)
# Events of Hugging Face's trainers that do not occur in a run -> the most similar event here.
ABSENT_EVENTS = {
    "on_epoch_begin": "on_step_begin",
    "on_epoch_end": "on_step_end",
    "on_pre_optimizer_step": "on_step_begin",
    "on_optimizer_step": "on_step_end",
    "on_substep_end": "on_step_end",
    "on_predict": "on_evaluate",
    "on_prediction_step": "on_evaluate",
    "on_push_begin": "on_save",
}
BASE_MODULE = "transformers.trainer_callback"  # the module of the class TrainerCallback

Figures = dict[str, Any]


def instantiate_and_check_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """
    Checks the callbacks, and returns them with an instance in place of each class.

    Raises ValueError if a callback has no method in EVENTS, or a method for an unknown event.
    """
    checked = []
    for callback in callbacks:
        instance = callback() if inspect.isclass(callback) else callback
        name = type(instance).__name__
        own = [method for method in _own_event_methods(instance) if method not in EVENTS]
        if own:
            advice = did_you_mean(own[0], EVENTS)
            if own[0] in ABSENT_EVENTS:
                advice = f"; use {ABSENT_EVENTS[own[0]]}"
            raise ValueError(
                f"the callback {name} has a method {own[0]}, which is never called{advice}; the "
                f"events are {', '.join(EVENTS)}"
            )
        if not any(callable(getattr(instance, event, None)) for event in EVENTS):
            raise ValueError(
                f"the callback {name} has none of the methods {', '.join(EVENTS)}; add one"
            )
        checked.append(instance)
    return checked


def _own_event_methods(callback: Any) -> list[str]:
    """The names of a callback's methods `on_…`, except those inherited from TrainerCallback."""
    methods = []
    for name in dir(callback):
        method = getattr(callback, name, None)
        is_own = getattr(method, "__module__", None) != BASE_MODULE
        if name.startswith("on_") and callable(method) and is_own:
            methods.append(name)
    return methods


class CallbackCaller:
    """Calls the callbacks of a run, once for each new step, evaluation and checkpoint."""

    def __init__(self, run: Any, callbacks: Iterable[Any]):
        """run: a `run.Run`."""
        self.run = run
        self.callbacks = instantiate_and_check_callbacks(callbacks)
        self.state = SimpleNamespace(
            global_step=run.step,
            max_steps=run.config.optimizer.steps,
            log_history=list(run.journal.steps),
        )
        self.control = SimpleNamespace(
            should_training_stop=False, should_save=False, should_evaluate=False, should_log=False
        )
        self.num_evaluations = len(run.journal.evaluations)
        self.saved_step = run.saved_step

    def call(self, event: str, **values: Any) -> None:
        """Calls the method named `event` of each callback that has it."""
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(
                    self.run.config,
                    self.state,
                    self.control,
                    model=self.run.model,
                    processing_class=self.run.tokenizer,
                    **values,
                )

    def call_on_evaluate_and_on_save_if_new(self) -> None:
        """Calls `on_evaluate` for each new evaluation, and `on_save` after a new checkpoint."""
        evaluations = self.run.journal.evaluations
        new = evaluations[self.num_evaluations :]
        self.num_evaluations = len(evaluations)
        for record in new:
            self.call("on_evaluate", metrics=record)
        if self.run.saved_step != self.saved_step:
            self.saved_step = self.run.saved_step
            self.call("on_save")

    def evaluate_and_save_if_asked(self) -> None:
        """Evaluates the run if `control.should_evaluate`, and saves it if `control.should_save`."""
        evaluations = self.run.journal.evaluations
        is_evaluated = bool(evaluations) and evaluations[-1]["step"] == self.run.step
        if self.control.should_evaluate and not is_evaluated:
            self.run.evaluate()
        if self.control.should_save and self.run.saved_step != self.run.step:
            self.run.save()
        self.control.should_evaluate = False
        self.control.should_save = False
        self.call_on_evaluate_and_on_save_if_new()


def train_with_callbacks(
    caller: CallbackCaller, steps: Generator[Figures, None, None]
) -> Generator[Figures, None, None]:
    """
    Yields the metrics of each step in `steps`, and calls the callbacks in between.

    If a callback sets `control.should_training_stop`, the run is saved and stops.
    """
    run = caller.run
    state = caller.state
    caller.control.should_training_stop = False
    caller.call("on_train_begin")
    with contextlib.closing(steps):
        if run.step < state.max_steps:
            caller.call("on_step_begin")
        for figures in steps:
            state.global_step = run.step
            state.log_history.append(figures)
            caller.call("on_step_end")
            caller.call("on_log", logs=figures)
            caller.call_on_evaluate_and_on_save_if_new()
            caller.evaluate_and_save_if_asked()
            yield figures
            if caller.control.should_training_stop and run.step < state.max_steps:
                print_line(f"a callback stopped training after step {run.step}")
                break
            if run.step < state.max_steps:
                caller.call("on_step_begin")
    caller.call_on_evaluate_and_on_save_if_new()
    caller.call("on_train_end")
