"""
Compares how soon runs reach a held-out accuracy.

    uv run python -m bench.sooner --task demo                    train variants, then compare them
    uv run python -m bench.sooner --line 0.85 runs/A runs/B      compare recorded runs

With --task, the command trains each variant in `variant_flags_by_name` once per seed, in
directories under --out, and then prints the table. Runs that are already complete are skipped. The
variant "trl" uses TRL (bench/trl_run.py), and is trained only if --variants names it.

A run reaches the accuracy at the first of two successive evaluations that are at or above it. The
costs of a run are those of its steps up to this evaluation, without the time for starting and
evaluating. They are the number of steps, the trained rows, the processor seconds on this machine,
and the estimated seconds on an M4 and an M4 Max. The estimate (forecast/time_estimate.py) assumes
8 prompts of 256 tokens per step, completions of 256 tokens, no judge, and a model of the size of
Qwen3-0.6B. It also assumes that each step trains the same fractions of rows and layers as the
recorded step.

For each variant, the table shows these figures:
    the accuracy at the last evaluation, averaged over the seeds;
    the mean gain in accuracy over the first variant, with a 95% interval;
    the median of each cost;
    the median ratio of each cost to the first variant's cost.
Gains and ratios compare runs with the same seed.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

import train
import trainer
from bench.step import ENGINES
from disk import model_choice
from disk.statistics import student_t_quantile
from flags import Parser, exit_on_mistakes
from forecast.memory_estimate import RunDemand, choose_sizes
from forecast.time_estimate import UpdateTokenCounts, estimate_phase_costs
from machine import chips
from machine.output import guard_output
from reporting import seeds
from reporting.history import History
from settings import sources
from step.advantages import MEASURED_OF

ROOT = Path(__file__).parent.parent
CPU_SECONDS = "cpu_seconds.json"  # in a run's directory: the processor seconds of each step
TRL = "trl"

# The times on these chips are estimated for steps of this model and size.
CHIPS = ("M4", "M4 Max")
MODEL = "random:0.6b"
BATCH = 8
PROMPT_TOKENS = 256
COMPLETION_TOKENS = 256
COSTS = ("steps", "rows", "cpu_s", *CHIPS)
COMPARED_COSTS = ("cpu_s", *CHIPS)


VariantFolders = list[Path]


class BenchmarkTask(NamedTuple):
    """A task to train: the flags of its runs, and the held-out accuracy to reach."""

    flags: str
    accuracy: float
    num_layers: int  # of the model


FIRST_HOUR = (
    "--model smollm2 --data examples/first_hour/messages.jsonl "
    "--reward examples/first_hour/short.py:short"
)
TASKS = {
    "demo": BenchmarkTask("--task demo --steps 60 --eval-every 5 --eval-limit 256", 0.85, 4),
    "demo-rg": BenchmarkTask(
        "--config recipes/demo-rg.yaml --steps 60 --eval-every 5 --eval-limit 256", 0.66, 4
    ),
    "calculator": BenchmarkTask(
        "--config recipes/calculator.yaml --eval-every 5 --eval-limit 128", 0.8, 4
    ),
    "guess": BenchmarkTask("--config recipes/guess.yaml --eval-every 5 --eval-limit 128", 0.8, 4),
    "own": BenchmarkTask(f"{FIRST_HOUR} --steps 15 --eval-every 3", 0.85, 30),
    "ifeval": BenchmarkTask(
        "--config recipes/ifeval.yaml --model smollm2 --steps 20 --eval-every 5", 0.5, 30
    ),
}


def variant_flags_by_name(task: BenchmarkTask) -> dict[str, str]:
    """
    The flags of each variant, by variant name.

    The first variant trains on all completions, with adapters on all layers.
    """
    half_layers = f"--lora-layers {task.num_layers // 2}"
    return {
        "8 of 8": "",
        "4 of 8": "--train-completions 4",
        "2 of 8": "--train-completions 2",
        "4 of 16": "--groups 16 --train-completions 4",
        "4 of 4": "--groups 4",
        "2 of 4": "--groups 4 --train-completions 2",
        "8 of 8, half the layers": half_layers,
        "4 of 8, half the layers": f"--train-completions 4 {half_layers}",
        "2 of 8, half the layers": f"--train-completions 2 {half_layers}",
    }


# ---- training


def train_missing_runs(
    task: BenchmarkTask, variant_flags: dict[str, str], parent: Path, num_seeds: int
) -> VariantFolders:
    """
    Trains each variant with each seed, and skips runs that are already complete.

    Returns the directory of each variant, which contains a directory for each seed.

    Raises ValueError if a run is incomplete.
    """
    folders = [parent / name.replace(",", "").replace(" ", "-") for name in variant_flags]
    for seed in range(num_seeds):
        for name, variant_folder in zip(variant_flags, folders, strict=True):
            run_dir = variant_folder / f"seed-{seed}"
            if (run_dir / CPU_SECONDS).is_file():
                continue
            if run_dir.exists():
                raise ValueError(f"{run_dir} is an incomplete run; delete it and start again")
            if name == TRL:
                command = trl_command(folders[0] / f"seed-{seed}", run_dir)
            else:
                command = [sys.executable, "-m", "bench.sooner", "--train-one", str(run_dir)]
                command += [*task.flags.split(), *variant_flags[name].split(), "--seed", str(seed)]
            # stdout is for the table, so the run prints to file descriptor 2, which is stderr
            subprocess.run(command, cwd=ROOT, check=True, stdout=2)
    return folders


def trl_command(gwen_run_dir: Path, run_dir: Path) -> list[str]:
    """The command that trains with TRL, using the settings of a Gwen run."""
    command = ["uv", "run", "-q", "--no-sync"]
    for package in ENGINES["trl"].packages:
        command += ["--with", package]
    return [*command, "python", "-m", "bench.trl_run", str(gwen_run_dir), str(run_dir)]


def train_run_and_write_cpu_seconds(run_dir: Path, flags: list[str]) -> None:
    """Trains one run in this process, and writes the processor seconds of its steps."""
    args = sources.parse_flags(flags)
    settings = sources.settings_from_flags(args)
    spec = trainer.make_run_spec(settings, args.config, run_dir=str(run_dir))
    grpo_trainer = train.Trainer(spec)
    evaluate = grpo_trainer.run.evaluate
    evaluation_seconds = 0.0

    def evaluate_and_count_cpu_seconds() -> None:
        nonlocal evaluation_seconds
        begin_s = time.process_time()
        evaluate()
        evaluation_seconds += time.process_time() - begin_s

    grpo_trainer.run.evaluate = evaluate_and_count_cpu_seconds  # type: ignore[method-assign]
    cpu_seconds = []
    begin_s = time.process_time()
    for _ in grpo_trainer.steps():
        end_s = time.process_time()
        cpu_seconds.append(end_s - begin_s - evaluation_seconds)
        begin_s = end_s
        evaluation_seconds = 0.0
    (run_dir / CPU_SECONDS).write_text(json.dumps(cpu_seconds))


# ---- the costs of a run


def first_of_two_steps_at_accuracy(run: History, accuracy: float) -> int | None:
    """Returns the first of two successive evaluated steps that reach `accuracy`, or None."""
    is_reached = [
        evaluation[f"eval/{run.figure_name}"] >= accuracy for evaluation in run.evals_with_figure
    ]
    for number in range(len(is_reached) - 1):
        if is_reached[number] and is_reached[number + 1]:
            return run.evals_with_figure[number]["step"]
    return None


def costs_to_reach_accuracy(run: History, accuracy: float) -> dict[str, float]:
    """
    Returns a run's costs of reaching `accuracy`, by the names in COSTS.

    The costs are inf if the run never reached the accuracy, and nan if the run has no record of
    them.
    """
    last_step = first_of_two_steps_at_accuracy(run, accuracy)
    if last_step is None:
        return dict.fromkeys(COSTS, math.inf)
    costs = dict.fromkeys(COSTS, math.nan)
    costs["steps"] = float(last_step)
    cpu_file = run.dir / CPU_SECONDS
    if cpu_file.is_file():
        costs["cpu_s"] = sum(json.loads(cpu_file.read_text())[:last_step])
    steps = [record for record in run.steps if record["step"] <= last_step]
    if all("update/rows" in record for record in steps):
        costs["rows"] = float(sum(record["update/rows"] for record in steps))
        costs |= estimate_scaled_up_seconds_by_chip(run, steps)
    return costs


def estimate_scaled_up_seconds_by_chip(
    run: History, steps: list[dict[str, Any]]
) -> dict[str, float]:
    """
    The estimated seconds that these steps would take on each of CHIPS, with other sizes.

    The estimate assumes MODEL, BATCH, PROMPT_TOKENS and COMPLETION_TOKENS instead of the model and
    the sizes of the run.
    """
    groups = run.settings["groups"]
    model = model_choice.load_config(MODEL)
    settings = {
        "model": MODEL,
        "task": "own",
        "batch": BATCH,
        "groups": groups,
        "max_tokens": COMPLETION_TOKENS,
    }
    lora_layers = run.settings.get("lora_layers")
    if isinstance(lora_layers, int):
        num_layers = model_choice.load_config(run.settings["model"]).num_hidden_layers
        settings["lora_layers"] = round(lora_layers / num_layers * model.num_hidden_layers)
    config = sources.merge_settings(settings, None)
    demand = RunDemand(model, mx.float16, config, [PROMPT_TOKENS] * BATCH)
    sizes = choose_sizes(demand)

    scale = BATCH / run.settings["batch"]
    totals = dict.fromkeys(CHIPS, 0.0)
    for record in steps:
        num_rows = scale * record["update/rows"]
        num_measured = (BATCH * groups - num_rows) / MEASURED_OF
        work = UpdateTokenCounts(
            prompt_tokens=scale * record["sampling/signal_groups"] * PROMPT_TOKENS,
            trained_tokens=num_rows * COMPLETION_TOKENS,
            measured_tokens=num_measured * COMPLETION_TOKENS,
        )
        costs = estimate_phase_costs(demand, sizes, work)
        for chip in chips.load_chips():
            if chip.name in totals:
                totals[chip.name] += chips.estimate_step_seconds(costs, chip)
    return totals


# ---- the table


def format_mean_gain_over_baseline(baseline: list[float], other: list[float]) -> str:
    """
    Returns the mean of `other` - `baseline` over all pairs as text, with Student's 95% interval.

    The interval needs at least two pairs. Returns "" if there are no pairs.
    """
    differences = [after - before for before, after in zip(baseline, other, strict=True)]
    if not differences:
        return ""
    mean = statistics.fmean(differences)
    num_pairs = len(differences)
    if num_pairs < 2:
        return f"{mean:+.3f}"
    half_width = student_t_quantile(num_pairs - 1) * statistics.stdev(differences) / num_pairs**0.5
    return f"{mean:+.3f} \u00b1 {half_width:.3f}"


def median_ratio_to_baseline(baseline: list[float], other: list[float]) -> float:
    """Returns the median of other / baseline, without pairs whose baseline is 0 or not finite."""
    ratios = [
        value / divisor
        for divisor, value in zip(baseline, other, strict=True)
        if math.isfinite(divisor) and divisor > 0
    ]
    return statistics.median(ratios) if ratios else math.nan


def print_accuracies_and_costs(seed_groups: list[seeds.SeedGroup], accuracy: float) -> None:
    """Prints a row for each group of seeds, and the figures of each seed as JSON."""
    headers = ["variant", "seeds", "accuracy", "difference"]
    headers += [f"{cost} until {accuracy:g}" for cost in COSTS]
    headers += [f"{cost}, relative to the first" for cost in COMPARED_COSTS]
    print(f"| {' | '.join(headers)} |")
    print("|" + "---|" * len(headers))

    last_accuracies: list[dict[int, float]] = []
    costs_by_seed: list[dict[int, dict[str, float]]] = []
    for group in seed_groups:
        key = f"eval/{group.figure_name}"
        last_accuracies.append(
            {run.settings["seed"]: run.evals_with_figure[-1][key] for run in group.runs}
        )
        costs_by_seed.append(
            {run.settings["seed"]: costs_to_reach_accuracy(run, accuracy) for run in group.runs}
        )

    for group, accuracies, costs in zip(seed_groups, last_accuracies, costs_by_seed, strict=True):
        shared_seeds = [seed for seed in costs_by_seed[0] if seed in costs]
        first_accuracies = [last_accuracies[0][seed] for seed in shared_seeds]
        other_accuracies = [accuracies[seed] for seed in shared_seeds]
        cells = [group.name, str(len(group.runs)), f"{statistics.fmean(accuracies.values()):.3f}"]
        cells.append(format_mean_gain_over_baseline(first_accuracies, other_accuracies))
        for cost in COSTS:
            cells.append(
                f"{statistics.median(seed_costs[cost] for seed_costs in costs.values()):,.0f}"
            )
        for cost in COMPARED_COSTS:
            first = [costs_by_seed[0][seed][cost] for seed in shared_seeds]
            other = [costs[seed][cost] for seed in shared_seeds]
            cells.append(f"{median_ratio_to_baseline(first, other):.2f}")
        print(f"| {' | '.join(cells)} |")

    records = [
        {"variant": group.name, "accuracy": accuracies, "costs": costs}
        for group, accuracies, costs in zip(
            seed_groups, last_accuracies, costs_by_seed, strict=True
        )
    ]
    print(json.dumps({"until": accuracy, "variants": records}))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench.sooner", "Compare how soon runs reach a held-out accuracy.")
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="a directory of a run, or of runs with different seeds (made by --seeds)",
    )
    parser.add_argument(
        "--line",
        type=float,
        help="the held-out accuracy to reach (default with --task: a value for each task, such as "
        f"{TASKS['demo'].accuracy:g} for demo; without --task, this flag is required)",
    )
    parser.add_argument("--task", choices=tuple(TASKS), help="train the variants on this task")
    parser.add_argument(
        "--num-seeds", type=int, default=5, help="number of seeds per variant (default: 5)"
    )
    parser.add_argument(
        "--variants", nargs="+", metavar="NAME", help="the variants to train (default: all but trl)"
    )
    parser.add_argument(
        "--train-flags",
        metavar="FLAGS",
        help='more flags of train.py for each run, such as "--steps 30 --eval-every 1"; use a '
        "different --out for different flags",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/sooner"),
        help="directory for the trained runs (default: runs/sooner)",
    )
    return parser.parse_args(sys.argv[1:] if argv is None else argv)


def choose_variant_flags(task: BenchmarkTask, variant_names: list[str] | None) -> dict[str, str]:
    """The flags of the named variants, by name. Raises ValueError if a name is unknown."""
    variants = variant_flags_by_name(task)
    if variant_names is None:
        return variants
    variants[TRL] = ""
    for name in variant_names:
        if name not in variants:
            known = ", ".join(repr(variant) for variant in variants)
            raise ValueError(f"--variants {name!r} is unknown; the variants are {known}")
    if variant_names[0] == TRL:
        raise ValueError(
            "--variants trl uses the settings of the variant that is named first; "
            "name another variant before trl"
        )
    return {name: variants[name] for name in variant_names}


@guard_output()
def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    with exit_on_mistakes():
        if arguments[:1] == ["--train-one"]:
            train_run_and_write_cpu_seconds(Path(arguments[1]), arguments[2:])
            return
        args = parse_arguments(argv)
        folders = args.runs
        accuracy = args.line
        if args.task:
            task = TASKS[args.task]
            task = task._replace(flags=f"{task.flags} {args.train_flags or ''}")
            variants = choose_variant_flags(task, args.variants)
            folders = train_missing_runs(task, variants, args.out / args.task, args.num_seeds)
            accuracy = accuracy or task.accuracy
        if not folders or accuracy is None:
            raise ValueError("give a --task to train, or --line and the runs to compare")
        print_accuracies_and_costs(seeds.load_seed_groups(folders), accuracy)


if __name__ == "__main__":
    main()
