"""
Tries the first steps of a run to find out whether the full run is worth starting.

A trial runs train.py for a few steps, so it measures the real program on this machine. The learning
rate is 0, so all answers come from the model before training. memory_estimate.py and
time_estimate.py estimate memory and time without running the model.
"""

import contextlib
import math
import shlex
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
from config import Config, MemoryDependentSizes
from disk import hub, model_choice
from disk.run_files import load_settings, read_log
from forecast.memory_estimate import (
    CHANGE,
    TOO_LARGE,
    RunDemand,
    choose_sizes,
    explain_memory_misfit,
    format_memory_line,
)
from forecast.time_estimate import format_range
from judging.grader import UNREADABLE_WARNING_FRACTION
from machine import alive, link, memory
from prompts import chat_template
from prompts.examples import (
    Example,
    hash_prompt_without_system,
    last_user_text,
    pick_evenly_spaced,
    shorten_value,
)
from prompts.held_out import warnings_of_few_held_out
from rewards import audit, form
from settings.sources import command_prefix_with_extras, to_yaml
from tools.toolbox import make_toolbox, max_conversation_tokens

TRY_STEPS = 4
TRY_SECONDS = 120.0  # a trial does not begin another step after this time

# If the rewards differ in a smaller fraction of the groups than this, the trial advises a change.
FEW_SIGNALS = 0.25
# Nearly all answers fail if the mean reward, on a scale from the lowest reward (0) to the highest
# (1), is below FEW_RIGHT. Nearly all answers succeed if it is above MANY_RIGHT.
FEW_RIGHT = 0.2
MANY_RIGHT = 0.8
MANY_CUT = 0.5  # if a larger fraction of the answers is cut off, the trial advises a change
# If a larger fraction of the answers is rewarded although these answers repeat themselves or copy
# the prompt, the trial advises a change.
MANY_DEGENERATE = 0.1
LONG = 300.0  # seconds; a shorter run is not stopped, even if all rewards in each group are equal
SHOWN = 5  # the number of answers that are printed
MOST_RENDERED = 256  # tokens are counted only in this many of the longest prompts
NONE_RIGHT = (
    "; no answer is right yet, so the model may learn only to please the reward function: "
    "first train it on right answers (docs/warm-start.md)"
)


# ---- the memory that a run demands


def make_run_demand(config: Config, task: tasks.Task) -> tuple[RunDemand, MemoryDependentSizes]:
    """
    Return the facts that determine a run's memory, and the sizes that train.py would choose.

    The weights of the model are not read.
    """
    model = model_choice.load_config(config.model.name)
    is_random = config.model.name.startswith("random:")
    tokenizer = hub.load_tokenizer(
        hub.DEMO if is_random else hub.find_model_directory(config.model.name)
    )
    toolbox = make_toolbox(config, task.tools, task.environments, tokenizer, model)

    def count_prompt_tokens(example: Example) -> int:
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
    by_length = sorted(examples, key=lambda example: len(last_user_text(example["prompt"])))
    lengths = [count_prompt_tokens(example) for example in by_length[-MOST_RENDERED:]]
    response_length = None
    if toolbox or task.harness:  # a response may contain results of tools
        context = max_conversation_tokens(config.tools, model.max_position_embeddings)
        response_length = context - max(lengths)

    held_out: list[Example] = []
    if config.evaluation.every:
        held_out = pick_evenly_spaced(task.held_out, config.evaluation.limit)
    rubric = task.rubric
    if rubric is None and held_out:
        rubric = task.witness
    demand = RunDemand(
        model,
        gwen.dtype_from_env_or_device(),
        config,
        lengths,
        rubric,
        response_length=response_length,
    )
    most_rows = max(config.sampling.batch * config.sampling.groups, len(held_out))
    return demand, choose_sizes(demand, most_rows)


# ---- the trial


def try_first_steps(config: Config) -> Iterator[str]:
    """
    Run the first steps of training. Yields lines with the results and with advice on the full run.

    If the estimate says that the run does not fit into memory, the steps run only with
    --over-memory.

    Raises ValueError if train.py refuses the run; train.py then prints the reason.
    """
    task = tasks.make_task(config)
    demand, sizes = make_run_demand(config, task)
    yield format_memory_line(demand, sizes)
    misfit = explain_memory_misfit(demand, sizes)
    if misfit and not config.optimizer.over_memory:
        yield f"{CHANGE}{misfit}; to try the run nevertheless, add --over-memory"
        return

    steps, answers = run_trial_steps(config)
    for name, reward_audit in audit_reward_functions(task, config.data.reward_gate):
        values = {answer["rewards"].get(name) for answer in answers} - {None}
        # the audit may find only one value of a reward although the trial has found others
        if reward_audit.value_if_constant is None or values <= {reward_audit.value_if_constant}:
            yield f"reward {reward_audit.name}: {audit.summarize_audit(reward_audit)}"
    if config.evaluation.every:
        yield from find_held_out_warnings(config, task, steps, answers)
    yield from trial_report_lines(
        config, steps, answers, verify_answers_to_train_problems(task, answers), misfit
    )


def run_trial_steps(config: Config) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """
    Run train.py for the steps of a trial, in a directory that is deleted afterwards.

    Returns the records of metrics.jsonl and the records of rollouts.jsonl.
    """
    trial_config = config.copy_with_settings(
        steps=TRY_STEPS, learning_rate=0.0, eval_every=0, save_every=1000, report_to=[]
    )
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "trial"
        recipe = Path(directory) / "recipe.yaml"
        recipe.write_text(to_yaml(trial_config), encoding="utf-8")
        status = run_train_until_deadline(recipe, run)
        steps = list(read_log(run / "metrics.jsonl"))
        answers = list(read_log(run / "rollouts.jsonl"))
    if not steps:
        raise ValueError(
            f"--try: train.py ended with exit status {status} before it finished a step; "
            "see the lines above"
        )
    return steps, answers


def run_train_until_deadline(recipe: Path, run: Path) -> int:
    """
    Run train.py until it ends, or until TRY_SECONDS have passed and it has finished a step.

    Returns the exit status of train.py.
    """
    train = str(Path(__file__).parents[1] / "train.py")
    command = [sys.executable, train, "--config", str(recipe), "--run-dir", str(run)]
    with interrupt_on_ending_signals():
        trial = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + TRY_SECONDS
            while trial.poll() is None:
                is_late = time.monotonic() > deadline
                if is_late and any(read_log(run / "metrics.jsonl")):
                    break
                time.sleep(0.2)
        finally:
            trial.kill()  # if this interrupts a step, the step is not recorded
            status = trial.wait()
            if sys.stderr.isatty():  # remove the last progress bar of train.py
                print("\r\x1b[J", end="", file=sys.stderr, flush=True)
    return status


@contextlib.contextmanager
def interrupt_on_ending_signals() -> Iterator[None]:
    """
    Inside the block, signals that would end this process raise KeyboardInterrupt.

    Otherwise such a signal would end this process, and train.py would continue to run.
    """
    handlers = {
        number: signal.signal(number, link.raise_keyboard_interrupt)
        for number in link.signals_that_end_run()[1:]
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def audit_reward_functions(task: tasks.Task, gate: str) -> Iterator[tuple[str, audit.AuditResult]]:
    """
    Audit each reward function of a task. Yields the function's name and the result of its audit.

    Judges and environments are not audited, because their audit would require running a model.

    gate: the value of --reward-gate.
    """
    for name, reward in task.rewards_with_nonzero_weight.items():
        if not audit.needs_environment(reward):
            with alive.show_activity(f"auditing {name}"):
                yield name, audit.audit_reward(name, reward, task.train or task.held_out, gate)


def verify_answers_to_train_problems(
    task: tasks.Task, answers: list[dict[str, Any]]
) -> list[float]:
    """
    Verify answers to training problems whose right answers are known.

    Returns the value that the verifier gives to each of these answers. Other answers are left out.
    Returns an empty list if the task has no verifier.

    answers: records of rollouts.jsonl.
    """
    if task.verifier is None:
        return []
    examples = {
        (hash_prompt_without_system(example), str(example["answer"])): example
        for example in task.train
        if example.get("answer") is not None
    }
    examples_and_texts = []
    for answer in answers:
        example = examples.get((hash_prompt_without_system(answer), answer["answer"]))
        if example:
            example_to_verify = audit.ExampleWithWrongAnswer(example)
            examples_and_texts.append((example_to_verify, answer["completion"]))
    return audit.call_reward_on_texts("correct", task.verifier, examples_and_texts)


def find_held_out_warnings(
    config: Config, task: tasks.Task, steps: list[dict[str, Any]], answers: list[dict[str, Any]]
) -> Iterator[str]:
    """Yield warnings if the held-out problems are too few or the model was trained on them."""
    # The standard deviation of rewards within a group, as a fraction of the range of rewards. 0
    # stands for an unknown deviation. If nearly all answers get the same reward now, the deviation
    # says little about the trained model, and counts as unknown.
    deviation = 0.0
    if task.metric == "score":
        rewards = readable_rewards_or_one_zero(answers)
        if FEW_RIGHT <= scale_mean_reward_to_0_1(rewards) <= MANY_RIGHT:
            within_group = mean_metric_with_missing_as_0(steps, "reward/std")
            deviation = within_group / (max(rewards) - min(rewards))
    held_out = pick_evenly_spaced(task.held_out, config.evaluation.limit)
    yield from warnings_of_few_held_out(len(held_out), config.to_flags(), deviation)
    yield from tasks.warm_start_contamination_warnings(config, task.train, held_out)


# ---- the report on a trial


class TrialFigures(NamedTuple):
    """Figures that a trial measured with the model before training."""

    num_groups: int
    signals: float  # the fraction of the groups in which rewards differ
    truncated: float  # the fraction of the answers that are cut off
    degenerate: float  # the fraction of the answers that repeat themselves or copy the prompt
    # the fraction of the answers that are rewarded although they repeat themselves or copy
    rewarded_degenerate: float
    unparsed: float  # the fraction of the judge's scores that are unreadable
    mean_reward: float
    deviation: float  # the standard deviation of the rewards within a group
    lowest: float  # the lowest reward
    highest: float  # the highest reward
    rewarded_most: float  # the fraction of the answers with the highest reward
    middle: float  # the mean reward on a scale from 0 (the lowest reward) to 1 (the highest)
    step_seconds: list[float]
    peak_gigabytes: float

    @classmethod
    def from_records(
        cls, config: Config, steps: list[dict[str, Any]], answers: list[dict[str, Any]]
    ) -> "TrialFigures":
        """
        Compute the figures of a trial.

        steps: the records of metrics.jsonl.
        answers: the records of rollouts.jsonl.
        """
        num_groups = config.sampling.batch * len(steps)
        num_signals = sum(step["sampling/signal_groups"] or 0 for step in steps)
        rewards = readable_rewards_or_one_zero(answers)
        highest = max(rewards)
        return cls(
            num_groups=num_groups,
            signals=num_signals / num_groups,
            truncated=mean_metric_with_missing_as_0(steps, "completion/truncated_frac"),
            degenerate=mean_metric_with_missing_as_0(steps, "completion/degenerate_frac"),
            rewarded_degenerate=rewarded_and_degenerate_fraction(answers),
            unparsed=mean_metric_with_missing_as_0(steps, "judge/unparsed_frac"),
            mean_reward=mean_metric_with_missing_as_0(steps, "reward/mean"),
            deviation=mean_metric_with_missing_as_0(steps, "reward/std"),
            lowest=min(rewards),
            highest=highest,
            rewarded_most=rewards.count(highest) / len(rewards),
            middle=scale_mean_reward_to_0_1(rewards),
            # the first step is left out, because it takes longer
            step_seconds=[step["step/s"] for step in steps[1:] or steps],
            peak_gigabytes=max(step["mem/peak_gb"] for step in steps),
        )

    @property
    def widest_ci95_half_width(self) -> float:
        """Half the width of the 95% interval of `signals` or `truncated`, whichever is wider."""
        # In a few groups, a measured fraction of 0 does not mean that the true fraction is 0. So
        # the interval is computed as if there were two more groups, one of which had shown the
        # event.
        likely = [
            (fraction * self.num_groups + 1) / (self.num_groups + 2)
            for fraction in (self.signals, self.truncated)
        ]
        return max(
            1.96 * math.sqrt(fraction * (1 - fraction) / self.num_groups) for fraction in likely
        )


def readable_rewards_or_one_zero(answers: list[dict[str, Any]]) -> list[float]:
    """List the rewards that are not None. Returns [0.0] if no answer has such a reward."""
    return [answer["reward"] for answer in answers if answer["reward"] is not None] or [0.0]


def scale_mean_reward_to_0_1(rewards: list[float]) -> float:
    """
    The mean reward on a scale from 0 (the lowest reward) to 1 (the highest).

    Returns 0 if all rewards are equal.
    """
    lowest = min(rewards)
    reward_range = max(rewards) - lowest
    return (sum(rewards) / len(rewards) - lowest) / reward_range if reward_range else 0.0


def rewarded_and_degenerate_fraction(answers: list[dict[str, Any]]) -> float:
    """
    The fraction of the answers that repeat themselves or copy the prompt, and are rewarded.

    An answer counts as rewarded if its reward is above 0. If rewards differ, the reward must also
    be above the lowest reward.
    """
    rewards = readable_rewards_or_one_zero(answers)
    highest_unrewarded = 0.0
    if max(rewards) > min(rewards):
        highest_unrewarded = max(min(rewards), 0.0)
    num_rewarded = 0
    for answer in answers:
        reward = answer["reward"]
        if reward is None or reward <= highest_unrewarded:
            continue
        num_rewarded += form.repeats_itself_or_copies_prompt(
            answer["completion"], last_user_text(answer["prompt"])
        )
    return num_rewarded / len(answers)


def mean_metric_with_missing_as_0(steps: list[dict[str, Any]], metric: str) -> float:
    """The mean of a metric over steps. A step without the metric counts as 0."""
    return sum(step.get(metric) or 0.0 for step in steps) / len(steps)


def advise_if_long_run_has_no_signal(
    config: Config, first_steps: list[dict[str, Any]], evaluation_s: float, run: Path
) -> str:
    """
    Advise what to change if the rewards in each group were equal in the first steps of a run.

    Returns "" if the rewards in any group differ. The advice is given only once, after as many
    steps as a trial has, and only if the rest of the run would take more than LONG seconds.

    evaluation_s: the number of seconds that an evaluation takes.
    """
    if not config.compares_rewards_within_groups:
        return ""
    seconds = [step["step/s"] for step in first_steps]
    passed_time = sum(seconds[:-1]) <= TRY_SECONDS < sum(seconds)
    is_end_of_trial = len(first_steps) == TRY_STEPS or passed_time

    seconds_left = min(seconds) * (config.optimizer.steps - len(first_steps))
    if config.evaluation.every:
        seconds_left += evaluation_s * (config.optimizer.steps // config.evaluation.every)

    has_signal = any(step["sampling/signal_groups"] != 0 for step in first_steps)
    if has_signal or not is_end_of_trial or seconds_left <= LONG:
        return ""
    *_, advice = trial_report_lines(config, first_steps, list(read_log(run / "rollouts.jsonl")))
    return advice.removeprefix(CHANGE)


def trial_report_lines(
    config: Config,
    steps: list[dict[str, Any]],
    answers: list[dict[str, Any]],
    verified: Sequence[float] = (),
    misfit: str = "",
) -> Iterator[str]:
    """
    Yield lines about the first steps of a run. The last line is advice.

    verified: the result of `verify_answers_to_train_problems`.
    misfit: the result of `explain_memory_misfit`.
    """
    figures = TrialFigures.from_records(config, steps, answers)
    yield from format_some_answers(answers)
    yield from format_trial_figures(config, figures, len(steps), len(answers), verified)

    changes = suggest_changes(config, figures, answers)
    room = memory.usable_memory_bytes() / 1e9
    if not misfit and figures.peak_gigabytes > room:
        misfit = (
            f"{TOO_LARGE}: a step took {figures.peak_gigabytes:.2f} GB, "
            f"but this machine has {room:.2f} GB"
        )
    if misfit:
        changes.insert(0, misfit)

    if changes:
        advice = f"{CHANGE}{'; '.join(changes)}"
    elif config.compares_rewards_within_groups:
        advice = (
            f"go: the rewards differ in {figures.signals:.0%} of the groups, and "
            f"{FEW_SIGNALS:.0%} are enough, even if the mean reward is low"
        )
    else:
        advice = "go"
    if config.compares_rewards_within_groups and verified and "warm start" not in advice:
        is_any_right = any(value > 0 for value in verified)
        if not is_any_right:
            advice += NONE_RIGHT
    yield advice


def format_some_answers(answers: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each of a few answers, with the reward, the prompt and the answer."""
    for answer in answers[:: max(len(answers) // SHOWN, 1)][:SHOWN]:
        reward = "unreadable" if answer["reward"] is None else f"{answer['reward']:.3g}"
        prompt = shorten_value(last_user_text(answer["prompt"]))
        yield f"  {reward}  {prompt} -> {shorten_value(answer['completion'])}"


def format_trial_figures(
    config: Config,
    figures: TrialFigures,
    num_steps: int,
    num_answers: int,
    verified: Sequence[float],
) -> Iterator[str]:
    """Yield the lines with the figures of a trial."""
    yield (
        f"the following percentages were measured in {figures.num_groups} groups before training, "
        f"with an error of up to {figures.widest_ci95_half_width:.0%}; they will change "
        "during training"
    )
    steps_text = "1 step" if num_steps == 1 else f"{num_steps} steps"
    yield (
        f"{steps_text}, {num_answers} answers: the rewards differ in {figures.signals:.0%} of the "
        f"groups, {figures.truncated:.0%} of the answers are cut off, "
        f"{figures.degenerate:.0%} repeat themselves or copy the prompt"
    )
    if verified:
        # as on the report page, an answer with a value below 1 is not right
        num_right = sum(value >= 1 for value in verified)
        yield f"right answers: {num_right} of {len(verified)}"
    reward_range = format_range([f"{figures.lowest:.3g}", f"{figures.highest:.3g}"])
    share_of_highest = ""
    if figures.highest > figures.lowest:
        share_of_highest = f"{figures.rewarded_most:.0%} of the answers got the highest reward; "
    yield (
        f"rewards {reward_range}; {share_of_highest}the mean reward, which training tries to "
        f"raise, is {figures.mean_reward:.3g}"
    )
    yield (
        f"the standard deviation of rewards within a group is {figures.deviation:.3g}; if it is 0, "
        "training learns nothing"
    )
    num_steps_of_run = config.optimizer.steps
    ends = [min(figures.step_seconds), max(figures.step_seconds)]
    pace = format_range([f"{end:.1f}" for end in ends])
    duration = format_range([alive.format_duration(num_steps_of_run * end) for end in ends])
    yield (
        f"{pace} s per step, {duration} for {num_steps_of_run} steps without evaluations, "
        f"{figures.peak_gigabytes:.2f} GB of memory"
    )


def suggest_changes(
    config: Config, figures: TrialFigures, answers: list[dict[str, Any]]
) -> list[str]:
    """List what to change before training, the most important change first."""
    is_gated = config.data.reward_gate == "form"
    # the gate may also remove the reward of a right answer, for example because it is too short
    gate_keeps_right_answers = all(map(form.right_answer_passes_form_gate, answers))

    changes = []
    if figures.unparsed > UNREADABLE_WARNING_FRACTION:
        changes.append(
            f"{figures.unparsed:.0%} of the judge's scores cannot be read: "
            "use another --judge-model (docs/judge.md)"
        )
    if config.compares_rewards_within_groups and figures.signals < FEW_SIGNALS:
        closed_gate = ""
        if is_gated:
            closed_gate = explain_form_gate_failures(answers, gate_keeps_right_answers)
        if closed_gate:
            changes.append(closed_gate)
        elif figures.highest == figures.lowest:
            changes.insert(0, advise_on_all_equal_rewards(config, figures.highest))
        elif figures.middle < FEW_RIGHT:
            changes.insert(
                0,
                f"nearly all answers fail: {advise_warm_start(config)}, use easier prompts, or "
                "more --groups",
            )
        elif figures.middle > MANY_RIGHT:
            changes.append("nearly all answers succeed: use harder prompts")
        else:
            changes.append(
                "most answers to the same prompt get the same reward: "
                "try a higher --temp or more --groups"
            )
    is_exploitable = figures.rewarded_degenerate > MANY_DEGENERATE
    if is_exploitable and not is_gated and gate_keeps_right_answers:
        changes.append(
            f"{figures.rewarded_degenerate:.0%} of the answers repeat themselves or copy the "
            "prompt and are rewarded: set --reward-gate form"
        )
    # this change comes first, because answers that are cut off may cause the other problems
    if figures.truncated > MANY_CUT:
        warm_start = f"{advise_warm_start(config)}, "
        if any(warm_start in change for change in changes):
            warm_start = ""
        changes.insert(
            0,
            f"{figures.truncated:.0%} of the answers are cut off, which may cause other problems "
            f"too: ask for shorter answers, {warm_start}or raise --max-tokens above "
            f"{config.sampling.max_tokens}",
        )
    return changes


def explain_form_gate_failures(
    answers: list[dict[str, Any]], gate_keeps_right_answers: bool
) -> str:
    """
    Explain why --reward-gate form takes away the rewards of answers.

    Returns "" if the gate is not the reason why rewards are equal.

    gate_keeps_right_answers: whether an answer that consists of a known right answer would keep its
        reward.
    """
    num_passed = sum(
        form.passes_form_gate(
            answer["completion"], last_user_text(answer["prompt"]), answer["finish_reason"]
        )
        for answer in answers
    )
    if num_passed and gate_keeps_right_answers:
        return ""
    text = (
        f"{num_passed / len(answers):.0%} of the answers pass --reward-gate form: "
        f"an answer gets a reward only if it {form.NEEDED}"
    )
    if not gate_keeps_right_answers:
        text += (
            "; even some right answers would get no reward: leave out --reward-gate form, or ask "
            "for whole sentences in the prompt"
        )
    return text


def advise_on_all_equal_rewards(config: Config, reward: float) -> str:
    """Advise what to change if all answers get the same reward."""
    fix = "use a reward that distinguishes answers, or other prompts"
    if reward <= 0:
        fix = f"{advise_warm_start(config)}, {fix}"
    return f"every answer gets the reward {reward:.3g}: {fix}"


def advise_warm_start(config: Config) -> str:
    """Advise a warm start, or its continuation if --init-adapter names the run of a warm start."""
    adapter = config.model.init_adapter
    if adapter and (Path(adapter) / "config.yaml").is_file():
        settings = load_settings(adapter)
        if settings.get("loss_type") == "sft":
            resume = f"--resume {shlex.quote(adapter)} --steps {2 * settings['steps']}"
            return f"continue the warm start ({command_prefix_with_extras(settings)} {resume})"
    return "use a warm start (docs/warm-start.md)"
