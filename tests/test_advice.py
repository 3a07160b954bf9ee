"""The advice at the end of a run, and its lines about past warnings."""

from types import SimpleNamespace

import pytest

from reporting import advice, health
from reporting.difference import BETTER
from reporting.journal import format_past_warning


@pytest.mark.parametrize(
    ("losses", "advises_longer_training"),
    [([1.3, 0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1], True), ([0.5] * 8, False)],
    ids=["falling", "flat"],
)
def test_a_warm_start_whose_answers_are_scored_trains_longer_if_its_loss_still_falls(
    losses, advises_longer_training
):
    run = SimpleNamespace(
        evals=[{"step": step, "eval/num": 64} for step in (0, 4, 8)],
        steps=[{"step": number, "loss": loss} for number, loss in enumerate(losses, 1)],
        figure_name="score",
        settings={"loss_type": "sft", "model": "demo", "lora_rank": 16},
        dir="runs/warm",
        parts_set_in_python={},
    )
    text = advice.advise_on_change(
        run, SimpleNamespace(outcome=BETTER), "", "", is_still_improving=False
    )
    expected = "Train longer, because the training loss was still falling"
    assert text.startswith(expected) == advises_longer_training


def test_a_past_warning_about_cut_off_answers_says_if_they_are_cut_off_no_longer():
    warning = {"step": 0, "name": "truncated"}
    assert format_past_warning(warning, are_answers_still_cut_off=True) == (
        "warning after step 0: truncated"
    )
    line = format_past_warning(warning, are_answers_still_cut_off=False)
    assert "at the end no more than half" in line
    other = format_past_warning({"step": 3, "name": "slow"}, are_answers_still_cut_off=False)
    assert other == "warning after step 3: slow"


@pytest.mark.parametrize(
    ("num_calls", "settings", "is_warned"),
    [
        ([0.0] * 5, {"tools": ["mine.py:search"]}, True),
        ([0.0] * 4 + [1.0], {"tools": ["mine.py:search"]}, False),
        ([0.0] * 4, {"tools": ["mine.py:search"]}, False),
        ([0.0] * 5, {"env_server": "python harness.py"}, False),
    ],
    ids=["never", "once", "too early", "a harness without tools"],
)
def test_tools_that_are_never_called_cause_a_warning(num_calls, settings, is_warned):
    steps = [{"step": n, "tools/calls": calls} for n, calls in enumerate(num_calls, 1)]
    warnings = health.find_symptoms(steps, has_gained=False, settings=settings)
    assert ("no tool calls" in [warning.name for warning in warnings]) == is_warned


@pytest.mark.parametrize(
    ("num_searches", "num_additions", "is_warned"),
    [
        ([0.0] * 5, [3.0] * 5, True),
        ([0.0] * 4 + [1.0], [3.0] * 5, False),
        ([0.0] * 4, [3.0] * 4, False),
        ([0.0] * 5, [0.0] * 5, False),
    ],
    ids=["never", "once", "too early", "no calls at all"],
)
def test_a_tool_that_is_never_called_while_others_are_causes_a_warning(
    num_searches, num_additions, is_warned
):
    steps = []
    for search, add in zip(num_searches, num_additions, strict=True):
        calls = {"tools/calls": search + add, "tools/calls/search": search, "tools/calls/add": add}
        steps.append({"step": len(steps) + 1} | calls)
    warnings = health.find_symptoms(steps, has_gained=False, settings={"tools": ["mine.py:a,b"]})
    texts = [warning.text for warning in warnings if warning.name == "tool never called"]
    assert bool(texts) == is_warned
    assert all("called search, although" in text for text in texts)
