"""
The harness under the benchmarks: their flags, engines in turn in one process or in processes of their own, what they
took, what the machine can do at most, and its description.

Engines get the weights of one directory in one dtype, on one BLAS, and take turns, every other round in reverse, so
that a machine that slows down slows all of them. A peak of MLX is what an engine held beyond what was held before, and
the weights once: what it would need if it were alone.
"""

import argparse
import contextlib
import gc
import importlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tqdm import tqdm

import gwen
from config import Config, resolve
from disk import hub
from flags import Parser, check_least, flag_of
from machine import gpu
from step import micro_batch

PHASES = ("rollout", "reward", "update")
ROOT = Path(__file__).parent.parent
PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]

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
    parser.add_argument("--share-prefix", choices=micro_batch.SHARING, default="auto", help="in our update")
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


def describe(args: argparse.Namespace) -> str:
    """The shape of a step."""
    return (
        f"B={args.batch} G={args.groups} prompt={args.prompt_tokens} max_tokens={args.max_tokens} "
        f"rank={args.lora_rank} model={args.model}"
    )


@contextlib.contextmanager
def model_directory(name: str) -> Iterator[Path]:
    """The directory of a model; one of random weights is written for as long as it is needed."""
    if not name.startswith("random:"):
        yield hub.find(name).resolve()
        return
    with tempfile.TemporaryDirectory() as directory:
        gwen.save(gwen.random_model(name), directory, hub.load_tokenizer(hub.DEMO))
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


def peer_with_adapters(directory: Path, rank: int) -> Any:
    """The same in our default dtype, frozen, with mlx_lm's adapters on all projections."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    peer = load_peer(directory, gwen.default_dtype())
    peer.freeze()
    shape = {"rank": rank, "scale": 2.0, "dropout": 0.0, "keys": PROJECTIONS}
    linear_to_lora_layers(peer, len(peer.layers), shape)
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
    for turn, name in tqdm(order, desc="runs", leave=False, disable=None):
        gc.collect()  # what the last engine left behind in cycles
        mx.clear_cache()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        begin = time.process_time()
        run = engines[name](work)
        if turn >= warmup:
            samples[name].append(Sample(run, mx.get_peak_memory() - held, time.process_time() - begin))
    return samples


def in_processes(
    module: str, args: argparse.Namespace, directory: Path, names: Iterable[str], engines: dict[str, str]
) -> dict[str, list[Any]]:
    """
    The records that `args.rounds` processes of each engine print, run with the settings of these names.

    engines: the interpreter of each.
    """
    flags = [text for name in names for text in (flag_of(name), str(getattr(args, name)))]
    records: dict[str, list[Any]] = {engine: [] for engine in engines}
    for _, engine in in_order(list(engines), args.rounds):
        command = [engines[engine], "-m", module, "--engine", engine, "--model", str(directory), *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise ValueError(f"{engine} ended with exit status {done.returncode}: {last}")
        records[engine].append(json.loads(done.stdout.splitlines()[-1]))
    return records


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


# ---- steps of training, each engine in processes of its own


class Steps(list[dict[str, float]]):
    """Seconds by phase of each step of a trainer, taken at what its loop calls."""

    def begin(self, *_: Any, **__: Any) -> None:
        self.append({"begin": time.perf_counter(), "cpu": -time.process_time()})

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, timed as a phase."""

        def wrapped(*positional: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = function(*positional, **named)
            self[-1][phase] = time.perf_counter() - begin
            return result

        return wrapped

    def end(self, *_: Any, **__: Any) -> None:
        """What is no other phase is the update."""
        seconds = time.perf_counter() - self[-1].pop("begin")
        self[-1]["update"] = seconds - sum(self[-1].get(phase, 0.0) for phase in PHASES)
        self[-1]["cpu"] += time.process_time()


def print_steps(run: Callable[..., Steps], args: argparse.Namespace, in_torch: bool = False) -> None:
    """What the process of one engine prints: every timed step's seconds by phase, and the peak of all of them."""
    before = most_resident()
    steps = run(args, Path(args.model), args.warmup + args.runs)
    peak = torch_peak(before) if in_torch else mx.get_peak_memory()
    print(json.dumps({"steps": steps[args.warmup :], "peak_bytes": peak}))


def torch_peak(before: int) -> int:
    """The most bytes that PyTorch held on its GPU; without one, how far the process has grown beyond `before`."""
    torch = importlib.import_module("torch")
    if torch.backends.mps.is_available():
        return int(torch.mps.driver_allocated_memory())  # it keeps what is freed
    return most_resident() - before


def most_resident() -> int:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def medians(records: list[Any], num_tokens: int) -> dict[str, float]:
    """Medians over all timed steps of an engine, of so many tokens each."""
    steps = [step for record in records for step in record["steps"]]
    entry = {f"{name}_s": statistics.median(step[name] for step in steps) for name in steps[0]}
    seconds = [sum(step.values()) - step["cpu"] for step in steps]
    entry |= {"step_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
    entry["tok_s"] = num_tokens / entry["step_s"]
    entry["peak_mb"] = max(record["peak_bytes"] for record in records) / 1e6
    return rounded(entry)


def report_steps(args: argparse.Namespace, records: dict[str, list[Any]], num_tokens: int, rivals: Any) -> None:
    """Prints what the engines took, how ours compares, and all of it as JSON. rivals: the versions of the others."""
    entries = {engine: medians(held, num_tokens) for engine, held in records.items()}
    for name, entry in entries.items():
        phases = "".join(f"{phase} {entry[f'{phase}_s']:.2f} s | " for phase in PHASES if f"{phase}_s" in entry)
        print(
            f"{name:<16} | step {entry['step_s']:.2f} s ({entry['min_s']:.2f} to {entry['max_s']:.2f}) | {phases}"
            f"{entry['cpu_s']:.2f} s of processors | {entry['tok_s']:.1f} tok/s | peak {entry['peak_mb']:.0f} MB"
        )
    ratios = {}
    for name in [name for name in entries if name != "ours" and "ours" in entries]:
        ratio = {key: entries[name][key] / entries["ours"][key] for key in ("step_s", "cpu_s", "peak_mb")}
        ratios[name] = round(ratio["step_s"], 3)
        print(
            f"Result: ours is {verdict(ratio['step_s'])} than {name} ({ratio['cpu_s']:.2f}x by processors), "
            f"at {1 / ratio['peak_mb']:.2f} of its peak memory"
        )
    record = {"config": vars(args), "engines": entries, "ratios": ratios, "rivals": rivals}
    print(json.dumps(record | environment()))


# ---- the machine


def best_seconds(compute: Callable[[], Any]) -> float:
    """The shortest of five runs."""
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        mx.eval(compute())  # wait: this is what is timed
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def memory_bandwidth() -> float:
    """Bytes a second of a copy far larger than any cache, read and written."""
    source = mx.zeros((2**26,), mx.float32)  # 268 MB
    mx.eval(source)
    return 2 * source.nbytes / best_seconds(lambda: source + 1)


def matmul_rate(dtype: mx.Dtype) -> float:
    """Floating-point operations a second of a large square product."""
    size = 4096 if gpu.on_gpu() else 1024
    square = mx.ones((size, size), dtype)
    mx.eval(square)
    return 2 * size**3 / best_seconds(lambda: square @ square)


def environment(*packages: str) -> dict[str, Any]:
    """Device and versions, with those of `packages` beside those that a run records."""
    held = gpu.environment(cpu_blas.description)
    return {
        "device": f"{held['device']}, {held['machine']}, BLAS: {held['blas']}",
        "versions": {"python": held["python"]} | held["versions"] | {name: version(name) for name in packages},
    }
