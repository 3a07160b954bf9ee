"""
Provides flags, timed runs and summaries for all benchmarks.

The engines take turns, in reverse order in every other round, so that a slowdown of the machine
affects all engines equally. To compute an engine's peak memory, the memory in use before its run is
subtracted from the largest amount in use during the run, and the size of the weights is added. So
the figure is the same as if the engine had run alone.
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
from typing import Any, NamedTuple, TypeVar

import cpu_blas
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import gwen
from disk import hub
from flags import Parser, check_minimums, flag_of
from machine import alive, versions

T = TypeVar("T")
# for each integer setting: its default, its least value, and its help text
Numbers = dict[str, tuple[int, int, str]]


def add_number_flags_and_parse(
    parser: Parser, argv: list[str] | None, number_flags: Numbers, **least_values: float
) -> argparse.Namespace:
    """
    Adds a flag for each entry of `number_flags` to a parser, and returns the parsed settings.

    least_values: the least allowed values of settings that are not in `number_flags`.

    Raises ValueError, which names the flag, if a value is too small.
    """
    for name, (default, _, text) in number_flags.items():
        help_text = f"{text} (default: {default})"
        parser.add_argument(flag_of(name), type=int, default=default, help=help_text)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    least_numbers = {name: minimum for name, (_, minimum, _) in number_flags.items()}
    check_minimums(args, **least_numbers, **least_values)
    return args


@contextlib.contextmanager
def model_directory(model_name: str) -> Iterator[Path]:
    """
    Yields the directory that contains the files of a model.

    A random model, or a model from a GGUF file, is written to a temporary directory, which is
    removed at the end of the `with` statement.
    """
    if not model_name.startswith("random:") and not hub.is_gguf_model(model_name):
        yield hub.find_model_directory(model_name).resolve()
        return
    with tempfile.TemporaryDirectory() as directory:
        model, tokenizer = gwen.load(model_name)
        gwen.save(model, directory, tokenizer)
        yield Path(directory)


def random_texts(tokenizer: Any, word_counts: Sequence[int], seed: int) -> list[str]:
    """
    Returns texts of random words of the vocabulary, one text for each number in `word_counts`.

    Each word, together with the space before it, is a single token.
    """
    words = sorted(
        token[1:] for token in tokenizer.get_vocab() if re.fullmatch("[\u0120\u2581][a-z]+", token)
    )
    rng = np.random.default_rng(seed)
    texts = []
    for num_words in word_counts:
        chosen_words = rng.choice(words, num_words)
        texts.append("".join(f" {word}" for word in chosen_words))
    return texts


def load_mlx_lm_model(directory: Path, dtype: mx.Dtype) -> Any:
    """Loads the model in a directory with mlx_lm, and converts it to `dtype`."""
    from mlx_lm.utils import load_model

    peer, _ = load_model(directory)
    peer.set_dtype(dtype)
    mx.eval(peer.parameters())
    return peer


class TimedRun(NamedTuple):
    """The result and the costs of one timed run of an engine."""

    run: Any  # the engine's result, whose attribute `seconds` is the duration of the run
    peak_bytes: int  # the most memory in use during the run, minus the memory in use before
    cpu_s: float  # the processor time that this process used


def turns_in_alternating_order(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yields (round, item) for each item in each round, in reverse order in every other round."""
    for number in range(rounds):
        order = items if number % 2 == 0 else items[::-1]
        for item in order:
            yield number, item


def time_engines_in_turn(
    engines: Mapping[str, Callable[[], Any]], warmup: int, runs: int
) -> dict[str, list[TimedRun]]:
    """
    Runs the engines in turn, and returns the timed runs of each engine.

    The first `warmup` rounds are not timed; the next `runs` rounds are.
    """
    samples: dict[str, list[TimedRun]] = {name: [] for name in engines}
    order = list(turns_in_alternating_order(list(engines), warmup + runs))
    for round_number, name in alive.Bar(order, desc="measuring", unit="run"):
        gc.collect()  # frees memory that the previous engine left in reference cycles
        mx.clear_cache()
        mx.reset_peak_memory()
        bytes_before = mx.get_active_memory()
        begin = time.process_time()
        run = engines[name]()
        if round_number >= warmup:
            peak_bytes = mx.get_peak_memory() - bytes_before
            samples[name].append(TimedRun(run, peak_bytes, time.process_time() - begin))
    return samples


def summarize_times_and_peak(
    samples: list[TimedRun], model: gwen.Model, **extra: float
) -> dict[str, float]:
    """
    Returns an engine's times, processor time and peak memory, in ms and MB.

    The peak memory is that of the run with the largest peak, and includes the weights, which every
    engine needs.

    extra: further figures to include in the result.
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


def describe_rival_time_ratios(gwen_samples: list[TimedRun], rival_samples: list[TimedRun]) -> str:
    """
    Describes the rival's times as multiples of Gwen's.

    For the duration, the text contains the range of the multiples over all rounds. For the CPU
    time, it contains one multiple for all rounds together.
    """
    pairs = zip(gwen_samples, rival_samples, strict=True)
    ratios = [rival.run.seconds / gwen_sample.run.seconds for gwen_sample, rival in pairs]
    rival_cpu_s = sum(sample.cpu_s for sample in rival_samples)
    cpu_ratio = rival_cpu_s / sum(sample.cpu_s for sample in gwen_samples)
    return (
        f"{min(ratios):.2f} to {max(ratios):.2f} times as long, {cpu_ratio:.2f} times the CPU time"
    )


def describe_speed_ratio(ratio: float) -> str:
    """Describes a speed ratio in words, for example "1.14x faster" or "0.90x slower"."""
    comparison = "faster" if round(ratio, 2) >= 1 else "slower"
    return f"{ratio:.2f}x {comparison}"


def collect_environment_facts(*packages: str) -> dict[str, Any]:
    """
    Returns the device, and the versions of packages.

    These packages are `packages` and those whose versions every run records.
    """
    recorded = versions.collect_environment_facts(cpu_blas.description)
    package_versions = {name: version(name) for name in packages}
    return {
        "device": f"{recorded['device']}, {recorded['machine']}, BLAS: {recorded['blas']}",
        "versions": {"python": recorded["python"]} | recorded["versions"] | package_versions,
    }
