"""The example taskset, with a stand-in for the package verifiers, which no test installs."""

import asyncio
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
from conftest import ROOT


class Generic:
    """A class that accepts type arguments, as those of verifiers do."""

    def __class_getitem__(cls, _):
        return cls


@pytest.fixture
def taskset(monkeypatch):
    """The module examples/environments/sums_taskset.py."""
    verifiers = ModuleType("verifiers.v1")
    for name in ("Toolset", "SharedToolsetConfig", "State", "TaskData", "Task", "TaskConfig"):
        setattr(verifiers, name, Generic)
    for name in ("Taskset", "TasksetConfig", "Trace"):
        setattr(verifiers, name, Generic)
    verifiers.tool = verifiers.reward = lambda function: function
    parent = ModuleType("verifiers")
    parent.v1 = verifiers
    monkeypatch.setitem(sys.modules, "verifiers", parent)
    monkeypatch.setitem(sys.modules, "verifiers.v1", verifiers)
    path = ROOT / "examples" / "environments" / "sums_taskset.py"
    spec = importlib.util.spec_from_file_location("sums_taskset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("reply", "reward"), [("It is 42.", 1.0), ("It is 42 or 43.", 0.0), ("42\nI give up.", 0.0)]
)
def test_the_reward_reads_the_last_line_of_the_last_reply(taskset, reply, reward):
    """`last_reply` is the name in verifiers 0.4."""
    task = SimpleNamespace(data=SimpleNamespace(answer="42"))
    trace = SimpleNamespace(last_reply=reply)
    assert asyncio.run(taskset.SumTask.right_answer(task, trace)) == reward


def test_the_calculator_computes_only_integers(taskset):
    calculator = taskset.Calculator()
    assert calculator.calculator("12 * 34 - 5") == "403"
    assert calculator.calculator("2 ** 9").startswith("error")
    assert calculator.calculator("print(1)").startswith("error")
