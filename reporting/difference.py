"""
The difference between two evaluations of a run, with its 95% interval.

Both evaluations answer the same problems, so the difference is taken problem by problem. This file
does not cover what the difference means for the run (verdict.py) or what to do next (advice.py).

Axes: P held-out problems.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from disk.statistics import student_t
from prompts.held_out import POWER
from reporting.history import Answers, History

BETTER = "better"
WORSE = "worse"
SAME = "no change"
FEW = "too few problems to tell"
# A change is too small to matter if its interval lies within this fraction of the values' range.
MARGIN = 0.1

Values = Mapping[Any, float]  # by problem


class Change(NamedTuple):
    """A mean difference with its 95% interval."""

    mean: float
    low: float
    high: float
    num: int  # problems that both evaluations have
    span: float  # the highest value minus the lowest

    def __str__(self) -> str:
        return f"{self.mean:+.3f}, 95% interval {self.low:+.3f} to {self.high:+.3f}"

    @property
    def outcome(self) -> str:
        """BETTER, WORSE, SAME or FEW."""
        if self.low > 0:
            return BETTER
        if self.high < 0:
            return WORSE
        largest_possible = max(-self.low, self.high)
        return SAME if largest_possible <= MARGIN * self.span else FEW

    @property
    def num_needed(self) -> int:
        """
        The number of problems that are needed to detect this difference in four of five cases.

        It is POWER s^2 / d^2 for a standard deviation s and this difference d. A smaller d than
        MARGIN of the span counts as MARGIN of the span.
        Source: Chow, Shao and Wang, Sample Size Calculations in Clinical Research, 3.1.
        """
        half_width = (self.high - self.low) / 2
        variance = self.num * (half_width / student_t(self.num - 1)) ** 2
        difference = max(abs(self.mean), MARGIN * self.span)
        return math.ceil(POWER * variance / difference**2)


def is_better(change: Change | None) -> bool:
    return change is not None and change.outcome == BETTER


def paired_difference(before: Values, after: Values, *, samples: int = 1) -> Change | None:
    """
    Returns the mean of after - before over the problems that both have; None for fewer than two.

    samples: how many samples of a problem each value averages.

    The interval is Student's t interval of P + 2 differences: one added problem rises by the whole
    range of the values, and another falls by it. If the values are means of several samples, that
    range is divided by sqrt(samples). So the interval has a width even if all differences are
    equal. If all values are 0 or 1, it is the interval of Bonett and Price.
    Source: Bonett and Price, J. Educ. Behav. Stat. 37 (2012) 479; see Fagerland et al., Stat. Med.
    33 (2014) 2850.
    """
    pairs = [(before[problem], after[problem]) for problem in before.keys() & after.keys()]
    if len(pairs) < 2:
        return None
    lowest = min(map(min, pairs))
    highest = max(map(max, pairs))
    span = highest - lowest or 1.0

    differences = [new - old for old, new in pairs]
    padding = span / samples**0.5
    padded = [*differences, padding, -padding]
    center = statistics.fmean(padded)
    reach = student_t(len(pairs) + 1) * statistics.stdev(padded) / len(padded) ** 0.5

    # values between 0 and 1 cannot differ by more than 1
    limit = 1.0 if lowest >= 0 and highest <= 1 else math.inf
    low = max(center - reach, -limit)
    high = min(center + reach, limit)
    return Change(statistics.fmean(differences), low, high, len(pairs), span)


def loss_difference(first: dict[str, Any], last: dict[str, Any]) -> Change | None:
    """
    Returns by how much the held-out loss fell between two evaluations of the same conversations.

    An evaluation has (nats, tokens) for each conversation. The interval is that of a ratio of two
    sums, as for the loss itself. Returns None if there are fewer than two conversations, or if the
    evaluations differ in their conversations.
    """
    first_losses = np.reshape(first.get("eval/losses") or [], (-1, 2))
    last_losses = np.reshape(last.get("eval/losses") or [], (-1, 2))
    first_nats, tokens = first_losses.T
    last_nats, last_tokens = last_losses.T
    num = len(tokens)
    if num < 2 or not np.array_equal(tokens, last_tokens):
        return None

    total = tokens.sum()
    mean = (first_nats - last_nats).sum() / total
    residuals = first_nats - last_nats - mean * tokens
    deviation = math.sqrt((residuals**2).sum() * num / (num - 1))
    reach = student_t(num - 1) * deviation / total
    return Change(mean, mean - reach, mean + reach, num, 1.0)


def change_between(run: History, first: dict[str, Any], last: dict[str, Any]) -> Change | None:
    """
    Returns the change from one evaluation to a later one; above 0 means better.

    Returns None if an evaluation has no figure (no score was readable, or the data changed), or if
    they share fewer than two problems.
    """
    key = f"eval/{run.figure}"
    if first.get(key) is None or last.get(key) is None:
        return None
    if run.figure == "loss":
        return loss_difference(first, last)
    before = mean_by_problem(run.answers.get(first["step"], {}))
    after = mean_by_problem(run.answers.get(last["step"], {}))
    return paired_difference(before, after)  # an evaluation has one sample of each problem


def best_evaluation(run: History) -> dict[str, Any] | None:
    """
    Returns the earliest evaluation that no later one beats significantly.

    If the figure is a loss, returns the evaluation with the lowest loss. Returns None if
    no evaluation has a figure.
    """
    evaluations = run.evals_with_figure
    if run.figure == "loss":
        return min(evaluations, key=lambda evaluation: evaluation["eval/loss"], default=None)
    best = None
    for evaluation in evaluations:
        if best is None or is_better(change_between(run, best, evaluation)):
            best = evaluation
    return best


# ---- values by problem


def mean_by_problem(answers: Mapping[Any, dict[str, Any]]) -> Values:
    """Returns the mean of each problem's readable samples."""
    means = {}
    for problem, record in answers.items():
        readable = [value for value in record["values"] if value is not None]
        if readable:
            means[problem] = statistics.fmean(readable)
    return means


def num_readable_samples(answers: Mapping[Any, dict[str, Any]]) -> int:
    """Returns the fewest readable samples of a problem, among the problems that have any."""
    counts = []
    for record in answers.values():
        count = sum(value is not None for value in record["values"])
        if count:
            counts.append(count)
    return min(counts, default=1)


def first_answer_rewards(answers: Answers, component: str | None = None) -> Values:
    """
    Returns the reward of each problem's first answer, and leaves out unreadable rewards.

    component: the name of a reward component; None means the whole reward.
    """
    rewards = {}
    for problem, record in answers.items():
        if component:
            values = record["rewards"].get(component)
        else:
            values = record.get("reward", record["values"])
        if values and values[0] is not None:
            rewards[problem] = values[0]
    return rewards


def greedy_values(answers: Answers) -> Values:
    """Returns the value of each problem's greedy answer, and leaves out unreadable values."""
    values = {}
    for problem, record in answers.items():
        value = record.get("greedy_value")
        if value is not None:
            values[problem] = value
    return values
