"""
Trains with TRL, using the settings of a Gwen run, and records the result for `bench.sooner`.

    uv run --with trl==1.16.0 --with peft==0.21.2 --with torch==2.15.0 \\
        python -m bench.trl_run runs/A runs/TRL

TRL gets the same prompts in the same order, the same rewards and judge, adapters of the same rank
on the same projections, and the same learning rates. Gwen evaluates TRL's adapters as often as it
evaluated its own adapters. The processor seconds of a step do not include Gwen's evaluations. TRL
has no equivalent of --target-kl, so TRL's steps are not limited in this way.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import datasets

import gwen
import lora
from bench import harness
from bench.sooner import CPU_SECONDS
from disk.eval_record import format_evaluation_line
from reporting import history
from step import sample


class TrlScorerAndRecorder:
    """
    Scores TRL's completions with the rewards of a Gwen run.

    Also records TRL's steps, and evaluates the adapter after some of these steps.
    """

    def __init__(self, run: Any, peft_model: Any, adapter_dir: str):
        """adapter_dir: the directory from which Gwen loads the trained adapter to evaluate it."""
        self.run = run
        self.peft_model = peft_model
        self.adapter_dir = adapter_dir
        num_steps = run.config.optimizer.steps
        self.examples_and_prompts = [run.prompts.next_prompts(step) for step in range(num_steps)]
        self.cpu_seconds: list[float] = []
        self.begin_s = 0.0

    def rewards_by_gwen_run(
        self, *_: Any, completion_ids: list[list[int]], **__: Any
    ) -> list[float]:
        """
        Returns the rewards that the Gwen run gives to these completions.

        TRL calls this method as its reward function.
        """
        train: Any = importlib.import_module("train")
        eos_ids = self.run.model.config.eos_ids
        examples, prompts = self.examples_and_prompts[self.run.step]
        samples = []
        empty_samples = sample.new_samples(examples, prompts, self.run.config.sampling.groups)
        for empty_sample, ids in zip(empty_samples, completion_ids, strict=True):
            is_finished = ids[-1] in eos_ids
            text_ids = ids[:-1] if is_finished else ids
            samples.append(
                empty_sample._replace(
                    response_ids=ids,
                    loss_positions=range(len(ids)),
                    finish_reason="stop" if is_finished else "length",
                    text=self.run.tokenizer.decode(text_ids),
                )
            )
        scored, _logged, _judgement = train.score(self.run, samples)
        return [scored_sample.reward for scored_sample in scored]

    def begin_step(self, *_: Any, **__: Any) -> None:
        self.begin_s = time.process_time()

    def end_step_and_maybe_evaluate(self, *_: Any, **__: Any) -> None:
        self.cpu_seconds.append(time.process_time() - self.begin_s)
        run = self.run
        run.step += 1
        run.journal.metrics.write({"step": run.step})
        if run.step % run.config.evaluation.every == 0:
            self.peft_model.save_pretrained(self.adapter_dir)
            run.model = gwen.load(run.config.model.name)[0]
            lora.attach_saved_adapter(run.model, self.adapter_dir)
            run.evaluate()
            print(run.step, format_evaluation_line(run.journal.evaluations[-1]), flush=True)
        self.begin_step()


def train_with_trl(gwen_run_dir: str, new_run_dir: str) -> None:
    """
    Trains with TRL, and records the training in `new_run_dir`.

    gwen_run_dir: the directory of the Gwen run whose settings are used.
    """
    train: Any = importlib.import_module("train")
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    trl: Any = importlib.import_module("trl")
    torch.set_num_threads(int(os.environ.get("OPENBLAS_NUM_THREADS", 1)))

    settings = history.load_history(gwen_run_dir).settings
    settings |= {"target_kl": 0.0, "checkpoint_layers": "auto"}
    run: Any = train.Trainer.start(run_dir=new_run_dir, **settings).run
    sampling = run.config.sampling
    optimizer = run.config.optimizer
    with (
        harness.model_directory(run.config.model.name) as model_dir,
        tempfile.TemporaryDirectory() as scratch,
        run.journal,
    ):
        transformers.set_seed(sampling.seed)  # for the initial adapters
        dtype = getattr(torch, str(gwen.dtype_from_env_or_device()).removeprefix("mlx.core."))
        base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        rank = run.config.model.lora_rank
        alpha = run.config.model.lora_scale * rank
        adapter_config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
        peft_model = peft.get_peft_model(base, adapter_config)
        recorder = TrlScorerAndRecorder(run, peft_model, scratch)

        prompts = [
            prompt for _examples, prompts in recorder.examples_and_prompts for prompt in prompts
        ]
        texts = [run.tokenizer.decode(prompt) for prompt in prompts]
        for text, prompt in zip(texts, prompts, strict=True):
            assert run.tokenizer.encode(text, add_special_tokens=False) == prompt, text
        run.evaluate()

        training_args = trl.GRPOConfig(
            per_device_train_batch_size=sampling.batch * sampling.groups,
            num_generations=sampling.groups,
            max_completion_length=sampling.max_tokens,
            max_steps=optimizer.steps,
            warmup_steps=optimizer.warmup_steps,
            learning_rate=optimizer.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            output_dir=scratch,
            seed=sampling.seed,
        )
        events = {
            "on_train_begin": recorder.begin_step,
            "on_step_end": recorder.end_step_and_maybe_evaluate,
        }
        members = {event: staticmethod(function) for event, function in events.items()}
        callback = type("Callback", (transformers.TrainerCallback,), members)
        trl.GRPOTrainer(
            peft_model,
            [recorder.rewards_by_gwen_run],
            args=training_args,
            train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
            processing_class=run.tokenizer,
            callbacks=[callback()],
        ).train()
    (Path(new_run_dir) / CPU_SECONDS).write_text(json.dumps(recorder.cpu_seconds))


if __name__ == "__main__":
    train_with_trl(*sys.argv[1:])
