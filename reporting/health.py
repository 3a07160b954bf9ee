"""
Diagnoses a run from its own figures: each symptom gives a warning that suggests what to try.

The functions take records and return warnings. The records are those of `metrics.jsonl`, so a
resumed run gets the same warnings as an uninterrupted one. This file does not cover unreadable
scores, about which the judge itself warns (judging/rubrics.py), or held-out figures (verdict.py).
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from disk import eval_record

Records = Sequence[dict[str, Any]]

TRUNCATED = "completion/truncated_frac"
EVAL_TRUNCATED = "eval/truncated_frac"
CONTROL = "completion/control_frac/"  # the prefix of the metrics of control tokens
FEW = 5  # steps to average, so that one odd step triggers nothing
MOST_OVER_CAP = 0.01  # fraction of the tokens whose mismatch exceeds the cap
MOST_CONTROL = 0.1  # fraction of completions that contain one control token
LEAST_ENTROPY = 0.1  # fraction of the entropy of the first steps
STILL = 10  # updates in a row that move nothing
LEAST_KL = 1e-6  # nats a token per update; the demo has 2e-3, and 1e-8 at a 400th of its rate
SLOWER = 3.0  # factor over the usual seconds a token
IN_A_ROW = 3  # slow steps


class Finding(NamedTuple):
    name: str
    text: str  # the symptom and what to try, without the last full stop


def find_symptoms(
    steps: Records,
    has_gained: bool,
    evaluations: Records = (),
    settings: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """
    Returns the symptoms that a run's steps and evaluations show; both are in order.

    A symptom that explains others comes before them. A missing figure is no symptom.

    has_gained: see `Verdict`. settings: the run's settings.
    """
    last = steps[-FEW:]
    is_early = len(steps) < FEW
    symptoms: dict[str, str] = {}

    fractions = control_shares(last)
    token = max(fractions, key=lambda name: fractions[name], default="")
    if fractions.get(token, 0.0) > MOST_CONTROL:
        symptoms["control token"] = (
            f"{fractions[token]:.0%} of the completions of the last {len(last)} steps contain the "
            f"control token {token!r}, which does not end a completion and is not shown in texts. "
            f"If it should end them, start again with --end-tokens '{token}'. Otherwise look at "
            "`ids` in rollouts.jsonl, and check that the model fits this chat template"
        )

    cut_off = describe_cut_off(steps, evaluations, settings or {})
    if cut_off and "control token" not in symptoms:
        symptoms["truncated"] = cut_off

    num_groups = measured_values(last, "sampling/signal_groups")
    if len(num_groups) == FEW and not any(num_groups):
        symptoms["no signal"] = (
            f"No group's rewards differed by more than noise, {FEW} steps in a row, so the model "
            "learned nothing from them. Is the reward constant, or is every prompt too easy or too "
            "hard? Try a reward that tells answers apart, other prompts, a higher --temp or more "
            "--groups"
        )

    num_calls = sum(measured_values(last, "tools/calls"))
    num_failures = sum(measured_values(last, "tools/failures"))
    if not is_early and num_failures > num_calls / 2:
        symptoms["tools fail"] = (
            f"{num_failures:.0f} of {num_calls:.0f} tool calls failed in {FEW} steps. Look at "
            "`tool_calls` in rollouts.jsonl for their errors"
        )

    if len(steps) >= 2 * FEW and not has_gained:
        collapse = describe_entropy_collapse(steps)
        if collapse:
            symptoms["entropy"] = collapse

    # no learning rate fixes these two
    has_other_cause = "no signal" in symptoms or "entropy" in symptoms
    moves = measured_values(steps[-STILL:], "update/kl")
    is_still = len(moves) == STILL and sum(map(abs, moves)) < STILL * LEAST_KL
    if is_still and not has_other_cause:
        symptoms["nothing moves"] = (
            f"{STILL} updates in a row changed the answers by {sum(moves) / STILL:.1g} nats a "
            "token, which is rounding. Try a --learning-rate ten times as high; recipes/ has usual "
            "rates"
        )

    slow = describe_slow_steps(steps)
    if slow:
        symptoms["slow"] = slow

    fraction = mean_value(last, "mismatch/over_cap_frac") or 0.0
    if not is_early and fraction > MOST_OVER_CAP:
        symptoms["mismatch"] = (
            f"For {fraction:.1%} of the tokens the trainer's probability exceeds the sampler's by "
            "more than a factor of 3. Try GWEN_DTYPE=float32"
        )
    return [Finding(name, text) for name, text in symptoms.items()]


def describe_cut_off(steps: Records, evaluations: Records, settings: Mapping[str, Any]) -> str:
    """
    Says that over half of the newest answers are cut off, and what to change; "" if they are not.

    The first step shows this, and so does an evaluation before it. Answers that never end teach the
    model nothing, and then no other figure means much.
    """
    newest = mean_value(steps[-FEW:], TRUNCATED) or 0.0
    last_step = steps[-1].get("step", 0) if steps else 0
    if evaluations and evaluations[-1]["step"] >= last_step:
        newest = max(newest, evaluations[-1].get(EVAL_TRUNCATED) or 0.0)

    first = measured_values(steps[:1], TRUNCATED)
    first += measured_values(evaluations[:1], EVAL_TRUNCATED)
    was_low = bool(first) and max(first) <= eval_record.MOST_CUT_OFF
    if newest > eval_record.MOST_CUT_OFF and was_low:
        limit = eval_record.token_limit(settings)
        return (
            f"{newest:.0%} of the answers are cut off at {limit}, {max(first):.0%} at first. Read "
            "some in rollouts.jsonl: useful answers need a higher --max-tokens, babble needs a "
            "lower --temp or --learning-rate"
        )
    return eval_record.cut_off_message(newest, settings)


def describe_entropy_collapse(steps: Records) -> str:
    """Says that the entropy fell to a small part of its first value; "" if it did not."""
    first = mean_value(steps[:FEW], "entropy")
    newest = mean_value(steps[-FEW:], "entropy")
    if first is None or newest is None or newest >= LEAST_ENTROPY * first:
        return ""
    return (
        f"The entropy fell from {first:.3f} to {newest:.3f} nats a token: the policy hardly tries "
        "anything new. Try a lower --learning-rate, --epsilon-high 0.28 or a higher --temp"
    )


def describe_slow_steps(steps: Records) -> str:
    """Says that the last steps took much longer a token than earlier ones; "" if they did not."""
    paces = []  # the seconds of each step, divided by the tokens of its mean completion
    for step in steps:
        if step.get("step/s"):
            paces.append(step["step/s"] / (step.get("completion/mean_tokens") or 1))
    if len(paces) < FEW + IN_A_ROW:
        return ""
    factor = min(paces[-IN_A_ROW:]) / statistics.median(paces[:-IN_A_ROW])
    if factor <= SLOWER:
        return ""
    return (
        f"The last {IN_A_ROW} steps took {factor:.1f} times as long a token as usual. The machine "
        "may lack memory, be hot or save power; docs/memory.md says what to lower"
    )


def control_shares(records: Records) -> dict[str, float]:
    """Returns the mean fraction of completions with each control token."""
    names = {key for record in records for key in record if key.startswith(CONTROL)}
    fractions = {}
    for name in sorted(names):
        total = sum(measured_values(records, name))
        fractions[name.removeprefix(CONTROL)] = total / len(records)
    return fractions


# ---- reading the records


def measured_values(records: Records, key: str) -> list[float]:
    """Returns the values under `key`, and leaves out records that lack it or have null."""
    return [record[key] for record in records if record.get(key) is not None]


def mean_value(records: Records, key: str) -> float | None:
    values = measured_values(records, key)
    return statistics.fmean(values) if values else None
