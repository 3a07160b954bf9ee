"""
The harness under the benchmarks: their flags, engines in turn, what they took, what the machine can do at most, and its
description.

Engines take turns, every other round in reverse, so that a machine that slows down slows all of them. A peak is what an
engine held beyond what was held before, and the weights once: what it would need if it were alone.
"""

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import grpo
import gwen
import lora
import preflight
import sampler
import update
from config import Config
from disk import hub
from flags import Parser, check_least, flag_of
from machine import alive, versions
from settings.sources import resolve
from step import batch, policy, sample

# ---- flags and the work

Numbers = dict[str, tuple[int, int, str]]  # a setting's default, the least that it may be, and its help


def add_numbers(parser: Parser, numbers: Numbers) -> dict[str, float]:
    """Adds a flag for each whole number; returns the least values."""
    for name, (default, _, text) in numbers.items():
        parser.add_argument(flag_of(name), type=int, default=default, help=f"{text} (default: {default})")
    return {name: least for name, (_, least, _) in numbers.items()}


def parse(parser: Parser, argv: list[str] | None, least: dict[str, float]) -> argparse.Namespace:
    """The settings of a command line. ValueError names the flag that is wrong."""
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    check_least(args, **least)
    return args


STEP: Numbers = {  # the shape of a step
    "batch": (4, 1, "B, prompts"),
    "groups": (8, 2, "G, completions of each"),
    "prompt_tokens": (96, 2, "tokens of a prompt, drawn at random"),
    "max_tokens": (64, 1, "tokens of every completion"),
    "lora_rank": (16, 1, "of the adapters"),
    "token_budget": (0, 0, "positions of our micro-batches; 0: as train.py takes it"),
    "seed": (0, 0, "of prompts and sampling"),
}


def add_step(parser: Parser) -> dict[str, float]:
    """Adds the flags of a step; returns their least values."""
    parser.add_argument("--model", default="random:30m", help="as train.py's")
    parser.add_argument("--share-prefix", choices=batch.SHARING, default="auto", help="in our update")
    return add_numbers(parser, STEP)


def settings(args: argparse.Namespace, model: str) -> Config:
    """Those of a run of `train.py` that takes such steps."""
    flags = {"model": model, "task": "demo", "batch": args.batch, "groups": args.groups}
    flags |= {"max_tokens": args.max_tokens, "lora_rank": args.lora_rank}
    if args.token_budget:
        flags["train_token_budget"] = args.token_budget
    return resolve(flags, None, None, gwen.choose_model)[0]


def rewards(args: argparse.Namespace) -> list[float]:
    """Rewards that differ within every group, so that every completion has a gradient."""
    return [(place * 7 % 5) / 4 for place in range(args.groups)] * args.batch


class Learning(NamedTuple):
    """A model with adapters that takes such steps."""

    args: argparse.Namespace
    config: Config
    model: gwen.Model
    tokenizer: Any

    @property
    def demand(self) -> preflight.Demand:
        lengths = [self.args.prompt_tokens] * self.args.batch
        return preflight.Demand(self.model.config, self.model.head_weight.dtype, self.config, lengths)

    def rows(self, num_rows: int) -> list[list[int]]:
        """The prompts of so many rows, in groups as large as a step's where they suffice."""
        size = min(num_rows, self.args.groups)
        prompts = random_prompts(self.model.config, num_rows // size, self.args.prompt_tokens, self.args.seed)
        return [prompt for prompt in prompts for _ in range(size)]

    def rollout(self, num_rows: int, key: int = 0) -> sampler.Rollout:
        """Completions of exactly `--max-tokens` tokens, so many rows at once."""
        size, params = min(num_rows, self.args.groups), sampler.SamplingParams(self.args.max_tokens)
        prompts = self.rows(num_rows)[::size]
        return sampler.rollout(self.model, prompts, params, group_size=size, key=key, batch_size=num_rows)

    def updates(self) -> Callable[[sampler.Rollout, list[float], float], update.UpdateResult]:
        """A function that updates by a rollout of a whole step, by advantages and a rate."""
        sizes, rows = preflight.settle(self.demand), self.rows(self.args.batch * self.args.groups)
        learner = update.Learner(self.model, self.config, policy.Reader(self.config, sizes))

        def once(rollout: sampler.Rollout, advantages: list[float], rate: float) -> update.UpdateResult:
            drawn = sample.of_rollout(rows[:: self.args.groups], rollout)
            taught = [one._replace(advantage=its) for one, its in zip(drawn, advantages, strict=True)]
            return update.update(learner, batch.cut(taught, sizes.train_token_budget, self.args.share_prefix), rate)

        return once


def learning(args: argparse.Namespace, config: Config) -> Learning:
    model, tokenizer = gwen.load(config.model.name)
    lora.apply(model, config.model.lora_rank, config.model.lora_scale, config.model.lora_targets)
    return Learning(args, config, model, tokenizer)


def advantages(args: argparse.Namespace) -> list[float]:
    """Those of the rewards, row by row."""
    by_group = np.array(rewards(args)).reshape(args.batch, args.groups)
    return grpo.group_advantages(by_group).reshape(-1).tolist()


def describe(args: argparse.Namespace) -> str:
    """The shape of a step."""
    return (
        f"B={args.batch} G={args.groups} prompt={args.prompt_tokens} max_tokens={args.max_tokens} "
        f"rank={args.lora_rank} model={args.model}"
    )


@contextlib.contextmanager
def model_directory(name: str) -> Iterator[Path]:
    """The directory of a model; of random weights or a GGUF file it is written for as long as it is needed."""
    if not name.startswith("random:") and not hub.is_gguf(name):
        yield hub.find(name).resolve()
        return
    with tempfile.TemporaryDirectory() as directory:
        model, tokenizer = gwen.load(name)
        gwen.save(model, directory, tokenizer)
        yield Path(directory)


def random_prompts(config: hub.ModelConfig, num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Prompts of ordinary tokens."""
    ordinary = np.setdiff1d(np.arange(min(config.vocab_size, 8192)), config.eos_ids)
    return np.random.default_rng(seed).choice(ordinary, (num_prompts, num_tokens)).tolist()


# ---- mlx_lm's models


def load_peer(directory: Path, dtype: mx.Dtype) -> Any:
    """mlx_lm's own model of a directory, in `dtype`."""
    from mlx_lm.utils import load_model

    peer, _ = load_model(directory)
    peer.set_dtype(dtype)
    mx.eval(peer.parameters())
    return peer


# ---- rounds


class Sample(NamedTuple):
    """One timed run of an engine, which says how many `seconds` it took."""

    run: Any
    peak_bytes: int  # beyond what was held before
    cpu_s: float  # of this process


def in_order(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, engine), every other round in reverse."""
    for turn in range(rounds):
        yield from ((turn, name) for name in (names if turn % 2 == 0 else names[::-1]))


def in_turn(engines: dict[str, Callable[[Any], Any]], work: Any, warmup: int, runs: int) -> dict[str, list[Sample]]:
    """`runs` timed runs of each engine, after `warmup` untimed ones."""
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    order = list(in_order(list(engines), warmup + runs))
    for turn, name in alive.Bar(order, desc="measuring", unit="run"):
        gc.collect()  # what the last engine left behind in cycles
        mx.clear_cache()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        begin = time.process_time()
        run = engines[name](work)
        if turn >= warmup:
            samples[name].append(Sample(run, mx.get_peak_memory() - held, time.process_time() - begin))
    return samples


def times(samples: list[Sample]) -> dict[str, float]:
    """Milliseconds of an engine's runs, and of the processors."""
    seconds = [sample.run.seconds for sample in samples]
    return {
        "mean_ms": 1e3 * statistics.fmean(seconds),
        "std_ms": 1e3 * statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        "median_ms": 1e3 * statistics.median(seconds),
        "min_ms": 1e3 * min(seconds),
        "max_ms": 1e3 * max(seconds),
        "cpu_ms": 1e3 * statistics.fmean(sample.cpu_s for sample in samples),
    }


def rounded(numbers: dict[str, Any]) -> dict[str, float]:
    return {name: round(float(number), 3) for name, number in numbers.items()}


def peak_mb(samples: list[Sample], model: gwen.Model) -> float:
    """The largest peak of the runs and the weights, which every engine holds."""
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return (weights + max(sample.peak_bytes for sample in samples)) / 1e6


def rounds(ours: list[Sample], theirs: list[Sample]) -> str:
    """How many times as long the others took, round by round and by processors."""
    ratios = [other.run.seconds / own.run.seconds for own, other in zip(ours, theirs, strict=True)]
    cpu = sum(one.cpu_s for one in theirs) / sum(one.cpu_s for one in ours)
    return f"{min(ratios):.2f} to {max(ratios):.2f} times as long, {cpu:.2f} by processors"


def verdict(ratio: float) -> str:
    """The ratio in words: "1.14x faster" or "0.90x slower"."""
    return f"{ratio:.2f}x {'faster' if round(ratio, 2) >= 1 else 'slower'}"


# ---- the machine


def memory_bandwidth() -> float:
    """Bytes a second of a copy far larger than any cache, read and written: the best of five."""
    source, seconds = mx.zeros((2**26,), mx.float32), list[float]()  # 268 MB
    mx.eval(source)
    for _ in range(5):
        begin = time.perf_counter()
        mx.eval(source + 1)  # wait: this is what is timed
        seconds.append(time.perf_counter() - begin)
    return 2 * source.nbytes / min(seconds)


def environment(*packages: str) -> dict[str, Any]:
    """Device and versions, with those of `packages` beside those that a run records."""
    held = versions.environment(cpu_blas.description)
    return {
        "device": f"{held['device']}, {held['machine']}, BLAS: {held['blas']}",
        "versions": {"python": held["python"]} | held["versions"] | {name: version(name) for name in packages},
    }
