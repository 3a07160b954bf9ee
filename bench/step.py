"""
One whole GRPO step against other trainers': `uv run python -m bench.step --rounds 3`.

All train adapters of the same rank on all projections of the same weights, in one dtype: the same prompts, G
completions of exactly `--max-tokens` tokens each, a reward that costs nothing, no KL term, AdamW. Each engine runs in
processes of its own, so that its peak is its own, and in an environment of its own, which uv installs into Gwen's cache
directory at first use (PyTorch's takes gigabytes). mlx_lm_lora decodes `--batch` rows at once, as it does by itself;
"mlx_lm_lora_wide" is the same with all rows at once. "trl" is TRL on PyTorch, on the device that PyTorch finds; without
a GPU with as many threads as ours, which are one. Their loops are timed at the functions they call: what generates,
what rewards, and the rest, which is the update. Processor seconds stand beside those of the clock, for a busy machine.

Left out: evaluation, checkpoints, logs, judges. Peaks include the weights. On a CPU TRL's is by how much its process
grew, which counts freed memory too; the others' is what MLX held.

Axes: B prompts, G completions of each, N = B * G rows.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_blas
import datasets
import mlx.core as mx
import mlx.optimizers as optim

import gwen
import sampler
from bench import harness
from disk import hub
from flags import Parser, fail, flag_of

PHASES = ("rollout", "reward", "update")
ROOT = Path(__file__).parent.parent
PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
RATE = 1e-4

# ---- engines: each runs some steps and gives the seconds of every phase of every step


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


def prompts_of(args: argparse.Namespace, directory: Path) -> list[list[int]]:
    return harness.random_prompts(gwen.load_config(directory), args.batch, args.prompt_tokens, args.seed)


def make_reward(args: argparse.Namespace) -> Callable[..., list[float]]:
    """A reward function as all trainers call one."""

    def reward(*_: Any, completion_ids: Any = (), **__: Any) -> list[float]:
        check_lengths(args, completion_ids)
        return harness.rewards(args)

    return reward


def check_lengths(args: argparse.Namespace, completions: Any) -> None:
    assert all(len(ids) == args.max_tokens for ids in completions), "a completion has another length"


def run_ours(args: argparse.Namespace, directory: Path, num_steps: int) -> Steps:
    """Steps as `train.py` takes them, with its defaults."""
    ours, num_rows = harness.learning(args, harness.settings(args, str(directory))), args.batch * args.groups
    update, steps = ours.updates(), Steps()

    def reward(rollout: sampler.Rollout) -> list[float]:
        sampler.texts(ours.tokenizer, rollout, ())
        check_lengths(args, rollout.ids)
        return harness.advantages(args)

    for step in range(num_steps):
        steps.begin()
        rollout = steps.timed(ours.rollout, "rollout")(num_rows, step)
        update(rollout, steps.timed(reward, "reward")(rollout), RATE)
        steps.end()
    return steps


def run_mlx_lm_lora(args: argparse.Namespace, directory: Path, num_steps: int) -> Steps:
    """Steps of mlx_lm_lora's own loop."""
    from mlx_lm.tokenizer_utils import load as load_tokenizer
    from mlx_lm.tuner.utils import linear_to_lora_layers

    trainer: Any = importlib.import_module("mlx_lm_lora.trainer.grpo_trainer")
    model = harness.load_peer(directory, gwen.default_dtype())
    model.freeze()
    shape = {"rank": args.lora_rank, "scale": 2.0, "dropout": 0.0, "keys": PROJECTIONS}
    linear_to_lora_layers(model, len(model.layers), shape)
    tokenizer: Any = load_tokenizer(directory)
    tokenizer.eos_token_ids = []  # every completion has all its tokens
    prompts, steps = prompts_of(args, directory), Steps()

    def batches(**_: Any) -> Any:
        while True:
            steps.begin()
            yield prompts, [[0]] * args.batch, [""] * args.batch, [""] * args.batch, None
            steps.end()

    def generate_grpo(*positional: Any, **named: Any) -> Any:
        result = generate(*positional, **named)
        check_lengths(args, result[0])
        return result

    rows = args.batch * args.groups if args.engine.endswith("wide") else args.batch
    how: Any = {"batch_size": rows, "iters": num_steps, "group_size": args.groups, "steps_per_report": 1}
    how |= {"max_completion_length": args.max_tokens, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    how |= {"beta": 0.0, "epsilon": 0.2}
    generate = trainer.generate_grpo
    trainer.generate_grpo = steps.timed(generate_grpo, "rollout")
    trainer._rollout_rewards = steps.timed(trainer._rollout_rewards, "reward")
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        trainer.train_grpo(
            model,
            None,
            tokenizer,
            optim.AdamW(RATE),
            [],
            reward_funcs=[make_reward(args)],
            args=trainer.GRPOTrainingArgs(**how, adapter_file=str(Path(scratch) / "adapters.safetensors")),
            iterate_batches=batches,
            end_answer_token="",
        )
    if "begin" in steps[-1]:
        steps.end()
    return steps


def run_trl(args: argparse.Namespace, directory: Path, num_steps: int) -> Steps:
    """Steps of TRL's own trainer; all rows in one batch, no activations computed again."""
    modules: Any = map(importlib.import_module, ("torch", "transformers", "trl", "peft"))
    torch, transformers, trl, peft = modules
    callback: Any = transformers.TrainerCallback
    torch.set_num_threads(int(os.environ.get("OPENBLAS_NUM_THREADS", 1)))
    dtype = getattr(torch, str(gwen.default_dtype()).removeprefix("mlx.core."))
    prompts, steps = prompts_of(args, directory), Steps()
    how: Any = {"per_device_train_batch_size": args.batch * args.groups, "num_generations": args.groups}
    how |= {"generation_kwargs": {"min_new_tokens": args.max_tokens}}  # every completion has all its tokens
    how |= {"max_completion_length": args.max_tokens, "temperature": 1.0, "beta": 0.0, "learning_rate": RATE}
    how |= {"max_steps": num_steps, "gradient_checkpointing": False, "bf16": False, "report_to": []}
    how |= {"logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}

    class Timer(callback):
        on_step_begin, on_step_end = staticmethod(steps.begin), staticmethod(steps.end)

    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        trainer = trl.GRPOTrainer(
            transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype),
            [make_reward(args)],
            args=trl.GRPOConfig(output_dir=scratch, **how),
            train_dataset=datasets.Dataset.from_dict({"prompt": list(map(str, range(args.batch)))}),
            processing_class=hub.load_tokenizer(directory),
            callbacks=[Timer()],
            peft_config=peft.LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"),
        )
        trainer._tokenize_prompts = lambda places: ([prompts[int(place)] for place in places], None, {})
        trainer._generate_single_turn = steps.timed(trainer._generate_single_turn, "rollout")
        trainer._calculate_rewards = steps.timed(trainer._calculate_rewards, "reward")
        trainer.train()
    return steps


ENGINES: dict[str, Callable[[argparse.Namespace, Path, int], Steps]] = {
    "ours": run_ours,
    "mlx_lm_lora": run_mlx_lm_lora,
    "mlx_lm_lora_wide": run_mlx_lm_lora,
    "trl": run_trl,
}
PACKAGES = {  # what uv installs for an engine beside Gwen's own packages
    "mlx_lm_lora": "mlx-lm-lora==5.10.2",
    "mlx_lm_lora_wide": "mlx-lm-lora==5.10.2",
    "trl": "trl==1.16.0 peft==0.21.2 torch==2.15.0",
}


def interpreter(engine: str) -> str:
    """A Python that has the engine's packages."""
    if engine not in PACKAGES:
        return sys.executable
    folder = cpu_blas.cache_directory() / "rivals" / PACKAGES[engine].partition(" ")[0]
    python, done = str(folder / "bin" / "python"), folder / "done"
    if not done.exists():
        print(f"installing {PACKAGES[engine]} into {folder}", file=sys.stderr)
        environment = os.environ | {"UV_PROJECT_ENVIRONMENT": str(folder)}
        add = ["uv", "pip", "install", "-q", "--python", python, *PACKAGES[engine].split()]
        for command in (["uv", "sync", "-q", "--no-dev"], add):
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
        done.touch()
    return python


# ---- the measurement


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What the process of one engine prints: every timed step's seconds by phase, and the peak of all of them."""
    for package in ("torch", "peft", "trl") if args.engine == "trl" else ():
        importlib.import_module(package)  # which is no part of what a step takes
    before = most_resident()
    steps = ENGINES[args.engine](args, Path(args.model), args.warmup + args.runs)
    peak = torch_peak(before) if args.engine == "trl" else mx.get_peak_memory()
    return {"steps": steps[args.warmup :], "peak_bytes": peak}


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
    return harness.rounded(entry)


def in_processes(args: argparse.Namespace, directory: Path) -> dict[str, list[Any]]:
    """The records of `args.rounds` processes of each engine, in turn."""
    flags = [text for name in PASSED for text in (flag_of(name), str(getattr(args, name)))]
    pythons = {engine: interpreter(engine) for engine in args.engines}
    records: dict[str, list[Any]] = {engine: [] for engine in args.engines}
    for _, engine in harness.in_order(args.engines, args.rounds):
        command = [pythons[engine], "-m", "bench.step", "--engine", engine, "--model", str(directory), *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise ValueError(f"{engine} ended with exit status {done.returncode}: {last}")
        records[engine].append(json.loads(done.stdout.splitlines()[-1]))
    return records


def report(args: argparse.Namespace, records: dict[str, list[Any]]) -> None:
    """Prints what the engines took, how ours compares, and all of it as JSON."""
    print(f"Config: {harness.describe(args)} warmup={args.warmup} runs={args.runs} rounds={args.rounds}")
    entries = {engine: medians(held, args.batch * args.groups * args.max_tokens) for engine, held in records.items()}
    for name, entry in entries.items():
        phases = " | ".join(f"{phase} {entry[f'{phase}_s']:.2f} s" for phase in PHASES)
        print(
            f"{name:<16} | step {entry['step_s']:.2f} s ({entry['min_s']:.2f} to {entry['max_s']:.2f}) | {phases} | "
            f"{entry['cpu_s']:.2f} s of processors | {entry['tok_s']:.1f} tok/s | peak {entry['peak_mb']:.0f} MB"
        )
    ratios = {}
    for name in [name for name in entries if name != "ours" and "ours" in entries]:
        ratio = {key: entries[name][key] / entries["ours"][key] for key in ("step_s", "cpu_s", "peak_mb")}
        ratios[name] = round(ratio["step_s"], 3)
        print(
            f"Result: ours is {harness.verdict(ratio['step_s'])} than {name} ({ratio['cpu_s']:.2f}x by processors), "
            f"at {1 / ratio['peak_mb']:.2f} of its peak memory"
        )
    record = {"config": vars(args), "engines": entries, "ratios": ratios, "rivals": PACKAGES}
    print(json.dumps(record | harness.environment()))


NUMBERS: harness.Numbers = {
    "warmup": (1, 0, "steps that are not timed, of each process"),
    "runs": (2, 1, "timed steps of each process"),
    "rounds": (1, 1, "processes of each engine, in turn"),
}
PASSED = [*harness.STEP, *NUMBERS, "share_prefix"]  # settings that the process of one engine gets


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The settings, checked. ValueError names the flag that is wrong."""
    parser = Parser("bench.step", "Time one whole GRPO step against those of mlx-lm-lora and TRL.")
    least = harness.add_step(parser)
    least |= harness.add_numbers(parser, NUMBERS)
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--engine", choices=tuple(ENGINES), help="runs this one here and prints its record")
    return harness.parse(parser, argv, least)


def main(argv: list[str] | None = None) -> None:
    try:
        args = parse(argv)
        if args.engine:
            print(json.dumps(measure(args)))
            return
        with harness.model_directory(args.model) as directory:
            report(args, in_processes(args, directory))
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
