"""
Records a run in files such as `metrics.jsonl` and `rollouts.jsonl`, and in lines on the console.

`PhaseClock` measures how long each phase of a step takes. Pure functions compute the metrics of a
step, which `docs/reference.md` explains. A metric that was not measured is None.
`Journal` writes all records, prints warnings, keeps track of the best evaluation, and updates the
live line and the trackers.

This file does not cover the format of console lines (console.py), the page (page.py), or the state
from which a run is resumed (disk/checkpoint.py).
"""

import base64
import contextlib
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

from config import Config
from disk import run_changes, run_files
from disk.run_files import JsonLinesLog, replace_nonfinite_by_none
from disk.statistics import mean_ignoring_nan
from judging.grader import Grader, Judgement
from machine import cpu_share, gpu, world
from machine.cpu_share import CpuShare
from prompts.examples import last_user_text, pick_evenly_spaced
from reporting import health, verdict
from reporting.console import LiveLine, format_step_line, print_line, print_line_to_stderr
from reporting.difference import earliest_unbeaten_evaluation
from reporting.history import History
from reporting.run_table import cumulative_costs
from reporting.trackers import Tracker
from rewards import form
from rewards.rewards import LoggedValues
from sampler import RolloutStats
from step.loss import UpdateResult
from step.sample import Sample, group_samples

# At most this many answers are recorded per evaluation, evenly spread over the held-out problems.
MOST_ANSWERS = 512


class PhaseClock:
    """Measures how many seconds each phase of a step takes; a phase cannot contain another."""

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None) -> None:
        self.on_phase = on_phase  # called with the name of each phase when it starts
        self.seconds: dict[str, float] = {}
        self.cpu_share = CpuShare()
        self.wait_s = 0.0  # the seconds in which this process has waited for other ranks
        self._step_start = time.perf_counter()
        self._running: str | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[..., None]]:
        """
        Times the body of a `with` statement and adds the time to the phase called `name`.

        At its end, the body must call the yielded function with the lazy arrays that it has made.
        The yielded function waits until the arrays are computed.
        """
        assert self._running is None, f"phase {name} started inside phase {self._running}"
        self.on_phase(name)
        self._running = name
        finished = False
        start = time.perf_counter()
        cpu_start = cpu_share.count_cpu_seconds()

        def wait_for_arrays_and_mark_finished(*arrays: Any) -> None:
            nonlocal finished
            mx.eval(arrays)  # wait, so that the phase's time includes its lazy computations
            finished = True

        try:
            yield wait_for_arrays_and_mark_finished
        finally:
            self._running = None
            if gpu.on_gpu():  # free the cached buffers, because the next phase needs other sizes
                mx.clear_cache()
        assert finished, f"phase {name} ended without calling the yielded function"
        elapsed_s = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed_s
        self.cpu_share.add_if_cpu_phase(name, elapsed_s, cpu_share.count_cpu_seconds() - cpu_start)

    def take_seconds_by_phase(self) -> dict[str, float]:
        """
        Returns the seconds spent in each phase since the last call, and starts counting again.

        The key `step` has the total time, and the key `other` has the time outside all phases.
        """
        now = time.perf_counter()
        total = now - self._step_start
        other = total - sum(self.seconds.values())
        seconds = self.seconds | {"step": total, "other": other}
        self.seconds = {}
        self._step_start = now
        waits = world.pop_wait_seconds_metric()
        self.wait_s += sum(waits.values())
        return seconds | waits


# ---- a step


class StepSamples(NamedTuple):
    """
    A step's samples, with reports from the sampler, the reward functions and the judge.

    The reports are None in supervised fine-tuning, which neither samples nor rewards completions.
    """

    samples: list[Sample]
    stats: RolloutStats | None = None
    logged: LoggedValues | None = None
    judgement: Judgement | None = None


# Metrics that supervised fine-tuning does not have; they are null in its metrics.jsonl.
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
# The phases after the rollout, whose total duration is the metric `train/s`.
TRAIN_PHASES = ("judge", "batch", "ref", "teacher", "update")


def metrics_of_update(
    result: UpdateResult,
    seconds: dict[str, float],
    num_rows: int,
    recent_step_seconds: Collection[float],
) -> dict[str, float | None]:
    """
    Returns the metrics of an optimizer update, including the durations of its step's phases.

    seconds: the duration of each phase, and of the step. num_rows: the number of samples in the
    step. recent_step_seconds: the durations of the last steps.
    """
    train_s = sum(seconds.get(phase, 0.0) for phase in TRAIN_PHASES)
    update_speed = None
    if result.num_counted_tokens:
        update_speed = result.num_counted_tokens / seconds["update"]

    figures: dict[str, float | None] = {
        "loss": result.loss,
        "update/s": seconds["update"],
        "update/tok_s": update_speed,
        "train/s": train_s,
        "train/tok_s": result.num_counted_tokens / train_s,
        "other/s": seconds["other"],
        "step/s": seconds["step"],
        "step_avg_last10/s": sum(recent_step_seconds) / len(recent_step_seconds),
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


def rollout_and_reward_metrics(
    config: Config, step_samples: StepSamples, seconds: dict[str, float]
) -> dict[str, float | None]:
    """Returns the metrics of a step's rollouts, rewards and judge."""
    samples = step_samples.samples
    stats = step_samples.stats
    assert stats
    num_tokens = sum(len(sample.loss_positions) for sample in samples)
    num_truncated = sum(sample.finish_reason == "length" for sample in samples)

    figures = reward_metrics(step_samples)
    figures["reward/s"] = seconds["reward"]
    if config.compares_rewards_within_groups:
        figures |= group_signal_metrics(samples)
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
    figures |= control_token_metrics(samples)
    figures |= repetition_and_degeneration_metrics(samples)
    figures["mem/cache_gb"] = stats.cache_bytes / 1e9
    return figures


def reward_metrics(step_samples: StepSamples) -> dict[str, float | None]:
    """Returns the means of rewards, reward components and values that reward functions log."""
    samples = step_samples.samples
    logged = step_samples.logged
    assert logged
    rewards = np.array([sample.reward_or_nan_if_unreadable for sample in samples])
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

    figures = {"reward/mean": mean_ignoring_nan(rewards), "reward/std": deviation}
    for name, values in components.items():
        figures[f"reward/{name}"] = mean_ignoring_nan(values)
    for name, logged_values in logged.metrics.items():
        figures[f"metric/{name}"] = float(np.mean(logged_values))
    figures["reward/none"] = num_missing
    return figures


def group_signal_metrics(samples: list[Sample]) -> dict[str, float | None]:
    """
    Returns metrics on how the rewards differ within groups.

    The metrics are the number of groups from which the model can learn, and the fraction of groups
    whose rewards are all equal.
    """
    groups = group_samples(samples)
    num_equal = sum(not group[0].rewards_differ for group in groups)
    return {
        "sampling/signal_groups": sum(group[0].has_signal for group in groups),
        "reward/zero_std_frac": num_equal / len(groups),
    }


def judge_metrics(judgement: Judgement) -> dict[str, float | None]:
    """Returns metrics of the judge: its speed, and how many scores were unreadable or cached."""
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


def control_token_metrics(samples: list[Sample]) -> dict[str, float | None]:
    """
    Returns the fraction of completions that contain a control token, for each such token.

    Tokens that end a completion do not count, and tokens that no completion contains are left out.
    """
    counts = Counter(token for sample in samples for token in sample.controls)
    return {
        f"{health.CONTROL}{token}": count / len(samples) for token, count in sorted(counts.items())
    }


def repetition_and_degeneration_metrics(samples: list[Sample]) -> dict[str, float | None]:
    """
    Returns the fraction of text that is repetition, and the fraction of degenerate completions.

    Both metrics are None for conversations with tools, because tool calls repeat text.
    """
    if samples[0].conversation:
        return {"completion/repeated": None, "completion/degenerate_frac": None}
    num = len(samples)
    repeated = sum(form.repeated_4gram_fraction(sample.text) for sample in samples)
    num_degenerate = sum(
        form.repeats_itself_or_copies_prompt(sample.text, last_user_text(sample.example["prompt"]))
        for sample in samples
    )
    return {
        "completion/repeated": repeated / num,
        "completion/degenerate_frac": num_degenerate / num,
    }


def tool_metrics(
    samples: list[Sample], stats: RolloutStats, tool_names: Sequence[str] = ()
) -> dict[str, float]:
    """
    Returns the metrics of conversations with tools; empty if no sample is such a conversation.

    tool_names: all tools of the run. If there are several, the calls of each are counted too.
    """
    conversations = [sample.conversation for sample in samples if sample.conversation]
    if not conversations:
        return {}
    calls = [call for conversation in conversations for call in conversation["tool_calls"]]
    num_turns = sum(conversation["turns"] for conversation in conversations)
    metrics = {
        "tools/calls": float(len(calls)),
        "tools/failures": float(sum(call["error"] is not None for call in calls)),
        "tools/s": sum(call["seconds"] for call in calls),
        "tools/wait_s": stats.wait_s,
        "tools/turns": num_turns / len(conversations),
    }
    if len(tool_names) > 1:
        called_names = [call["name"] for call in calls]
        for name in tool_names:
            metrics[health.CALLS_OF_TOOL + name] = float(called_names.count(name))
    if stats.failures is not None:
        metrics["episodes/failed"] = float(len(stats.failures))
    return metrics


def format_past_warning(warning: dict[str, Any], are_answers_still_cut_off: bool) -> str:
    """Returns the line with which the summary at a run's end repeats an earlier warning."""
    line = f"warning after step {warning['step']}: {warning['name']}"
    if warning["name"] == health.CUT_OFF_NAME and not are_answers_still_cut_off:
        line += ", but at the end no more than half of the answers were cut off"
    return line


def completion_records(step: int, samples: list[Sample]) -> Iterator[dict[str, Any]]:
    """Yields the record in `rollouts.jsonl` of each completion that was sampled in a step."""
    for sample in samples:
        if sample.logprobs is None:
            continue
        example = sample.example
        answer = example.get("answer")
        record: dict[str, Any] = {
            "step": step,
            "group": sample.group,
            "prompt": example["prompt"],
            "answer": None if answer is None else str(answer),  # an answer need not be text
            "category": example.get("category"),
            "completion": sample.text,
            "ids": sample.response_ids,
        }
        if sample.conversation:
            record |= {"own": sample.turn_begins_and_ends} | sample.conversation
        # half precision has a relative error of at most 0.05%, or an absolute error of 3e-8
        logprobs = sample.logprobs.astype("<f2").tobytes()
        record["logprobs"] = base64.b64encode(logprobs).decode()
        record |= replace_nonfinite_by_none({"reward": sample.reward_or_nan_if_unreadable})
        record["rewards"] = replace_nonfinite_by_none(sample.reward_components)
        if sample.extra_columns:
            record["extra"] = sample.extra_columns
        record["judge_scores"] = round_scores(sample.scores)
        record["finish_reason"] = sample.finish_reason
        # each turn may have its own advantage; the first turn's depends on the rewards of all turns
        record["advantage"] = np.ravel(sample.advantage)[0].item()
        if not sample.is_chosen:
            record["left_out"] = True
        yield record


def round_scores(scores: list[float] | None) -> list[float | None] | None:
    """Returns a judge's scores rounded to four decimals, with None for each unreadable score."""
    if not scores:
        return None if scores is None else []
    return [None if math.isnan(score) else round(score, 4) for score in scores]


# ---- the files


class Journal:
    """Writes the logs in a run's directory, and prints lines and warnings about the run."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        step: int,
        *,
        keep_scores: bool,
        changes: run_changes.Changes | None = None,
    ):
        """
        Opens the logs and removes all records after `step`, the step at which the run resumes.

        changes: records of what was changed when the run was resumed. They are written after the
        first figures of the resumed run. None means the records in the run's directory.
        keep_scores: whether to keep the judge's scores from after `step`. The caller sets this for
        a paid judge, whose scores cost money. A local judge computes its scores again, so that the
        run repeats bit for bit.
        """
        self.config = config
        self.dir = run_dir
        self.clock = PhaseClock(self.show_and_remember_phase)
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
        self.steps, self.evaluations = world.compute_on_rank0(
            lambda: [self.metrics.read(), self.evals.read()]
        )

        def list_changes() -> list[dict[str, Any]]:
            """The records of all changes; only the first rank knows the changes of this resume."""
            return run_changes.read_changes(run_dir) if changes is None else list(changes)

        self.changes = world.compute_on_rank0(list_changes)
        self.has_written_changes = changes is None
        self.verdict: verdict.Verdict | None = None  # the verdict on the run so far
        self.tool_names: Sequence[str] = ()  # the tools that the policy may call

        # the step of the best evaluation; None if no evaluation could be scored
        self.best_step: int | None = world.compute_on_rank0(
            self._update_verdict_warn_and_find_best_step
        )
        # the seconds of each of the last ten steps of this process
        self.recent: deque[float] = deque(maxlen=10)
        self.live: LiveLine | None = None
        self.phase = ""  # the phase of a step that started most recently, or "evaluating"
        self.begun_at = step
        self.has_told_of_busy_cpu = False
        self.trackers: list[Tracker] = []

    def __enter__(self) -> "Journal":
        """Shows the live line, and connects to the trackers in --report-to."""
        last_step = self.steps[-1]["step"] if self.steps else 0
        self.live = LiveLine(self.config.optimizer.steps, last_step)
        names = self.config.records.report_to
        if names and world.is_first():
            self.trackers = [
                Tracker(name, self.dir, print_line_to_stderr) for name in dict.fromkeys(names)
            ]
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live:
            self.live.close()
        self.live = None
        with contextlib.suppress(KeyboardInterrupt):  # an impatient user may interrupt the wait
            for tracker in self.trackers:
                tracker.finish()

    def show_and_remember_phase(self, phase: str) -> None:
        """Shows the current phase in the live line, and remembers it for error messages."""
        self.phase = phase
        if self.live:
            self.live.show_phase(phase)

    def record_and_print_step(
        self,
        number: int,
        seconds: dict[str, float],
        step_samples: StepSamples,
        result: UpdateResult,
        peak_bytes: int,
    ) -> dict[str, Any]:
        """
        Writes a step's metrics and completions, prints the step's line, and returns the metrics.

        number: the number of the step, counted from 1. seconds: the seconds spent in each phase.
        """
        self.recent.append(seconds["step"])
        samples = step_samples.samples
        figures: dict[str, Any] = {"step": number} | dict.fromkeys(NOT_SAMPLED)
        num_completions = len(samples)
        if step_samples.stats:
            figures |= rollout_and_reward_metrics(self.config, step_samples, seconds)
            figures |= tool_metrics(samples, step_samples.stats, self.tool_names)
        else:
            # in supervised fine-tuning, several samples may be parts of one conversation
            num_completions = len(group_samples(samples))
        figures |= metrics_of_update(result, seconds, len(samples), self.recent)
        num_tokens = sum(len(sample.loss_positions) for sample in samples)
        figures["completion/mean_tokens"] = num_tokens / num_completions
        figures["mem/peak_gb"] = peak_bytes / 1e9
        totals = cumulative_costs(self.steps)
        figures["time/s"] = totals["time/s"] + seconds["step"]
        figures["tokens/total"] = totals["tokens/total"] + num_tokens
        figures = replace_nonfinite_by_none(figures)

        self.metrics.write(figures)
        self.steps.append(figures)
        self._record_and_warn_of_resume_changes_once()
        for completion in completion_records(number, samples):
            self.rollouts.write(completion)
        for tracker in self.trackers:
            tracker.send_metrics(figures)
        print_line(format_step_line(figures, self.config.optimizer.steps))
        self._tell_once_about_failed_episodes(number, step_samples.stats)
        if step_samples.stats:
            self._tell_once_about_missing_rewards(number, samples)
        if figures["skipped"]:
            print_line_to_stderr(
                f"step {number}: skipped the update, because the gradient was not finite"
            )
        self.record_and_print_new_warnings(number)
        self._tell_once_if_cpu_is_busy(number)
        if self.live:
            self.live.show_finished_step(figures)
        return figures

    def _tell_once_about_failed_episodes(self, number: int, stats: RolloutStats | None) -> None:
        """Prints and logs, only once, why episodes of an outside harness failed."""
        if stats and stats.failures:
            text = (
                f"{len(stats.failures)} episodes failed and were left out, the first because: "
                f"{stats.failures[0]}. The metric episodes/failed counts further ones"
            )
            self.warn_once(number, health.RunWarning("failed episodes", text))

    def _tell_once_about_missing_rewards(self, number: int, samples: list[Sample]) -> None:
        """Prints and logs, only once, how many completions of a step have no reward."""
        if samples[0].imputed_components.keys() <= {"rubric"}:
            return  # the judge has a warning of its own
        num_missing = sum(np.isnan(sample.reward_or_nan_if_unreadable) for sample in samples)
        if num_missing:
            text = (
                f"{num_missing} of {len(samples)} completions of step {number} have no reward, "
                "because each of their rewards is None. They are trained with the reward 0. Return "
                "a number for each completion, or leave these completions out with "
                "Trainer.on_samples, where sample.reward_or_nan_if_unreadable is nan"
            )
            self.warn_once(number, health.RunWarning("no reward", text))

    def record_evaluation_and_update_best(
        self, step: int, record: dict[str, Any], answers: list[dict[str, Any]]
    ) -> None:
        """
        Writes the record of an evaluation, and at most MOST_ANSWERS of its answers.

        Also sends the record to the trackers, updates the verdict and the best step, and prints new
        warnings.
        """
        # write the answers first: a run that stops before it writes the record evaluates again
        for answer in pick_evenly_spaced(answers, MOST_ANSWERS):
            self.answers.write({"step": step} | answer)
        record = {"step": step} | record | cumulative_costs(self.steps)
        self.evals.write(record)
        self.evaluations.append(record)
        self._record_and_warn_of_resume_changes_once()
        self.best_step = world.compute_on_rank0(self._update_verdict_warn_and_find_best_step)
        for tracker in self.trackers:
            tracker.send_metrics(record)
        self.record_and_print_new_warnings(step)

    def write_new_judge_scores(self, step: int, grader: Grader | None) -> None:
        """Writes the judge's new scores to a log from which a resumed run can load them."""
        for score in grader.take_unsaved_scores() if grader else []:
            self.judge_scores.write({"step": step} | score)

    def record_and_print_new_warnings(self, step: int) -> None:
        """Prints and records each warning when it first applies, with the number of the step."""
        has_gained = self.verdict is not None and self.verdict.has_gained
        symptoms = health.find_symptoms(
            self.steps, has_gained, self.evaluations, self.config.to_flags()
        )
        for symptom in symptoms:
            self.warn_once(step, symptom)

    def warn_once(self, step: int, new_warning: health.RunWarning) -> None:
        """Prints and records a warning, unless this run has already given the same warning."""
        if self.record_warning_once(step, new_warning):
            print_line_to_stderr(f"WARNING after step {step}: {new_warning.text}.")

    def record_warning_once(self, step: int, new_warning: health.RunWarning) -> bool:
        """Records a warning for the run's page. If it is already recorded, only returns False."""
        if new_warning.name in {warning["name"] for warning in self.warnings.read()}:
            return False
        self.warnings.write({"step": step} | new_warning._asdict())
        return True

    def _tell_once_if_cpu_is_busy(self, step: int) -> None:
        """
        Prints a line, at most once, if this process gets little CPU time.

        The line is not recorded as a warning, because it describes only the present state of this
        machine.
        """
        shortage = self.clock.cpu_share.describe_shortage(self.clock.wait_s)
        if shortage and not self.has_told_of_busy_cpu:
            self.has_told_of_busy_cpu = True
            print_line_to_stderr(f"slow after step {step}: {shortage}.")

    def _record_and_warn_of_resume_changes_once(self) -> None:
        """
        Records what was changed on a resume, and warns of it.

        This happens when the resumed run has its first figures, so that a resume which fails
        earlier leaves no record.
        """
        if self.has_written_changes:
            return
        self.has_written_changes = True
        if world.is_first():
            run_changes.write_changes(self.dir, self.changes)
        for change in run_changes.changes_that_affect_evaluations(self.changes):
            self.warn_once(change["step"], warning_of_measure_change(change))

    def _update_verdict_warn_and_find_best_step(self) -> int | None:
        """Updates the verdict, prints its warning, and returns the step of the best evaluation."""
        run = History(
            self.dir,
            self.config.to_flags(),
            {},
            self.steps,
            self.evaluations,
            changes=self.changes,
        )
        self.verdict = verdict.reach_verdict_on_held_out_change(run)
        if self.verdict and self.verdict.warning:
            self.warn_once(self.evaluations[-1]["step"], self.verdict.warning)
        best = earliest_unbeaten_evaluation(run.with_comparable_evals)
        return best["step"] if best else None

    @property
    def comparable_evaluations(self) -> list[dict[str, Any]]:
        """The evaluations that came after the newest change in what evaluations measure."""
        num_before, _ = run_changes.num_incomparable_evaluations_and_answers(self.changes)
        return self.evaluations[num_before:]

    @property
    def needs_evaluation_after_change(self) -> bool:
        """Whether a resume changed what evaluations measure, and no evaluation has followed."""
        has_changed = bool(run_changes.changes_that_affect_evaluations(self.changes))
        return (
            has_changed and bool(self.config.evaluation.every) and not self.comparable_evaluations
        )

    def print_summary(self) -> None:
        """Prints a final summary of cut-off answers, past warnings, files and the verdict."""
        settings = self.config.to_flags()
        cut_off = health.advise_on_cut_off_answers(self.steps, self.evaluations, settings)
        if cut_off:
            print_line(cut_off)
        for warning in self.warnings.read():
            print_line(format_past_warning(warning, are_answers_still_cut_off=bool(cut_off)))
        if self.best_step is None:
            print_line(f"adapter: {self.dir / 'adapter'}")
        else:
            print_line(self._describe_adapter_to_use(self.best_step))
        if self.verdict and self.verdict.better_greedy_step is not None:
            print_line(self._describe_better_greedy_answers(self.verdict.better_greedy_step))
        page = self.dir / "report.html"
        if page.is_file():
            print_line(f"page: {page}")
        for line in verdict.verdict_lines(self.verdict, settings, self.dir):
            print_line(line)

    def _describe_adapter_to_use(self, best_step: int) -> str:
        """Returns a line that says which adapter to use, and which step adapter-best is from."""
        newest = f"{self.dir / 'adapter'}, after step {self.evaluations[-1]['step']}"
        if best_step == self.evaluations[-1]["step"]:
            return f"use: {newest}; adapter-best is the same adapter"

        has_initial_adapter = bool(self.config.model.init_adapter)
        before_training = (
            "the initial adapter" if has_initial_adapter else "the model before training"
        )
        best = self.dir / "adapter-best"
        warning = self.verdict.warning if self.verdict else None
        if warning and warning.name == "worse":
            line = f"use: {best}, after step {best_step}"
            if not best_step:
                line = f"use: {before_training}, which is also {best}"
            return f"{line}; the newest adapter is significantly worse"
        when = f"is from step {best_step}" if best_step else f"is {before_training}"
        return f"use: {newest}; adapter-best {when}, which no later evaluation beats significantly"

    def _describe_better_greedy_answers(self, step: int) -> str:
        """
        Returns a line that greedy answers were better after an earlier step.

        The line says how to chat with the model of that step, if it is still saved.
        """
        when = f"after step {step}" if step else "before training"
        line = f"  greedy answers (--temp 0) were significantly better {when} than at the end"
        if step == 0 or step in run_files.list_saved_steps(str(self.dir)):
            return f"{line}; evaluate.py and chat.py use that model with --step {step}"
        if step == self.best_step:
            return f"{line}; that model is {self.dir / 'adapter-best'}"
        return f"{line}; that model is no longer saved"


def warning_of_measure_change(change: dict[str, Any]) -> health.RunWarning:
    """A warning that evaluations before a change are not compared with those after the change."""
    name = str(change["setting"])
    return health.RunWarning(
        f"{name} changed after step {change['step']}",
        f"The run was resumed after step {change['step']} with another {name}. This change can "
        "affect every held-out figure, so the model is evaluated again at this step, and the new "
        "figures are not compared with those of earlier evaluations",
    )


def open_log(run_dir: Path, name: str) -> JsonLinesLog:
    """Opens a log in a run's directory; only the first of several processes writes to it."""
    return JsonLinesLog(run_dir / f"{name}.jsonl", is_enabled=world.is_first())


def evaluation_is_due(config: Config, step: int, evaluations: list[dict[str, Any]]) -> bool:
    """Whether an evaluation is scheduled after this step and has not been recorded yet."""
    every = config.evaluation.every
    if not every or (step % every and step != config.optimizer.steps):
        return False
    return not any(record["step"] == step for record in evaluations)
