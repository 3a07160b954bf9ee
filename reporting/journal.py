"""
What a run records: `metrics.jsonl`, `rollouts.jsonl`, `eval.jsonl` and the lines on the console.

A clock bills seconds to phases. Pure functions turn a step into dictionaries of figures and completions. A figure that
was not measured is None; `docs/reference.md` explains the keys. `Journal` writes them, prints warnings, knows the best
evaluation, and keeps the live line and the trackers up to date.

What is left out: console lines (console.py), the page (page.py), and the state to resume from (disk/checkpoint.py).
"""

import base64
import contextlib
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from config import Config
from disk.run_files import JsonLines, mean, without_infinities
from judging import rubrics
from machine import gpu, world
from problems import form
from problems.examples import prompt_text, spread_evenly
from problems.rewards import Logged
from reporting import health, verdict
from reporting.console import LiveLine, console_line, print_line, print_warning
from reporting.history import History
from reporting.trackers import Tracker
from sampler import RolloutStats
from step.loss import UpdateResult
from step.sample import Sample, group_samples

MOST_ANSWERS = 512  # answers recorded per evaluation, evenly spread over the held-out problems


class PhaseClock:
    """Seconds by phase within one step; phases do not nest."""

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None) -> None:
        self.on_phase = on_phase  # hears of each phase that begins
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()
        self._running: str | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[..., None]]:
        """Bills its body's time to `name`; the body must end with `done(*arrays)`, which waits for arrays."""
        assert self._running is None, f"phase {name} inside phase {self._running}"
        self.on_phase(name)
        self._running, finished, begin = name, False, time.perf_counter()

        def done(*arrays: Any) -> None:
            nonlocal finished
            mx.eval(arrays)  # wait: the phase pays for its own lazy work
            finished = True

        try:
            yield done
        finally:
            self._running = None
            if gpu.on_gpu():  # the next phase has buffers of other sizes
                mx.clear_cache()
        assert finished, f"phase {name} ended without done()"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call, plus `step` (the total) and `other` (outside all phases)."""
        now = time.perf_counter()
        seconds = self.seconds | {
            "step": now - self._begin,
            "other": now - self._begin - sum(self.seconds.values()),
        }
        self.seconds, self._begin = {}, now
        return seconds | world.take_wait_seconds()


# ---- a step


class StepSamples(NamedTuple):
    """The samples of a step, and what sampling, rewards and the judge say of them; given replies have samples alone."""

    samples: list[Sample]
    stats: RolloutStats | None = None
    logged: Logged | None = None
    judged: rubrics.Judgement | None = None


# what given replies do not have; null in their metrics.jsonl
NOT_SAMPLED = (
    *("reward/mean", "reward/std", "reward/zero_std_frac", "reward/none", "reward/s"),
    "sampling/signal_groups",
    *("rollout/s", "rollout/tok_s", "prefill/s", "decode/s", "ref/s", "teacher/s"),
    *(
        "judge/s",
        "judge/crit_eval_s",
        "judge/unparsed",
        "judge/unparsed_frac",
        "judge/mass",
        "judge/cached",
    ),
    *(
        "completion/truncated_frac",
        "completion/repeated",
        "completion/degenerate_frac",
        "mem/cache_gb",
    ),
)


def update_metrics(
    result: UpdateResult, seconds: dict[str, float], num_rows: int, recent: Collection[float]
) -> dict[str, float | None]:
    """Figures of an update, and of the step's seconds by phase. num_rows: of the step."""
    train_s = sum(
        seconds.get(phase, 0.0) for phase in ("judge", "batch", "ref", "teacher", "update")
    )
    return {
        "loss": result.loss,
        "update/s": seconds["update"],
        "update/tok_s": result.num_loss_tokens / seconds["update"]
        if result.num_loss_tokens
        else None,
        "train/s": train_s,
        "train/tok_s": result.num_loss_tokens / train_s,
        "other/s": seconds["other"],
        "step/s": seconds["step"],
        "step_avg_last10/s": sum(recent) / len(recent),
        **({"wait/s": seconds["wait"]} if "wait" in seconds else {}),
        **result.means,
        "update/kl": result.moved,
        "update/rows": result.num_with_gradient,
        "update/rate": result.lr_scale,
        "update/repeats": result.num_backtracks,
        "skipped_total": result.num_skipped,
        "forwards_per_completion": result.num_forwards / num_rows,
        "grad_norm": result.grad_norm,
        "loss_scale": result.loss_scale,
        "lr": result.lr,
        "skipped": result.num_skipped_now,
        "pad_frac": result.pad_frac,
    }


def sampled_metrics(
    config: Config, drawn: StepSamples, seconds: dict[str, float]
) -> dict[str, float | None]:
    """Figures of the rollouts of a step, of their rewards and of what the judge was asked."""
    samples, stats, logged, judged = drawn
    assert stats and logged
    groups, num = group_samples(samples), len(samples)
    spreads = [np.std([one.reward for one in group], ddof=1) for group in groups if len(group) > 1]
    rewards = np.array([one.logged_reward for one in samples])
    parts = {
        name: np.array([one.reward_components[name] for one in samples])
        for name in samples[0].reward_components
    }
    texts = (
        [] if samples[0].conversation else [sample.text for sample in samples]
    )  # calls of tools repeat
    odd = list(
        map(form.is_degenerate, texts, (prompt_text(one.example["prompt"]) for one in samples))
    )
    signal = {
        "sampling/signal_groups": sum(one[0].has_signal for one in groups),
        "reward/zero_std_frac": sum(not one[0].rewards_differ for one in groups) / len(groups),
    }
    asked = (
        {}
        if judged is None
        else {
            "judge/crit_eval_s": judged.num_evaluations / judged.seconds
            if judged.num_evaluations
            else None,
            "judge/unparsed": judged.num_unreadable,
            "judge/unparsed_frac": judged.num_unreadable / judged.scores.size,
            "judge/mass": judged.mass,
            "judge/cached": judged.num_cached,
        }
    )
    speeds = stats.speeds if "wait" in seconds else []  # of several machines
    return {
        "reward/mean": mean(rewards),
        "reward/std": float(np.mean(spreads)) if spreads and np.isfinite(rewards).any() else None,
        **{f"reward/{name}": mean(part) for name, part in parts.items()},
        **{f"metric/{name}": float(np.mean(values)) for name, values in logged.metrics.items()},
        "reward/none": int(
            sum(
                np.isnan(parts[name]).sum()
                for name in samples[0].imputed_components
                if name != "rubric"
            )
        ),
        "reward/s": seconds["reward"],
        **(signal if config.compares_within_groups else {}),
        "rollout/s": seconds["rollout"],
        "rollout/tok_s": sum(len(one.loss_positions) for one in samples) / seconds["rollout"],
        **{f"rollout/tok_s/{rank}": float(speed) for rank, speed in enumerate(speeds)},
        "prefill/s": stats.prefill_s,
        "decode/s": stats.decode_s,
        "ref/s": seconds.get("ref", 0.0),
        "teacher/s": seconds.get("teacher"),
        "judge/s": seconds.get("judge", 0.0),
        **asked,
        "completion/truncated_frac": sum(one.finish_reason == "length" for one in samples) / num,
        **control_metrics(samples),
        "completion/repeated": sum(map(form.repetition, texts)) / num if texts else None,
        "completion/degenerate_frac": sum(odd) / num if texts else None,
        "mem/cache_gb": stats.cache_bytes / 1e9,
    }


def control_metrics(samples: list[Sample]) -> dict[str, float | None]:
    """The share of completions with each control token that ends nothing; none for tokens that nobody wrote."""
    counts = Counter(token for sample in samples for token in sample.controls)
    return {
        f"{health.CONTROL}{token}": count / len(samples) for token, count in sorted(counts.items())
    }


def tool_metrics(samples: list[Sample], stats: RolloutStats) -> dict[str, float]:
    """The figures of conversations with tools; none without."""
    talks = [sample.conversation for sample in samples if sample.conversation]
    calls = [call for talk in talks for call in talk["tool_calls"]]
    if not talks:
        return {}
    return {
        "tools/calls": float(len(calls)),
        "tools/failures": float(sum(call["error"] is not None for call in calls)),
        "tools/s": sum(call["seconds"] for call in calls),
        "tools/wait_s": stats.wait_s,
        "tools/turns": sum(talk["turns"] for talk in talks) / len(talks),
    }


def completion_records(number: int, samples: list[Sample]) -> Iterator[dict[str, Any]]:
    """One record per sampled completion of a step; groups are numbered."""
    for sample in samples:
        if sample.logprobs is None:
            continue
        example, answer = sample.example, sample.example.get("answer")
        yield {
            "step": number,
            "group": sample.group,
            "prompt": example["prompt"],
            "answer": None if answer is None else str(answer),  # may have any type
            "category": example.get("category"),
            "completion": sample.text,
            "ids": sample.response_ids,
            **({"own": sample.spans} | sample.conversation if sample.conversation else {}),
            # within 0.05% or 3e-8
            "logprobs": base64.b64encode(sample.logprobs.astype("<f2").tobytes()).decode(),
            **without_infinities({"reward": sample.logged_reward}),
            "rewards": without_infinities(sample.reward_components),
            **({"extra": sample.extra_columns} if sample.extra_columns else {}),
            "judge_scores": sample.scores
            and [None if math.isnan(one) else round(one, 4) for one in sample.scores],
            "finish_reason": sample.finish_reason,
            # where turns have their own, the first one's: it is of the whole conversation
            "advantage": np.ravel(sample.advantage)[0].item(),
        }


# ---- the files


class Journal:
    """The logs of a run directory, and the console lines about them."""

    def __init__(self, config: Config, run_dir: Path, step: int, *, keep_scores: bool):
        """
        Opens the logs and drops records later than `step`, from which the run continues.

        keep_scores: keep all scores of a paid judge; a local judge scores again, so the run repeats bit for bit.
        """
        self.config, self.dir, self.clock = config, run_dir, PhaseClock(self.begin)
        self.metrics, self.rollouts, self.evals, self.answers, self.judge_scores, self.warnings = (
            JsonLines(run_dir / f"{name}.jsonl", kept=world.is_first())
            for name in ("metrics", "rollouts", "eval", "eval_answers", "judge_scores", "warnings")
        )
        for log in (self.metrics, self.rollouts, self.evals, self.warnings):
            log.truncate_after(step)
        self.answers.truncate_after(
            max((record["step"] for record in self.evals.read()), default=-1)
        )
        self.judge_scores.truncate_after(sys.maxsize if keep_scores else step)
        self.steps, self.evaluations = world.on_rank0(
            lambda: [self.metrics.read(), self.evals.read()]
        )
        self.verdict: verdict.Verdict | None = None  # on the run so far
        self.best_step: int | None = world.on_rank0(
            self._judge_run
        )  # see `verdict.best_evaluation`; None if nothing could be scored
        self.recent: deque[float] = deque(maxlen=10)  # seconds of this process's last steps
        self.live: LiveLine | None = None
        self.phase = ""  # that began last: of a step, or "evaluating"
        self.begun_at = step
        self.trackers: list[Tracker] = []

    def __enter__(self) -> "Journal":
        """From here on the run is shown: its live line, its trackers."""
        self.live = LiveLine(
            self.config.optimizer.steps, self.steps[-1]["step"] if self.steps else 0
        )
        if (names := self.config.records.report_to) and world.is_first():
            self.trackers = [
                Tracker(name, self.dir, print_warning) for name in dict.fromkeys(names)
            ]
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live:
            self.live.close()
        self.live = None
        with contextlib.suppress(KeyboardInterrupt):  # an impatient one's
            for tracker in self.trackers:
                tracker.finish()

    def begin(self, phase: str) -> None:
        """Notes what the run is doing, for the live line and for who asks what failed."""
        self.phase = phase
        if self.live:
            self.live.begin(phase)

    def write_step(
        self,
        number: int,
        seconds: dict[str, float],
        drawn: StepSamples,
        result: UpdateResult,
        peak_bytes: int,
    ) -> dict[str, Any]:
        """Writes figures, which it returns, and completions, and prints a line; number: from 1; seconds: by phase."""
        self.recent.append(seconds["step"])
        samples, stats = drawn.samples, drawn.stats
        figures: dict[str, Any] = {"step": number} | dict.fromkeys(NOT_SAMPLED)
        if stats:
            figures |= sampled_metrics(self.config, drawn, seconds) | tool_metrics(samples, stats)
        figures |= update_metrics(result, seconds, len(samples), self.recent)
        num_completions = (
            len(samples) if stats else len(group_samples(samples))
        )  # a conversation is trained in parts
        figures["completion/mean_tokens"] = (
            sum(len(sample.loss_positions) for sample in samples) / num_completions
        )
        figures = without_infinities(figures | {"mem/peak_gb": peak_bytes / 1e9})
        self.metrics.write(figures)
        self.steps.append(figures)
        for completion in completion_records(number, samples):
            self.rollouts.write(completion)
        for tracker in self.trackers:
            tracker.log(figures)
        print_line(console_line(figures, self.config.optimizer.steps))
        if figures["skipped"]:
            print_warning(f"step {number}: the gradient was not finite; the step changed nothing")
        self.print_new_warnings(number)
        if self.live:
            self.live.note(figures)
        return figures

    def write_evaluation(
        self, step: int, record: dict[str, Any], answers: list[dict[str, Any]]
    ) -> None:
        """Writes an evaluation and up to MOST_ANSWERS of its answers."""
        for answer in spread_evenly(
            answers, MOST_ANSWERS
        ):  # first: without its record the evaluation is repeated
            self.answers.write({"step": step} | answer)
        record = {"step": step} | record
        self.evals.write(record)
        self.evaluations.append(record)
        self.best_step = world.on_rank0(self._judge_run)
        for tracker in self.trackers:
            tracker.log(record)
        self.print_new_warnings(step)

    def write_scores(self, step: int, grader: rubrics.Grader | None) -> None:
        """Writes the judge's new scores, so a resumed run knows exactly those that this one knew."""
        for score in grader.take_new_scores() if grader else []:
            self.judge_scores.write({"step": step} | score)

    def print_new_warnings(self, step: int) -> None:
        """Prints and records each warning once, with the step at which it first applied."""
        has_gained = self.verdict is not None and self.verdict.has_gained
        for finding in health.find_symptoms(
            self.steps, has_gained, self.evaluations, self.config.to_flags()
        ):
            self.warn_once(step, finding)

    def warn_once(self, step: int, finding: health.Finding) -> None:
        """Prints and records a warning, unless this run has given it."""
        if finding.name not in {warning["name"] for warning in self.warnings.read()}:
            self.warnings.write({"step": step} | finding._asdict())
            print_warning(f"WARNING after step {step}: {finding.text}.")

    def _judge_run(self) -> int | None:
        """The best evaluation's step, after the verdict and its warning."""
        run = History(self.dir, self.config.to_flags(), {}, self.steps, self.evaluations)
        self.verdict, best = verdict.judge_change(run), verdict.best_evaluation(run)
        if self.verdict and self.verdict.warning:
            self.warn_once(self.evaluations[-1]["step"], self.verdict.warning)
        return best["step"] if best else None

    def print_summary(self) -> None:
        """Says first if most answers are cut off, repeats the warnings, then what was written, and the verdict."""
        if cut := health.describe_cut_off(self.steps, self.evaluations, self.config.to_flags()):
            print_line(cut)
        for warning in self.warnings.read():
            print_line(f"warned after step {warning['step']}: {warning['name']}")
        print_line(f"adapter: {self.dir / 'adapter'}")
        if (best := self.best_step) is not None:
            is_worse = self.verdict and (self.verdict.warning or [""])[0] == "worse"
            since = "the newest is worse" if is_worse else "use the newest, which is no worse"
            beaten = f"; {since} by more than noise" * (best != self.evaluations[-1]["step"])
            print_line(
                f"best: {self.dir / 'adapter-best'}, {f'after {best} steps' if best else 'before training'}{beaten}"
            )
        if (written := self.dir / "report.html").is_file():
            print_line(f"page: {written}")
        for line in verdict.verdict_lines(self.verdict, self.config.to_flags(), self.dir):
            print_line(line)


def evaluation_is_due(config: Config, step: int, evaluations: list[dict[str, Any]]) -> bool:
    """Whether to evaluate after this step: the schedule says so and these records do not have it yet."""
    if not config.evaluation.every or (
        step % config.evaluation.every and step != config.optimizer.steps
    ):
        return False
    return not any(record["step"] == step for record in evaluations)
