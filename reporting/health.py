"""
Diagnoses a run from its own figures: each illness found gives a warning that suggests what to try.

Records in, warnings out. The records are those of `metrics.jsonl` and `eval.jsonl`, so a resumed run sees the same as
an uninterrupted one. Of scores that cannot be read the judge itself warns (judging/rubrics.py).
"""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

Records = list[dict[str, Any]]

FEW = 5  # steps to average, so that one odd step triggers nothing
HELD_OUT = ("eval/accuracy", "eval/score")  # a run has one of these figures
MOST_TRUNCATED, MOST_OVER_CAP = 0.5, 0.01
LEAST_ENTROPY = 0.1  # relative to the first steps
STILL, LEAST_KL = 10, 1e-6  # updates, and nats a token of one; the demo has 2e-3 at its rate, 1e-8 at a 400th of it
SLOWER, IN_A_ROW = 3.0, 3  # times the usual seconds a token, of so many steps


class Finding(NamedTuple):
    name: str
    text: str  # the symptom, and what to try


Symptom = Callable[[Records, Records], str]  # (steps, evaluations) -> description, "" if absent
ILLNESSES: list[tuple[str, Symptom, str]] = []  # name, symptom, advice
READ = "Read late completions in rollouts.jsonl"


def illness(name: str, advice: str) -> Callable[[Symptom], Symptom]:
    """Makes a function the symptom of an illness."""

    def register(symptom: Symptom) -> Symptom:
        ILLNESSES.append((name, symptom, advice))
        return symptom

    return register


def examine(steps: Records, evals: Records) -> list[Finding]:
    """Finds illnesses in these ordered steps and evaluations. Missing figures never count as symptoms."""
    seen = [(name, symptom(steps, evals), advice) for name, symptom, advice in ILLNESSES]
    return [Finding(name, f"{symptom}. {advice}") for name, symptom, advice in seen if symptom]


# ---- reading the records


def measured(records: Records, key: str) -> list[float]:
    """The values under `key`; skips records without it or with null."""
    return [record[key] for record in records if record.get(key) is not None]


def recent(steps: Records, key: str) -> float | None:
    """The mean over the last FEW steps; None with fewer steps or without values."""
    values = measured(steps[-FEW:], key)
    return statistics.fmean(values) if values and len(steps) >= FEW else None


def ends(steps: Records, key: str) -> tuple[float, float] | None:
    """The means over the first and the last FEW steps; None while they overlap, or without values."""
    first, last = measured(steps[:FEW], key), measured(steps[-FEW:], key)
    return (statistics.fmean(first), statistics.fmean(last)) if first and last and len(steps) >= 2 * FEW else None


def has_gained(evals: Records) -> bool:
    """Whether more held-out answers are right than at first, by more than noise: no reward can bend that."""
    known = [record for record in evals if record.get("eval/accuracy") is not None]
    noise = [record.get("eval/accuracy_ci95") or 0.0 for record in known]
    return bool(known) and known[-1]["eval/accuracy"] - known[0]["eval/accuracy"] > math.hypot(noise[0], noise[-1])


def best(records: Records, key: str) -> dict[str, Any]:
    """The record with the best value under `key`, the earliest of equals; a loss is the better the lower."""
    sign = -1 if key == "eval/loss" else 1
    return max(records, key=lambda record: sign * record[key])


def held_out(evals: Records) -> tuple[str, Records]:
    """The name of the held-out figure, and the evaluations that have it."""
    key = next((key for key in HELD_OUT if measured(evals, key)), HELD_OUT[0])
    return key, [record for record in evals if record.get(key) is not None]


# ---- the symptoms


@illness(
    "no signal",
    "Is the reward constant, or is every prompt too easy or too hard? Try a reward that tells answers apart, other "
    "prompts, a higher --temp or more --groups",
)
def no_signal(steps: Records, _: Records) -> str:
    groups = measured(steps[-FEW:], "sampling/signal_groups")
    if len(groups) < FEW or any(groups):
        return ""
    return f"In no group did rewards differ by more than noise, {FEW} steps in a row: they taught nothing"


@illness("nothing moves", "Try a --learning-rate ten times as high; docs/data.md has rates by size")
def unmoved(steps: Records, _: Records) -> str:
    moved = measured(steps[-STILL:], "update/kl")
    if len(moved) < STILL or sum(map(abs, moved)) >= STILL * LEAST_KL:
        return ""
    return f"{STILL} updates in a row changed the answers by {sum(moved) / STILL:.1g} nats a token, which is rounding"


@illness("tools fail", "Look at `tool_calls` in rollouts.jsonl for their errors")
def tools_fail(steps: Records, _: Records) -> str:
    calls, failures = (sum(measured(steps[-FEW:], f"tools/{name}")) for name in ("calls", "failures"))
    if len(steps) < FEW or failures <= calls / 2:
        return ""
    return f"{failures:.0f} of {calls:.0f} calls of tools failed in {FEW} steps"


@illness("entropy", "Try a lower --learning-rate, --epsilon-high 0.28 or a higher --temp")
def entropy_lost(steps: Records, evals: Records) -> str:
    means = ends(steps, "entropy")
    if means is None or means[1] >= LEAST_ENTROPY * means[0] or has_gained(evals):
        return ""
    return f"The entropy fell from {means[0]:.3f} to {means[1]:.3f} nats a token: the policy hardly tries anything new"


@illness("truncated", f"{READ}: answers cut short need a higher --max-tokens, babble a lower --learning-rate")
def truncated(steps: Records, _: Records) -> str:
    share = recent(steps, "completion/truncated_frac")
    if share is None or share <= MOST_TRUNCATED:
        return ""
    return f"{share:.0%} of the completions of the last {FEW} steps ran into --max-tokens"


@illness("slow", "The machine may lack memory, be hot or save power; docs/memory.md says what to lower")
def slow(steps: Records, _: Records) -> str:
    tokens = [(step.get("completion/mean_tokens") or 1) * (step.get("sampling/draws") or 1) for step in steps]
    paces = [step["step/s"] / num for step, num in zip(steps, tokens, strict=True) if step.get("step/s")]
    if len(paces) < FEW + IN_A_ROW:
        return ""
    times = min(paces[-IN_A_ROW:]) / statistics.median(paces[:-IN_A_ROW])
    return f"The last {IN_A_ROW} steps took {times:.1f} times as long a token as usual" if times > SLOWER else ""


@illness("mismatch", "Try GWEN_DTYPE=float32")
def mismatched(steps: Records, _: Records) -> str:
    share = recent(steps, "mismatch/over_cap_frac")
    if share is None or share <= MOST_OVER_CAP:
        return ""
    return f"The trainer finds {share:.1%} of the tokens likelier than the sampler did by more than a factor of 3"
