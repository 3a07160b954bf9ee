"""
What a run records: `metrics.jsonl`, `rollouts.jsonl`, `eval.jsonl` and the lines on the console.

A clock bills seconds to phases. Pure functions turn a step into dictionaries of figures and completions. A figure that
was not measured is None; `docs/reference.md` explains the keys. `Journal` writes them, prints warnings, knows the best
evaluation, and keeps the live line and the trackers up to date.

What is left out: console lines (console.py), the page (page.py), and the state to resume from (checkpoint.py).
"""

import base64
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import sampler
from config import Config
from disk.run_files import JsonLines, Unwritten, finite, mean
from judging import rubrics
from machine import alive, gpu, power, world
from problems import form
from problems.examples import prompt_text, spread
from problems.rewards import Logged, merged
from reporting import health, trackers
from reporting.console import LiveLine, comparison, console_line, say, warn
from step.groups import Choice, Draw
from step.result import UpdateResult
from turns.seats import spans

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
        """Bills the time of its body to `name`; the body must end with `done(*arrays)`, which waits for them."""
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
            gpu.end_phase()
        assert finished, f"phase {name} ended without done()"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last call, plus `step` (the total) and `other` (outside all phases)."""
        now = time.perf_counter()
        seconds = self.seconds | {"step": now - self._begin, "other": now - self._begin - sum(self.seconds.values())}
        self.seconds, self._begin = {}, now
        return seconds | world.lap()


# ---- a step


class Step(NamedTuple):
    """Everything known about a finished step."""

    number: int  # from 1
    seconds: dict[str, float]  # by phase
    draws: list[Draw]
    choice: Choice  # the groups that were trained
    rollout: sampler.Rollout  # of these
    result: UpdateResult
    peak_bytes: int
    curriculum: dict[str, float]  # figures of the choice of prompts


def step_metrics(config: Config, step: Step, recent: Collection[float]) -> dict[str, Any]:
    """One object of `metrics.jsonl`. recent: seconds of the last steps, including this one."""
    seconds, draws, result = step.seconds, step.draws, step.result
    num_trained = config.sampling.batch * config.sampling.groups
    stats = [draw.rollout.stats for draw in draws]
    num_tokens, num_rows = sum(int(draw.rollout.lengths.sum()) for draw in draws), len(draws) * num_trained
    rewards, filled = ([getattr(draw.rewards, name) for draw in draws] for name in ("total", "filled"))
    judged = [draw.rewards.judgement for draw in draws if draw.rewards.judgement is not None]
    judge_s = sum(one.stats.seconds for one in judged)
    num_judged = sum(one.stats.num_evaluations for one in judged)
    num_scores = sum(one.scores.size for one in judged)
    num_groups = len(draws) * config.sampling.batch
    num_signal = step.choice.num_signal if config.compares_rewards else None
    weights = config.data.reward_weights
    by_function = [
        values
        for draw in draws
        for name, values in draw.rewards.components.items()
        if name != "rubric" and weights.get(name, 1.0)
    ]
    num_none = int(sum(np.isnan(values).sum() for values in by_function))
    has_std = config.sampling.groups > 1 and np.isfinite(np.concatenate(rewards)).any()
    speeds = np.mean([one.speeds for one in stats], axis=0) if "wait" in seconds else []  # of several machines
    metrics: dict[str, Any] = {
        "step": step.number,
        "reward/mean": mean(np.concatenate(rewards)),
        "reward/std": float(np.concatenate(filled).std(axis=1, ddof=1).mean()) if has_std else None,
        "reward/zero_std_frac": None if num_signal is None else 1 - step.choice.num_unlike / num_groups,
        **{
            f"reward/{name}": mean(np.concatenate([draw.rewards.components[name] for draw in draws]))
            for name in draws[0].rewards.components
        },
        **logged_metrics([draw.rewards.logged for draw in draws]),
        **step.curriculum,
        "reward/none": num_none,
        "sampling/draws": len(draws),
        "sampling/signal_groups": num_signal,
        "sampling/unused_frac": 1 - num_trained / num_rows,
        "rollout/s": seconds["rollout"],
        "rollout/tok_s": num_tokens / seconds["rollout"],
        "prefill/s": sum(one.prefill_s for one in stats),
        "decode/s": sum(one.decode_s for one in stats),
        "reward/s": seconds["reward"],
        "judge/s": seconds.get("judge", 0.0),
        "judge/crit_eval_s": num_judged / judge_s if num_judged else None,
        "judge/unparsed": sum(one.unparsed for one in judged) if judged else None,
        "judge/unparsed_frac": sum(one.unparsed for one in judged) / num_scores if judged else None,
        "judge/mass": mean(np.array([one.stats.mass for one in judged])),
        "judge/cached": sum(one.stats.num_cached for one in judged) if judged else None,
        "ref/s": seconds.get("ref", 0.0),
        "teacher/s": seconds.get("teacher"),
        **result.metrics(seconds, num_trained, recent),
        **tool_metrics(draws),
        **{f"rollout/tok_s/{rank}": float(mean) for rank, mean in enumerate(speeds)},
        "completion/mean_tokens": num_tokens / num_rows,
        "completion/truncated_frac": sum(d.rollout.finish_reasons.count("length") for d in draws) / num_rows,
        **forms(config, draws),
        "mem/peak_gb": step.peak_bytes / 1e9,
        "mem/cache_gb": max(one.cache_bytes for one in stats) / 1e9,
    }
    return finite(metrics)


def logged_metrics(logs: list[Logged]) -> dict[str, float]:
    """The means of what rewards gave to `log_metric`."""
    metrics = merged((((), one._replace(extra={})) for one in logs), 0).metrics
    return {f"metric/{name}": float(np.mean(values)) for name, values in metrics.items()}


def forms(config: Config, draws: list[Draw]) -> dict[str, float | None]:
    """Means over all completions of what tells of answers that are none; null with tools, whose calls repeat."""
    if draws[0].talk:
        return {"completion/repeated": None, "completion/degenerate_frac": None}
    texts = [text for draw in draws for text in draw.rewards.completions]
    prompts = [prompt_text(example["prompt"]) for draw in draws for example in draw.examples]
    asked = [prompt for prompt in prompts for _ in range(config.sampling.groups)]
    return {
        "completion/repeated": sum(map(form.repeated, texts)) / len(texts),
        "completion/degenerate_frac": sum(map(form.is_degenerate, texts, asked)) / len(texts),
    }


def tool_metrics(draws: list[Draw]) -> dict[str, float]:
    """The figures of conversations with tools; none without."""
    each = [draw.talk.metrics() for draw in draws if draw.talk]
    return {
        name: sum(one[name] for one in each) / (len(each) if name == "tools/turns" else 1)
        for name in (each[0] if each else ())
    }


def completion_records(config: Config, step: Step) -> Iterator[dict[str, Any]]:
    """One record per sampled completion; groups are numbered through all draws."""
    trained = {group: place for place, group in enumerate(step.choice.groups)}
    first = 0  # the draw's first group
    for draw in step.draws:
        rollout, rewards, judged, extra = draw.rollout, draw.rewards, draw.rewards.judgement, draw.rewards.logged.extra
        ids, logprobs, total = rollout.ids, np.array(rollout.logprobs), rewards.total.reshape(-1)
        for row, completion in enumerate(rewards.completions):
            group, member = divmod(row, config.sampling.groups)
            example, num, place = draw.examples[group], len(ids[row]), trained.get(first + group)
            yield {
                "step": step.number,
                "group": first + group,
                "prompt": example["prompt"],
                "answer": None if example.get("answer") is None else str(example["answer"]),  # may have any type
                "category": example.get("category"),
                "completion": completion,
                "ids": rollout.sequences[row] if rollout.sequences else ids[row],
                **({"own": spans((rollout.places or [])[row])} | draw.talk.record(row) if draw.talk else {}),
                "logprobs": packed(logprobs[row, :num]),
                "reward": _known(total[row]),
                "rewards": {name: _known(values[row]) for name, values in rewards.components.items()},
                **({"extra": {name: column[row] for name, column in extra.items()}} if extra else {}),
                "judge_scores": None
                if judged is None
                else [s and round(s, 4) for s in map(_known, judged.scores[row])],
                "finish_reason": rollout.finish_reasons[row],
                # where turns have their own, the first one's: it is of the whole conversation
                "advantage": None if place is None else step.choice.advantages[place, member].flat[0].item(),
            }
        first += len(draw.examples)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def packed(values: np.ndarray) -> str:
    """Base64 of little-endian float16, within 0.05% or 3e-8."""
    return base64.b64encode(values.astype("<f2").tobytes()).decode()


# ---- the files


class Journal:
    """The logs of a run directory, and the console lines about them."""

    def __init__(self, config: Config, run_dir: Path, metric: str, step: int, *, keep_scores: bool):
        """
        Opens the logs and drops records later than `step`, from which the run continues.

        metric: name of the task's held-out figure. keep_scores: keep all scores of a paid judge; a local judge scores
        again instead, so the run repeats bit for bit.
        """
        self.config, self.dir, self.metric = config, run_dir, metric
        self.metrics, self.rollouts, self.evals, self.answers, self.judge_scores, self.warnings = (
            (JsonLines if world.is_first() else Unwritten)(run_dir / f"{name}.jsonl")
            for name in ("metrics", "rollouts", "eval", "eval_answers", "judge_scores", "warnings")
        )
        for log in (self.metrics, self.rollouts, self.evals, self.warnings):
            log.cut_after(step)
        self.answers.cut_after(max((record["step"] for record in self.evals.read()), default=-1))
        self.judge_scores.cut_after(sys.maxsize if keep_scores else step)
        self.steps, self.evaluations = world.first(lambda: [self.metrics.read(), self.evals.read()])
        self.recent: deque[float] = deque(maxlen=10)  # seconds of this process's last steps
        self.live = LiveLine(config.optimizer.steps)
        self.live.step = step
        self.begun_at, self.trackers = step, list[trackers.Tracker]()

    def __enter__(self) -> "Journal":
        """From here on the run is shown: its live line, its trackers."""
        self.live.__enter__()
        names = dict.fromkeys(self.config.records.report_to if world.is_first() else ())
        so_far = self.steps + self.evaluations
        self.trackers = [trackers.Tracker(name, self.dir, self.begun_at, so_far, warn) for name in names]
        return self

    def __exit__(self, *_: Any) -> None:
        self.live.__exit__()
        with contextlib.suppress(KeyboardInterrupt), alive.doing("waiting for trackers"):  # an impatient one's
            trackers.finish(self.trackers)

    def write_step(self, step: Step) -> dict[str, Any]:
        """Writes a step's figures and all sampled completions, and prints its line; returns the figures."""
        self.recent.append(step.seconds["step"])
        figures = step_metrics(self.config, step, self.recent)
        self.record(figures, console_line(figures, self.config.optimizer.steps), completion_records(self.config, step))
        return figures

    def record(self, figures: dict[str, Any], line: str, completions: Iterable[dict[str, Any]] = ()) -> None:
        """Writes a step's figures and completions, prints its line, and warns of what they show."""
        self.metrics.write(figures)
        self.steps.append(figures)
        group: list[dict[str, Any]] = []
        for completion in completions:
            self.rollouts.write(completion)
            if completion["group"] == 0:
                group.append(trackers.completion_row(completion))
        is_shown = figures["step"] == 1 or figures["step"] % trackers.TABLE_EVERY == 0
        self._track(figures, "completions", group if is_shown else [])
        say(line)
        if figures["skipped"]:
            warn(f"step {figures['step']}: the gradient was not finite; the step changed nothing")
        self.warn(figures["step"])
        self.live.note(figures)

    def _track(self, record: dict[str, Any], table: str, rows: list[dict[str, Any]]) -> None:
        for tracker in self.trackers:
            tracker.log(record, {table: spread(rows, trackers.MOST_ROWS)} if rows else {})

    def write_evaluation(self, step: int, record: dict[str, Any], answers: list[dict[str, Any]]) -> None:
        """Writes an evaluation and up to MOST_ANSWERS of its answers."""
        for answer in spread(answers, MOST_ANSWERS):  # first: without its record the evaluation is repeated
            self.answers.write({"step": step} | answer)
        record = {"step": step} | record
        self.evals.write(record)
        self.evaluations.append(record)
        self._track(record, "eval/answers", [trackers.answer_row(answer) for answer in answers])
        self.warn(step)

    def write_scores(self, step: int, grader: rubrics.Grader | None) -> None:
        """Writes the judge's new scores, so a resumed run knows exactly those that this one knew."""
        for score in grader.cache.take_fresh() if grader else []:
            self.judge_scores.write({"step": step} | score)

    def warn(self, step: int) -> None:
        """Prints and records each warning once, with the step at which it first applied."""
        for finding in health.examine(self.steps, self.evaluations):
            self.warn_of(step, finding)

    def warn_of(self, step: int, finding: health.Finding) -> None:
        """Prints and records a warning, unless this run has given it."""
        if finding.name not in {warning["name"] for warning in self.warnings.read()}:
            if finding.name == "slow" and (said := power.pressure()):
                finding = finding._replace(text=f"{finding.text}. macOS says: {said}")
            self.warnings.write({"step": step} | finding._asdict())
            warn(f"WARNING after step {step}: {finding.text}.")

    def best_step(self) -> int | None:
        """The step with the best held-out figure, the earliest of equals; None if nothing could be scored."""
        name = f"eval/{self.metric}"
        scored = [record for record in self.evaluations if record[name] is not None]
        return health.best(scored, name)["step"] if scored else None

    def print_summary(self) -> None:
        """Repeats the warnings, compares the first and the last evaluation, and says what the run has written."""
        for warning in self.warnings.read():
            print(f"warned after step {warning['step']}: {warning['name']}")
        if len(self.evaluations) > 1:
            print(comparison(self.evaluations[0], self.evaluations[-1]))
        print(f"adapter: {self.dir / 'adapter'}")
        if (best := self.best_step()) is not None:
            print(f"best: {self.dir / 'adapter-best'}, {f'after {best} steps' if best else 'before training'}")
        if (written := self.dir / "report.html").is_file():
            print(f"page: {written}")


def evaluation_is_due(config: Config, step: int, evaluations: list[dict[str, Any]]) -> bool:
    """Whether to evaluate after this step: the schedule says so and these records do not have it yet."""
    if not config.evaluation.every or (step % config.evaluation.every and step != config.optimizer.steps):
        return False
    return not any(record["step"] == step for record in evaluations)
