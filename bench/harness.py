"""
Parses the benchmarks' flags, runs engines in turn, sums up their times and memory peaks, and
describes the machine.

Engines take turns, and every other round runs them in reverse order, so that a machine that slows
down slows all engines alike. An engine's peak is the memory that it uses beyond the memory already
in use, plus the weights once. So it is the memory that this engine needs alone.
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

Numbers = dict[str, tuple[int, int, str]]  # by setting: default, least value, help


def parse_settings(
    parser: Parser, argv: list[str] | None, numbers: Numbers, **least: float
) -> argparse.Namespace:
    """
    The settings from a command line, with a flag for each of `numbers`.

    least: the least values of other settings. Raises ValueError, which names the flag, if a value
    is too small.
    """
    for name, (default, _, text) in numbers.items():
        help_text = f"{text} (default: {default})"
        parser.add_argument(flag_of(name), type=int, default=default, help=help_text)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    least_numbers = {name: minimum for name, (_, minimum, _) in numbers.items()}
    check_least(args, **least_numbers, **least)
    return args


@contextlib.contextmanager
def model_directory(name: str) -> Iterator[Path]:
    """
    The directory of a model.

    Random weights, or those of a GGUF file, are written to a temporary directory, which is removed
    at the end.
    """
    if not name.startswith("random:") and not hub.is_gguf(name):
        yield hub.find_model(name).resolve()
        return
    with tempfile.TemporaryDirectory() as directory:
        model, tokenizer = gwen.load(name)
        gwen.save(model, directory, tokenizer)
        yield Path(directory)


def random_texts(tokenizer: Any, lengths: Sequence[int], seed: int) -> list[str]:
    """
    Texts of random words from the vocabulary, one text for each length in words.

    Each word is one token together with the space before it.
    """
    words = sorted(
        token[1:] for token in tokenizer.get_vocab() if re.fullmatch("[\u0120\u2581][a-z]+", token)
    )
    rng = np.random.default_rng(seed)
    texts = []
    for length in lengths:
        chosen_words = rng.choice(words, length)
        texts.append("".join(f" {word}" for word in chosen_words))
    return texts


def load_peer(directory: Path, dtype: mx.Dtype) -> Any:
    """The model in a directory as mlx_lm loads it, in `dtype`."""
    from mlx_lm.utils import load_model

    peer, _ = load_model(directory)
    peer.set_dtype(dtype)
    mx.eval(peer.parameters())
    return peer


class Sample(NamedTuple):
    """One timed run of an engine."""

    run: Any  # the engine's result, which states its `seconds`
    peak_bytes: int  # beyond the memory in use before the run
    cpu_s: float  # processor time of this process


def interleave(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yields (round, engine); every other round has the engines in reverse order."""
    for number in range(rounds):
        order = names if number % 2 == 0 else names[::-1]
        for name in order:
            yield number, name


def run_in_turn(
    engines: Mapping[str, Callable[[], Any]], warmup: int, runs: int
) -> dict[str, list[Sample]]:
    """Runs the engines in turn. Returns `runs` timed runs of each, after `warmup` untimed ones."""
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    order = list(interleave(list(engines), warmup + runs))
    for number, name in alive.Bar(order, desc="measuring", unit="run"):
        gc.collect()  # frees what the last engine left in reference cycles
        mx.clear_cache()
        mx.reset_peak_memory()
        bytes_before = mx.get_active_memory()
        begin = time.process_time()
        run = engines[name]()
        if number >= warmup:
            peak_bytes = mx.get_peak_memory() - bytes_before
            samples[name].append(Sample(run, peak_bytes, time.process_time() - begin))
    return samples


def summarize(samples: list[Sample], model: gwen.Model, **extra: float) -> dict[str, float]:
    """
    The times of an engine's runs in ms, its processor time, and its largest peak in MB.

    The peak includes the weights, which all engines hold. extra: further figures for the result.
    """
    times = 1e3 * np.array([sample.run.seconds for sample in samples])
    weight_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    peak_bytes = max(sample.peak_bytes for sample in samples)
    numbers = {
        "mean_ms": times.mean(),
        "std_ms": times.std(ddof=1) if len(times) > 1 else 0.0,
        "median_ms": np.median(times),
        "min_ms": times.min(),
        "max_ms": times.max(),
        "cpu_ms": 1e3 * np.mean([sample.cpu_s for sample in samples]),
        "peak_mb": (weight_bytes + peak_bytes) / 1e6,
    }
    return {name: round(float(number), 3) for name, number in (numbers | extra).items()}


def describe_rounds(gwen_samples: list[Sample], rival_samples: list[Sample]) -> str:
    """How many times as long the rival took, in words: by round, and by processor time."""
    pairs = zip(gwen_samples, rival_samples, strict=True)
    ratios = [rival.run.seconds / gwen_sample.run.seconds for gwen_sample, rival in pairs]
    rival_cpu_s = sum(sample.cpu_s for sample in rival_samples)
    cpu_ratio = rival_cpu_s / sum(sample.cpu_s for sample in gwen_samples)
    return (
        f"{min(ratios):.2f} to {max(ratios):.2f} times as long, {cpu_ratio:.2f} times the CPU time"
    )


def describe_ratio(ratio: float) -> str:
    """The ratio in words: "1.14x faster" or "0.90x slower"."""
    comparison = "faster" if round(ratio, 2) >= 1 else "slower"
    return f"{ratio:.2f}x {comparison}"


def describe_environment(*packages: str) -> dict[str, Any]:
    """The device, the versions that a run records, and the versions of `packages`."""
    recorded = versions.describe_environment(cpu_blas.description)
    package_versions = {name: version(name) for name in packages}
    return {
        "device": f"{recorded['device']}, {recorded['machine']}, BLAS: {recorded['blas']}",
        "versions": {"python": recorded["python"]} | recorded["versions"] | package_versions,
    }
