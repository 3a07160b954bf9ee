"""
GRPO on one page: the bundled model learns to add in words. `uv run python -m examples.nano`, a minute on a laptop.

The same algorithm as train.py, with `gwen`, `sampler` and `grpo` as a library. Left out, because train.py has it: the
judge, evaluation, checkpoints, memory (all rows go through the model at once), and a bound on a step.

Axes: B prompts a step, G completions a prompt, N = B * G rows, T completion positions, L positions of a row.
"""

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

import grpo
import gwen
import lora
import sampler
import tasks
from layers import lm_head
from problems import chat_template

B, G, T = 8, 8, 24


def rows_of(prompts: list[list[int]], completions: list[list[int]]) -> tuple[mx.array, mx.array]:
    """
    Prompts and completions as one array of tokens, (N, L), padded on the right, and where each completion token is
    predicted: one position before it, (N, T).
    """
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    starts = np.array([len(prompt) - 1 for prompt in prompts])[:, None]
    positions = np.minimum(starts + np.arange(max(map(len, completions))), tokens.shape[1] - 1)
    return mx.array(tokens), mx.array(positions)


def loss_of(
    model: gwen.Model, tokens: mx.array, positions: mx.array, rollout: sampler.Rollout, advantages: mx.array
) -> mx.array:
    """The clipped loss; the policy before the step is the one that sampled, so every ratio is 1 here."""
    hidden = mx.take_along_axis(model.hidden(tokens), positions[:, :, None], axis=1)  # (N, T, C)
    logprobs, _ = lm_head.token_logprobs(hidden, model.head_weight, rollout.completion_ids)
    seen = grpo.Tokens(logprobs, mx.stop_gradient(logprobs), advantages, rollout.mask)
    return grpo.LOSSES["dapo"](seen, grpo.Objective()).value


def train(steps: int, learning_rate: float = 0.004, seed: int = 0) -> list[float]:
    """Trains adapters on the bundled model; returns the mean reward of each step."""
    model, tokenizer = gwen.load("demo", mx.float32)
    lora.apply(model, rank=16, scale=2.0)
    optimizer = optim.AdamW(learning_rate, weight_decay=0.0, bias_correction=True)
    params = sampler.SamplingParams(max_tokens=T, eos_ids=model.config.eos_ids)
    task, random = tasks.load("demo"), np.random.default_rng(seed)
    history = []
    for step in range(steps):
        # 1. sample G completions of each of B prompts
        examples = [task.train[index] for index in random.choice(len(task.train), B, replace=False)]
        prompts = [chat_template.chat_ids(tokenizer, example["prompt"]) for example in examples]
        rollout = sampler.rollout(model, prompts, params, group_size=G, key=step)
        texts = sampler.texts(tokenizer, rollout, model.config.eos_ids)

        # 2. reward each: 1 if everything that it says is right
        questions = [example["prompt"] for example in examples for _ in range(G)]
        answers = [example["answer"] for example in examples for _ in range(G)]
        rewards = np.array(task.rewards["correct"](prompts=questions, completions=texts, answer=answers)).reshape(B, G)

        # 3. advantage: how much better than its group; a group of equal rewards teaches nothing
        advantages = mx.array(grpo.group_advantages(rewards).reshape(-1))
        tokens, positions = rows_of([prompt for prompt in prompts for _ in range(G)], rollout.ids)

        # 4. one step of AdamW on the loss
        _, grads = nn.value_and_grad(model, loss_of)(model, tokens, positions, rollout, advantages)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.learning_rate = learning_rate * (1 - step / steps)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)

        history.append(float(rewards.mean()))
        print(f"step {step + 1}/{steps} | reward {history[-1]:.3f} | {texts[0]}", flush=True)
    return history


if __name__ == "__main__":
    train(steps=60)
