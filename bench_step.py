"""
One whole GRPO step against other trainers': `uv run --group trl --with mlx-lm-lora --with peft bench_step.py`.

All train adapters of the same rank on all projections of the same weights, in one dtype: the same
prompts, G completions of exactly `--max-tokens` tokens each, a reward that costs nothing, no KL term, AdamW. Each
engine runs in a process of its own, so that its peak is its own; rounds alternate. mlx_lm_lora decodes `--batch` rows
at once, as it does by itself; "mlx_lm_lora_wide" is the same with all rows at once.
"trl" is TRL on PyTorch, on the device that PyTorch finds; without a GPU with as many threads as ours, which are one.
"unsloth_zoo" is unsloth-zoo's MLX trainer with its defaults, among them that it computes activations again.
Their loops are timed at the functions they call: what generates, what rewards, and the rest, which is the update.

What is left out: evaluation, checkpoints, logs, judges. Peaks include the weights. On a CPU TRL's is by how much its
process grew, which counts freed memory too; the others' is what MLX held.

Axes: B prompts, G completions of each, N = B * G rows.
"""

import argparse
import contextlib
import dataclasses
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import datasets
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

import grpo
import gwen
import hub
import lora
import preflight
import sampler
import update
from bench import harness, ledger, survey
from config import Config, resolve
from flags import Parser, check_least, fail
from machine import gpu
from step import micro_batch
from step.policy import Reader

ENGINES = ("ours", "mlx_lm_lora", "mlx_lm_lora_wide", "trl", "unsloth_zoo")
PACKAGES = {
    "mlx_lm_lora": ("mlx_lm_lora",),
    "mlx_lm_lora_wide": ("mlx_lm_lora",),
    "trl": ("trl", "peft", "torch"),
    "unsloth_zoo": ("unsloth_zoo",),
}
OPTIONAL = {  # engines that are left out where they are not installed, and what brings them
    "trl": "uv run --group trl --with peft bench_step.py",
    "unsloth_zoo": "uv run --with unsloth-zoo bench_step.py --engines ours unsloth_zoo",
}
PHASES = ("rollout", "reward", "update")
# flags that the process of one engine gets
PASSED = "batch groups prompt_tokens max_tokens lora_rank warmup runs share_prefix token_budget seed".split()


def make_prompts(args: argparse.Namespace, config: hub.ModelConfig) -> list[list[int]]:
    """B prompts of random ordinary tokens."""
    ordinary = np.setdiff1d(np.arange(min(config.vocab_size, 8192)), config.eos_ids)
    return np.random.default_rng(args.seed).choice(ordinary, (args.batch, args.prompt_tokens)).tolist()


def reward_of(place: int) -> float:
    """A reward that differs within every group, so that every completion has a gradient."""
    return (place * 7 % 5) / 4


# ---- engines: each runs some steps and gives the seconds of every phase of every step


def settings(args: argparse.Namespace, model: str) -> Config:
    """Those of a run of `train.py` that takes such steps."""
    flags = {"model": model, "task": "demo", "batch": args.batch, "groups": args.groups}
    flags |= {"max_tokens": args.max_tokens, "lora_rank": args.lora_rank}
    if args.token_budget:
        flags["train_token_budget"] = args.token_budget
    return resolve(flags, None, None, gwen.choose_model)[0]


def run_ours(args: argparse.Namespace, directory: Path, num_steps: int) -> list[dict[str, float]]:
    """Steps as `train.py` takes them, with its defaults."""
    config = settings(args, str(directory))
    model = gwen.load_model(directory)
    lora.apply(model, config.model.lora_rank, config.model.lora_scale, config.model.lora_targets)
    prompts, tokenizer = make_prompts(args, model.config), hub.load_tokenizer(directory)
    lengths = [len(prompt) for prompt in prompts]
    sizes = preflight.settle(preflight.Demand(model.config, model.head_weight.dtype, config, lengths))
    learner = update.Learner(model, config, Reader(config, sizes))
    steps = []
    for step in range(num_steps):
        marks = [time.perf_counter()]
        rollout = sampler.rollout(
            model,
            prompts,
            sampler.SamplingParams(config.sampling.max_tokens),
            group_size=config.sampling.groups,
            key=step,
            batch_size=config.sampling.rollout_batch_size or config.sampling.batch * config.sampling.groups,
        )
        assert (np.array(rollout.mask).sum(-1) == args.max_tokens).all()
        marks.append(time.perf_counter())
        sampler.texts(tokenizer, rollout, ())
        rewards = np.array([[reward_of(place) for place in range(config.sampling.groups)]] * config.sampling.batch)
        advantages = mx.array(grpo.group_advantages(rewards).reshape(-1))
        marks.append(time.perf_counter())
        rows = [prompt for prompt in prompts for _ in range(config.sampling.groups)]
        batches = micro_batch.micro_batches(rows, rollout, sizes.train_token_budget, args.share_prefix)
        update.update(
            learner, batches, update.targets_of(learner, batches, rollout, advantages), config.optimizer.learning_rate
        )
        marks.append(time.perf_counter())
        steps.append(dict(zip(PHASES, np.diff(marks).tolist(), strict=True)))
    return steps


def run_mlx_lm_lora(args: argparse.Namespace, directory: Path, num_steps: int) -> list[dict[str, float]]:
    """Steps of mlx_lm_lora's own loop, timed at what it calls."""
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load

    trainer: Any = importlib.import_module("mlx_lm_lora.trainer.grpo_trainer")
    model, tokenizer = load(str(directory))[:2]
    tokenizer.eos_token_ids = []  # every completion has all its tokens
    model.set_dtype(gwen.default_dtype())
    model.freeze()
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    parameters = {"rank": args.lora_rank, "scale": 2.0, "dropout": 0.0, "keys": projections}
    linear_to_lora_layers(model, len(model.layers), parameters)
    mx.eval(model.parameters())
    prompts = make_prompts(args, gwen.load_config(directory))
    steps: list[dict[str, float]] = []

    def batches(**_: Any) -> Any:
        while True:
            now = time.perf_counter()
            if steps:
                steps[-1]["update"] = now - steps[-1].pop("until")
            steps.append({})
            yield prompts, [[0]] * args.batch, [""] * args.batch, [""] * args.batch, None

    def timed(name: str, phase: str) -> None:
        function = getattr(trainer, name)

        def wrapped(*positional: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = function(*positional, **named)
            steps[-1]["until"] = time.perf_counter()
            steps[-1][phase] = steps[-1]["until"] - begin
            if phase == "rollout":
                assert [len(ids) for ids in result[0]] == [args.max_tokens] * args.batch * args.groups
            return result

        setattr(trainer, name, wrapped)

    timed("generate_grpo", "rollout")
    timed("_rollout_rewards", "reward")

    def reward(prompts: Any, completions: Any, answer: Any, types: Any = None) -> list[float]:
        return [reward_of(row % args.groups) for row in range(len(completions))]

    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        trainer.train_grpo(
            model,
            None,
            tokenizer,
            optim.AdamW(1e-4),
            [],
            reward_funcs=[reward],
            args=trainer.GRPOTrainingArgs(
                batch_size=args.batch * args.groups if args.engine.endswith("wide") else args.batch,
                iters=num_steps,
                group_size=args.groups,
                beta=0.0,
                epsilon=0.2,
                max_completion_length=args.max_tokens,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                steps_per_report=1,
                adapter_file=str(Path(scratch) / "adapters.safetensors"),
            ),
            iterate_batches=batches,
            end_answer_token="",
        )
    steps[-1]["update"] = time.perf_counter() - steps[-1].pop("until")
    return steps


def run_trl(args: argparse.Namespace, directory: Path, num_steps: int) -> list[dict[str, float]]:
    """Steps of TRL's own trainer, timed at what it calls; all rows in one batch, no activations computed again."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    trl: Any = importlib.import_module("trl")
    peft: Any = importlib.import_module("peft")
    torch.set_num_threads(int(os.environ.get("OPENBLAS_NUM_THREADS", 1)))
    tokenizer = hub.load_tokenizer(directory)
    dtype = getattr(torch, str(gwen.default_dtype()).removeprefix("mlx.core."))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    prompts = make_prompts(args, gwen.load_config(directory))
    steps: list[dict[str, float]] = []

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            steps.append({"begin": time.perf_counter()})

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = time.perf_counter() - steps[-1].pop("begin")
            steps[-1]["update"] = seconds - steps[-1]["rollout"] - steps[-1]["reward"]

    class Trainer(trl.GRPOTrainer):
        def _tokenize_prompts(self, places: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
            return [prompts[int(place)] for place in places], None, {}

        def _generate_single_turn(self, *positional: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = super()._generate_single_turn(*positional, **named)
            steps[-1]["rollout"] = time.perf_counter() - begin
            assert [len(ids) for ids in result[0]] == [args.max_tokens] * args.batch * args.groups
            return result

        def _calculate_rewards(self, *positional: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = super()._calculate_rewards(*positional, **named)
            steps[-1]["reward"] = time.perf_counter() - begin
            return result

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [reward_of(row % args.groups) for row in range(len(completions))]

    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        Trainer(
            model,
            [reward],
            args=trl.GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=args.batch * args.groups,
                num_generations=args.groups,
                max_completion_length=args.max_tokens,
                generation_kwargs={"min_new_tokens": args.max_tokens},  # every completion has all its tokens
                temperature=1.0,
                beta=0.0,
                learning_rate=1e-4,
                max_steps=num_steps,
                gradient_checkpointing=False,
                bf16=False,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": list(map(str, range(args.batch)))}),
            processing_class=tokenizer,
            callbacks=[Steps()],
            peft_config=peft.LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"),
        ).train()
    return steps


def run_unsloth_zoo(args: argparse.Namespace, directory: Path, num_steps: int) -> list[dict[str, float]]:
    """Steps of unsloth-zoo's own MLX trainer with its defaults, all rows in one batch; timed at what it calls."""
    os.environ["UNSLOTH_ZOO_DISABLE_GPU_INIT"] = "1"  # else it asks for PyTorch where there is no Mac
    grpo_module: Any = importlib.import_module("unsloth_zoo.mlx.grpo")
    trainer_module: Any = importlib.import_module("unsloth_zoo.mlx.trainer")
    loader: Any = importlib.import_module("unsloth_zoo.mlx.loader").FastMLXModel
    length = args.prompt_tokens + args.max_tokens
    dtype = str(gwen.default_dtype()).removeprefix("mlx.core.")
    model, tokenizer = loader.from_pretrained(str(directory), length + 1, dtype=dtype, load_in_4bit=False)
    model = loader.get_peft_model(model, r=args.lora_rank, lora_alpha=2 * args.lora_rank, max_seq_length=length + 1)
    prompts = make_prompts(args, gwen.load_config(directory))
    steps: list[dict[str, float]] = []

    def timed(holder: Any, name: str, phase: str) -> None:
        function = getattr(holder, name)

        def wrapped(*positional: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            if phase == "rollout":
                steps.append({"begin": begin})
                named["defaults"] = dataclasses.replace(named["defaults"], stop_token_ids=())
            result = function(*positional, **named)
            steps[-1][phase] = time.perf_counter() - begin
            return result

        setattr(holder, name, wrapped)

    timed(grpo_module.generate_module, "generate_batch", "rollout")
    timed(grpo_module, "calculate_rewards", "reward")
    grpo_module.encode_mlx_text = lambda _, text, **__: prompts[int(text)]
    grpo_module.cut_completion = lambda ids, *_, **__: (list(map(int, ids)), True)  # all its tokens, as all engines

    class Steps(importlib.import_module("transformers").TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            mx.eval(model.parameters())  # wait
            seconds = time.perf_counter() - steps[-1].pop("begin")
            steps[-1]["update"] = seconds - steps[-1]["rollout"] - steps[-1]["reward"]

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert [len(ids) for ids in completion_ids] == [args.max_tokens] * args.batch * args.groups
        return [reward_of(row % args.groups) for row in range(len(completions))]

    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        trainer_module.MLXGRPOTrainer(
            model,
            tokenizer,
            datasets.Dataset.from_dict({"prompt": list(map(str, range(args.batch)))}),
            reward_funcs=[reward],
            args=trainer_module.MLXGRPOConfig(
                per_device_train_batch_size=args.batch * args.groups,
                gradient_accumulation_steps=1,
                num_generations=args.groups,
                max_completion_length=args.max_tokens,
                max_seq_length=length + 1,
                max_steps=num_steps,
                warmup_steps=0,
                learning_rate=1e-4,
                compile=gpu.on_gpu(),  # on a CPU MLX calls g++ for every shape, minutes of it
                output_dir=scratch,
            ),
            callbacks=[Steps()],
        ).train()
    return steps


def torch_peak(before: int) -> int:
    """The most bytes that PyTorch held on its GPU; without one, how far the process has grown beyond `before`."""
    torch = importlib.import_module("torch")
    if torch.backends.mps.is_available():
        return int(torch.mps.driver_allocated_memory())  # it keeps what is freed
    return most_resident() - before


def most_resident() -> int:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- the measurement


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What the process of one engine prints: seconds of every timed step, by phase, and the peak of all of them."""
    is_trl = args.engine == "trl"
    for package in PACKAGES["trl"] if is_trl else ():
        importlib.import_module(package)  # which is no part of what a step takes
    runs = {"ours": run_ours, "trl": run_trl, "unsloth_zoo": run_unsloth_zoo}
    before, run = most_resident(), runs.get(args.engine, run_mlx_lm_lora)
    steps = run(args, Path(args.model), args.warmup + args.runs)
    return {"steps": steps[args.warmup :], "peak_bytes": torch_peak(before) if is_trl else mx.get_peak_memory()}


def child(args: argparse.Namespace, directory: Path, engine: str) -> dict[str, Any]:
    """`measure` in a process of its own."""
    passed = {name: value for name, value in vars(args).items() if name in PASSED}
    flags = [text for name, value in passed.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, __file__, "--engine", engine, "--model", str(directory), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{engine} ended with exit status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(args: argparse.Namespace, records: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all timed steps of an engine."""
    steps = [step for record in records for step in record["steps"]]
    seconds = [sum(step.values()) for step in steps]
    median = statistics.median(seconds)
    entry = {f"{phase}_s": statistics.median(step[phase] for step in steps) for phase in PHASES}
    entry |= {"step_s": median, "min_s": min(seconds), "max_s": max(seconds)}
    entry["tok_s"] = args.batch * args.groups * args.max_tokens / median
    entry["peak_mb"] = max(record["peak_bytes"] for record in records) / 1e6
    return {name: round(value, 3) for name, value in entry.items()}


def compare(args: argparse.Namespace, directory: Path) -> None:
    """Runs the engines in turn and reports them. ValueError when one is not installed."""
    for engine, command in OPTIONAL.items():
        absent = [name for name in PACKAGES[engine] if not find_spec(name)]
        if engine in args.engines and absent:
            print(f"{engine} is left out, without {', '.join(absent)}: {command}")
            args.engines = [other for other in args.engines if other != engine]
    if not {"ours", *OPTIONAL} >= set(args.engines) and not find_spec("mlx_lm_lora"):
        raise ValueError(
            "mlx-lm-lora is not installed: uv run --with mlx-lm-lora bench_step.py, or give --engines ours trl"
        )
    records: dict[str, list[dict[str, Any]]] = {engine: [] for engine in args.engines}
    for turn in range(args.rounds):
        for engine in args.engines if turn % 2 == 0 else args.engines[::-1]:
            records[engine].append(child(args, directory, engine))
    print(f"Config: {describe(args)} warmup={args.warmup} runs={args.runs} rounds={args.rounds}")
    entries = {engine: summary(args, records[engine]) for engine in args.engines}
    for name, entry in entries.items():
        phases = " | ".join(f"{phase} {entry[f'{phase}_s']:.2f} s" for phase in PHASES)
        print(
            f"{name:<16} | step {entry['step_s']:.2f} s ({entry['min_s']:.2f} to {entry['max_s']:.2f}) | {phases} | "
            f"{entry['tok_s']:.1f} tok/s | peak {entry['peak_mb']:.0f} MB"
        )
    others = {name: entry for name, entry in entries.items() if name != "ours"}
    ratios = {}
    if "ours" in entries:
        for name, entry in others.items():
            ratios[name] = round(entry["step_s"] / entries["ours"]["step_s"], 3)
            share = entries["ours"]["peak_mb"] / entry["peak_mb"]
            verdict = harness.verdict(ratios[name])
            print(f"Result: ours is {verdict} than {name}, at {share:.2f} of its peak memory")
    packages = [name.replace("_", "-") for engine in others for name in PACKAGES[engine]]
    print(json.dumps({"config": vars(args), "engines": entries, "ratios": ratios} | harness.environment(*packages)))


def print_ledger(args: argparse.Namespace) -> None:
    """What such a step costs on a GPU, counted: see bench/ledger.py."""
    dtype, budget = gwen.DTYPES[args.dtype or "float16"], args.token_budget or preflight.GPU_BUDGET
    config = settings(args, args.model).but(train_token_budget=budget, checkpoint_layers="off")
    work = ledger.StepWork(gwen.load_config(args.model), dtype, config, args.prompt_tokens, sharing=args.share_prefix)
    machines = {name: ledger.MACHINES[name] for name in args.machine or ledger.MACHINES}
    phases = ledger.make(work)
    print(f"Ledger: {describe(args)} in {args.dtype or 'float16'}, {budget} positions a micro-batch")
    for line in ledger.lines(work, phases, machines):
        print(line)
    print(json.dumps({"config": vars(args), "ledger": ledger.record(work, phases, machines)}))


def describe(args: argparse.Namespace) -> str:
    """The shape of the work."""
    return (
        f"B={args.batch} G={args.groups} prompt={args.prompt_tokens} max_tokens={args.max_tokens} "
        f"rank={args.lora_rank} model={args.model}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The settings, checked. ValueError names the flag that is wrong."""
    parser = Parser("bench_step.py", "Time one whole GRPO step against those of mlx-lm-lora, TRL and unsloth-zoo.")
    parser.add_argument("--model", default="random:30m", help="as train.py's")
    parser.add_argument("--batch", type=int, default=4, help="B, prompts")
    parser.add_argument("--groups", type=int, default=8, help="G, completions of each")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="tokens of a prompt, drawn at random")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of every completion")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not timed, of each process")
    parser.add_argument("--runs", type=int, default=2, help="timed steps of each process")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each engine, in turn")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--share-prefix", choices=micro_batch.SHARING, default="auto", help="in our update")
    parser.add_argument("--token-budget", type=int, default=0, help="of our update; 0: as train.py takes it")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling")
    parser.add_argument("--ledger", action="store_true", help="count what a GPU would do instead, and run nothing")
    parser.add_argument("--machine", nargs="+", choices=tuple(ledger.MACHINES), help="in the ledger (default: all)")
    parser.add_argument("--dtype", choices=tuple(gwen.DTYPES), help="of the ledger's weights (default: float16)")
    parser.add_argument("--report", action="store_true", help="measure this machine: a JSON file and a table row")
    parser.add_argument("--quick", action="store_true", help="the same in two minutes, with shapes of its own")
    parser.add_argument("--out", default="bench-report.json", metavar="FILE", help="of the report")
    parser.add_argument("--engine", choices=ENGINES, help="runs this one here and prints its record; for --model DIR")
    args = parser.parse_args(argv)
    lowest = {"batch": 1, "groups": 2, "prompt_tokens": 2, "max_tokens": 1, "lora_rank": 1, "warmup": 0, "runs": 1}
    check_least(args, **lowest, rounds=1, seed=0, token_budget=0)
    return args


def main(argv: list[str] | None = None) -> None:
    try:
        args = parse(argv)
        if args.engine:
            print(json.dumps(measure(args)))
            return
        if args.ledger:
            print_ledger(args)
            return
        if args.report or args.quick:
            vars(args).update(survey.QUICK if args.quick else {})
            survey.write(args, settings(args, args.model))
            return
        with harness.model_directory(args.model) as directory:
            compare(args, directory)
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
