"""
Diagnoses a run from its own figures: each illness found gives a warning that suggests what to try.

Records in, warnings out. The records are those of `metrics.jsonl`, so a resumed run sees the same as an uninterrupted
one. Of scores that cannot be read the judge itself warns (judging/rubrics.py), of held-out ones the verdict.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from disk import run_files

Records = Sequence[dict[str, Any]]

TRUNCATED, EVAL_TRUNCATED = "completion/truncated_frac", "eval/truncated_frac"
FEW = 5  # steps to average, so that one odd step triggers nothing
MOST_OVER_CAP = 0.01
MOST_CONTROL = 0.1  # share of completions that hold one control token
CONTROL = "completion/control_frac/"  # what the metric of a control token begins with
LEAST_ENTROPY = 0.1  # relative to the first steps
STILL, LEAST_KL = (
    10,
    1e-6,
)  # updates, and nats a token of one; the demo has 2e-3 at its rate, 1e-8 at a 400th of it
SLOWER, IN_A_ROW = 3.0, 3  # times the usual seconds a token, of so many steps


class Finding(NamedTuple):
    name: str
    text: str  # the symptom, and what to try


def find_symptoms(
    steps: Records,
    has_gained: bool,
    evaluations: Records = (),
    settings: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """
    The illnesses of these ordered steps and evaluations, the one that explains others first.

    A missing figure is no symptom. has_gained: the verdict's, so far. settings: the run's.
    """
    last, is_early, found = steps[-FEW:], len(steps) < FEW, dict[str, str]()

    shares = control_shares(last)
    token = max(shares, key=lambda name: shares[name], default="")
    if shares.get(token, 0.0) > MOST_CONTROL:
        found["control token"] = (
            f"{shares[token]:.0%} of the completions of the last {len(last)} steps hold the control token {token!r}, "
            "which ends none and is left out of texts. If it should end them, start again with "
            f"--end-tokens '{token}'; "
            "else look at `ids` in rollouts.jsonl, and at whether the model is of this chat template"
        )

    cut = describe_cut_off(steps, evaluations, settings or {})
    if cut and "control token" not in found:
        found["truncated"] = cut

    groups = measured_values(last, "sampling/signal_groups")
    if len(groups) == FEW and not any(groups):
        found["no signal"] = (
            f"In no group did rewards differ by more than noise, {FEW} steps in a row: they taught nothing. Is the "
            "reward constant, or is every prompt too easy or too hard? Try a reward that tells answers apart, other "
            "prompts, a higher --temp or more --groups"
        )

    calls, failures = (
        sum(measured_values(last, f"tools/{name}")) for name in ("calls", "failures")
    )
    if not is_early and failures > calls / 2:
        found["tools fail"] = (
            f"{failures:.0f} of {calls:.0f} calls of tools failed in {FEW} steps. Look at `tool_calls` in "
            "rollouts.jsonl for their errors"
        )

    first, now = mean_value(steps[:FEW], "entropy"), mean_value(last, "entropy")
    is_lost = first is not None and now is not None and now < LEAST_ENTROPY * first
    if is_lost and len(steps) >= 2 * FEW and not has_gained:
        found["entropy"] = (
            f"The entropy fell from {first:.3f} to {now:.3f} nats a token: the policy hardly tries anything new. Try "
            "a lower --learning-rate, --epsilon-high 0.28 or a higher --temp"
        )

    moved = measured_values(steps[-STILL:], "update/kl")
    is_still = len(moved) == STILL and sum(map(abs, moved)) < STILL * LEAST_KL
    if is_still and not found.keys() & {"no signal", "entropy"}:  # no rate mends these
        found["nothing moves"] = (
            f"{STILL} updates in a row changed the answers by {sum(moved) / STILL:.1g} nats a token, which is "
            "rounding. Try a --learning-rate ten times as high; recipes/ has usual rates"
        )

    tokens = [step.get("completion/mean_tokens") or 1 for step in steps]
    paces = [
        step["step/s"] / num for step, num in zip(steps, tokens, strict=True) if step.get("step/s")
    ]
    if len(paces) >= FEW + IN_A_ROW:
        times = min(paces[-IN_A_ROW:]) / statistics.median(paces[:-IN_A_ROW])
        if times > SLOWER:
            found["slow"] = (
                f"The last {IN_A_ROW} steps took {times:.1f} times as long a token as usual. The machine may lack "
                "memory, be hot or save power; docs/memory.md says what to lower"
            )

    share = mean_value(last, "mismatch/over_cap_frac") or 0.0
    if not is_early and share > MOST_OVER_CAP:
        found["mismatch"] = (
            f"The trainer finds {share:.1%} of the tokens likelier than the sampler did by more than a factor of 3. "
            "Try GWEN_DTYPE=float32"
        )
    return [Finding(name, text) for name, text in found.items()]


def describe_cut_off(steps: Records, evaluations: Records, settings: Mapping[str, Any]) -> str:
    """
    That over half of the newest answers are cut off, and what to change; "" where they are not.

    This is known from the first step on, and before it from the evaluation at step 0: answers that never end teach
    nothing, and no other figure means much then.
    """
    newest = mean_value(steps[-FEW:], TRUNCATED) or 0.0
    last_step = steps[-1].get("step", 0) if steps else 0
    if evaluations and evaluations[-1]["step"] >= last_step:
        newest = max(newest, evaluations[-1].get(EVAL_TRUNCATED) or 0.0)
    first = measured_values(steps[:1], TRUNCATED) + measured_values(evaluations[:1], EVAL_TRUNCATED)
    was_low = bool(first) and max(first) <= run_files.MOST_CUT_OFF
    if newest > run_files.MOST_CUT_OFF and was_low:
        return (
            f"{newest:.0%} of the answers are cut off at {run_files.token_limit(settings)}, {max(first):.0%} at first. "
            "Read some in rollouts.jsonl: answers cut short need a higher --max-tokens, babble a lower --temp or "
            "--learning-rate"
        )
    return run_files.cut_off_message(newest, settings)


def control_shares(records: Records) -> dict[str, float]:
    """The mean share of completions with each control token."""
    names = {key for record in records for key in record if key.startswith(CONTROL)}
    totals = {name: sum(measured_values(records, name)) for name in sorted(names)}
    return {name.removeprefix(CONTROL): total / len(records) for name, total in totals.items()}


# ---- reading the records


def measured_values(records: Records, key: str) -> list[float]:
    """The values under `key`; skips records without it or with null."""
    return [record[key] for record in records if record.get(key) is not None]


def mean_value(records: Records, key: str) -> float | None:
    values = measured_values(records, key)
    return statistics.fmean(values) if values else None
