"""
Looks for signs of trouble in a run's metrics, and returns warnings that suggest what to try.

All functions take the records of `metrics.jsonl`, so a resumed run gets the same warnings as an
uninterrupted run. This file does not cover unreadable judge scores (judging/rubrics.py) or
held-out figures (verdict.py).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from disk import eval_record

Records = Sequence[dict[str, Any]]

CUT_OFF_NAME = "truncated"  # the name of the warning about answers that are cut off
TRUNCATED = "completion/truncated_frac"
EVAL_TRUNCATED = "eval/truncated_frac"
CONTROL = "completion/control_frac/"  # the prefix of the metrics about control tokens
CALLS_OF_TOOL = "tools/calls/"  # the prefix of the metrics with the number of calls of each tool
# If at most this fraction of the answers was cut off at the start, and over half are cut off now,
# training is to blame.
LOW_CUT_OFF = 0.25
FEW = 5  # the number of steps to average, so that a single odd step does not cause a warning
# the largest normal fraction of tokens for which the trainer's probability is over 3 times as high
# as the sampler's
MOST_OVER_CAP = 0.01
MOST_CONTROL = 0.1  # the largest normal fraction of completions that contain one control token
LEAST_SIGNAL = 0.25  # the smallest normal fraction of groups whose rewards differ
LEAST_ENTROPY = 0.1  # the smallest normal entropy, as a fraction of the entropy at the start
STILL = 10  # a warning needs this many updates in a row that change nothing

# The least KL divergence of an update that changes something, in nats per token. An update of the
# demo has a KL divergence of 2e-3, or of 1e-8 at 1/400 of the demo's learning rate.
LEAST_KL = 1e-6
SLOWER = 3.0  # a slow step takes more than this many times the usual seconds per token
LEAST_FALL = 0.1  # the smallest clear fall of the training loss, as a fraction of the loss
# A smaller fall changes the probability of a token by less than 1%.
LEAST_NATS = 0.01
IN_A_ROW = 3  # a warning needs this many slow steps in a row


class RunWarning(NamedTuple):
    name: str
    text: str  # describes the problem and what to try, without a final full stop


def find_symptoms(
    steps: Records,
    has_gained: bool,
    evaluations: Records = (),
    settings: Mapping[str, Any] | None = None,
) -> list[RunWarning]:
    """
    Returns a warning for each sign of trouble in a run's steps and evaluations.

    Warnings about causes come before warnings about their effects. A missing figure causes no
    warning.

    steps, evaluations: the run's records in order. has_gained: see `Verdict`.
    """
    last = steps[-FEW:]
    is_early = len(steps) < FEW
    symptoms: dict[str, str] = {}

    fractions = mean_completion_fraction_by_control_token(last)
    token = max(fractions, key=lambda name: fractions[name], default="")
    if fractions.get(token, 0.0) > MOST_CONTROL:
        symptoms["control token"] = (
            f"{fractions[token]:.0%} of the completions of the last {len(last)} steps contain the "
            f"control token {token!r}, which does not end a completion and is not shown in texts. "
            "If this token should end completions, start the run again with "
            f"--end-tokens '{token}'. Otherwise, look at `ids` in rollouts.jsonl, and check that "
            "the model was trained with this chat template"
        )

    cut_off = advise_on_cut_off_answers(steps, evaluations, settings or {})
    if cut_off and "control token" not in symptoms:
        symptoms[CUT_OFF_NAME] = cut_off

    num_groups = measured_values(last, "sampling/signal_groups")
    if len(num_groups) == FEW and not any(num_groups):
        symptoms["no signal"] = (
            f"In the last {FEW} steps, the rewards within each group differed by no more than "
            "noise, so the model learned nothing from them. Is the reward constant, or is every "
            "prompt too easy or too hard? Try a reward that distinguishes better answers from "
            "worse ones, other prompts, a higher --temp or more --groups"
        )
    little_signal = describe_little_signal(steps)
    if little_signal and "no signal" not in symptoms:
        symptoms["little signal"] = little_signal

    calls = measured_values(last, "tools/calls")
    num_calls = sum(calls)
    has_own_tools = not (settings or {}).get("env_server")  # a harness may have no tools
    if len(calls) == FEW and not num_calls and has_own_tools:
        symptoms["no tool calls"] = (
            f"No completion of the last {FEW} steps called a tool, and training cannot teach calls "
            "that the model never makes. Read some completions in rollouts.jsonl: say in a system "
            "message when to call a tool (the column `system`), or begin with a warm start on "
            "conversations with calls (docs/warm-start.md)"
        )
    uncalled = find_uncalled_tools(last)
    if len(calls) == FEW and num_calls and uncalled:
        symptoms["tool never called"] = (
            f"No completion of the last {FEW} steps called {' or '.join(uncalled)}, although "
            "other tools were called. Training cannot teach calls that the model never makes: if "
            "the task needs these calls, say in a system message when to make them (the column "
            "`system`), or begin with a warm start on conversations with such calls "
            "(docs/warm-start.md)"
        )
    num_failures = sum(measured_values(last, "tools/failures"))
    if not is_early and num_failures > num_calls / 2:
        symptoms["tools fail"] = (
            f"{num_failures:.0f} of {num_calls:.0f} tool calls failed in the last {FEW} steps. "
            "Read the error messages under `tool_calls` in rollouts.jsonl"
        )

    # a warm start is meant to lower the entropy
    learns_replies = (settings or {}).get("loss_type") == "sft"
    if len(steps) >= 2 * FEW and not has_gained and not learns_replies:
        collapse = describe_entropy_collapse(steps)
        if collapse:
            symptoms["entropy"] = collapse

    # a higher learning rate would fix neither equal rewards nor a collapsed entropy
    has_other_cause = "no signal" in symptoms or "entropy" in symptoms
    moves = measured_values(steps[-STILL:], "update/kl")
    is_still = len(moves) == STILL and sum(map(abs, moves)) < STILL * LEAST_KL
    if is_still and not has_other_cause:
        symptoms["nothing moves"] = (
            f"The last {STILL} updates changed the answers by only {sum(moves) / STILL:.1g} nats "
            "per token on average, no more than rounding does. Try a --learning-rate ten "
            "times as high; the files in recipes/ have typical rates"
        )

    slow = describe_slow_steps(steps)
    if slow:
        symptoms["slow"] = slow

    fraction = mean_value(last, "mismatch/over_cap_frac") or 0.0
    if not is_early and fraction > MOST_OVER_CAP:
        symptoms["mismatch"] = (
            f"For {fraction:.1%} of the tokens, the trainer's probability is more than 3 times as "
            "high as the sampler's. Set GWEN_DTYPE=float32 to compute more exactly"
        )
    return [RunWarning(name, text) for name, text in symptoms.items()]


def find_uncalled_tools(steps: Records) -> list[str]:
    """The names of the tools that were never called in these steps."""
    num_calls: dict[str, float] = {}
    for record in steps:
        for key, value in record.items():
            if key.startswith(CALLS_OF_TOOL):
                name = key.removeprefix(CALLS_OF_TOOL)
                num_calls[name] = num_calls.get(name, 0.0) + value
    return [name for name, num in num_calls.items() if not num]


def advise_on_cut_off_answers(
    steps: Records, evaluations: Records, settings: Mapping[str, Any]
) -> str:
    """
    Returns a warning and advice if over half of the newest answers are cut off, else "".

    The warning can appear after the first step, or even after an evaluation before the first step,
    because answers that never end teach the model nothing and make all other figures meaningless.
    """
    newest = mean_value(steps[-FEW:], TRUNCATED) or 0.0
    last_step = steps[-1].get("step", 0) if steps else 0
    if evaluations and evaluations[-1]["step"] >= last_step:
        newest = max(newest, evaluations[-1].get(EVAL_TRUNCATED) or 0.0)

    first = measured_values(steps[:1], TRUNCATED)
    first += measured_values(evaluations[:1], EVAL_TRUNCATED)
    was_low = bool(first) and max(first) <= LOW_CUT_OFF
    if newest > eval_record.MAX_CUT_OFF and was_low:
        limit = eval_record.flags_limiting_answer_length(settings)
        if settings.get("loss_type") == "sft":
            return (
                f"{newest:.0%} of the answers are now cut off at {limit}, compared with "
                f"{max(first):.0%} at the start. Read some of them in eval_answers.jsonl: if the "
                "answers are useful, raise --max-tokens"
            )
        return (
            f"{newest:.0%} of the answers are now cut off at {limit}, compared with "
            f"{max(first):.0%} at the start. Read some of them in rollouts.jsonl: if the answers "
            "are useful, raise --max-tokens; if they are babble, lower --temp or --learning-rate"
        )
    return eval_record.cut_off_warning(newest, settings)


def describe_little_signal(steps: Records) -> str:
    """Returns a warning if rewards have lately differed in only a few of the groups, else ""."""
    newest = steps[-2 * FEW :]
    fractions_equal = measured_values(newest, "reward/zero_std_frac")
    if len(fractions_equal) < 2 * FEW:
        return ""
    fraction = 1 - statistics.fmean(fractions_equal)
    if fraction >= LEAST_SIGNAL:
        return ""
    return (
        f"In the last {len(newest)} steps, only {fraction:.0%} of the groups had answers with "
        "different rewards, and the model learned nothing from the other groups. If most answers "
        "fail, try easier prompts; if most succeed, try harder prompts. In either case, a higher "
        "--temp or more --groups may help"
    )


def describe_entropy_collapse(steps: Records) -> str:
    """Returns a warning if the entropy fell to a small fraction of its first value, else ""."""
    first = mean_value(steps[:FEW], "entropy")
    newest = mean_value(steps[-FEW:], "entropy")
    if first is None or newest is None or newest >= LEAST_ENTROPY * first:
        return ""
    return (
        f"The entropy fell from {first:.3f} to {newest:.3f} nats per token, so the model hardly "
        "tries anything new. Try a lower --learning-rate, --entropy-coef 0.001 or a higher --temp"
    )


def describe_slow_steps(steps: Records) -> str:
    """Returns a warning if the last steps took much longer per token than usual, else ""."""
    paces = []  # for each step, its seconds divided by the mean number of tokens per completion
    for step in steps:
        if step.get("step/s"):
            paces.append(step["step/s"] / (step.get("completion/mean_tokens") or 1))
    if len(paces) < FEW + IN_A_ROW:
        return ""
    factor = min(paces[-IN_A_ROW:]) / statistics.median(paces[:-IN_A_ROW])
    if factor <= SLOWER:
        return ""
    return (
        f"Each of the last {IN_A_ROW} steps took at least {factor:.1f} times as long per token as "
        "usual. The machine may be short of memory, be too hot or be saving power; docs/memory.md "
        "lists the settings that save memory"
    )


def is_training_loss_still_falling(steps: Records) -> bool:
    """
    Whether the loss still fell clearly from the third to the fourth quarter of the steps.

    The fall is that of a straight line through the losses of both quarters. It must be at least
    `LEAST_FALL` of the third quarter's mean, `LEAST_NATS`, and twice its standard error.
    """
    losses = measured_values(steps, "loss")
    size = len(losses) // 4
    if not size:
        return False
    second_half = losses[-2 * size :]
    places = range(2 * size)
    slope, intercept = statistics.linear_regression(places, second_half)
    fall = -slope * size

    standard_error = 0.0
    if size > 1:  # two losses always lie on a straight line
        residuals = [
            loss - (intercept + slope * place)
            for place, loss in zip(places, second_half, strict=True)
        ]
        residual_variance = sum(residual**2 for residual in residuals) / (2 * size - 2)
        spread = sum((place - statistics.fmean(places)) ** 2 for place in places)
        standard_error = size * math.sqrt(residual_variance / spread)
    third_quarter = statistics.fmean(second_half[:size])
    return fall >= max(LEAST_FALL * third_quarter, LEAST_NATS, 2 * standard_error)


def mean_completion_fraction_by_control_token(records: Records) -> dict[str, float]:
    """Returns the mean fraction of completions that contain each control token, by token."""
    names = {key for record in records for key in record if key.startswith(CONTROL)}
    fractions = {}
    for name in sorted(names):
        total = sum(measured_values(records, name))
        fractions[name.removeprefix(CONTROL)] = total / len(records)
    return fractions


# ---- reading the records


def measured_values(records: Records, key: str) -> list[float]:
    """Returns the values of a key in those records in which the key is present and not null."""
    return [record[key] for record in records if record.get(key) is not None]


def mean_value(records: Records, key: str) -> float | None:
    values = measured_values(records, key)
    return statistics.fmean(values) if values else None
