"""
The harness under the benchmarks: their flags, engines in turn, what they took, and the machine.

Engines take turns, every other round in reverse, so that a machine that slows down slows all of them. A peak is what an
engine held beyond what was held before, and the weights once: what it would need if it were alone.
"""

import argparse
import contextlib
import gc
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import gwen
from disk import hub
from flags import Parser, check_least, flag_of
from machine import alive, versions

Numbers = dict[
    str, tuple[int, int, str]
]  # a setting's default, the least that it may be, and its help


def parse_settings(
    parser: Parser, argv: list[str] | None, numbers: Numbers, **least: float
) -> argparse.Namespace:
    """The settings of a command line, with a flag for each whole number. ValueError names the flag that is wrong."""
    for name, (default, _, text) in numbers.items():
        parser.add_argument(
            flag_of(name), type=int, default=default, help=f"{text} (default: {default})"
        )
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    check_least(args, **{name: low for name, (_, low, _) in numbers.items()}, **least)
    return args


@contextlib.contextmanager
def model_directory(name: str) -> Iterator[Path]:
    """The directory of a model; of random weights or a GGUF file it is written for as long as it is needed."""
    if not name.startswith("random:") and not hub.is_gguf(name):
        yield hub.find_model(name).resolve()
        return
    with tempfile.TemporaryDirectory() as directory:
        model, tokenizer = gwen.load(name)
        gwen.save(model, directory, tokenizer)
        yield Path(directory)


def random_texts(tokenizer: Any, lengths: Sequence[int], seed: int) -> list[str]:
    """Texts of so many random words of the vocabulary, each with the space before it a token."""
    words = sorted(
        token[1:] for token in tokenizer.get_vocab() if re.fullmatch("[\u0120\u2581][a-z]+", token)
    )
    rng = np.random.default_rng(seed)
    return ["".join(f" {word}" for word in rng.choice(words, length)) for length in lengths]


def load_peer(directory: Path, dtype: mx.Dtype) -> Any:
    """mlx_lm's own model of a directory, in `dtype`."""
    from mlx_lm.utils import load_model

    peer, _ = load_model(directory)
    peer.set_dtype(dtype)
    mx.eval(peer.parameters())
    return peer


class Sample(NamedTuple):
    """One timed run of an engine, which says how many `seconds` it took."""

    run: Any
    peak_bytes: int  # beyond what was held before
    cpu_s: float  # of this process


def interleave(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, engine), every other round in reverse."""
    for turn in range(rounds):
        yield from ((turn, name) for name in (names if turn % 2 == 0 else names[::-1]))


def run_in_turn(
    engines: Mapping[str, Callable[[], Any]], warmup: int, runs: int
) -> dict[str, list[Sample]]:
    """`runs` timed runs of each engine, after `warmup` untimed ones."""
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    order = list(interleave(list(engines), warmup + runs))
    for turn, name in alive.Bar(order, desc="measuring", unit="run"):
        gc.collect()  # what the last engine left behind in cycles
        mx.clear_cache()
        mx.reset_peak_memory()
        before, begin = mx.get_active_memory(), time.process_time()
        run = engines[name]()
        if turn >= warmup:
            samples[name].append(
                Sample(run, mx.get_peak_memory() - before, time.process_time() - begin)
            )
    return samples


def summarize(samples: list[Sample], model: gwen.Model, **more: float) -> dict[str, float]:
    """Milliseconds of an engine's runs, and of the processors; the largest peak, with the weights that all hold."""
    times = 1e3 * np.array([sample.run.seconds for sample in samples])
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    numbers = {
        "mean_ms": times.mean(),
        "std_ms": times.std(ddof=1) if len(times) > 1 else 0.0,
        "median_ms": np.median(times),
        "min_ms": times.min(),
        "max_ms": times.max(),
        "cpu_ms": 1e3 * np.mean([sample.cpu_s for sample in samples]),
        "peak_mb": (weights + max(sample.peak_bytes for sample in samples)) / 1e6,
    }
    return {name: round(float(number), 3) for name, number in (numbers | more).items()}


def round_ratios(ours: list[Sample], theirs: list[Sample]) -> str:
    """How many times as long the others took, round by round and by processors."""
    ratios = [other.run.seconds / own.run.seconds for own, other in zip(ours, theirs, strict=True)]
    cpu = sum(one.cpu_s for one in theirs) / sum(one.cpu_s for one in ours)
    return f"{min(ratios):.2f} to {max(ratios):.2f} times as long, {cpu:.2f} by processors"


def describe_ratio(ratio: float) -> str:
    """The ratio in words: "1.14x faster" or "0.90x slower"."""
    return f"{ratio:.2f}x {'faster' if round(ratio, 2) >= 1 else 'slower'}"


def describe_environment(*packages: str) -> dict[str, Any]:
    """Device and versions, with those of `packages` beside those that a run records."""
    recorded = versions.describe_environment(cpu_blas.description)
    return {
        "device": f"{recorded['device']}, {recorded['machine']}, BLAS: {recorded['blas']}",
        "versions": {"python": recorded["python"]}
        | recorded["versions"]
        | {name: version(name) for name in packages},
    }
