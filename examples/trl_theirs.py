"""GRPO in TRL, on the bundled model and a CPU; `trl_ours.py` is the same in Gwen. docs/trl.md compares them."""

from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

SUMS = {"two plus three": "five", "four plus four": "eight", "one plus six": "seven", "nine plus five": "fourteen"}
ROWS = [{"prompt": [{"role": "user", "content": f"What is {s}?"}], "answer": SUMS[s]} for s in SUMS]


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where a completion ends with the answer."""
    said = [completion[0]["content"].rstrip(".").split() for completion in completions]
    return [float(words[-1:] == [word]) for words, word in zip(said, answer, strict=True)]


def run(run_dir: str, steps: int = 20, temperature: float = 1.0) -> list[dict[str, float]]:
    args = GRPOConfig(
        output_dir=run_dir,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=24,
        temperature=temperature,
        chat_template_kwargs={"enable_thinking": False},
        learning_rate=1e-5,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    trainer = GRPOTrainer(model="demo/model", reward_funcs=right, args=args, train_dataset=Dataset.from_list(ROWS))
    trainer.train()
    return [step for step in trainer.state.log_history if "reward" in step]


if __name__ == "__main__":
    print([step["reward"] for step in run("runs/theirs")])
