"""
Reaches the verdict on a run. The verdict says whether the model improved on held-out problems.

The verdict also describes how the model's answers changed, and suggests what to do next. The parts
of a verdict are computed in difference.py, answer_changes.py and advice.py. This file covers
neither the warnings during a run (health.py) nor the display of a verdict (journal.py, page.py).
"""

import random
import re
import shlex
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from disk import run_changes
from disk.model_card import describe_initial_adapter
from flags import escape_and_redact_for_printing, escape_invisible
from prompts.examples import last_user_text
from prompts.held_out import warnings_of_few_held_out
from reporting import advice, health
from reporting.answer_changes import (
    CHEATED,
    describe_copying_repetition_and_length,
    describe_grade_reward_and_right_answer,
    describe_right_answers_never_given,
    describe_score_rise_without_witness_rise,
    describe_words_used_more,
    greedy_text_or_empty,
    last_reply_or_completion,
    shorten_to_one_line,
    wrong_with_highest_reward_if_alarming,
)
from reporting.difference import (
    BETTER,
    FEW,
    SAME,
    WORSE,
    MeanChange,
    earliest_unbeaten_evaluation,
    evaluation_with_greedy_answers_better_than_last,
    first_sample_reward_by_problem,
    greedy_gain,
    greedy_value_by_problem,
    held_out_gain,
    is_significantly_better,
    paired_difference,
)
from reporting.health import Records
from reporting.history import Answers, History
from text.commands import command_prefix

NUM_READ = 10  # the number of problems that a verdict shows


class RandomlyDrawnAnswer(NamedTuple):
    """The newest answer to a randomly drawn held-out problem, for the user to read."""

    prompt: str
    text: str
    facts: str  # the answer's grade, its reward and the right answer, if they are known


class Verdict(NamedTuple):
    outcome: str  # BETTER, WORSE, SAME or FEW
    headline: str  # the outcome; if only the score changed, also whether it rose or fell
    has_gained: bool  # whether significantly more answers are right according to the verifier
    text: str  # the measured figures
    signs: list[str]  # how the run's answers changed, the most telling sign first
    advice: str
    drawn: list[RandomlyDrawnAnswer]  # the answers to at most ten randomly drawn problems
    is_doubtful: bool  # whether the model may have gamed the reward
    warning: health.RunWarning | None  # None if there is nothing to warn about

    # the step after which greedy answers were significantly better than after the last step; None
    # if there is no such step
    better_greedy_step: int | None


def sample_problems_to_show(problems: list[int], settings: dict[str, Any]) -> list[int]:
    """
    Draws at most ten problems at random, for the user to read.

    The run's seed determines the draw, so nobody can select favourable problems.
    """
    draws = random.Random(settings.get("seed"))
    return sorted(draws.sample(problems, min(NUM_READ, len(problems))))


def reach_verdict_on_held_out_change(run: History) -> Verdict | None:
    """
    Returns the verdict on the change from the first evaluation to the last.

    If a resume changed what evaluations measure, only the evaluations since then are compared.
    Returns None if there are fewer than two evaluations to compare.
    """
    measure_changes = run_changes.describe_changes(
        run_changes.changes_that_affect_evaluations(run.changes)
    )
    run = run.with_comparable_evals
    if len(run.evals) < 2:
        return None
    settings = run.settings
    is_verified = run.figure_name == "accuracy"
    first = run.evals[0]
    last = run.evals[-1]
    first_answers = run.answers_by_step.get(first["step"], {})
    last_answers = run.answers_by_step.get(last["step"], {})
    shared = sorted(first_answers.keys() & last_answers.keys())
    before = [first_answers[problem] for problem in shared]
    after = [last_answers[problem] for problem in shared]

    change = held_out_gain(run, first, last)
    component_changes = change_by_component(first_answers, last_answers)
    total_change = None
    if is_verified and "eval/score" in last:
        total_change = paired_difference(
            first_sample_reward_by_problem(first_answers),
            first_sample_reward_by_problem(last_answers),
        )
    lone_reward_change = reward_outcome_if_figure_unchanged(
        change, total_change, component_changes, is_verified
    )
    signs = find_answer_changes(run, before, after, component_changes)

    outcome = change.outcome if change else FEW
    headline = outcome
    text = describe_figures(run, change, first_answers, last_answers)
    if change is not None and only_reward_changed(change, total_change):
        direction = "rose" if lone_reward_change == BETTER else "fell"
        headline = f"{outcome}, though the score {direction}"
        text += f"; the score of the sampled answers changed by {total_change}"
    text += describe_component_changes(change, component_changes)
    if measure_changes:
        text += f"; earlier evaluations are not compared, because {measure_changes}"

    verifier_is_default = (
        is_verified
        and settings.get("task") == "own"
        and bool(settings.get("reward"))
        and not settings.get("verifier")
    )
    reward_fix = advice.advise_on_gamed_reward(settings, verifier_is_default, after)
    best = earliest_unbeaten_evaluation(run) or last
    warning = None
    if is_significantly_better(held_out_gain(run, last, best)):
        best_value = best[f"eval/{run.figure_name}"]
        decline = (
            f"{run.figure_name} was better after step {best['step']}, at {best_value:.3f}; "
            "adapter-best is from that step"
        )
        text += f"; {decline}"
        warning = health.RunWarning("worse", f"The {decline}. {advice.TOO_FAR}")
    elif signs.alarms:
        warning = gamed_reward_warning(signs.alarms, verifier_is_default, reward_fix)

    middle = run.evals[len(run.evals) // 2]
    is_still_improving = best is last and is_significantly_better(held_out_gain(run, middle, last))
    better_greedy = evaluation_with_greedy_answers_better_than_last(run)
    better_greedy_step = better_greedy["step"] if better_greedy else None
    next_step = advice.suggest_next_step(
        run,
        change,
        lone_reward_change,
        reward_fix if signs.is_doubtful else "",
        is_still_improving,
        better_greedy_step,
    )
    return Verdict(
        outcome=outcome,
        headline=headline,
        has_gained=is_verified and is_significantly_better(change),
        text=text,
        signs=signs.alarms + signs.changes,
        advice=next_step,
        drawn=pick_random_last_answers(run, shared),
        is_doubtful=signs.is_doubtful,
        warning=warning,
        better_greedy_step=better_greedy_step,
    )


# ---- the answers


class AnswerChanges(NamedTuple):
    """Lines that describe how a run's answers changed."""

    alarms: list[str]  # changes that suggest that the model games the reward
    changes: list[str]  # all other changes
    is_doubtful: bool  # whether the model may have gamed the reward


def find_answer_changes(
    run: History,
    answers_before: Records,
    answers_after: Records,
    component_changes: dict[str, MeanChange],
) -> AnswerChanges:
    """
    Describes how the answers changed between the first and the last evaluation.

    answers_before, answers_after: the answers to the problems that are in both evaluations.

    If a judge gives the score, changes in length, copying and repetition count as alarms, because
    they can deceive a judge but not a verifier. If the built-in reward `exact` rose too, they do
    not count as alarms.
    """
    form_signs = describe_copying_repetition_and_length(answers_before, answers_after)
    word_signs = describe_risen_words(run.settings, answers_before, answers_after)
    if advice.is_supervised(run.settings):  # training used no reward that could be gamed
        changes = form_signs + word_signs
        if run.figure_name == "accuracy":
            changes = describe_right_answers_never_given(answers_after) + changes
        return AnswerChanges([], changes, False)

    if run.figure_name == "score":
        alarms = describe_score_rise_without_witness_rise(run.evals[0], run.evals[-1])
        if not has_built_in_exact_reward_risen(run.settings, component_changes):
            alarms += form_signs
            return AnswerChanges(alarms, word_signs, bool(alarms) or bool(word_signs))
        return AnswerChanges(alarms, form_signs + word_signs, bool(alarms))

    if run.figure_name == "accuracy":
        alarms = describe_alarming_rewarded_mistakes(run) if answers_before else []
        return AnswerChanges(
            alarms,
            describe_right_answers_never_given(answers_after) + form_signs + word_signs,
            bool(alarms),
        )
    return AnswerChanges([], form_signs + word_signs, False)


def pick_random_last_answers(run: History, problems: list[int]) -> list[RandomlyDrawnAnswer]:
    """Draws at most ten problems at random, and returns the newest answer to each of them."""
    last = run.evals[-1]
    answers = run.answers_by_step.get(last["step"], {})
    drawn = []
    for problem in sample_problems_to_show(problems, run.settings):
        answer = answers[problem]
        facts = describe_grade_reward_and_right_answer(answer, last, run.figure_name == "accuracy")
        drawn.append(
            RandomlyDrawnAnswer(
                last_user_text(answer["prompt"]), last_reply_or_completion(answer), facts
            )
        )
    return drawn


# ---- how the rewards moved


def change_by_component(first_answers: Answers, last_answers: Answers) -> dict[str, MeanChange]:
    """Returns the mean change of each reward component that is in both evaluations."""
    changes = {}
    names = dict.fromkeys(name for record in last_answers.values() for name in record["rewards"])
    for name in names:
        change = paired_difference(
            first_sample_reward_by_problem(first_answers, name),
            first_sample_reward_by_problem(last_answers, name),
        )
        if change:
            changes[name] = change
    return changes


def only_reward_changed(figure_change: MeanChange, reward_change: MeanChange | None) -> bool:
    """Whether the total reward changed significantly, but the held-out figure did not."""
    if reward_change is None or figure_change.outcome not in (SAME, FEW):
        return False
    return reward_change.outcome in (BETTER, WORSE)


def reward_outcome_if_figure_unchanged(
    change: MeanChange | None,
    total_change: MeanChange | None,
    component_changes: dict[str, MeanChange],
    is_verified: bool,
) -> str:
    """
    Returns how the rewards changed if the held-out figure did not improve, otherwise "".

    The result is BETTER or WORSE if the total reward changed significantly, but the figure did not.
    It is also BETTER if a component of the reward rose significantly, but the accuracy did not rise
    at all.
    """
    if change is None:
        return ""
    if total_change is not None and only_reward_changed(change, total_change):
        return total_change.outcome
    # at least one component of the reward rose
    if (
        is_verified
        and change.mean <= 0
        and any(map(is_significantly_better, component_changes.values()))
    ):
        return BETTER
    return ""


def has_built_in_exact_reward_risen(
    settings: dict[str, Any], component_changes: dict[str, MeanChange]
) -> bool:
    """
    Whether the built-in reward `exact` rose significantly.

    Returns False if the user supplied a reward with the name `exact`.
    """
    user_rewards = set()
    for spec in settings.get("reward") or ():
        user_rewards.update(spec.rpartition(":")[2].split(","))
    return "exact" not in user_rewards and is_significantly_better(component_changes.get("exact"))


def describe_alarming_rewarded_mistakes(run: History) -> list[str]:
    """
    Returns a line about wrong answers that get the highest reward of the run.

    Returns [] unless `wrong_with_highest_reward_if_alarming` finds alarmingly many of them.
    """
    first, last = wrong_with_highest_reward_if_alarming(run.answers_by_step)
    if not last:
        return []
    return [f"{CHEATED}: {len(first)} -> {len(last)} answers"]


def describe_risen_words(settings: dict[str, Any], before: Records, after: Records) -> list[str]:
    """
    Returns lines about words that became more common in the sampled answers.

    If there are no such words, the lines are about words that became more common in the greedy
    answers. In a run with tools or environments, greedy answers are left out.
    """
    signs = describe_words_used_more(before, after)
    # with tools or an environment, the text of a greedy answer contains tool calls too
    if signs or settings.get("tools") or settings.get("env"):
        return signs
    return describe_words_used_more(before, after, greedy_text_or_empty, "greedy answers")


def gamed_reward_warning(
    alarms: list[str], verifier_is_default: bool, reward_fix: str
) -> health.RunWarning:
    suspicion = "The reward may favour something that you did not intend"
    if verifier_is_default:
        suspicion += ", or the verifier may be too strict"
    return health.RunWarning("gamed", f"{suspicion} ({'; '.join(alarms)}). {reward_fix}")


# ---- the figures in words


def describe_figures(
    run: History, change: MeanChange | None, first_answers: Answers, last_answers: Answers
) -> str:
    """Describes the held-out figure of sampled and greedy answers before and after training."""
    first = run.evals[0]
    last = run.evals[-1]
    kind = "conversations" if run.figure_name == "loss" else "problems"
    if change is None:
        steps = f"both step {first['step']} and step {last['step']}"
        return f"fewer than two {kind} have a readable {run.figure_name} after {steps}"

    start = str(first["step"])
    origin = describe_initial_adapter(run.settings) if first["step"] == 0 else ""
    if origin:
        start += f"{origin},"
    num = str(change.num)
    if change.num < last["eval/num"]:
        num += f" of {last['eval/num']}"
    old = first[f"eval/{run.figure_name}"]
    new = last[f"eval/{run.figure_name}"]
    text = f"{run.figure_name} {old:.3f} -> {new:.3f} from step {start} to {last['step']}"
    text += f", on {num} held-out {kind}; gain {change}"
    if run.figure_name == "loss":
        text = "; ".join([text, *warnings_of_few_held_out(change.num, run.settings)])

    greedy_change = greedy_gain(run, first, last)
    if greedy_change:
        old = statistics.fmean(greedy_value_by_problem(first_answers).values())
        new = statistics.fmean(greedy_value_by_problem(last_answers).values())
        text += f"; greedy answers {old:.3f} -> {new:.3f}, {greedy_change.outcome}"
    has_other_loss = run.figure_name != "loss" and "eval/loss" in first and "eval/loss" in last
    if has_other_loss:
        text += (
            f"; loss on the held-out replies {first['eval/loss']:.3f} -> {last['eval/loss']:.3f}"
        )
    return text


def describe_component_changes(
    change: MeanChange | None, component_changes: dict[str, MeanChange]
) -> str:
    """
    Describes the mean changes of the reward components.

    Returns "" if every change equals that of the held-out figure, or if there are no components.
    """
    means = {name: component.mean for name, component in component_changes.items()}
    if change is not None and all(mean == change.mean for mean in means.values()):
        return ""
    if not means:
        return ""
    listed = [f"{escape_invisible(name)} {mean:+.3f}" for name, mean in means.items()]
    return f"; rewards: {', '.join(listed)}"


def verdict_lines(verdict: Verdict | None, settings: dict[str, Any], run_dir: Path) -> list[str]:
    """Returns the lines about the verdict that a terminal shows."""
    if verdict is None:
        measure = advice.command_to_evaluate_before_and_after(settings, shlex.quote(str(run_dir)))
        return [
            "verdict: none, because a verdict needs two held-out evaluations (--eval-every)",
            *lines_of_next_step(f"Evaluate the model before and after training: {measure}"),
        ]
    lines = [f"verdict: {verdict.headline}", f"  {verdict.text}"]
    lines += [f"  changed: {sign}" for sign in verdict.signs]
    if verdict.drawn:
        lines.append(f"  read these {len(verdict.drawn)} answers, which were drawn at random:")
    for answer in verdict.drawn:
        line = f"    {shorten_to_one_line(answer.prompt)} -> {shorten_to_one_line(answer.text)}"
        if answer.facts:
            line += f" ({answer.facts})"
        lines.append(line)
    lines += lines_of_next_step(verdict.advice)
    return [escape_and_redact_for_printing(line) for line in lines]


def lines_of_next_step(advice_text: str) -> list[str]:
    """Returns the advice as lines for a terminal. Each command is on a line of its own."""
    launcher = command_prefix().split()[0]  # "uv" or "gwen"
    text_and_command = re.compile(rf"(.*?: )({re.escape(launcher)} .*)")
    lines: list[str] = []
    # a clause with "or" may contain a call in Python instead of a command
    clause_begins = rf"; (?=or |[^;]*: {re.escape(launcher)} )"
    for clause in re.split(clause_begins, f"next: {advice_text}"):
        indent = "  " if lines else ""
        match = text_and_command.fullmatch(clause)
        if match is None:
            lines.append(f"{indent}{clause}")
            continue
        lines.append(f"{indent}{match[1].rstrip()}")
        lines += [f"    {command}" for command in match[2].split(" && ")]
    return lines
