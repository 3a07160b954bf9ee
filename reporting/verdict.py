"""
Gives the verdict on a run: whether it got better on held-out problems, how its answers changed
meanwhile, and what to do now.

The functions take a run's records and return sentences. The parts of a verdict are in
difference.py (figures), answer_changes.py (answers) and advice.py (advice). This file does not
cover warnings during a run (health.py) or the places that show a verdict (journal.py, page.py).
"""

import random
import shlex
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from disk.model_card import describe_start
from flags import escape_invisible, make_printable
from prompts.examples import prompt_text
from prompts.held_out import warn_of_few_held_out
from reporting import advice, health
from reporting.answer_changes import (
    CHEATED,
    describe_answer,
    final_text,
    form_change_signs,
    greedy_text,
    missing_answer_signs,
    problems_with_rewarded_mistakes,
    risen_word_signs,
    shorten_answer,
    unwitnessed_rise_signs,
)
from reporting.difference import (
    BETTER,
    FEW,
    SAME,
    WORSE,
    Change,
    best_evaluation,
    change_between,
    first_answer_rewards,
    greedy_values,
    is_better,
    paired_difference,
)
from reporting.health import Records
from reporting.history import Answers, History

NUM_READ = 10  # problems that a verdict shows


class DrawnAnswer(NamedTuple):
    """The last answer to a held-out problem, drawn for the user to read."""

    prompt: str
    text: str
    facts: str  # see `describe_answer`


class Verdict(NamedTuple):
    outcome: str  # BETTER, WORSE, SAME or FEW
    headline: str  # the outcome, and how the score moved if the figure did not
    has_gained: bool  # whether more answers are right; no reward can fake this
    text: str  # the figures
    signs: list[str]  # how the run's answers changed, the most telling first
    advice: str
    drawn: list[DrawnAnswer]  # answers to ten problems, drawn at random
    is_doubtful: bool  # whether the reward may have been gamed
    warning: health.Finding | None  # None if nothing is bad


def draw_problems(problems: list[int], settings: dict[str, Any]) -> list[int]:
    """Draws the problems to read with the run's seed, so that nobody chooses them."""
    draws = random.Random(settings.get("seed"))
    return sorted(draws.sample(problems, min(NUM_READ, len(problems))))


def judge_change(run: History) -> Verdict | None:
    """
    Returns the verdict on the change from the first evaluation to the last.

    Returns None if there are fewer than two evaluations.
    """
    if len(run.evals) < 2:
        return None
    settings = run.settings
    is_verified = run.figure == "accuracy"
    first = run.evals[0]
    last = run.evals[-1]
    first_answers = run.answers.get(first["step"], {})
    last_answers = run.answers.get(last["step"], {})
    shared = sorted(first_answers.keys() & last_answers.keys())
    before = [first_answers[problem] for problem in shared]
    after = [last_answers[problem] for problem in shared]

    change = change_between(run, first, last)
    component_changes = changes_by_component(first_answers, last_answers)
    total_change = None
    if is_verified and "eval/score" in last:
        total_change = paired_difference(
            first_answer_rewards(first_answers), first_answer_rewards(last_answers)
        )
    reward_moved = find_reward_move(change, total_change, component_changes, is_verified)
    signs = find_signs(run, before, after, component_changes)

    outcome = change.outcome if change else FEW
    headline = outcome
    text = describe_figures(run, change, first_answers, last_answers)
    if change is not None and has_moved_alone(change, total_change):
        direction = "rose" if reward_moved == BETTER else "fell"
        headline = f"{outcome}, though the score {direction}"
        text += f", though the score changed by {total_change}"
    text += describe_components(change, component_changes)

    verifier_is_default = (
        is_verified
        and settings.get("task") == "own"
        and bool(settings.get("reward"))
        and not settings.get("verifier")
    )
    reward_fix = advice.suggest_reward_fix(settings, verifier_is_default, after)
    best = best_evaluation(run) or last
    warning = None
    if is_better(change_between(run, last, best)):
        best_value = best[f"eval/{run.figure}"]
        decline = (
            f"{run.figure} was better after step {best['step']}: {best_value:.3f} (adapter-best)"
        )
        text += f"; {decline}"
        warning = health.Finding("worse", f"The {decline}. {advice.TOO_FAR}")
    elif signs.alarms:
        warning = gamed_reward_warning(signs.alarms, verifier_is_default, reward_fix)

    middle = run.evals[len(run.evals) // 2]
    is_rising = best is last and is_better(change_between(run, middle, last))
    next_step = advice.suggest_next_step(
        run, change, reward_moved, reward_fix if signs.is_doubtful else "", is_rising
    )
    return Verdict(
        outcome=outcome,
        headline=headline,
        has_gained=is_verified and is_better(change),
        text=text,
        signs=signs.alarms + signs.changes,
        advice=next_step,
        drawn=draw_answers(run, shared),
        is_doubtful=signs.is_doubtful,
        warning=warning,
    )


# ---- the answers


class Signs(NamedTuple):
    """How the answers changed, a line for each change."""

    alarms: list[str]  # signs that the reward is gamed
    changes: list[str]  # other signs
    is_doubtful: bool  # whether the reward may have been gamed


def find_signs(
    run: History, before: Records, after: Records, component_changes: dict[str, Change]
) -> Signs:
    """
    Compares the first and the last answers to the problems that both evaluations have.

    The form of an answer cannot deceive a verifier, but it can deceive a judge. So if a judge gives
    the score, a change of form is an alarm.
    """
    form_signs = form_change_signs(before, after)
    word_signs = find_risen_words(run.settings, before, after)
    if run.figure == "score":
        alarms = unwitnessed_rise_signs(run.evals[0], run.evals[-1])
        if not exact_component_rose(run.settings, component_changes):
            alarms += form_signs
            return Signs(alarms, word_signs, bool(alarms) or bool(word_signs))
        return Signs(alarms, form_signs + word_signs, bool(alarms))

    if run.figure == "accuracy":
        alarms = find_rewarded_mistakes(run) if before else []
        return Signs(alarms, missing_answer_signs(after) + form_signs + word_signs, bool(alarms))
    return Signs([], form_signs + word_signs, False)


def draw_answers(run: History, problems: list[int]) -> list[DrawnAnswer]:
    """Draws problems and returns the last answer to each."""
    last = run.evals[-1]
    answers = run.answers.get(last["step"], {})
    drawn = []
    for problem in draw_problems(problems, run.settings):
        answer = answers[problem]
        facts = describe_answer(answer, last, run.figure == "accuracy")
        drawn.append(DrawnAnswer(prompt_text(answer["prompt"]), final_text(answer), facts))
    return drawn


# ---- how the rewards moved


def changes_by_component(first_answers: Answers, last_answers: Answers) -> dict[str, Change]:
    """Returns the change of each reward component that both evaluations have."""
    changes = {}
    names = dict.fromkeys(name for record in last_answers.values() for name in record["rewards"])
    for name in names:
        change = paired_difference(
            first_answer_rewards(first_answers, name), first_answer_rewards(last_answers, name)
        )
        if change:
            changes[name] = change
    return changes


def has_moved_alone(change: Change, total_change: Change | None) -> bool:
    """Whether the whole reward changed significantly but the figure did not."""
    if total_change is None or change.outcome not in (SAME, FEW):
        return False
    return total_change.outcome in (BETTER, WORSE)


def find_reward_move(
    change: Change | None,
    total_change: Change | None,
    component_changes: dict[str, Change],
    is_verified: bool,
) -> str:
    """Returns BETTER or WORSE if the rewards changed but the figure did not, otherwise ""."""
    if change is None:
        return ""
    if total_change is not None and has_moved_alone(change, total_change):
        return total_change.outcome
    # a single component rose
    if is_verified and change.mean <= 0 and any(map(is_better, component_changes.values())):
        return BETTER
    return ""


def exact_component_rose(settings: dict[str, Any], component_changes: dict[str, Change]) -> bool:
    """Whether this project's metric `exact` rose; a user's reward of that name does not count."""
    user_rewards = set()
    for spec in settings.get("reward") or ():
        user_rewards.update(spec.rpartition(":")[2].split(","))
    return "exact" not in user_rewards and is_better(component_changes.get("exact"))


def find_rewarded_mistakes(run: History) -> list[str]:
    """Returns a line if alarmingly many wrong answers earn the highest reward."""
    first, last = problems_with_rewarded_mistakes(run.answers)
    if not last:
        return []
    return [f"{CHEATED}: {len(first)} -> {len(last)} answers"]


def find_risen_words(settings: dict[str, Any], before: Records, after: Records) -> list[str]:
    """Returns lines about the words that rose in the answers, or else in the greedy answers."""
    signs = risen_word_signs(before, after)
    # with tools or an environment a greedy answer contains its calls too
    if signs or settings.get("tools") or settings.get("env"):
        return signs
    return risen_word_signs(before, after, greedy_text, "greedy answers")


def gamed_reward_warning(
    alarms: list[str], verifier_is_default: bool, reward_fix: str
) -> health.Finding:
    suspicion = "The reward may favour something that you did not mean"
    if verifier_is_default:
        suspicion += ", or the verifier may be too strict"
    return health.Finding("gamed", f"{suspicion} ({'; '.join(alarms)}). {reward_fix}")


# ---- the figures in words


def describe_figures(
    run: History, change: Change | None, first_answers: Answers, last_answers: Answers
) -> str:
    """Returns the figure before and after, its change, and the same for greedy answers."""
    first = run.evals[0]
    last = run.evals[-1]
    kind = "conversations" if run.figure == "loss" else "problems"
    if change is None:
        steps = f"both step {first['step']} and {last['step']}"
        return f"{run.figure}: fewer than two {kind} have a figure after {steps}"

    start = str(first["step"])
    origin = describe_start(run.settings) if first["step"] == 0 else ""
    if origin:
        start += f"{origin},"
    num = str(change.num)
    if change.num < last["eval/num"]:
        num += f" of {last['eval/num']}"
    old = first[f"eval/{run.figure}"]
    new = last[f"eval/{run.figure}"]
    text = f"{run.figure} {old:.3f} -> {new:.3f} from step {start} to {last['step']}"
    text += f", on {num} held-out {kind}; gain {change}"
    if run.figure == "loss":
        text = "; ".join([text, *warn_of_few_held_out(change.num, run.settings)])

    before = greedy_values(first_answers)
    after = greedy_values(last_answers)
    greedy_change = paired_difference(before, after)
    if greedy_change:
        old = statistics.fmean(before.values())
        new = statistics.fmean(after.values())
        text += f"; greedy answers {old:.3f} -> {new:.3f}, {greedy_change.outcome}"
    return text


def describe_components(change: Change | None, component_changes: dict[str, Change]) -> str:
    """Returns the changes of reward components, or "" if they say no more than the figure."""
    means = {name: component.mean for name, component in component_changes.items()}
    if change is not None and all(mean == change.mean for mean in means.values()):
        return ""
    if not means:
        return ""
    listed = [f"{escape_invisible(name)} {mean:+.3f}" for name, mean in means.items()]
    return f"; rewards: {', '.join(listed)}"


def verdict_lines(verdict: Verdict | None, settings: dict[str, Any], run: Path) -> list[str]:
    """Returns the lines that show a run's verdict in the terminal."""
    if verdict is None:
        measure = advice.comparison_command(settings, shlex.quote(str(run)))
        return [
            "verdict: none, because it needs two held-out evaluations (--eval-every)",
            f"next: measure before and after training: {measure}",
        ]
    lines = [f"verdict: {verdict.headline}", f"  {verdict.text}"]
    lines += [f"  changed: {sign}" for sign in verdict.signs]
    if verdict.drawn:
        lines.append(f"  {len(verdict.drawn)} answers drawn at random, to read:")
    for answer in verdict.drawn:
        line = f"    {shorten_answer(answer.prompt)} -> {shorten_answer(answer.text)}"
        if answer.facts:
            line += f" ({answer.facts})"
        lines.append(line)
    lines.append(f"next: {verdict.advice}")
    return [make_printable(line) for line in lines]
