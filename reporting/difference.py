"""
Computes the difference between two evaluations of a run, with its 95% confidence interval.

Both evaluations answer the same problems, so the difference is computed problem by problem. This
file does not cover what the difference says about the run (verdict.py) or what to do next
(advice.py).

Axes: P, the held-out problems.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from disk.statistics import FEWEST_FOR_INTERVAL, student_t_quantile
from prompts.held_out import POWER
from reporting.history import Answers, History

BETTER = "better"
WORSE = "worse"
SAME = "no change"
FEW = "too few problems to tell"
# A change counts as too small to matter if both ends of its interval are within this fraction of
# the range of the values.
MARGIN = 0.1

ValueByProblem = Mapping[Any, float]


class MeanChange(NamedTuple):
    """The mean difference between two evaluations, with its 95% confidence interval."""

    mean: float
    low: float
    high: float
    num: int  # the number of problems that both evaluations have
    span: float  # the highest value minus the lowest, over both evaluations

    def __str__(self) -> str:
        if self.num < FEWEST_FOR_INTERVAL:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f}, 95% interval {self.low:+.3f} to {self.high:+.3f}"

    @property
    def mean_plus_minus_text(self) -> str:
        """The mean and its distance to the farther end of the interval: "+0.125 \u00b1 0.080"."""
        if self.num < FEWEST_FOR_INTERVAL:
            return f"{self.mean:+.3f}"
        reach = max(self.mean - self.low, self.high - self.mean)
        return f"{self.mean:+.3f} \u00b1 {reach:.3f}"

    @property
    def outcome(self) -> str:
        """
        BETTER or WORSE if the interval excludes 0, otherwise SAME or FEW.

        SAME means that both ends of the interval are close to 0, as MARGIN defines it. FEW means
        that the interval is too wide to tell, because there are too few problems.
        """
        if self.low > 0:
            return BETTER
        if self.high < 0:
            return WORSE
        largest_possible = max(-self.low, self.high)
        return SAME if largest_possible <= MARGIN * self.span else FEW

    @property
    def num_problems_needed(self) -> int:
        """
        The number of problems needed to detect a difference of this size with a power of 80%.

        The number is POWER s^2 / d^2. Here s is the standard deviation of the differences, and d is
        this difference or MARGIN times the range of the values, whichever is larger.
        Source: Chow, Shao and Wang, Sample Size Calculations in Clinical Research, 3.1.
        """
        confidence_half_width = (self.high - self.low) / 2
        variance = self.num * (confidence_half_width / student_t_quantile(self.num - 1)) ** 2
        difference = max(abs(self.mean), MARGIN * self.span)
        return math.ceil(POWER * variance / difference**2)


def is_significantly_better(change: MeanChange | None) -> bool:
    return change is not None and change.outcome == BETTER


def paired_difference(
    before: ValueByProblem, after: ValueByProblem, *, samples_per_value: int = 1
) -> MeanChange | None:
    """
    Returns the mean of after - before over the shared problems; None for fewer than two problems.

    samples_per_value: the number of samples that each value averages.

    The interval is Student's t interval of P + 2 differences. One of the two added differences is
    the whole range of the values, and the other is minus this range. If the values are means of
    several samples, both added differences are divided by sqrt(samples). Thanks to the added
    differences, the interval has a positive width even if all differences are equal. If all values
    are 0 or 1, the interval equals that of Bonett and Price.
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
    padding = span / samples_per_value**0.5
    padded = [*differences, padding, -padding]
    center = statistics.fmean(padded)
    reach = student_t_quantile(len(pairs) + 1) * statistics.stdev(padded) / len(padded) ** 0.5

    # two values between 0 and 1 cannot differ by more than 1
    limit = 1.0 if lowest >= 0 and highest <= 1 else math.inf
    low = max(center - reach, -limit)
    high = min(center + reach, limit)
    return MeanChange(statistics.fmean(differences), low, high, len(pairs), span)


def loss_decrease(
    first_evaluation: dict[str, Any], last_evaluation: dict[str, Any]
) -> MeanChange | None:
    """
    Returns how much the held-out loss fell between two evaluations of the same conversations.

    An evaluation has a pair (nats, tokens) for each conversation. The decrease of the loss is a
    ratio of two sums over the conversations: the decrease of the nats, and the tokens. Its interval
    comes from the residuals, which are each conversation's decrease of the nats minus the ratio
    times the conversation's tokens. Returns None if there are fewer than two conversations, or if
    the conversations are not the same.
    """
    first_losses = np.reshape(first_evaluation.get("eval/losses") or [], (-1, 2))
    last_losses = np.reshape(last_evaluation.get("eval/losses") or [], (-1, 2))
    first_nats, tokens = first_losses.T
    last_nats, last_tokens = last_losses.T
    num = len(tokens)
    if num < 2 or not np.array_equal(tokens, last_tokens):
        return None

    total = tokens.sum()
    mean = (first_nats - last_nats).sum() / total
    residuals = first_nats - last_nats - mean * tokens
    deviation = math.sqrt((residuals**2).sum() * num / (num - 1))
    reach = student_t_quantile(num - 1) * deviation / total
    return MeanChange(mean, mean - reach, mean + reach, num, 1.0)


def held_out_gain(run: History, first: dict[str, Any], last: dict[str, Any]) -> MeanChange | None:
    """
    Returns how much a run's held-out figure improved from one evaluation to a later one.

    A positive change means that the run improved. Returns None if either evaluation lacks the
    figure, because no score was readable or the data changed. Also returns None if the evaluations
    share fewer than two problems.
    """
    key = f"eval/{run.figure_name}"
    if first.get(key) is None or last.get(key) is None:
        return None
    if run.figure_name == "loss":
        return loss_decrease(first, last)
    before = mean_value_by_problem(run.answers_by_step.get(first["step"], {}))
    after = mean_value_by_problem(run.answers_by_step.get(last["step"], {}))
    return paired_difference(before, after)  # a run's evaluations sample each problem once


def greedy_gain(run: History, first: dict[str, Any], last: dict[str, Any]) -> MeanChange | None:
    """
    Returns how much a run's greedy answers improved from one evaluation to a later one.

    Returns None if the evaluations share fewer than two problems with a readable greedy value.
    """
    before = greedy_value_by_problem(run.answers_by_step.get(first["step"], {}))
    after = greedy_value_by_problem(run.answers_by_step.get(last["step"], {}))
    return paired_difference(before, after)


def evaluation_with_greedy_answers_better_than_last(run: History) -> dict[str, Any] | None:
    """
    Returns an evaluation whose greedy answers are significantly better than those of the last one.

    If there are several, returns the earliest one that no later evaluation beats significantly.
    Returns None if there is no such evaluation.
    """
    best = run.evals[0]
    for evaluation in run.evals[1:]:
        if is_significantly_better(greedy_gain(run, best, evaluation)):
            best = evaluation
    return best if is_significantly_better(greedy_gain(run, run.evals[-1], best)) else None


def earliest_unbeaten_evaluation(run: History) -> dict[str, Any] | None:
    """
    Returns the earliest evaluation that no later evaluation beats significantly.

    If the held-out figure is a loss, returns the evaluation with the lowest loss. Returns None if
    no evaluation has a figure.
    """
    evaluations = run.evals_with_figure
    if run.figure_name == "loss":
        return min(evaluations, key=lambda evaluation: evaluation["eval/loss"], default=None)
    best = None
    for evaluation in evaluations:
        if best is None or is_significantly_better(held_out_gain(run, best, evaluation)):
            best = evaluation
    return best


# ---- values by problem


def mean_value_by_problem(answers: Mapping[Any, dict[str, Any]]) -> ValueByProblem:
    """Returns the mean value of each problem's samples, leaving out unreadable values."""
    means = {}
    for problem, record in answers.items():
        readable = [value for value in record["values"] if value is not None]
        if readable:
            means[problem] = statistics.fmean(readable)
    return means


def fewest_readable_samples(answers: Mapping[Any, dict[str, Any]]) -> int:
    """
    Returns the smallest number of readable samples that any problem has.

    Problems without a readable sample are ignored.

    Returns 1 if no problem has a readable sample.
    """
    counts = []
    for record in answers.values():
        count = sum(value is not None for value in record["values"])
        if count:
            counts.append(count)
    return min(counts, default=1)


def first_sample_reward_by_problem(
    answers: Answers, component: str | None = None
) -> ValueByProblem:
    """
    Returns the reward of each problem's first sampled answer, leaving out unreadable rewards.

    component: the name of a reward component; None means the total reward.
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


def greedy_value_by_problem(answers: Mapping[Any, dict[str, Any]]) -> ValueByProblem:
    """
    Returns the value of each problem's greedy answer, leaving out unreadable values.

    answers: the records of an evaluation, by problem.
    """
    values = {}
    for problem, record in answers.items():
        value = record.get("greedy_value")
        if value is not None:
            values[problem] = value
    return values
