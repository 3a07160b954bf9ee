"""GRPO in Gwen, on the bundled model; `trl_theirs.py` is the same in TRL. docs/trl.md compares them."""

from typing import Any

from train import Trainer

SUMS = {"two plus three": "five", "four plus four": "eight", "one plus six": "seven", "nine plus five": "fourteen"}
ROWS = [{"prompt": [{"role": "user", "content": f"What is {s}?"}], "answer": SUMS[s], "split": "train"} for s in SUMS]


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where a completion ends with the answer."""
    said = [completion[0]["content"].rstrip(".").split() for completion in completions]
    return [float(words[-1:] == [word]) for words, word in zip(said, answer, strict=True)]


def run(run_dir: str, steps: int = 20, temperature: float = 1.0) -> list[dict[str, float]]:
    trainer = Trainer.start(
        run_dir=run_dir,
        batch=4,  # prompts: 32 completions / 8
        groups=8,
        max_tokens=24,
        temp=temperature,
        learning_rate=1e-5,
        steps=steps,
        eval_every=0,
        lora_rank=0,  # as in the other script, which has no peft_config
        warmup_steps=0,
        target_kl=0,  # TRL bounds no update
        model="demo",
        reward=right,
        reward_format="messages",
        data=ROWS,  # without the column `split` a tenth would be held out
    )
    return list(trainer.steps())


if __name__ == "__main__":
    print([step["reward/mean"] for step in run("runs/ours")])
