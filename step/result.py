"""
What an update did, and its figures in `metrics.jsonl`, which every kind of run has.

Left out: the update itself (update.py), the figures of rollouts and rewards (reporting/journal.py).
"""

from collections.abc import Collection
from typing import Any, NamedTuple

# the policy before the update against the sampler's
MISMATCH = ("logprob_abs_mean", "logprob_abs_max", "ratio_mean", "ratio_max", "over_cap_frac")
# measured at each step: means over the counted tokens; `_max` is the largest
MEASURED = ("kl", "clip_frac", "entropy", "distill", *MISMATCH)


class UpdateResult(NamedTuple):
    """Result of the optimizer steps on one rollout; Python numbers, means over these steps, None if not measured."""

    lr: float  # as scheduled
    rate: float  # factor of it in the last step
    num_skipped: int  # skipped steps since the run began
    loss_scale: float  # after the last step
    # over the counted tokens; `_max` is the largest
    means: dict[str, float | None]
    num_items: int = 0  # counted tokens
    num_taught: int = 0  # rows with a gradient
    loss: float | None = None
    grad_norm: float | None = None  # before clipping
    moved: float | None = None  # KL between the policies before the first and after the last, `trust_region.distance`
    repeats: int = 0  # tries that went too far and were undone
    skipped: int = 0  # steps skipped because their gradient was not finite
    num_forwards: int = 0  # rows computed, including the reference's
    pad_frac: float | None = None  # padding's share of the computed positions

    @classmethod
    def of(
        cls, steps: list[dict[str, float]], passes: int, num: int, *, num_items: int, **others: Any
    ) -> "UpdateResult":
        """Of what the optimizer steps measured: `passes` through `num` mini-batches of together `num_items` tokens."""

        def mean(name: str) -> float:
            values = [one[name] for one in steps]
            return max(values) if name.endswith("_max") else sum(values) / passes / num_items

        norms = [one["grad_norm"] for one in steps if "grad_norm" in one]
        return cls(
            means=dict.fromkeys(MEASURED) | {name: mean(name) for name in steps[0] if name in MEASURED},
            loss=sum(one["loss"] for one in steps) / (num * passes),
            grad_norm=sum(norms) / len(norms) if norms else None,
            skipped=int(sum(one["skipped"] for one in steps)),
            num_items=num_items,
            **others,
        )

    def metrics(self, seconds: dict[str, float], num_rows: int, recent: Collection[float]) -> dict[str, Any]:
        """seconds: of the step, by phase. num_rows: rows that were trained. recent: seconds of the last steps."""
        train_s = sum(seconds.get(phase, 0.0) for phase in ("reward", "judge", "batch", "ref", "teacher", "update"))
        return {
            "loss": self.loss,
            "update/s": seconds["update"],
            "update/tok_s": self.num_items / seconds["update"] if self.num_items else None,
            "train/s": train_s,
            "train/tok_s": self.num_items / train_s,
            "other/s": seconds["other"],
            "step/s": seconds["step"],
            "step_avg_last10/s": sum(recent) / len(recent),
            **({"wait/s": seconds["wait"]} if "wait" in seconds else {}),
            "kl": self.means["kl"],
            "distill/kl": self.means["distill"],
            "entropy": self.means["entropy"],
            "clip_frac": self.means["clip_frac"],
            **{f"mismatch/{name}": self.means[name] for name in MISMATCH},
            "grad_norm": self.grad_norm,
            "loss_scale": self.loss_scale,
            "lr": self.lr,
            "update/kl": self.moved,
            "update/rows": self.num_taught,
            "update/rate": self.rate,
            "update/repeats": self.repeats,
            "skipped": self.skipped,
            "skipped_total": self.num_skipped,
            "pad_frac": self.pad_frac,
            "forwards_per_completion": self.num_forwards / num_rows,
        }
