"""
Trials: the first steps of a run show whether to go on with the run.

A trial takes a few steps of train.py with a learning rate of 0. So the trial measures the real
program on the real machine, and all answers are those of the model before training. This file does
not cover estimates, which run nothing (forecast/memory_estimate.py, forecast/time_estimate.py).
"""

import contextlib
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gwen
import tasks
from config import Config, Sizes
from disk import hub, model_choice
from disk.run_files import read_log
from forecast.memory_estimate import (
    CHANGE,
    TOO_LARGE,
    RunDemand,
    choose_sizes,
    explain_misfit,
    memory_line,
)
from forecast.time_estimate import format_range
from judging import rubrics
from machine import alive, link, memory
from prompts import chat_template
from prompts.examples import Example, prompt_key, prompt_text, shorten_value, spread_evenly
from prompts.held_out import warn_of_few_held_out
from rewards import audit, form
from settings.sources import to_yaml
from tools.toolbox import make_toolbox

TRY_STEPS = 4
TRY_SECONDS = 120.0  # after this time a trial begins no further step
FEW_SIGNALS = 0.25  # if at least this fraction of the groups has a signal, training can learn
FEW_RIGHT = 0.2  # nearly all answers fail if the mean reward is below this fraction of the range
MANY_RIGHT = 0.8  # nearly all answers succeed if the mean reward is above this fraction
MANY_CUT = 0.5  # fraction of the answers
MANY_DEGENERATE = 0.1  # fraction of the answers
LONG = 300.0  # seconds; a run without a signal is ended early only if it takes longer
SHOWN = 5  # the number of answers that are printed
MOST_RENDERED = 256  # tokens are counted for this many prompts, those with the most characters
WARM_START = "a warm start (docs/warm-start.md)"
NONE_RIGHT = (
    "; no answer is right yet, so training may learn only what the reward pays: "
    "show the model answers first (docs/warm-start.md)"
)


# ---- what a run demands


def make_demand(config: Config, task: tasks.Task) -> tuple[RunDemand, Sizes]:
    """
    The demand and the sizes of a run of this task, as train.py estimates them.

    This function reads no weights.
    """
    model = model_choice.load_config(config.model.name)
    is_random = config.model.name.startswith("random:")
    tokenizer = hub.load_tokenizer(hub.DEMO if is_random else hub.find_model(config.model.name))
    toolbox = make_toolbox(config, task.tools, task.environments, tokenizer, model)

    def count_tokens(example: Example) -> int:
        if toolbox:
            return len(toolbox.encode_prompt(example))
        prompts = chat_template.encode_prompts(
            tokenizer,
            [example],
            max_tokens=config.sampling.max_tokens,
            context=model.max_position_embeddings,
            thinking=config.sampling.thinking,
            kind="training prompt",
        )
        return len(prompts[0])

    examples = task.train or task.held_out
    by_length = sorted(examples, key=lambda example: len(prompt_text(example["prompt"])))
    lengths = [count_tokens(example) for example in by_length[-MOST_RENDERED:]]
    response_length = None
    if toolbox:  # tool results follow a prompt too
        response_length = toolbox.context - max(lengths)

    held_out: list[Example] = []
    if config.evaluation.every:
        held_out = spread_evenly(task.held_out, config.evaluation.limit)
    rubric = task.rubric
    if rubric is None and held_out:
        rubric = task.witness
    demand = RunDemand(
        model, gwen.default_dtype(), config, lengths, rubric, response_length=response_length
    )
    most_rows = max(config.sampling.batch * config.sampling.groups, len(held_out))
    return demand, choose_sizes(demand, most_rows)


# ---- the trial


def try_run(config: Config) -> Iterator[str]:
    """
    Takes the first steps of a run. Yields lines that say what they show and whether to go on.

    A run that does not fit into memory is tried only with --over-memory.

    Raises ValueError if train.py refuses the run. It has printed the reason before.
    """
    task = tasks.make_task(config)
    demand, sizes = make_demand(config, task)
    yield memory_line(demand, sizes)
    misfit = explain_misfit(demand, sizes)
    if misfit and not config.optimizer.over_memory:
        yield f"{CHANGE}{misfit}; add --over-memory to try it all the same"
        return

    steps, answers = run_first_steps(config)
    for name, reward_audit in audit_rewards(task, config.data.reward_gate):
        values = {answer["rewards"].get(name) for answer in answers} - {None}
        # otherwise the audit would say that there is one value, although the trial saw another
        if not reward_audit.only or values <= reward_audit.only:
            yield f"reward {reward_audit.name}: {audit.describe_surprise(reward_audit)}"
    if config.evaluation.every:
        yield from held_out_warnings(config, task, steps, answers)
    yield from trial_verdict(config, steps, answers, verify_answers(task, answers), misfit)


def run_first_steps(config: Config) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """
    Runs train.py for the steps of a trial, in a directory that is deleted afterwards.

    Returns the records of metrics.jsonl and of rollouts.jsonl.
    """
    trial_config = config.with_settings(
        steps=TRY_STEPS, learning_rate=0.0, eval_every=0, save_every=1000, report_to=[]
    )
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "trial"
        recipe = Path(directory) / "recipe.yaml"
        recipe.write_text(to_yaml(trial_config), encoding="utf-8")
        status = run_train(recipe, run)
        steps = list(read_log(run / "metrics.jsonl"))
        answers = list(read_log(run / "rollouts.jsonl"))
    if not steps:
        raise ValueError(f"--try: train.py ended with status {status} before its first step")
    return steps, answers


def run_train(recipe: Path, run: Path) -> int:
    """
    Runs train.py until it ends, or until the deadline is over and it has finished a step.

    Returns the exit status.
    """
    train = str(Path(__file__).parents[1] / "train.py")
    command = [sys.executable, train, "--config", str(recipe), "--run-dir", str(run)]
    with ending_signals_interrupt():
        trial = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + TRY_SECONDS
            while trial.poll() is None:
                is_late = time.monotonic() > deadline
                if is_late and any(read_log(run / "metrics.jsonl")):
                    break
                time.sleep(0.2)
        finally:
            trial.kill()  # after the deadline this interrupts a step, which is not recorded
            status = trial.wait()
            if sys.stderr.isatty():  # removes the last progress bar of train.py
                print("\r\x1b[J", end="", file=sys.stderr, flush=True)
    return status


@contextlib.contextmanager
def ending_signals_interrupt() -> Iterator[None]:
    """
    Wraps code in which the signals that end a process shall raise KeyboardInterrupt.

    The default handlers would end this process but leave the trial running.
    """
    handlers = {
        number: signal.signal(number, link.raise_interrupt) for number in link.ending_signals()[1:]
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def audit_rewards(task: tasks.Task, gate: str) -> Iterator[tuple[str, audit.Audit]]:
    """
    The name and the audit of each reward function of a run.

    Judges and environments are left out, because an audit would have to run them.
    """
    for name, reward in task.counted_rewards.items():
        if not audit.needs_episodes(reward):
            with alive.show_activity(f"trying {name}"):
                yield name, audit.audit(name, reward, task.train or task.held_out, gate)


def verify_answers(task: tasks.Task, answers: list[dict[str, Any]]) -> list[float]:
    """
    The verifier's value of each answer to a problem that has a column `answer`.

    The list is empty if the task has no verifier.
    """
    if task.verifier is None:
        return []
    examples = {
        (prompt_key(example), str(example["answer"])): example
        for example in task.train
        if example.get("answer") is not None
    }
    rows = []
    for answer in answers:
        example = examples.get((prompt_key(answer), answer["answer"]))
        if example:
            rows.append((audit.Row(example), answer["completion"]))
    return audit.call_on_texts("correct", task.verifier, rows)


def held_out_warnings(
    config: Config, task: tasks.Task, steps: list[dict[str, Any]], answers: list[dict[str, Any]]
) -> Iterator[str]:
    """Warnings if there are too few held-out problems, or if the model was trained on them."""
    deviation = 0.0  # standard deviation of rewards within a group / range of all rewards
    if task.metric == "score":
        rewards = list_rewards(answers)
        reward_range = max(rewards) - min(rewards)
        within_group = mean_of_steps(steps, "reward/std")
        if within_group:
            deviation = within_group / reward_range
    held_out = spread_evenly(task.held_out, config.evaluation.limit)
    yield from warn_of_few_held_out(len(held_out), config.to_flags(), deviation)
    yield from tasks.warm_start_contamination_warnings(config, task.train, held_out)


# ---- the verdict


class TrialFigures(NamedTuple):
    """Measurements from the steps and answers of the model before training."""

    num_groups: int
    signals: float  # fraction of the groups whose rewards differ
    truncated: float  # fraction of the answers that are cut off
    degenerate: float  # fraction of the answers that repeat themselves or copy
    unparsed: float  # fraction of the judge's scores that cannot be read
    mean_reward: float
    deviation: float  # standard deviation of the rewards within a group
    lowest: float  # the lowest reward
    highest: float  # the highest reward
    middle: float  # position of the mean reward from the lowest, 0, to the highest, 1
    step_seconds: list[float]
    peak_gigabytes: float

    @classmethod
    def from_records(
        cls, config: Config, steps: list[dict[str, Any]], answers: list[dict[str, Any]]
    ) -> "TrialFigures":
        """steps, answers: records of metrics.jsonl and rollouts.jsonl."""
        num_groups = config.sampling.batch * len(steps)
        num_signals = sum(step["sampling/signal_groups"] or 0 for step in steps)
        rewards = list_rewards(answers)
        lowest = min(rewards)
        highest = max(rewards)
        middle = 0.0
        if highest > lowest:
            middle = (sum(rewards) / len(rewards) - lowest) / (highest - lowest)
        return cls(
            num_groups=num_groups,
            signals=num_signals / num_groups,
            truncated=mean_of_steps(steps, "completion/truncated_frac"),
            degenerate=mean_of_steps(steps, "completion/degenerate_frac"),
            unparsed=mean_of_steps(steps, "judge/unparsed_frac"),
            mean_reward=mean_of_steps(steps, "reward/mean"),
            deviation=mean_of_steps(steps, "reward/std"),
            lowest=lowest,
            highest=highest,
            middle=middle,
            step_seconds=[step["step/s"] for step in steps[1:] or steps],  # the first one warms up
            peak_gigabytes=max(step["mem/peak_gb"] for step in steps),
        )

    @property
    def error(self) -> float:
        """Half of the 95% interval of `signals` or of `truncated`, whichever is wider."""
        # few groups: a measured fraction of 0 does not mean that the true fraction is 0
        likely = [
            (fraction * self.num_groups + 1) / (self.num_groups + 2)
            for fraction in (self.signals, self.truncated)
        ]
        return max(
            1.96 * math.sqrt(fraction * (1 - fraction) / self.num_groups) for fraction in likely
        )


def list_rewards(answers: list[dict[str, Any]]) -> list[float]:
    """The rewards that are known; [0.0] if no reward is known."""
    return [answer["reward"] for answer in answers if answer["reward"] is not None] or [0.0]


def mean_of_steps(steps: list[dict[str, Any]], name: str) -> float:
    """The mean of a metric over steps. A step without the metric counts as 0."""
    return sum(step.get(name) or 0.0 for step in steps) / len(steps)


def explain_hopeless(
    config: Config, steps: list[dict[str, Any]], evaluation_s: float, run: Path
) -> str:
    """
    Says what to change if the first steps of a run showed no signal; else "".

    The text comes only once, after as many steps as a trial has, and only if the rest of the run
    would take longer than LONG. evaluation_s: the seconds of one evaluation.
    """
    if not config.compares_within_groups:
        return ""
    seconds = [step["step/s"] for step in steps]
    passed_time = sum(seconds[:-1]) <= TRY_SECONDS < sum(seconds)
    is_end_of_trial = len(steps) == TRY_STEPS or passed_time

    seconds_left = min(seconds) * (config.optimizer.steps - len(steps))
    if config.evaluation.every:
        seconds_left += evaluation_s * (config.optimizer.steps // config.evaluation.every)

    has_signal = any(step["sampling/signal_groups"] != 0 for step in steps)
    if has_signal or not is_end_of_trial or seconds_left <= LONG:
        return ""
    *_, advice = trial_verdict(config, steps, list(read_log(run / "rollouts.jsonl")))
    return advice.removeprefix(CHANGE)


def trial_verdict(
    config: Config,
    steps: list[dict[str, Any]],
    answers: list[dict[str, Any]],
    verified: Sequence[float] = (),
    misfit: str = "",
) -> Iterator[str]:
    """
    The lines about a run's first steps, taken with the model before training. The last is advice.

    verified: from `verify_answers`. misfit: from `explain_misfit`.
    """
    figures = TrialFigures.from_records(config, steps, answers)
    yield from show_answers(answers)
    yield from describe_trial(config, figures, len(steps), len(answers), verified)

    changes = suggest_changes(config, figures, answers)
    room = memory.memory_size() / 1e9
    if not misfit and figures.peak_gigabytes > room:
        misfit = (
            f"{TOO_LARGE}: a step took {figures.peak_gigabytes:.2f} GB, "
            f"and this machine has {room:.2f}"
        )
    if misfit:
        changes.insert(0, misfit)

    if changes:
        advice = f"{CHANGE}{'; '.join(changes)}"
    elif config.compares_within_groups:
        advice = (
            f"go: {figures.signals:.0%} of the groups have a signal, and {FEW_SIGNALS:.0%} are "
            "enough, even if the mean reward is low"
        )
    else:
        advice = "go"
    if config.compares_within_groups and verified and "warm start" not in advice:
        is_any_right = any(value > 0 for value in verified)
        if not is_any_right:
            advice += NONE_RIGHT
    yield advice


def show_answers(answers: list[dict[str, Any]]) -> Iterator[str]:
    """A line for some answers, with the reward of each."""
    for answer in answers[:: max(len(answers) // SHOWN, 1)][:SHOWN]:
        reward = "unreadable" if answer["reward"] is None else f"{answer['reward']:.3g}"
        prompt = shorten_value(prompt_text(answer["prompt"]))
        yield f"  {reward}  {prompt} -> {shorten_value(answer['completion'])}"


def describe_trial(
    config: Config,
    figures: TrialFigures,
    num_steps: int,
    num_answers: int,
    verified: Sequence[float],
) -> Iterator[str]:
    """The lines with the figures of a trial."""
    yield (
        f"the next fractions are those of {figures.num_groups} groups before training, "
        f"within {figures.error:.0%}; training changes them"
    )
    steps_text = "1 step" if num_steps == 1 else f"{num_steps} steps"
    yield (
        f"{steps_text}, {num_answers} answers: {figures.signals:.0%} of the groups have a signal, "
        f"{figures.truncated:.0%} of the answers are cut off, "
        f"{figures.degenerate:.0%} repeat or copy"
    )
    if verified:
        # as on the report's page, a smaller value is not right
        num_right = sum(value >= 1 for value in verified)
        yield f"right answers: {num_right} of {len(verified)}"
    reward_range = format_range([f"{figures.lowest:.3g}", f"{figures.highest:.3g}"])
    yield f"rewards {reward_range}, mean {figures.mean_reward:.3g}, which training raises"
    yield (
        f"standard deviation within a group {figures.deviation:.3g}: training learns from it; "
        "it is 0 if all answers of a group earn the same"
    )
    num_steps_of_run = config.optimizer.steps
    ends = [min(figures.step_seconds), max(figures.step_seconds)]
    pace = format_range([f"{end:.1f}" for end in ends])
    duration = format_range([alive.format_duration(num_steps_of_run * end) for end in ends])
    yield (
        f"{pace} s a step, {num_steps_of_run} in {duration} without evaluations, "
        f"{figures.peak_gigabytes:.2f} GB"
    )


def suggest_changes(
    config: Config, figures: TrialFigures, answers: list[dict[str, Any]]
) -> list[str]:
    """What to change before training, the most important first; empty if the run can go on."""
    is_gated = config.data.reward_gate == "form"
    # for example, a gate gives no reward for a right answer that is too short
    gate_keeps_right_answers = all(map(form.keeps_own_answer, answers))

    changes = []
    if figures.unparsed > rubrics.UNREADABLE_WARNING_FRACTION:
        changes.append(
            f"{figures.unparsed:.0%} of the judge's scores cannot be read: "
            "take another --judge-model, see docs/judge.md"
        )
    if config.compares_within_groups and figures.signals < FEW_SIGNALS:
        closed_gate = ""
        if is_gated:
            closed_gate = explain_closed_gate(answers, gate_keeps_right_answers)
        if closed_gate:
            changes.append(closed_gate)
        elif figures.highest == figures.lowest:
            changes.insert(0, explain_equal_rewards(figures.highest))
        elif figures.middle < FEW_RIGHT:
            changes.insert(
                0, f"nearly all fail: take {WARM_START}, easier prompts, or more --groups"
            )
        elif figures.middle > MANY_RIGHT:
            changes.append("nearly all succeed: take harder prompts")
        else:
            changes.append(
                "answers to one prompt earn the same: try a higher --temp or more --groups"
            )
    if figures.degenerate > MANY_DEGENERATE and not is_gated and gate_keeps_right_answers:
        changes.append("set --reward-gate form")
    if (
        figures.truncated > MANY_CUT
    ):  # the first change, because long answers may cause the other problems
        warm_start = f"take {WARM_START}, "
        if any(WARM_START in change for change in changes):
            warm_start = ""
        changes.insert(
            0,
            f"ask for shorter answers, {warm_start}or raise --max-tokens above "
            f"{config.sampling.max_tokens}",
        )
    return changes


def explain_closed_gate(answers: list[dict[str, Any]], gate_keeps_right_answers: bool) -> str:
    """Why --reward-gate form leaves no answer a reward; "" if the gate is not the reason."""
    num_passed = sum(
        form.passes_gate(
            answer["completion"], prompt_text(answer["prompt"]), answer["finish_reason"]
        )
        for answer in answers
    )
    if num_passed and gate_keeps_right_answers:
        return ""
    text = (
        f"{num_passed / len(answers):.0%} of the answers pass --reward-gate form: "
        f"an answer is paid only if it {form.NEEDED}"
    )
    if not gate_keeps_right_answers:
        text += (
            "; some right answers alone would earn nothing: leave the gate out, "
            "or ask for sentences"
        )
    return text


def explain_equal_rewards(reward: float) -> str:
    """What to change if every answer earns `reward`."""
    if reward > 0:
        fix = "take a reward that tells answers apart, or other prompts"
    else:
        fix = f"take {WARM_START}, a reward that tells answers apart, or other prompts"
    return f"every answer earns {reward:.3g}: {fix}"
