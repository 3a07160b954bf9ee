"""
The demo in TRL: `uv run --group trl --group peft python -m demo.stability_trl --steps 300 --batch 4 --groups 4`.

The same model, prompts, reward (verifier and judge), adapters, learning rate and schedule, in TRL's own trainer without
any bound on a step; printed is the accuracy of `evaluate.py` after it, by our sampler on the adapter that TRL wrote.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)

import evaluate
import gwen
import hub
import judge
import tasks
from config import Config, JudgeSettings


def reward_of(task: tasks.Task) -> Any:
    """The demo's reward as TRL calls one: the verifier's, plus the judge's share."""
    assert task.rubric is not None
    grader = judge.make(JudgeSettings(), task.rubric, lambda: gwen.load("demo"))
    (name, verifier), share = next(iter(task.rewards.items())), task.reward_weights["rubric"]

    def reward(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        asked, said = ([messages[-1]["content"] for messages in one] for one in (prompts, completions))
        right = verifier(prompts=asked, completions=said, answer=answer)
        judged = grader.score(asked, said).rewards
        return [task.reward_weights[name] * a + share * float(b) for a, b in zip(right, judged, strict=True)]

    return reward


def train(args: argparse.Namespace, out: Path) -> None:
    import peft
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    task = tasks.load("demo")
    rows = [{"prompt": [{"role": "user", "content": e["prompt"]}], "answer": e["answer"]} for e in task.train]
    settings = trl.GRPOConfig(
        output_dir=str(out / "trl"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch * args.groups,
        num_generations=args.groups,
        max_completion_length=24,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=Config.warmup_steps,
        seed=args.seed,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=20,
    )
    shape = peft.LoraConfig(
        r=Config.lora_rank,
        lora_alpha=int(Config.lora_scale * Config.lora_rank),
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        lora_dropout=0.0,
    )
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(hub.DEMO, dtype=torch.float32),
        reward_of(task),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(hub.DEMO, padding_side="left"),
        peft_config=shape,
    )
    trainer.train()
    trainer.model.save_pretrained(out / "adapter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train(args, Path(folder))
        model, tokenizer = gwen.load("demo", adapter=Path(folder) / "adapter")
        record, details = evaluate.evaluate(model, tokenizer, tasks.load("demo"), evaluate.EvalParams(24))
    for detail in details[:5]:
        print(detail["prompt"], "|", detail["completions"][0])
    print(json.dumps(vars(args) | {"eval/accuracy": record["eval/accuracy"], "eval/greedy": record["eval/greedy"]}))


if __name__ == "__main__":
    main()
