"""
One whole GRPO step against other trainers': `uv run python -m bench.step --rounds 3`.

All train adapters of the same rank on all projections of the same weights, in one dtype: the same prompts in the chat
template, G completions of exactly `--max-tokens` tokens each, a reward that costs nothing, no KL term, AdamW. Each
engine runs in processes of its own, so that its peak is its own, with its packages in front of Gwen's, which uv keeps
in its cache (PyTorch takes gigabytes). All decode all rows at once. TRL runs on the device that PyTorch finds, without
a GPU with as many threads as ours, which are one. All are called by public names, and a step ends where a callback is
told of it, or where `train.train` yields.

Left out: evaluation, checkpoints, judges. Peaks include the weights. On a CPU TRL's is by how much its process grew,
which counts freed memory too; the others' is what MLX held.

Axes: B prompts, G completions of each, N = B * G rows.
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
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import datasets
import mlx.core as mx
import mlx.optimizers as optim
import pandas as pd

import gwen
from bench import harness
from disk import hub
from flags import Parser, flag_of, report_mistakes
from machine.output import guard_output
from problems import chat_template

ROOT = Path(__file__).parent.parent
PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
]
RATE = 1e-4


class Steps(list[dict[str, float]]):
    """Seconds of each step of a trainer, which calls `reward` after its rollout and `end` after its update."""

    def __init__(self, args: argparse.Namespace, directory: Path):
        super().__init__()
        self.args, self.num, self.num_rows = args, args.warmup + args.runs, args.batch * args.groups
        self.tokenizer = hub.load_tokenizer(directory)
        self.texts = harness.random_texts(
            self.tokenizer, [args.prompt_tokens] * args.batch, args.seed
        )
        self.lengths: set[int] = set()  # of the last rollout's completions
        self.begin()

    def begin(self) -> None:
        self.clock, self.cpu = time.perf_counter(), time.process_time()

    def reward(self, completions: list[str], completion_ids: Any = (), **_: Any) -> list[float]:
        """A reward function as all trainers call one; neighbours differ, so that all rows have a gradient."""
        self.lengths = set(map(len, completion_ids))
        return [place * 7 % 5 / 4 for place in range(len(completions))]

    def end(self, *_: Any, **__: Any) -> None:
        assert self.lengths <= {self.args.max_tokens}, f"completions of {self.lengths} tokens"
        self.append(
            {"step_s": time.perf_counter() - self.clock, "cpu_s": time.process_time() - self.cpu}
        )
        self.begin()


# ---- engines: each takes so many steps in a directory of its own


def run_ours(args: argparse.Namespace, directory: Path, steps: Steps, scratch: str) -> None:
    train: Any = importlib.import_module(
        "train"
    )  # an engine as the others: their processes load none of it
    names = ("batch", "groups", "max_tokens", "lora_rank", "seed")
    how: Any = {name: getattr(args, name) for name in names} | {
        "learning_rate": RATE,
        "eval_every": 0,
    }
    how |= {
        "data": [{"prompt": text} for text in steps.texts],
        "eval_data": [{"prompt": "none of them"}],
    }
    trainer = train.Trainer.start(
        model=str(directory),
        reward=steps.reward,
        steps=steps.num + 1,
        run_dir=f"{scratch}/run",
        **how,
    )
    trainer.run.sampling = trainer.run.sampling._replace(
        eos_ids=()
    )  # every completion has all its tokens
    steps.begin()
    for _ in itertools.islice(train.train(trainer.run), steps.num):  # a last step would be saved
        steps.end()


def run_mlx_lm_lora(args: argparse.Namespace, directory: Path, steps: Steps, scratch: str) -> None:
    from mlx_lm.tokenizer_utils import load as load_tokenizer
    from mlx_lm.tuner.utils import linear_to_lora_layers

    trainer: Any = importlib.import_module("mlx_lm_lora.trainer.grpo_trainer")
    model = harness.load_peer(directory, gwen.default_dtype())
    model.freeze()
    shape = {"rank": args.lora_rank, "scale": 2.0, "dropout": 0.0, "keys": PROJECTIONS}
    linear_to_lora_layers(model, len(model.layers), shape)
    tokenizer: Any = load_tokenizer(directory)
    tokenizer.eos_token_ids = []  # every completion has all its tokens
    prompts = [chat_template.encode_chat(steps.tokenizer, text) for text in steps.texts]
    batch = prompts, [[0]] * args.batch, steps.texts, [""] * args.batch, None
    how: Any = {
        "batch_size": steps.num_rows,
        "iters": steps.num,
        "group_size": args.groups,
        "steps_per_report": 1,
    }
    how |= {"max_completion_length": args.max_tokens, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    how |= {"beta": 0.0, "epsilon": 0.2, "adapter_file": f"{scratch}/adapters.safetensors"}
    trainer.train_grpo(
        model,
        None,
        tokenizer,
        optim.AdamW(RATE),
        [],
        reward_funcs=[steps.reward],
        args=trainer.GRPOTrainingArgs(**how),
        iterate_batches=lambda **_: itertools.repeat(batch),
        training_callback=SimpleNamespace(on_train_loss_report=steps.end),
        end_answer_token="",
    )


def run_trl(args: argparse.Namespace, directory: Path, steps: Steps, scratch: str) -> None:
    """All rows in one batch, no activations computed again."""
    modules: Any = map(importlib.import_module, ("torch", "transformers", "trl", "peft"))
    torch, transformers, trl, peft = modules
    torch.set_num_threads(int(os.environ.get("OPENBLAS_NUM_THREADS", 1)))
    how: Any = {"per_device_train_batch_size": steps.num_rows, "num_generations": args.groups}
    how |= {
        "generation_kwargs": {"min_new_tokens": args.max_tokens}
    }  # every completion has all its tokens
    how |= {
        "max_completion_length": args.max_tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": RATE,
    }
    how |= {"max_steps": steps.num, "gradient_checkpointing": False, "bf16": False, "report_to": []}
    how |= {
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "output_dir": scratch,
    }
    dtype = getattr(torch, str(gwen.default_dtype()).removeprefix("mlx.core."))
    prompts = [[{"role": "user", "content": text}] for text in steps.texts]
    trl.GRPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype),
        [steps.reward],
        args=trl.GRPOConfig(**how, chat_template_kwargs={"enable_thinking": False}),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=steps.tokenizer,
        callbacks=[
            type(
                "Timer", (transformers.TrainerCallback,), {"on_step_end": staticmethod(steps.end)}
            )()
        ],
        peft_config=peft.LoraConfig(
            r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"
        ),
    ).train()


# each with what uv puts in front of Gwen's own packages; mlx: half a package in front would hide the other half
ENGINES: dict[str, tuple[Callable[[argparse.Namespace, Path, Steps, str], None], str]] = {
    "ours": (run_ours, ""),
    "mlx_lm_lora": (run_mlx_lm_lora, "mlx-lm-lora==5.10.2 mlx[cpu]"),
    "trl": (run_trl, "trl==1.16.0 peft==0.21.2 torch==2.15.0"),
}


def engine_command(engine: str) -> list[str]:
    """A Python with the engine's packages, running this module."""
    packages = [word for package in ENGINES[engine][1].split() for word in ("--with", package)]
    python = ["uv", "run", "-q", "--no-sync", *packages, "python"] if packages else [sys.executable]
    return [*python, "-m", "bench.step", "--engine", engine]


# ---- the measurement


def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """What the process of one engine prints: what every timed step took, and the peak of all of them."""
    for package in ("torch", "peft", "trl") if args.engine == "trl" else ():
        importlib.import_module(package)  # which is no part of what a step takes
    before, directory = peak_resident_bytes(), Path(args.model)
    steps = Steps(args, directory)
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as scratch:
        ENGINES[args.engine][0](args, directory, steps, scratch)
    peak = mx.get_peak_memory()
    if args.engine == "trl":
        mps: Any = importlib.import_module(
            "torch.mps"
        )  # its GPU, where PyTorch keeps what is freed
        peak = (
            mps.driver_allocated_memory() if mps.is_available() else peak_resident_bytes() - before
        )
    return [step | {"peak_mb": peak / 1e6} for step in steps[args.warmup :]]


def peak_resident_bytes() -> int:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def run_processes(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """The timed steps of `args.rounds` processes of each engine, in turn."""
    flags = [text for name in NUMBERS for text in (flag_of(name), str(getattr(args, name)))]
    steps: list[dict[str, Any]] = []
    for _, engine in harness.interleave(args.engines, args.rounds):
        command = [*engine_command(engine), "--model", str(directory), *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise ValueError(f"{engine} ended with exit status {done.returncode}: {last}")
        steps += [{"engine": engine} | step for step in json.loads(done.stdout.splitlines()[-1])]
    return steps


def print_report(args: argparse.Namespace, steps: list[dict[str, Any]]) -> None:
    """Prints medians of what the engines took, how ours compares, and all of it as JSON."""
    print(
        f"Config: B={args.batch} G={args.groups} prompt={args.prompt_tokens} max_tokens={args.max_tokens} "
        f"rank={args.lora_rank} model={args.model} warmup={args.warmup} runs={args.runs} rounds={args.rounds}"
    )
    by_engine = pd.DataFrame(steps).groupby("engine", sort=False)
    table = by_engine[["step_s", "cpu_s"]].median()
    table = table.assign(
        min_s=by_engine.step_s.min(), max_s=by_engine.step_s.max(), peak_mb=by_engine.peak_mb.max()
    )
    table["tok_s"] = args.batch * args.groups * args.max_tokens / table.step_s
    print(table.round(2).to_string())
    ratios = (table / table.loc["ours"]).drop("ours") if "ours" in table.index else table[:0]
    for name, ratio in ratios.iterrows():
        said = (
            f"{harness.describe_ratio(ratio.step_s)} than {name} ({ratio.cpu_s:.2f}x by processors)"
        )
        print(f"Result: ours is {said}, at {1 / ratio.peak_mb:.2f} of its peak memory")
    record = {"config": vars(args), "rivals": {name: ENGINES[name][1] for name in table.index}}
    record |= {
        "engines": table.round(3).to_dict("index"),
        "ratios": ratios.step_s.round(3).to_dict(),
    }
    print(json.dumps(record | harness.describe_environment()))


NUMBERS: harness.Numbers = {  # what the process of one engine gets too
    "batch": (4, 1, "B, prompts"),
    "groups": (8, 2, "G, completions of each"),
    "prompt_tokens": (96, 2, "tokens of a prompt, random words"),
    "max_tokens": (64, 1, "tokens of every completion"),
    "lora_rank": (16, 1, "of the adapters"),
    "seed": (0, 0, "of prompts and sampling"),
    "warmup": (1, 0, "steps that are not timed, of each process"),
    "runs": (2, 1, "timed steps of each process"),
    "rounds": (1, 1, "processes of each engine, in turn"),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The settings, checked. ValueError names the flag that is wrong."""
    parser = Parser("bench.step", "Time one whole GRPO step against those of mlx-lm-lora and TRL.")
    parser.add_argument("--model", default="random:30m", help="as train.py's")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument(
        "--engine", choices=tuple(ENGINES), help="runs this one here and prints its record"
    )
    return harness.parse_settings(parser, argv, NUMBERS)


@guard_output()
def main(argv: list[str] | None = None) -> None:
    with report_mistakes():
        args = parse(argv)
        if args.engine:
            print(json.dumps(measure(args)))
            return
        with harness.model_directory(args.model) as directory:
            print_report(args, run_processes(args, directory))


if __name__ == "__main__":
    main()
