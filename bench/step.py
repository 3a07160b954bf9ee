"""
Compares the time of a GRPO step in Gwen and in other trainers: `uv run python -m bench.step`.

All trainers train adapters of the same rank on all projections of the same weights, with the same
data type. All trainers get the same prompts in the chat template, and sample G completions of
exactly `--max-tokens` tokens per prompt. All trainers use AdamW without a KL term, and a reward
that takes almost no time. All trainers decode all rows at once.

Each trainer runs in its own processes, so that no other trainer adds to its peak memory. If Gwen
and another trainer need different versions of a package, the process of the other trainer uses the
version that this trainer needs. uv keeps the trainers' packages in its cache; PyTorch alone takes
gigabytes there. TRL runs on the device that PyTorch finds. On a CPU, TRL and Gwen use the same
number of threads, which is one by default. All trainers are called through their public functions.
A step of Gwen ends when `train.train` yields, and a step of any other trainer ends when the trainer
calls a callback.

This file does not cover evaluation, checkpoints or judges. All peaks include the weights. On a
Mac's GPU, TRL's peak is the memory that PyTorch holds after the last step, because PyTorch keeps
GPU memory that was freed. On other devices, TRL's peak is the largest size of its process, minus
the size before the model was loaded. The peaks of the other trainers are the largest amounts of
memory that MLX used.

Axes: B prompts, G completions per prompt, N = B * G rows.
"""

import argparse
import contextlib
import importlib
import io
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import datasets
import mlx.core as mx
import mlx.optimizers as optim
import pandas as pd

import gwen
from bench import harness
from disk import hub
from flags import Parser, exit_on_mistakes, flag_of
from machine.output import guard_output
from prompts import chat_template

ROOT = Path(__file__).parent.parent
ATTENTION_PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP_PROJECTIONS = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
LEARNING_RATE = 1e-4


class StepTimes(list[dict[str, float]]):
    """
    A list of the durations of a trainer's steps.

    The trainer calls `arbitrary_varied_rewards` after each rollout, and `record_step_time` after
    each update.
    """

    def __init__(self, args: argparse.Namespace, directory: Path):
        super().__init__()
        self.args = args
        self.num_steps = args.warmup + args.runs
        self.num_rows = args.batch * args.groups
        self.tokenizer = hub.load_tokenizer(directory)
        prompt_lengths = [args.prompt_tokens] * args.batch
        self.texts = harness.random_texts(self.tokenizer, prompt_lengths, args.seed)
        self.lengths: set[int] = set()  # the lengths of the last rollout's completions
        self.start_clock()

    def start_clock(self) -> None:
        self.begin_s = time.perf_counter()
        self.begin_cpu_s = time.process_time()

    def arbitrary_varied_rewards(
        self, completions: list[str], completion_ids: Any = (), **_: Any
    ) -> list[float]:
        """
        Returns a reward for each completion. All trainers can call a function of this signature.

        Neighbouring completions get different rewards, so that all rows have a gradient.
        """
        self.lengths = set(map(len, completion_ids))
        return [index * 7 % 5 / 4 for index in range(len(completions))]

    def record_step_time(self, *_: Any, **__: Any) -> None:
        assert self.lengths <= {self.args.max_tokens}, f"completions of {self.lengths} tokens"
        step_s = time.perf_counter() - self.begin_s
        cpu_s = time.process_time() - self.begin_cpu_s
        self.append({"step_s": step_s, "cpu_s": cpu_s})
        self.start_clock()


# ---- engines, each of which takes `steps.num_steps` steps and writes into the directory `scratch`


def train_with_gwen(
    args: argparse.Namespace, directory: Path, steps: StepTimes, scratch: str
) -> None:
    # import each engine only in its own function, so that no other engine's process loads it
    train: Any = importlib.import_module("train")
    trainer = train.Trainer.start(
        model=str(directory),
        reward=steps.arbitrary_varied_rewards,
        steps=steps.num_steps + 1,
        run_dir=f"{scratch}/run",
        batch=args.batch,
        groups=args.groups,
        max_tokens=args.max_tokens,
        lora_rank=args.lora_rank,
        seed=args.seed,
        learning_rate=LEARNING_RATE,
        eval_every=0,
        data=[{"prompt": text} for text in steps.texts],
        eval_data=[{"prompt": "none of them"}],
    )
    # without end tokens, each completion has `max_tokens` tokens
    trainer.run.sampling = trainer.run.sampling._replace(eos_ids=())
    steps.start_clock()
    # leave the loop one step early, because the trainer would save a checkpoint after the last step
    for _ in itertools.islice(train.train(trainer.run), steps.num_steps):
        steps.record_step_time()


def train_with_mlx_lm_lora(
    args: argparse.Namespace, directory: Path, steps: StepTimes, scratch: str
) -> None:
    from mlx_lm.tokenizer_utils import load as load_tokenizer
    from mlx_lm.tuner.utils import linear_to_lora_layers

    trainer: Any = importlib.import_module("mlx_lm_lora.trainer.grpo_trainer")
    model = harness.load_mlx_lm_model(directory, gwen.dtype_from_env_or_device())
    model.freeze()
    adapter_config = {
        "rank": args.lora_rank,
        "scale": 2.0,
        "dropout": 0.0,
        "keys": ATTENTION_PROJECTIONS + MLP_PROJECTIONS,
    }
    linear_to_lora_layers(model, len(model.layers), adapter_config)
    tokenizer: Any = load_tokenizer(directory)
    tokenizer.eos_token_ids = []  # without end tokens, each completion has `max_tokens` tokens
    prompts = [chat_template.encode_chat(steps.tokenizer, text) for text in steps.texts]
    batch = (prompts, [[0]] * args.batch, steps.texts, [""] * args.batch, None)
    training_args = trainer.GRPOTrainingArgs(
        batch_size=steps.num_rows,
        iters=steps.num_steps,
        group_size=args.groups,
        steps_per_report=1,
        max_completion_length=args.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        adapter_file=f"{scratch}/adapters.safetensors",
    )
    trainer.train_grpo(
        model,
        None,
        tokenizer,
        optim.AdamW(LEARNING_RATE),
        [],
        reward_funcs=[steps.arbitrary_varied_rewards],
        args=training_args,
        iterate_batches=lambda **_: itertools.repeat(batch),
        training_callback=SimpleNamespace(on_train_loss_report=steps.record_step_time),
        end_answer_token="",
    )


def train_with_trl(
    args: argparse.Namespace, directory: Path, steps: StepTimes, scratch: str
) -> None:
    """Trains with TRL on all rows in one batch, without gradient checkpointing."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    trl: Any = importlib.import_module("trl")
    peft: Any = importlib.import_module("peft")
    torch.set_num_threads(int(os.environ.get("OPENBLAS_NUM_THREADS", 1)))

    dtype = getattr(torch, str(gwen.dtype_from_env_or_device()).removeprefix("mlx.core."))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    adapter_config = peft.LoraConfig(
        r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"
    )
    training_args = trl.GRPOConfig(
        per_device_train_batch_size=steps.num_rows,
        num_generations=args.groups,
        # a minimum length prevents completions from ending early
        generation_kwargs={"min_new_tokens": args.max_tokens},
        max_completion_length=args.max_tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        max_steps=steps.num_steps,
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        output_dir=scratch,
        chat_template_kwargs={"enable_thinking": False},
    )
    prompts = [[{"role": "user", "content": text}] for text in steps.texts]
    members = {"on_step_end": staticmethod(steps.record_step_time)}
    timer_class = type("Timer", (transformers.TrainerCallback,), members)
    trainer = trl.GRPOTrainer(
        model,
        [steps.arbitrary_varied_rewards],
        args=training_args,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=steps.tokenizer,
        callbacks=[timer_class()],
        peft_config=adapter_config,
    )
    trainer.train()


class TrainerEngine(NamedTuple):
    run: Callable[[argparse.Namespace, Path, StepTimes, str], None]
    # the packages that Python imports in place of Gwen's versions of them
    packages: tuple[str, ...] = ()


ENGINES = {
    "ours": TrainerEngine(train_with_gwen),
    # without mlx[cpu], the engine's own mlx would hide the CPU part of Gwen's mlx
    "mlx_lm_lora": TrainerEngine(train_with_mlx_lm_lora, ("mlx-lm-lora==5.10.2", "mlx[cpu]")),
    "trl": TrainerEngine(train_with_trl, ("trl==1.16.0", "peft==0.21.2", "torch==2.15.0")),
}


def engine_command(engine: str) -> list[str]:
    """Returns the command that runs this benchmark in a Python with an engine's packages."""
    packages = ENGINES[engine].packages
    python = [sys.executable]
    if packages:
        python = ["uv", "run", "-q", "--no-sync"]
        for package in packages:
            python += ["--with", package]
        python.append("python")
    return [*python, "-m", "bench.step", "--engine", engine]


# ---- the measurement


def measure_engine_steps(args: argparse.Namespace) -> list[dict[str, float]]:
    """Trains with one engine, and returns the times and the peak memory of each timed step."""
    if args.engine == "trl":
        for package in ("torch", "peft", "trl"):
            importlib.import_module(package)  # load these before the memory is measured
    bytes_before = peak_process_bytes()
    directory = Path(args.model)
    steps = StepTimes(args, directory)
    run = ENGINES[args.engine].run
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as scratch:
        run(args, directory, steps, scratch)

    peak_bytes = mx.get_peak_memory()
    if args.engine == "trl":
        # PyTorch keeps freed GPU memory, so the memory in use at the end is the peak
        mps: Any = importlib.import_module("torch.mps")
        if mps.is_available():
            peak_bytes = mps.driver_allocated_memory()
        else:
            peak_bytes = peak_process_bytes() - bytes_before
    return [step | {"peak_mb": peak_bytes / 1e6} for step in steps[args.warmup :]]


def peak_process_bytes() -> int:
    """Returns the largest number of bytes that this process has ever had in memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run_engines_in_processes(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """
    Runs `args.rounds` processes of each engine in turn, and returns all timed steps.

    Raises ValueError, which quotes the last line of the error output, if a process fails.
    """
    flags = []
    for name in NUMBERS:
        flags += [flag_of(name), str(getattr(args, name))]
    steps: list[dict[str, Any]] = []
    for _, engine in harness.turns_in_alternating_order(args.engines, args.rounds):
        command = [*engine_command(engine), "--model", str(directory), *flags]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if process.returncode:
            last_line = process.stderr.strip().splitlines()[-1:]
            raise ValueError(
                f"the process of {engine} failed with exit status {process.returncode}: {last_line}"
            )
        engine_steps = json.loads(process.stdout.splitlines()[-1])
        steps += [{"engine": engine} | step for step in engine_steps]
    return steps


def print_table_and_json(args: argparse.Namespace, steps: list[dict[str, Any]]) -> None:
    """Prints each engine's median figures, a comparison with Gwen, and all figures as JSON."""
    print(
        f"Config: B={args.batch} G={args.groups} prompt={args.prompt_tokens} "
        f"max_tokens={args.max_tokens} rank={args.lora_rank} model={args.model} "
        f"warmup={args.warmup} runs={args.runs} rounds={args.rounds}"
    )
    by_engine = pd.DataFrame(steps).groupby("engine", sort=False)
    table = by_engine[["step_s", "cpu_s"]].median()
    table = table.assign(
        min_s=by_engine.step_s.min(), max_s=by_engine.step_s.max(), peak_mb=by_engine.peak_mb.max()
    )
    table["tok_s"] = args.batch * args.groups * args.max_tokens / table.step_s
    print(table.round(2).to_string())

    ratios = table[:0]
    if "ours" in table.index:
        ratios = (table / table.loc["ours"]).drop("ours")
    for name, ratio in ratios.iterrows():
        speed = harness.describe_speed_ratio(ratio.step_s)
        print(
            f"Result: ours is {speed} than {name}, with {1 / ratio.cpu_s:.2f} times the processor "
            f"time and {1 / ratio.peak_mb:.2f} times the peak memory of {name}"
        )
    record = {
        "config": vars(args),
        "rivals": {name: " ".join(ENGINES[name].packages) for name in table.index},
        "engines": table.round(3).to_dict("index"),
        "ratios": ratios.step_s.round(3).to_dict(),
    }
    print(json.dumps(record | harness.collect_environment_facts()))


# These flags are also passed on to each engine's process.
NUMBERS: harness.Numbers = {
    "batch": (4, 1, "B, the number of prompts"),
    "groups": (8, 2, "G, the number of completions per prompt"),
    "prompt_tokens": (96, 2, "the number of random words, of one token each, in a prompt"),
    "max_tokens": (64, 1, "the number of tokens in every completion"),
    "lora_rank": (16, 1, "the rank of the adapters"),
    "seed": (0, 0, "the seed of the prompts and of sampling"),
    "warmup": (1, 0, "the number of untimed steps of each process"),
    "runs": (2, 1, "the number of timed steps of each process"),
    "rounds": (1, 1, "the number of processes of each engine"),
}


def parse_flags(argv: list[str] | None) -> argparse.Namespace:
    """
    Returns the settings from a command line, after checking them.

    Raises ValueError, which names the flag, if a setting is wrong.
    """
    parser = Parser("bench.step", "Compare the time of a GRPO step in Gwen, mlx-lm-lora and TRL.")
    parser.add_argument("--model", default="random:30m", help="the model, as in train.py")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        help="run only this engine, in this process, and print its times as JSON",
    )
    return harness.add_number_flags_and_parse(parser, argv, NUMBERS)


@guard_output()
def main(argv: list[str] | None = None) -> None:
    with exit_on_mistakes():
        args = parse_flags(argv)
        if args.engine:
            print(json.dumps(measure_engine_steps(args)))
            return
        with harness.model_directory(args.model) as directory:
            print_table_and_json(args, run_engines_in_processes(args, directory))


if __name__ == "__main__":
    main()
