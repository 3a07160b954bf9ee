"""Callbacks of a Python program, and the end of a program that trains."""

import signal
import subprocess
import sys

import pytest
from conftest import ROOT, catch_message
from small_run import SMALL_SETTINGS
from transformers import TrainerCallback

import train
from reporting import callbacks
from train import Trainer

SMALL = SMALL_SETTINGS | {"eval_limit": 2}


class Recorder:
    """Records the events."""

    def __init__(self):
        self.events = []

    def __getattr__(self, name):
        if name not in callbacks.EVENTS:
            raise AttributeError(name)

        def record(args, state, control, *, model, processing_class, logs=None, metrics=None):
            assert args.optimizer.steps == state.max_steps
            assert model
            assert processing_class
            step = (logs or metrics or {}).get("step", state.global_step)
            self.events.append((name.removeprefix("on_"), step))

        return record


def test_callbacks_are_called_for_every_event_in_order(tmp_path):
    recorder = Recorder()
    trainer = Trainer.start(
        steps=2, eval_every=2, run_dir=str(tmp_path / "a"), callbacks=[recorder], **SMALL
    )
    trainer.fit()
    assert recorder.events == [
        ("init_end", 0),
        ("train_begin", 0),
        ("step_begin", 0),
        ("step_end", 1),
        ("log", 1),
        ("evaluate", 0),
        ("step_begin", 1),
        ("step_end", 2),
        ("log", 2),
        ("evaluate", 2),
        ("save", 2),
        ("train_end", 2),
    ]

    recorder = Recorder()
    resumed = Trainer.resume(tmp_path / "a", steps=3, callbacks=[recorder])
    resumed.fit()
    assert ("train_begin", 2) in recorder.events
    assert ("log", 3) in recorder.events
    assert len(resumed.callbacks.state.log_history) == 3


def test_a_callback_can_stop_evaluate_and_save(tmp_path, capsys):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2
            control.should_save = control.should_evaluate = state.global_step == 1

    trainer = Trainer.start(steps=4, eval_every=4, run_dir=str(tmp_path / "a"), **SMALL)
    trainer.add_callback(Stop)
    assert [figures["step"] for figures in trainer.steps()] == [1, 2]
    assert [record["step"] for record in trainer.run.journal.evaluations] == [0, 1]
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir()) == [
        "step-000000",  # it is the best so far
        "step-000001",
        "step-000002",
    ]
    assert "after step 2" in capsys.readouterr().out

    trainer.callbacks.callbacks.clear()
    assert [figures["step"] for figures in trainer.steps()] == [3, 4]


@pytest.mark.parametrize(
    ("method", "expected_text"),
    [
        ("on_stepend", "on_stepend, which is never called, did you mean"),
        ("on_epoch_end", "on_epoch_end, which is never called; use on_step_end"),
        ("step_end", "has none of the methods on_init_end"),
    ],
)
def test_a_callback_that_would_never_be_called_is_refused(tmp_path, method, expected_text):
    bad = type("Bad", (), {method: lambda self, *args, **kwargs: None})()
    message = catch_message(
        Trainer.start, steps=1, run_dir=str(tmp_path / "a"), callbacks=[bad], **SMALL
    )
    assert message.startswith("the callback Bad")
    assert expected_text in message
    assert not (tmp_path / "a").exists()


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import os, signal
from train import Trainer
from run import GrpoRun

def short(completions, **columns):
    return [-float(len(text)) for text in completions]

def die(run):
    os.kill(os.getpid(), signal.SIGTERM)

GrpoRun.evaluate = die
trainer = Trainer.start(model="demo", task="demo", batch=2, groups=2, max_tokens=4, steps=1,
                        reward=short, reward_weights={"rubric": 0}, run_dir=sys.argv[2])
trainer.fit()
"""


def test_sigterm_in_an_evaluation_ends_a_program_without_a_traceback(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(tmp_path / "run")]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 128 + signal.SIGTERM, process.stderr
    assert "Traceback" not in process.stderr
    assert "stopped after step 0; continue in this program with" in process.stderr

    # at the start, a note says that only this program defines the reward
    note = "only this program can resume or evaluate the run"
    [line] = [line for line in process.stdout.splitlines() if line.startswith(note)]
    assert "defines short;" in line


def test_ctrl_c_still_raises_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt), train.trainer.exit_on_termination():
        raise KeyboardInterrupt
