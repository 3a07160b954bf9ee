"""
Times the update of a GRPO step for several settings: `uv run python -m bench.update`.

All settings train on the same rollouts: B prompts of random tokens, G random completions of each
prompt, and random rewards. The name of a setting, such as "4 of 8, 15 layers", means that the
update trains on 4 of every 8 completions, with adapters on the upper 15 layers. The settings take
turns, each with its own model.

This file does not cover rollouts (bench/rollout.py) or whole steps (bench/step.py).
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
import pandas as pd

import gwen
import lora
import update
from bench import harness
from config import Config, MemoryDependentSizes
from flags import Parser, exit_on_mistakes
from forecast import memory_estimate
from machine.output import guard_output
from step.advantages import assign_advantages, mark_for_update
from step.batch import make_batches
from step.loss import StepLoss
from step.sample import Sample

LEARNING_RATE = 1e-6  # so small that --target-kl never shortens a step


class TrainedCompletionsAndLayers(NamedTuple):
    """The settings of one row of the table; None means the default of `train.py`."""

    train_completions: int | None
    lora_layers: int | None

    def describe(self, groups: int) -> str:
        completions = f"{self.train_completions or groups} of {groups}"
        layers = "all layers" if self.lora_layers is None else f"{self.lora_layers} layers"
        return f"{completions}, {layers}"


def list_variants(groups: int, num_layers: int) -> list[TrainedCompletionsAndLayers]:
    """
    Returns the settings to time.

    Each setting trains on all, half or a quarter of the completions, with adapters on all layers or
    on the upper half of the layers.
    """
    variants = []
    for num_upper in (None, max(num_layers // 2, 1)):
        for num_trained in (None, groups // 2, groups // 4):
            if num_trained is None or num_trained >= 2:
                variants.append(TrainedCompletionsAndLayers(num_trained, num_upper))
    return variants


def make_samples_with_random_rewards(args: argparse.Namespace, vocab_size: int) -> list[Sample]:
    """Makes samples with random tokens and rewards, in the form that a rollout returns."""
    rng = np.random.default_rng(args.seed)
    samples = []
    for group in range(args.batch):
        prompt = rng.integers(vocab_size, size=args.prompt_tokens).tolist()
        for _ in range(args.groups):
            reward = float(rng.normal())
            samples.append(
                Sample(
                    prompt,
                    rng.integers(vocab_size, size=args.max_tokens).tolist(),
                    range(args.max_tokens),
                    group,
                    logprobs=np.full(args.max_tokens, -np.log(vocab_size)),
                    reward_components={"reward": reward},
                    imputed_components={"reward": reward},
                    reward=reward,
                )
            )
    return samples


def time_updates_of_variant(
    args: argparse.Namespace, directory: Path, variant: TrainedCompletionsAndLayers
) -> Iterator[dict[str, Any]]:
    """Yields the processor seconds, the seconds and the peak memory of each timed update."""
    config = Config.from_flags(
        batch=args.batch,
        groups=args.groups,
        max_tokens=args.max_tokens,
        lora_layers=variant.lora_layers,
        train_completions=variant.train_completions,
    )
    model = gwen.load_model(directory)
    settings = config.model
    lora.apply(model, settings.lora_rank, settings.lora_scale, num_layers=settings.lora_layers)
    loss = StepLoss(
        config, MemoryDependentSizes(args.batch * args.groups, memory_estimate.BUDGET, 0)
    )
    learner = update.Learner(model, config, loss)
    scored = make_samples_with_random_rewards(args, model.config.vocab_size)

    for number in range(args.warmup + args.runs):
        mx.reset_peak_memory()
        begin_s = time.perf_counter()
        begin_cpu_s = time.process_time()
        samples = assign_advantages(config, scored, {"reward": 1.0})
        selected = mark_for_update(config, samples, number, loss.all_have_gradient)
        batches = make_batches(selected, memory_estimate.BUDGET)
        result = update.run_optimizer_steps(learner, batches, LEARNING_RATE)
        mx.eval(learner.trainable)
        if number >= args.warmup:
            yield {
                "setting": variant.describe(args.groups),
                "cpu_s": time.process_time() - begin_cpu_s,
                "update_s": time.perf_counter() - begin_s,
                "peak_mb": mx.get_peak_memory() / 1e6,
                "rows": result.num_with_gradient,
                "positions": sum(batch.num_positions_with_padding for batch in batches),
            }


def print_table_and_json(args: argparse.Namespace, updates: list[dict[str, Any]]) -> None:
    """
    Prints the median figures of each setting as a table and as JSON.

    The column "of the first" contains the setting's CPU time, divided by that of the first setting.
    """
    table = pd.DataFrame(updates).groupby("setting", sort=False).median()
    table["of the first"] = table.cpu_s / table.cpu_s.iloc[0]
    print(
        f"update of B={args.batch} G={args.groups} prompt={args.prompt_tokens} "
        f"completion={args.max_tokens} tokens, model={args.model}, median of "
        f"{args.rounds * args.runs} updates; cpu_s: processor seconds"
    )
    print(table.round(2).to_string())
    record = {"config": vars(args), "settings": table.round(4).to_dict("index")}
    print(json.dumps(record | harness.collect_environment_facts()))


NUMBERS: harness.Numbers = {
    "batch": (8, 1, "B, the number of prompts"),
    "groups": (8, 2, "G, the number of completions per prompt"),
    "prompt_tokens": (128, 1, "the number of tokens in a prompt"),
    "max_tokens": (128, 1, "the number of tokens in every completion"),
    "seed": (0, 0, "the seed of prompts, completions and rewards"),
    "warmup": (1, 0, "the number of untimed updates per setting and round"),
    "runs": (2, 1, "the number of timed updates per setting and round"),
    "rounds": (1, 1, "the number of rounds, in which the settings take turns"),
}


@guard_output()
def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench.update", "Time the update of a GRPO step for several settings.")
    parser.add_argument("--model", default="random:30m", help="model, as in train.py")
    with exit_on_mistakes():
        args = harness.add_number_flags_and_parse(parser, argv, NUMBERS)
        updates: list[dict[str, Any]] = []
        with harness.model_directory(args.model) as directory:
            num_layers = gwen.load_model(directory, lazy=True).config.num_hidden_layers
            variants = list_variants(args.groups, num_layers)
            for _, variant in harness.turns_in_alternating_order(variants, args.rounds):
                updates += time_updates_of_variant(args, directory, variant)
        print_table_and_json(args, updates)


if __name__ == "__main__":
    main()
