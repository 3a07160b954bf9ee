"""
Diagnoses a run from its own figures: each illness found gives a warning that suggests what to try.

Records in, warnings out. The records are those of `metrics.jsonl`, so a resumed run sees the same as an uninterrupted
one. Of scores that cannot be read the judge itself warns (judging/rubrics.py), of held-out ones the verdict.
"""

import statistics
from typing import Any, NamedTuple

Records = list[dict[str, Any]]

FEW = 5  # steps to average, so that one odd step triggers nothing
MOST_TRUNCATED, MOST_OVER_CAP = 0.5, 0.01
LEAST_ENTROPY = 0.1  # relative to the first steps
STILL, LEAST_KL = 10, 1e-6  # updates, and nats a token of one; the demo has 2e-3 at its rate, 1e-8 at a 400th of it
SLOWER, IN_A_ROW = 3.0, 3  # times the usual seconds a token, of so many steps


class Finding(NamedTuple):
    name: str
    text: str  # the symptom, and what to try


def examine(steps: Records, has_gained: bool) -> list[Finding]:
    """The illnesses of these ordered steps. A missing figure is no symptom. has_gained: the verdict's, so far."""
    last, is_early, found = steps[-FEW:], len(steps) < FEW, dict[str, str]()

    groups = measured(last, "sampling/signal_groups")
    if len(groups) == FEW and not any(groups):
        found["no signal"] = (
            f"In no group did rewards differ by more than noise, {FEW} steps in a row: they taught nothing. Is the "
            "reward constant, or is every prompt too easy or too hard? Try a reward that tells answers apart, other "
            "prompts, a higher --temp or more --groups"
        )

    calls, failures = (sum(measured(last, f"tools/{name}")) for name in ("calls", "failures"))
    if not is_early and failures > calls / 2:
        found["tools fail"] = (
            f"{failures:.0f} of {calls:.0f} calls of tools failed in {FEW} steps. Look at `tool_calls` in "
            "rollouts.jsonl for their errors"
        )

    first, now = mean(steps[:FEW], "entropy"), mean(last, "entropy")
    is_lost = first is not None and now is not None and now < LEAST_ENTROPY * first
    if is_lost and len(steps) >= 2 * FEW and not has_gained:
        found["entropy"] = (
            f"The entropy fell from {first:.3f} to {now:.3f} nats a token: the policy hardly tries anything new. Try "
            "a lower --learning-rate, --epsilon-high 0.28 or a higher --temp"
        )

    moved = measured(steps[-STILL:], "update/kl")
    is_still = len(moved) == STILL and sum(map(abs, moved)) < STILL * LEAST_KL
    if is_still and not found.keys() & {"no signal", "entropy"}:  # no rate mends these
        found["nothing moves"] = (
            f"{STILL} updates in a row changed the answers by {sum(moved) / STILL:.1g} nats a token, which is "
            "rounding. Try a --learning-rate ten times as high; recipes/ has usual rates"
        )

    began, share = (mean(its, "completion/truncated_frac") or 0.0 for its in (steps[:1], last))
    if not is_early and share > MOST_TRUNCATED:
        found["truncated"] = (
            f"{share:.0%} of the completions of the last {FEW} steps hit --max-tokens, {began:.0%} at first. Read some "
            "in rollouts.jsonl: answers cut short need a higher --max-tokens, babble a lower --temp or --learning-rate"
        )

    tokens = [step.get("completion/mean_tokens") or 1 for step in steps]
    paces = [step["step/s"] / num for step, num in zip(steps, tokens, strict=True) if step.get("step/s")]
    if len(paces) >= FEW + IN_A_ROW:
        times = min(paces[-IN_A_ROW:]) / statistics.median(paces[:-IN_A_ROW])
        if times > SLOWER:
            found["slow"] = (
                f"The last {IN_A_ROW} steps took {times:.1f} times as long a token as usual. The machine may lack "
                "memory, be hot or save power; docs/memory.md says what to lower"
            )

    share = mean(last, "mismatch/over_cap_frac") or 0.0
    if not is_early and share > MOST_OVER_CAP:
        found["mismatch"] = (
            f"The trainer finds {share:.1%} of the tokens likelier than the sampler did by more than a factor of 3. "
            "Try GWEN_DTYPE=float32"
        )
    return [Finding(name, text) for name, text in found.items()]


# ---- reading the records


def measured(records: Records, key: str) -> list[float]:
    """The values under `key`; skips records without it or with null."""
    return [record[key] for record in records if record.get(key) is not None]


def mean(records: Records, key: str) -> float | None:
    values = measured(records, key)
    return statistics.fmean(values) if values else None
