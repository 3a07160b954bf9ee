"""
Records a run in `metrics.jsonl`, `rollouts.jsonl`, `eval.jsonl` and lines on the console.

A clock measures the seconds of each phase. Pure functions turn a step into dictionaries of figures
and completions. A figure that was not measured is None; `docs/reference.md` explains the keys.
`Journal` writes the dictionaries, prints warnings, knows the best evaluation, and keeps the live
line and the trackers up to date.

This file does not cover console lines (console.py), the page (page.py), or the state to resume
from (disk/checkpoint.py).
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
from disk.run_files import JsonLines, without_infinities
from disk.statistics import mean
from judging import rubrics
from machine import gpu, world
from prompts.examples import prompt_text, spread_evenly
from reporting import health, verdict
from reporting.console import LiveLine, console_line, print_line, print_warning
from reporting.difference import best_evaluation
from reporting.history import History
from reporting.trackers import Tracker
from rewards import form
from rewards.rewards import Logged
from sampler import RolloutStats
from step.loss import UpdateResult
from step.sample import Sample, group_samples

MOST_ANSWERS = 512  # answers recorded per evaluation, evenly spread over the held-out problems


class PhaseClock:
    """Measures the seconds of each phase of a step; phases do not nest."""

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None) -> None:
        self.on_phase = on_phase  # is called with the name of each phase that begins
        self.seconds: dict[str, float] = {}
        self._step_start = time.perf_counter()
        self._running: str | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[..., None]]:
        """
        Adds the time of the `with` block to the phase `name`.

        The block must end with a call of `done(*arrays)`, which waits for the arrays.
        """
        assert self._running is None, f"phase {name} inside phase {self._running}"
        self.on_phase(name)
        self._running = name
        finished = False
        start = time.perf_counter()

        def done(*arrays: Any) -> None:
            nonlocal finished
            mx.eval(arrays)  # wait, so that the phase's lazy work counts in its own time
            finished = True

        try:
            yield done
        finally:
            self._running = None
            if gpu.on_gpu():  # the next phase needs buffers of other sizes
                mx.clear_cache()
        assert finished, f"phase {name} ended without done()"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take_seconds(self) -> dict[str, float]:
        """
        Returns the seconds by phase since the last call.

        `step` is the total time, and `other` is the time outside all phases.
        """
        now = time.perf_counter()
        total = now - self._step_start
        other = total - sum(self.seconds.values())
        seconds = self.seconds | {"step": total, "other": other}
        self.seconds = {}
        self._step_start = now
        return seconds | world.take_wait_seconds()


# ---- a step


class StepSamples(NamedTuple):
    """A step's samples, and the sampler's, rewards' and judge's reports; None for given replies."""

    samples: list[Sample]
    stats: RolloutStats | None = None
    logged: Logged | None = None
    judgement: rubrics.Judgement | None = None


# Figures that given replies do not have; they are null in metrics.jsonl.
NOT_SAMPLED = (
    "reward/mean",
    "reward/std",
    "reward/zero_std_frac",
    "reward/none",
    "reward/s",
    "sampling/signal_groups",
    "rollout/s",
    "rollout/tok_s",
    "prefill/s",
    "decode/s",
    "ref/s",
    "teacher/s",
    "judge/s",
    "judge/crit_eval_s",
    "judge/unparsed",
    "judge/unparsed_frac",
    "judge/mass",
    "judge/cached",
    "completion/truncated_frac",
    "completion/repeated",
    "completion/degenerate_frac",
    "mem/cache_gb",
)
# The phases after the rollout, whose seconds `train/s` adds up.
TRAIN_PHASES = ("judge", "batch", "ref", "teacher", "update")


def update_metrics(
    result: UpdateResult, seconds: dict[str, float], num_rows: int, recent: Collection[float]
) -> dict[str, float | None]:
    """
    Returns the figures of an update, and the seconds of its step.

    num_rows: the step's rows. recent: the seconds of each of the last steps.
    """
    train_s = sum(seconds.get(phase, 0.0) for phase in TRAIN_PHASES)
    update_speed = None
    if result.num_loss_tokens:
        update_speed = result.num_loss_tokens / seconds["update"]

    figures: dict[str, float | None] = {
        "loss": result.loss,
        "update/s": seconds["update"],
        "update/tok_s": update_speed,
        "train/s": train_s,
        "train/tok_s": result.num_loss_tokens / train_s,
        "other/s": seconds["other"],
        "step/s": seconds["step"],
        "step_avg_last10/s": sum(recent) / len(recent),
    }
    if "wait" in seconds:
        figures["wait/s"] = seconds["wait"]
    figures |= result.means
    figures |= {
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
    return figures


def sampled_metrics(
    config: Config, step_samples: StepSamples, seconds: dict[str, float]
) -> dict[str, float | None]:
    """Returns the figures of a step's rollouts, rewards and judge."""
    samples = step_samples.samples
    stats = step_samples.stats
    assert stats
    num_tokens = sum(len(sample.loss_positions) for sample in samples)
    num_truncated = sum(sample.finish_reason == "length" for sample in samples)

    figures = reward_metrics(step_samples)
    figures["reward/s"] = seconds["reward"]
    if config.compares_within_groups:
        figures |= signal_metrics(samples)
    figures["rollout/s"] = seconds["rollout"]
    figures["rollout/tok_s"] = num_tokens / seconds["rollout"]
    if "wait" in seconds:  # several machines
        for rank, speed in enumerate(stats.speeds):
            figures[f"rollout/tok_s/{rank}"] = float(speed)
    figures |= {
        "prefill/s": stats.prefill_s,
        "decode/s": stats.decode_s,
        "ref/s": seconds.get("ref", 0.0),
        "teacher/s": seconds.get("teacher"),
        "judge/s": seconds.get("judge", 0.0),
    }
    if step_samples.judgement is not None:
        figures |= judge_metrics(step_samples.judgement)
    figures["completion/truncated_frac"] = num_truncated / len(samples)
    figures |= control_metrics(samples)
    figures |= text_metrics(samples)
    figures["mem/cache_gb"] = stats.cache_bytes / 1e9
    return figures


def reward_metrics(step_samples: StepSamples) -> dict[str, float | None]:
    """Returns the means of the rewards, their components and the values that rewards logged."""
    samples = step_samples.samples
    logged = step_samples.logged
    assert logged
    rewards = np.array([sample.logged_reward for sample in samples])
    components = {
        name: np.array([sample.reward_components[name] for sample in samples])
        for name in samples[0].reward_components
    }
    # deviations within groups
    deviations = []
    for group in group_samples(samples):
        if len(group) > 1:
            deviations.append(np.std([sample.reward for sample in group], ddof=1))
    deviation = None
    if deviations and np.isfinite(rewards).any():
        deviation = float(np.mean(deviations))

    num_missing = 0
    for name in samples[0].imputed_components:
        if name != "rubric":
            num_missing += int(np.isnan(components[name]).sum())

    figures = {"reward/mean": mean(rewards), "reward/std": deviation}
    for name, values in components.items():
        figures[f"reward/{name}"] = mean(values)
    for name, logged_values in logged.metrics.items():
        figures[f"metric/{name}"] = float(np.mean(logged_values))
    figures["reward/none"] = num_missing
    return figures


def signal_metrics(samples: list[Sample]) -> dict[str, float | None]:
    """Returns how many groups have a signal, and the fraction whose rewards are all equal."""
    groups = group_samples(samples)
    num_equal = sum(not group[0].rewards_differ for group in groups)
    return {
        "sampling/signal_groups": sum(group[0].has_signal for group in groups),
        "reward/zero_std_frac": num_equal / len(groups),
    }


def judge_metrics(judgement: rubrics.Judgement) -> dict[str, float | None]:
    speed = None
    if judgement.num_evaluations:
        speed = judgement.num_evaluations / judgement.seconds
    return {
        "judge/crit_eval_s": speed,
        "judge/unparsed": judgement.num_unreadable,
        "judge/unparsed_frac": judgement.num_unreadable / judgement.scores.size,
        "judge/mass": judgement.mass,
        "judge/cached": judgement.num_cached,
    }


def control_metrics(samples: list[Sample]) -> dict[str, float | None]:
    """
    Returns, for each control token, the fraction of the completions that contain it.

    Tokens that end a completion do not count, and tokens that no completion contains have no
    figure.
    """
    counts = Counter(token for sample in samples for token in sample.controls)
    return {
        f"{health.CONTROL}{token}": count / len(samples) for token, count in sorted(counts.items())
    }


def text_metrics(samples: list[Sample]) -> dict[str, float | None]:
    """
    Returns how much of the completions is repeated, and the fraction that is degenerate.

    Conversations have neither figure, because their tool calls repeat.
    """
    if samples[0].conversation:
        return {"completion/repeated": None, "completion/degenerate_frac": None}
    num = len(samples)
    repeated = sum(form.repetition(sample.text) for sample in samples)
    num_degenerate = sum(
        form.is_degenerate(sample.text, prompt_text(sample.example["prompt"])) for sample in samples
    )
    return {
        "completion/repeated": repeated / num,
        "completion/degenerate_frac": num_degenerate / num,
    }


def tool_metrics(samples: list[Sample], stats: RolloutStats) -> dict[str, float]:
    """Returns the figures of conversations with tools; none if there are no conversations."""
    conversations = [sample.conversation for sample in samples if sample.conversation]
    if not conversations:
        return {}
    calls = [call for conversation in conversations for call in conversation["tool_calls"]]
    num_turns = sum(conversation["turns"] for conversation in conversations)
    return {
        "tools/calls": float(len(calls)),
        "tools/failures": float(sum(call["error"] is not None for call in calls)),
        "tools/s": sum(call["seconds"] for call in calls),
        "tools/wait_s": stats.wait_s,
        "tools/turns": num_turns / len(conversations),
    }


def completion_records(number: int, samples: list[Sample]) -> Iterator[dict[str, Any]]:
    """Yields one record per sampled completion of a step. number: the step's number."""
    for sample in samples:
        if sample.logprobs is None:
            continue
        example = sample.example
        answer = example.get("answer")
        record: dict[str, Any] = {
            "step": number,
            "group": sample.group,
            "prompt": example["prompt"],
            "answer": None if answer is None else str(answer),  # an answer may have any type
            "category": example.get("category"),
            "completion": sample.text,
            "ids": sample.response_ids,
        }
        if sample.conversation:
            record |= {"own": sample.spans} | sample.conversation
        # half precision is exact to within 0.05% or 3e-8
        logprobs = sample.logprobs.astype("<f2").tobytes()
        record["logprobs"] = base64.b64encode(logprobs).decode()
        record |= without_infinities({"reward": sample.logged_reward})
        record["rewards"] = without_infinities(sample.reward_components)
        if sample.extra_columns:
            record["extra"] = sample.extra_columns
        record["judge_scores"] = rounded_scores(sample.scores)
        record["finish_reason"] = sample.finish_reason
        # if each turn has an advantage, take the first turn's, which covers the conversation
        record["advantage"] = np.ravel(sample.advantage)[0].item()
        yield record


def rounded_scores(scores: list[float] | None) -> list[float | None] | None:
    """Returns a judge's scores with four decimals; None for an unreadable one."""
    if not scores:
        return None if scores is None else []
    return [None if math.isnan(score) else round(score, 4) for score in scores]


# ---- the files


class Journal:
    """The logs of a run directory, and the console lines about them."""

    def __init__(self, config: Config, run_dir: Path, step: int, *, keep_scores: bool):
        """
        Opens the logs and drops records later than `step`, from which the run continues.

        keep_scores: whether to keep the scores of later steps too, as for a paid judge. A local
        judge computes its scores again, so that the run repeats bit for bit.
        """
        self.config = config
        self.dir = run_dir
        self.clock = PhaseClock(self.begin)
        self.metrics = open_log(run_dir, "metrics")
        self.rollouts = open_log(run_dir, "rollouts")
        self.evals = open_log(run_dir, "eval")
        self.answers = open_log(run_dir, "eval_answers")
        self.judge_scores = open_log(run_dir, "judge_scores")
        self.warnings = open_log(run_dir, "warnings")

        for log in (self.metrics, self.rollouts, self.evals, self.warnings):
            log.truncate_after(step)
        last_evaluated = max((record["step"] for record in self.evals.read()), default=-1)
        self.answers.truncate_after(last_evaluated)
        self.judge_scores.truncate_after(sys.maxsize if keep_scores else step)
        self.steps, self.evaluations = world.on_rank0(
            lambda: [self.metrics.read(), self.evals.read()]
        )

        self.verdict: verdict.Verdict | None = None  # the verdict on the run so far
        # see `difference.best_evaluation`; None if nothing could be scored
        self.best_step: int | None = world.on_rank0(self._judge_run)
        self.recent: deque[float] = deque(maxlen=10)  # seconds of this process's last steps
        self.live: LiveLine | None = None
        self.phase = ""  # the phase of a step that began last, or "evaluating"
        self.begun_at = step
        self.trackers: list[Tracker] = []

    def __enter__(self) -> "Journal":
        """Starts the run's live line and its trackers."""
        last_step = self.steps[-1]["step"] if self.steps else 0
        self.live = LiveLine(self.config.optimizer.steps, last_step)
        names = self.config.records.report_to
        if names and world.is_first():
            self.trackers = [
                Tracker(name, self.dir, print_warning) for name in dict.fromkeys(names)
            ]
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live:
            self.live.close()
        self.live = None
        with contextlib.suppress(KeyboardInterrupt):  # an impatient user interrupts the wait
            for tracker in self.trackers:
                tracker.finish()

    def begin(self, phase: str) -> None:
        """Notes what the run is doing, for the live line and for messages about a failure."""
        self.phase = phase
        if self.live:
            self.live.begin(phase)

    def write_step(
        self,
        number: int,
        seconds: dict[str, float],
        step_samples: StepSamples,
        result: UpdateResult,
        peak_bytes: int,
    ) -> dict[str, Any]:
        """
        Writes a step's figures and completions, prints its line, and returns the figures.

        number: the step's number, from 1. seconds: the seconds of each phase.
        """
        self.recent.append(seconds["step"])
        samples = step_samples.samples
        figures: dict[str, Any] = {"step": number} | dict.fromkeys(NOT_SAMPLED)
        num_completions = len(samples)
        if step_samples.stats:
            figures |= sampled_metrics(self.config, step_samples, seconds)
            figures |= tool_metrics(samples, step_samples.stats)
        else:
            # several samples may be parts of one given conversation
            num_completions = len(group_samples(samples))
        figures |= update_metrics(result, seconds, len(samples), self.recent)
        num_tokens = sum(len(sample.loss_positions) for sample in samples)
        figures["completion/mean_tokens"] = num_tokens / num_completions
        figures["mem/peak_gb"] = peak_bytes / 1e9
        figures = without_infinities(figures)

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
        # answers come first: a run that stops before it writes the record evaluates again
        for answer in spread_evenly(answers, MOST_ANSWERS):
            self.answers.write({"step": step} | answer)
        record = {"step": step} | record
        self.evals.write(record)
        self.evaluations.append(record)
        self.best_step = world.on_rank0(self._judge_run)
        for tracker in self.trackers:
            tracker.log(record)
        self.print_new_warnings(step)

    def write_scores(self, step: int, grader: rubrics.Grader | None) -> None:
        """Writes the judge's new scores, so that a resumed run knows the same scores."""
        for score in grader.take_new_scores() if grader else []:
            self.judge_scores.write({"step": step} | score)

    def print_new_warnings(self, step: int) -> None:
        """Prints and records each warning once, with the step at which it first applied."""
        has_gained = self.verdict is not None and self.verdict.has_gained
        symptoms = health.find_symptoms(
            self.steps, has_gained, self.evaluations, self.config.to_flags()
        )
        for symptom in symptoms:
            self.warn_once(step, symptom)

    def warn_once(self, step: int, finding: health.Finding) -> None:
        """Prints and records a warning, unless this run has already given it."""
        if finding.name not in {warning["name"] for warning in self.warnings.read()}:
            self.warnings.write({"step": step} | finding._asdict())
            print_warning(f"WARNING after step {step}: {finding.text}.")

    def _judge_run(self) -> int | None:
        """Updates the verdict, gives its warning, and returns the step of the best evaluation."""
        run = History(self.dir, self.config.to_flags(), {}, self.steps, self.evaluations)
        self.verdict = verdict.judge_change(run)
        if self.verdict and self.verdict.warning:
            self.warn_once(self.evaluations[-1]["step"], self.verdict.warning)
        best = best_evaluation(run)
        return best["step"] if best else None

    def print_summary(self) -> None:
        """Prints how many answers are cut off, the warnings again, the files and the verdict."""
        settings = self.config.to_flags()
        cut_off = health.describe_cut_off(self.steps, self.evaluations, settings)
        if cut_off:
            print_line(cut_off)
        for warning in self.warnings.read():
            print_line(f"warned after step {warning['step']}: {warning['name']}")
        print_line(f"adapter: {self.dir / 'adapter'}")
        if self.best_step is not None:
            print_line(self._describe_best(self.best_step))
        page = self.dir / "report.html"
        if page.is_file():
            print_line(f"page: {page}")
        for line in verdict.verdict_lines(self.verdict, settings, self.dir):
            print_line(line)

    def _describe_best(self, step: int) -> str:
        """Returns a line that says where the best adapter is and whether the newest is worse."""
        when = f"after {step} steps" if step else "before training"
        line = f"best: {self.dir / 'adapter-best'}, {when}"
        if step == self.evaluations[-1]["step"]:
            return line
        warning = self.verdict.warning if self.verdict else None
        if warning and warning.name == "worse":
            return f"{line}; the newest adapter is significantly worse"
        return f"{line}; use the newest adapter, which is not significantly worse"


def open_log(run_dir: Path, name: str) -> JsonLines:
    """Opens a log of a run directory, to which only the first rank writes."""
    return JsonLines(run_dir / f"{name}.jsonl", kept=world.is_first())


def evaluation_is_due(config: Config, step: int, evaluations: list[dict[str, Any]]) -> bool:
    """Whether the schedule has an evaluation after this step and these records lack it."""
    every = config.evaluation.every
    if not every or (step % every and step != config.optimizer.steps):
        return False
    return not any(record["step"] == step for record in evaluations)
