"""
TRL's own trainer on the settings of a run of ours, recorded as a run that `bench.sooner` reads:

    uv run --with trl==1.16.0 --with peft==0.21.2 --with torch==2.15.0 python -m bench.trl_run runs/A runs/TRL

It gets the same prompts in the same order, rewards and judge, adapters of the same rank on the same projections, rate
and schedule. Its adapters are evaluated by ours, as often as the run's. A step's seconds are those of its own loop.
Left out: --target-kl, of which TRL has no equal.
"""

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import datasets

import gwen
import lora
from bench import harness
from disk import run_files
from reporting import history
from step import sample


def model_of(directory: Path) -> Any:
    """PyTorch's, in the type of ours and with as many threads."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.set_num_threads(int(os.environ.get("OPENBLAS_NUM_THREADS", 1)))
    dtype = getattr(torch, str(gwen.default_dtype()).removeprefix("mlx.core."))
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def adapters(rank: int, scale: float) -> Any:
    peft: Any = importlib.import_module("peft")
    return peft.LoraConfig(r=rank, lora_alpha=scale * rank, target_modules="all-linear")


def trainer(
    model: Any, tokenizer: Any, prompts: Sequence[Any], reward: Any, calls: dict[str, Callable[..., None]], **how: Any
) -> Any:
    """TRL's trainer, which takes the prompts in their order, tells a reward function and calls, and writes nothing."""
    modules: Any = map(importlib.import_module, ("transformers", "trl"))
    transformers, trl = modules
    how |= {"shuffle_dataset": False, "temperature": 1.0, "beta": 0.0, "loss_type": "dapo", "bf16": False}
    how |= {"gradient_checkpointing": False, "report_to": [], "logging_strategy": "no", "save_strategy": "no"}
    told = type("Told", (transformers.TrainerCallback,), {name: staticmethod(call) for name, call in calls.items()})
    return trl.GRPOTrainer(
        model,
        [reward],
        args=trl.GRPOConfig(**how, disable_tqdm=True),
        train_dataset=datasets.Dataset.from_dict({"prompt": list(prompts)}),
        processing_class=tokenizer,
        callbacks=[told()],
    )


class Beside:
    """A run of ours beside TRL, which pays its completions, and records and evaluates its steps."""

    def __init__(self, run: Any, model: Any, directory: str):
        """model: PEFT's, in training. directory: where its adapter is written, to be read by ours."""
        self.run, self.model, self.directory = run, model, directory
        self.log = run_files.JsonLines(run.dir / "metrics.jsonl")
        self.drawn = [run.prompts.draw(number) for number in range(run.config.optimizer.steps)]

    def reward(self, *_: Any, completion_ids: list[list[int]], **__: Any) -> list[float]:
        run, eos_ids = self.run, self.run.model.config.eos_ids
        examples, prompts = self.drawn[run.step]
        asked, samples = sample.asked(examples, prompts, run.config.sampling.groups), []
        for one, ids in zip(asked, completion_ids, strict=True):
            ends = ids[-1] in eos_ids
            about: dict[str, Any] = {"ids": ids, "own": range(len(ids)), "finish_reason": "stop" if ends else "length"}
            samples.append(one._replace(**about, text=run.tokenizer.decode(ids[:-1] if ends else ids)))
        self.mean_tokens = sum(map(len, completion_ids)) / len(samples)
        train: Any = importlib.import_module("train")
        return [one.value for one in train.rewarded(run, samples)]

    def begin(self, *_: Any, **__: Any) -> None:
        self.clock = time.perf_counter()

    def end(self, *_: Any, **__: Any) -> None:
        run, seconds = self.run, time.perf_counter() - self.clock
        run.step += 1
        self.log.write({"step": run.step, "step/s": seconds, "completion/mean_tokens": self.mean_tokens})
        if run.step % run.config.evaluation.every == 0:
            self.model.save_pretrained(self.directory)
            run.model = gwen.load(run.config.model.name)[0]
            lora.attach(run.model, self.directory)
            run.evaluate()
            print(run.step, run_files.evaluation_line(run.journal.evaluations[-1]), flush=True)
        self.begin()


def measure(source: str, folder: str) -> None:
    """Trains as the run in `source` was trained, and records it in `folder`."""
    modules: Any = map(importlib.import_module, ("train", "transformers", "peft"))
    train, transformers, peft = modules
    settings = history.load(source).settings | {"target_kl": 0.0, "checkpoint_layers": "auto"}
    run: Any = train.Trainer.start(run_dir=folder, **settings).run
    s, o = run.config.sampling, run.config.optimizer
    with harness.model_directory(run.config.model.name) as found, tempfile.TemporaryDirectory() as scratch, run.journal:
        transformers.set_seed(s.seed)  # of its adapters
        model = peft.get_peft_model(model_of(found), adapters(settings["lora_rank"], settings["lora_scale"]))
        beside = Beside(run, model, scratch)
        prompts = [ids for _, each in beside.drawn for ids in each]
        texts = list(map(run.tokenizer.decode, prompts))
        again = [run.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        assert again == prompts, "TRL would get other prompts"
        run.evaluate()
        how: Any = {"per_device_train_batch_size": s.batch * s.groups, "num_generations": s.groups, "seed": s.seed}
        how |= {"max_completion_length": s.max_tokens, "max_steps": o.steps, "warmup_steps": o.warmup_steps}
        how |= {"learning_rate": o.learning_rate, "lr_scheduler_type": "cosine_with_min_lr", "output_dir": scratch}
        how |= {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
        calls = {"on_train_begin": beside.begin, "on_step_end": beside.end}
        trainer(model, run.tokenizer, texts, beside.reward, calls, **how).train()


if __name__ == "__main__":
    measure(*sys.argv[1:])
