"""
Chooses by measurement how many rows a rollout decodes at once, and whether it holds a group's prompt once.

A measurement times steps in the middle of completions at a few row counts, as far as memory allows and speed rises. It
holds for a kind of work: machine, model shape, dtype, group size, and prompt and completion lengths rounded up to
powers of two. It runs once and is kept in the user's cache directory. Left out: who measures (not training on a CPU,
where runs repeat bit for bit), and what happens when memory runs out (sampler.py).
"""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import cpu_blas  # before mlx
import mlx.core as mx
import numpy as np

import gwen
import sampler
from config import Config, Switch
from disk import run_files
from kv_cache import SlotCache
from machine import alive, gpu

USUAL_ROWS = 64  # at once if nothing is measured
ROW_COUNTS = tuple(2**exponent for exponent in range(2, 11))  # 4 to 1,024
ROOM = 0.7  # of the available memory; the prompts of waiting rows and MLX's own cache need the rest
GAIN = 1.05  # a smaller speedup is noise, and not worth twice the memory
Fits = Callable[[int, bool], bool]  # rows at once, whether prompts are shared -> whether memory should suffice
MOST_SECONDS = 60.0  # after this, start no larger row count
SHORT, LONG = 4, 12  # steps; their difference excludes one-time costs of the first step
FORMAT = "format 2"  # of the file; also raised when a change to the sampler invalidates old measurements


class Kind(NamedTuple):
    """The kind of work that a measurement covers."""

    machine: str
    model: str
    dtype: str
    group_size: int
    prompt_tokens: int  # both are the upper end of their class
    max_tokens: int


class Trial(NamedTuple):
    """The measurement of one setting."""

    rows: int
    share_prefix: bool
    tok_s: float  # completion tokens per second of a whole rollout, prefill included
    peak_bytes: int  # peak memory of MLX, minus what it held before


def kind_of(model: gwen.Model, prompt_lengths: Sequence[int], max_tokens: int, group_size: int) -> Kind:
    """The kind of a piece of work; nine of ten prompts fit its length class."""
    config = model.config
    heads = f"{config.num_attention_heads}/{config.num_key_value_heads} heads of {config.head_dim}"
    widths = f"{config.hidden_size}/{config.intermediate_size}/{config.vocab_size} wide"
    machine = (
        f"{mx.device_info().get('device_name', 'unknown')} {mx.default_device()}, {os.cpu_count()} cores, "
        f"{gpu.memory_size() >> 30} GiB, MLX {version('mlx')}, BLAS {cpu_blas.description}"
    )
    return Kind(
        machine,
        f"{config.model_type}, {config.num_hidden_layers} layers, {widths}, {heads}",
        str(model.head_weight.dtype).removeprefix("mlx.core."),
        group_size,
        _class(float(np.percentile(prompt_lengths, 90))),
        _class(max_tokens),
    )


def _class(length: float) -> int:
    """The length rounded up to a power of two, at least 16."""
    return max(2 ** math.ceil(math.log2(length)), 16)


# ---- measuring


def time_work(model: gwen.Model, kind: Kind, rows: int, modes: Sequence[bool]) -> list[Trial]:
    """
    Prefills random prompts for `rows` rows and times decode steps halfway through their completions, for each of
    `modes`: prompts shared (True) or copied (False).
    """
    num_prompts = max(rows // kind.group_size, 1)
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (num_prompts, kind.prompt_tokens)).tolist()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    begin = time.perf_counter()
    prompt_cache, prompt_logits = sampler.prefill(model, prompts, pad_id=0)
    prefill_s = time.perf_counter() - begin
    prefill_peak = mx.get_peak_memory()

    def seconds(num_steps: int, share_prefix: bool) -> float:
        cache = SlotCache(prompt_cache, rows, kind.max_tokens, share_prefix)
        cache.skip(max(kind.max_tokens // 2 - num_steps // 2, 0))
        prompt_of = {row: row * num_prompts // rows for row in range(rows)}
        record = sampler.Record(rows, sampler.SamplingParams(num_steps), key=0)
        begin = time.perf_counter()
        sampler.decode(model, cache, prompt_logits, prompt_of, record)
        return time.perf_counter() - begin

    trials = []
    for share_prefix in modes:
        mx.reset_peak_memory()
        seconds(SHORT, share_prefix)  # warm-up: builds kernels, takes memory
        short = min(seconds(SHORT, share_prefix) for _ in range(2))
        long = min(seconds(LONG, share_prefix) for _ in range(2))
        step_s = max(long - short, 0.1 * long) / (LONG - SHORT)
        whole_s = prefill_s + short + (kind.max_tokens - SHORT) * step_s
        peak = max(prefill_peak, mx.get_peak_memory()) - held
        trials.append(Trial(rows, share_prefix, rows * kind.max_tokens / whole_s, peak))
    return trials


def measure(
    model: gwen.Model,
    kind: Kind,
    known: Sequence[Trial],
    row_counts: Sequence[int],
    room: float,
    fits: Fits = lambda rows, share_prefix: True,
) -> list[Trial]:
    """
    Trials at the ascending row counts, including the known ones.

    Stops when twice the last memory peak exceeds `room` bytes, when nothing `fits`, when memory runs out, when two row
    counts in a row are hardly faster than an earlier one, and after MOST_SECONDS.
    """
    trials = list(known)
    begin = time.perf_counter()
    for rows in alive.Bar(row_counts, desc="measuring rollouts", unit="row count"):
        before = [trial for trial in trials if trial.rows < rows]
        counts = sorted({trial.rows for trial in before})
        best = [max(trial.tok_s for trial in before if trial.rows == count) for count in counts]
        if len(best) > 2 and max(best[-2:]) < GAIN * max(best[:-2]):
            break
        if any(trial.rows == rows for trial in trials):
            continue
        needs = {trial.share_prefix: 2 * trial.peak_bytes for trial in before}  # the latest of each mode
        modes = [s for s in (True, False)[kind.group_size == 1 :] if needs.get(s, 0) <= room and fits(rows, s)]
        if not modes or time.perf_counter() - begin > MOST_SECONDS:
            break
        if not (made := gpu.attempt(time_work, model, kind, rows, modes)):
            break
        trials += made[0]
        mx.clear_cache()
    return sorted(trials)


def pick(trials: Sequence[Trial], room: float) -> Trial:
    """The trial within `room` bytes with the fewest rows whose speed is near the maximum, in their faster mode."""
    fitting = [trial for trial in trials if trial.peak_bytes <= room] or [min(trials)]
    most = max(trial.tok_s for trial in fitting)
    rows = min(trial.rows for trial in fitting if GAIN * trial.tok_s >= most)
    return max((trial for trial in fitting if trial.rows == rows), key=lambda trial: trial.tok_s)


# ---- the file of measurements


def load(path: Path) -> dict[str, list[Trial]]:
    """The file's trials by kind; empty if it is missing or damaged, since everything can be measured again."""
    try:
        kinds = json.loads(path.read_text(encoding="utf-8"))[FORMAT]
        return {key: [Trial(*entry) for entry in entries] for key, entries in kinds.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def save(path: Path, kinds: dict[str, list[Trial]]) -> None:
    """Replaces the file. Raises OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run_files.replace_text(path, json.dumps({FORMAT: kinds}, indent=1) + "\n")


# ---- choosing


def choose(
    model: gwen.Model,
    prompt_lengths: Sequence[int],
    *,
    max_tokens: int,
    group_size: int,
    most_rows: int,
    rows: int = 0,
    fits: Fits = lambda rows, share_prefix: True,
) -> tuple[Trial, str]:
    """
    The best setting for work of this kind, and a line that explains it.

    most_rows: rows that the work has; larger counts are not tried. rows: if given, only sharing is chosen.
    The first call for a kind measures for up to a minute or two; later calls read the file.
    """
    kind, room = kind_of(model, prompt_lengths, max_tokens, group_size), ROOM * gpu.memory_at_hand()
    row_counts = [rows] if rows else [n for n in ROW_COUNTS if n < max(2 * most_rows, ROW_COUNTS[0] + 1)]
    path = cpu_blas.cache_directory() / "rollouts.json"
    kinds = load(path)
    key = " | ".join(f"{name} {value}" for name, value in kind._asdict().items())
    known = [t for t in kinds.get(key, []) if t.rows in row_counts and fits(t.rows, t.share_prefix)]
    trials = measure(model, kind, known, row_counts, room, fits)
    source = f"as measured before, in {path}"
    if len(trials) > len(known):
        kinds[key] = sorted({*kinds.get(key, []), *trials})
        source = f"measured now and kept in {path}"
        try:
            save(path, kinds)
        except OSError as error:
            source = f"measured now and not kept: {error.strerror or error}"
    if not trials:
        return Trial(row_counts[0], group_size > 1, 0.0, 0), f"rollouts: {row_counts[0]} rows at once; memory is short"
    chosen = pick(trials, room)
    return chosen, describe(chosen, trials, kind, source)


def settle(
    model: gwen.Model, config: Config, prompt_lengths: Sequence[int], num_held_out: int, fits: Fits
) -> tuple[int, Switch]:
    """
    The rows that a run decodes at once, and whether they share prompts. On a GPU this measures what is `auto`.

    They are enough for the step's rows or the held-out problems, whichever are more.
    """
    sampling = config.sampling
    rows, sharing = sampling.rollout_batch_size, sampling.share_prefix
    most_rows = max(sampling.batch * sampling.groups, num_held_out)
    if not gpu.on_gpu():
        return rows or min(most_rows, USUAL_ROWS), sharing
    if rows and sharing != "auto":
        return rows, sharing
    chosen, why = choose(
        model,
        prompt_lengths,
        max_tokens=sampling.max_tokens,
        group_size=sampling.groups,
        most_rows=most_rows,
        rows=rows or 0,
        fits=fits,
    )
    print(why, flush=True)
    return chosen.rows, sharing if sharing != "auto" else "on" if chosen.share_prefix else "off"


def describe(chosen: Trial, trials: Sequence[Trial], kind: Kind, source: str) -> str:
    """One line with the choice, its other mode, and the faster mode at other row counts."""

    def words(trial: Trial) -> str:
        how = f" {'shared' if trial.share_prefix else 'copied'}" if kind.group_size > 1 else ""
        return f"{trial.rows}{how} {trial.tok_s:.0f} tok/s"

    fastest = {trial.rows: trial for trial in sorted(trials, key=lambda trial: trial.tok_s)}
    others = [t for t in trials if t != chosen and (t.rows == chosen.rows or t == fastest[t.rows])]
    against = f" (against {', '.join(map(words, others))})" if others else ""
    work = f"{kind.prompt_tokens} + {kind.max_tokens} tokens in groups of {kind.group_size}"
    return f"rollouts: rows at once {words(chosen)}{against} for {work}, {source}"
