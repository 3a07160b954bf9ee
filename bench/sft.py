"""
A step of supervised fine-tuning against mlx_lm's trainer: `uv run python -m bench.sft --model random:30m`.

Both train adapters of the same rank on all projections of the same weights, in one dtype and on one BLAS, with AdamW,
on the same rows of `--tokens` random ids, all of which count but the first. mlx_lm's trainer is its own loop and loss,
in one batch. Each engine runs in a process of its own, so that its peak is its own. Processor seconds stand beside
those of the clock, for a busy machine. Peaks include the weights. Left out: data, evaluation, checkpoints, logs.
"""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.optimizers as optim

import gwen
import lora
import preflight
import update
from bench import harness
from config import TARGETS, Config
from disk import hub
from flags import Parser, fail
from sft import tuning
from sft.chats import Row
from step.policy import Reader, Targets


def make_rows(args: argparse.Namespace, config: hub.ModelConfig) -> list[list[int]]:
    """Random ids of every step's rows, the batches one after the other."""
    return harness.random_prompts(config, args.batch * (args.warmup + args.runs), args.tokens, 0)


def run_ours(args: argparse.Namespace, directory: Path, num_steps: int) -> harness.Steps:
    """Steps as `train.py --loss-type sft` takes them."""
    config = Config.of(loss_type="sft", batch=args.batch, lora_rank=args.lora_rank)
    model = gwen.load_model(directory)
    lora.apply(model, config.model.lora_rank, config.model.lora_scale, TARGETS)
    demand = preflight.Demand(model.config, model.head_weight.dtype, config, [args.tokens] * args.batch)
    sizes = preflight.settle(demand)
    learner = update.Learner(model, config, Reader(config, sizes))
    rows = [Row(ids, list(range(1, len(ids)))) for ids in make_rows(args, model.config)]
    steps = harness.Steps()
    for begin in range(0, len(rows), args.batch):
        steps.begin()
        step = rows[begin : begin + args.batch]
        targets = Targets(len(step), sum(len(row.places) for row in step))
        batches = tuning.make_batches(step, sizes.train_token_budget)
        update.optimizer_step(learner, batches, targets, config.optimizer.learning_rate)
        mx.eval(learner.trainable, learner.optimizer.state)
        steps.end()
    return steps


def run_mlx_lm(args: argparse.Namespace, directory: Path, num_steps: int) -> harness.Steps:
    """Steps of `mlx_lm.tuner.trainer.train`, which reports after every one."""
    from mlx_lm.tuner import trainer

    model = harness.peer_with_adapters(directory, args.lora_rank)
    rows = make_rows(args, gwen.load_config(directory))

    steps = harness.Steps()

    class Report(trainer.TrainingCallback):
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            steps.end()
            steps.begin()

    how: dict[str, Any] = {"batch_size": args.batch, "iters": num_steps, "max_seq_length": args.tokens + 1}
    how |= {"steps_per_report": 1, "steps_per_save": 2**31}
    pairs = [(ids, 0) for ids in rows]
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        settings = trainer.TrainingArgs(**how, adapter_file=str(Path(scratch) / "adapters.safetensors"))
        steps.begin()
        trainer.train(model, optim.AdamW(1e-4), pairs, args=settings, training_callback=Report())
    steps.pop()  # which began with the last report
    return steps


ENGINES = {"ours": run_ours, "mlx_lm": run_mlx_lm}


NUMBERS: harness.Numbers = {
    "batch": (8, 1, "rows of a step"),
    "tokens": (256, 2, "tokens of a row"),
    "lora_rank": (16, 1, "of the adapters"),
    "warmup": (1, 0, "steps of each process that are not timed"),
    "runs": (3, 1, "timed steps of each process"),
    "rounds": (2, 1, "processes of each engine, in turn"),
}


def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench.sft", "Time a step of supervised fine-tuning against mlx_lm's.")
    parser.add_argument("--model", default="random:30m", help="as train.py's")
    least = harness.add_numbers(parser, NUMBERS)
    parser.add_argument("--engine", choices=tuple(ENGINES), help="runs this one here and prints its record")
    try:
        args = harness.parse(parser, argv, least)
        if args.engine:
            harness.print_steps(ENGINES[args.engine], args)
            return
        engines = dict.fromkeys(ENGINES, sys.executable)
        with harness.model_directory(args.model) as directory:
            records = harness.in_processes("bench.sft", args, directory, NUMBERS, engines)
        print(f"Config: B={args.batch} tokens={args.tokens} rank={args.lora_rank} model={args.model}")
        harness.report_steps(args, records, args.batch * (args.tokens - 1), {})
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
