"""
A step of supervised fine-tuning against mlx_lm's trainer: `uv run python -m bench.sft --model random:30m`.

Both train adapters of the same rank on all projections of the same weights, in one dtype and on one BLAS, with AdamW,
on the same rows of `--tokens` random ids, all of which count but the first. mlx_lm's trainer is its own loop and loss,
in one batch. Each engine runs in a process of its own, so that its peak is its own; rounds alternate. Processor seconds
stand beside those of the clock, for a busy machine. `--vocab` gives a random model another vocabulary. Peaks include
the weights. Left out: data, evaluation, checkpoints, logs.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

import gwen
import lora
import preflight
import update
from bench import harness
from config import TARGETS, Config
from flags import Parser, fail
from sft import tuning as sft
from sft.chats import Row
from step.policy import Reader, Targets

ENGINES = ("ours", "mlx_lm")
ROOT = Path(__file__).parent.parent


def make_rows(args: argparse.Namespace, vocab: int) -> list[list[int]]:
    """Random ids of every step's rows, the batches one after the other."""
    return np.random.default_rng(0).integers(0, vocab, (args.batch * (args.warmup + args.runs), args.tokens)).tolist()


def now() -> tuple[float, float]:
    """Seconds of the clock and of this process."""
    return time.perf_counter(), time.process_time()


def run_ours(args: argparse.Namespace, directory: Path) -> list[tuple[float, float]]:
    """When each step ended, as `train.py --loss-type sft` takes it; the first entry is the beginning."""
    config = Config.of(loss_type="sft", batch=args.batch, lora_rank=args.lora_rank)
    model = gwen.load_model(directory)
    lora.apply(model, config.model.lora_rank, config.model.lora_scale, TARGETS)
    demand = preflight.Demand(model.config, model.head_weight.dtype, config, [args.tokens] * args.batch)
    sizes = preflight.settle(demand)
    learner = update.Learner(model, config, Reader(config, sizes))
    rows = [Row(ids, list(range(1, len(ids)))) for ids in make_rows(args, model.config.vocab_size)]
    marks = [now()]
    for begin in range(0, len(rows), args.batch):
        step = rows[begin : begin + args.batch]
        targets = Targets(len(step), sum(len(row.places) for row in step))
        batches = sft.make_batches(step, sizes.train_token_budget)
        update.optimizer_step(learner, batches, targets, config.optimizer.learning_rate)
        mx.eval(learner.trainable, learner.optimizer.state)
        marks.append(now())
    return marks


def run_mlx_lm(args: argparse.Namespace, directory: Path) -> list[tuple[float, float]]:
    """The same of `mlx_lm.tuner.trainer.train`, which reports after every step."""
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load

    model = load(str(directory))[0]
    model.set_dtype(gwen.default_dtype())
    model.freeze()
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    linear_to_lora_layers(
        model, len(model.layers), {"rank": args.lora_rank, "scale": 2.0, "dropout": 0.0, "keys": names}
    )
    mx.eval(model.parameters())
    rows = make_rows(args, model.args.vocab_size)

    class Report(trainer.TrainingCallback):
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            marks.append(now())

    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        marks = [now()]
        trainer.train(
            model,
            optim.AdamW(1e-4),
            [(ids, 0) for ids in rows],
            args=trainer.TrainingArgs(
                batch_size=args.batch,
                iters=args.warmup + args.runs,
                steps_per_report=1,
                steps_per_save=2**31,
                max_seq_length=args.tokens + 1,
                adapter_file=str(Path(scratch) / "adapters.safetensors"),
            ),
            training_callback=Report(),
        )
    return marks


def child(args: argparse.Namespace, directory: Path, engine: str) -> dict[str, Any]:
    """Seconds of the timed steps and the peak of one engine, in a process of its own."""
    names = ("batch", "tokens", "lora_rank", "warmup", "runs")
    flags = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    command = [sys.executable, "-m", "bench.sft", "--engine", engine, "--model", str(directory), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{engine} ended with exit status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(args: argparse.Namespace, directory: Path) -> None:
    """Runs the engines in turn and reports medians, peaks and their ratios."""
    records: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for turn in range(args.rounds):
        for engine in ENGINES if turn % 2 == 0 else ENGINES[::-1]:
            records[engine].append(child(args, directory, engine))
    print(f"Config: B={args.batch} tokens={args.tokens} rank={args.lora_rank} model={args.model} vocab={args.vocab}")
    entries = {}
    for engine, held in records.items():
        clock, cpu = ([one for record in held for one in record[name]] for name in ("seconds", "cpu_seconds"))
        entry = {"step_s": statistics.median(clock), "min_s": min(clock), "max_s": max(clock)}
        entry |= {"cpu_s": statistics.median(cpu), "peak_mb": max(record["peak_bytes"] for record in held) / 1e6}
        entries[engine] = {name: round(value, 3) for name, value in entry.items()}
        print(
            f"{engine:<7} | step {entry['step_s']:.2f} s ({entry['min_s']:.2f} to {entry['max_s']:.2f}) | "
            f"{entry['cpu_s']:.2f} s of processors | peak {entry['peak_mb']:.0f} MB"
        )
    ours, theirs = entries["ours"], entries["mlx_lm"]
    verdict, cpu_ratio = harness.verdict(theirs["step_s"] / ours["step_s"]), theirs["cpu_s"] / ours["cpu_s"]
    share = ours["peak_mb"] / theirs["peak_mb"]
    print(f"Result: ours is {verdict} than mlx_lm ({cpu_ratio:.2f}x by processors), at {share:.2f} of its peak memory")
    print(json.dumps({"config": vars(args), "engines": entries} | harness.environment()))


def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench.sft", "Time a step of supervised fine-tuning against mlx_lm's.")
    parser.add_argument("--model", default="random:30m", help="as train.py's")
    for name, default, text in (
        ("batch", 8, "rows of a step"),
        ("tokens", 256, "tokens of a row"),
        ("lora-rank", 16, "of the adapters"),
        ("vocab", 0, "vocabulary of a random model; 0: its own"),
        ("warmup", 1, "steps of each process that are not timed"),
        ("runs", 3, "timed steps of each process"),
        ("rounds", 2, "processes of each engine, in turn"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--engine", choices=ENGINES, help="runs this one here and prints its record; for --model DIR")
    args = parser.parse_args(argv)
    try:
        if args.engine:
            marks = (run_ours if args.engine == "ours" else run_mlx_lm)(args, Path(args.model))
            clock, cpu = np.diff(np.array(marks[args.warmup :]), axis=0).T.tolist()
            print(json.dumps({"seconds": clock, "cpu_seconds": cpu, "peak_bytes": mx.get_peak_memory()}))
            return
        for name in ("batch", "tokens", "lora_rank", "runs", "rounds"):
            if getattr(args, name) < 1 + (name == "tokens"):
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it is too small")
        if args.vocab:
            if args.model not in gwen.RANDOM:
                raise ValueError(f"--vocab {args.vocab} is for a random model, not {args.model}; leave it out")
            gwen.RANDOM[args.model] = (*gwen.RANDOM[args.model][:-1], args.vocab)
        with harness.model_directory(args.model) as directory:
            compare(args, directory)
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
