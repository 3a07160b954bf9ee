"""
The measurements of an evaluation: rewards, form, categories and the distance to another model.

This file does not cover how answers are generated and how figures become a record
(evaluation/evaluate.py).

Axes: P problems, K samples of each, N = P * K completions, problem-major; T completion positions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

import grpo
import gwen
import lora
import tasks
from disk import statistics
from judging.rubrics import Grader
from layers import lm_head
from machine import alive, world
from prompts.examples import prompt_text
from rewards.form import is_degenerate, is_refusal, repetition
from rewards.rewards import Logged
from step.batch import completion_hidden_states, make_batches
from step.sample import Sample, pad_rows
from step.scoring import assign_rewards, compute_rewards, judge_samples

REFERENCE_TOKENS = 2048  # positions in one batch of the reference model


def grade(
    task: tasks.Task, grader: Grader | None, samples: list[Sample]
) -> tuple[list[Sample], np.ndarray, Logged]:
    """
    The samples with their rewards, the reported values, (N,), and the logs of reward functions.

    A sample's value is 1 for a right answer. Without a verifier the value is the weighted sum of
    the rewards. As in training, an unreadable judge score then counts as the mean of the other
    scores. The value nan means that the value is unknown.
    """
    components, logged = compute_rewards(task.rewards, samples, task.reward_weights)
    scores = None
    if grader is not None:
        judgement = judge_samples(grader, samples)
        components["rubric"] = judgement.rewards
        scores = judgement.scores
    samples = assign_rewards(
        samples, components, task.reward_weights, scores, compares_whole_step=True
    )

    if task.verifier is None:
        return samples, logged_rewards(samples), logged
    verified, _ = compute_rewards({"correct": task.verifier}, samples)
    return samples, verified["correct"], logged


def logged_rewards(samples: list[Sample]) -> np.ndarray:
    """The reward of each sample, (N,); nan where it is unreadable."""
    return np.array([sample.logged_reward for sample in samples])


def measure_divergence(reference: gwen.Model, samples: list[Sample], temperature: float) -> float:
    """
    The KL divergence of the sampling policy from the model before training, in nats per token.

    It is the mean of the estimator k3 over completion tokens: exp(d) - d - 1, where d is
    log reference - log policy, at most `grpo.LARGEST_KL_LOG_RATIO`. It is computed in float64.
    reference: a model that `lora.with_initial_weights` turns into the one before training.
    Source: see `grpo.kl_term`.
    """
    batches = make_batches(samples, REFERENCE_TOKENS, "off")
    local_batches = [batch for batch in batches if batch.is_local]
    local_logprobs: dict[int, np.ndarray] = {}  # by row
    with lora.with_initial_weights(reference):
        for batch in alive.Bar(local_batches, desc="reference", unit="part"):
            logprobs, *_ = lm_head.token_logprobs(
                completion_hidden_states(reference, batch),
                reference.head_weight,
                batch.completion_ids,
                temperature=temperature,
                gradient=False,
            )
            rows = np.array(logprobs * batch.mask)  # computes the lazy arrays now
            local_logprobs |= dict(zip(batch.rows, rows, strict=True))

    policy = pad_rows([sample.logprobs for sample in samples if sample.logprobs is not None])
    reference_logprobs = []
    for sample, row in zip(samples, world.gather_by_number(local_logprobs), strict=True):
        reference_logprobs.append(row[: len(sample.loss_positions)])
    difference = pad_rows(reference_logprobs) - policy
    difference = np.minimum(difference, grpo.LARGEST_KL_LOG_RATIO)
    k3 = np.expm1(difference) - difference
    num_tokens = sum(len(sample.loss_positions) for sample in samples)
    return float(k3.sum() / num_tokens)


def mean_entropy(samples: list[Sample]) -> float | None:
    """The mean entropy of the tokens; None for a server's answers, which have no entropies."""
    entropies = [sample.entropies for sample in samples if sample.entropies is not None]
    if not entropies:
        return None
    num_tokens = sum(map(len, entropies))
    return float(pad_rows(entropies).sum() / num_tokens)


def measure_form(samples: list[Sample]) -> dict[str, np.ndarray]:
    """The lengths of the answers, and signs that an answer has no content, each (N,)."""
    forms: dict[str, list[float]] = {
        "tokens": [len(sample.loss_positions) for sample in samples],
        "truncated_frac": [sample.finish_reason == "length" for sample in samples],
        "refusals": [is_refusal(sample.text) for sample in samples],
        "repeated": [repetition(sample.text) for sample in samples],
        "degenerate": [
            is_degenerate(sample.text, prompt_text(sample.example["prompt"])) for sample in samples
        ],
    }
    return {name: np.array(values, np.float64) for name, values in forms.items()}


def compute_figures(
    task: tasks.Task, sampled: list[Sample], values: np.ndarray, num_samples: int
) -> dict[str, np.ndarray]:
    """Figures, each (P,), of the values (N,). A task with a verifier also has pass@1 and pass@K."""
    means = mean_by_problem(values, num_samples)
    figures = {task.metric: means, "mean_at_k": means}
    if task.verifier is None:
        return figures

    by_problem = values.reshape(-1, num_samples)
    # with all K samples, these are the unbiased estimates
    figures["pass_at_1"] = by_problem.mean(1)
    figures[f"pass_at_{num_samples}"] = by_problem.max(1)
    has_all_rewards = sampled[0].scores is not None or task.rubric is None
    has_other_reward = any(reward is not task.verifier for reward in task.counted_rewards.values())
    if has_all_rewards and has_other_reward:
        figures["score"] = mean_by_problem(logged_rewards(sampled), num_samples)
    return figures


def split_by_category(
    figures: dict[str, np.ndarray], categories: Sequence[Any]
) -> dict[str, np.ndarray]:
    """
    The accuracy and the judge's criteria by category; empty if there is only one category.

    categories: the category of each of the P problems, None for a problem without one.
    """
    kinds = sorted({*categories} - {None})
    if len(kinds) < 2:
        return {}
    category_of = np.array(categories, object)
    split = {}
    for name, column in figures.items():
        if name == "accuracy" or name.startswith("judge/"):
            for kind in kinds:
                split[f"{name}/{kind}"] = column[category_of == kind]
    return split


def mean_by_problem(column: np.ndarray, num_samples: int) -> np.ndarray:
    """The mean over each problem's samples, (N,) -> (P,); nan if no value is readable."""
    means = [statistics.mean(row) for row in column.reshape(-1, num_samples)]
    return np.array(means, np.float64)  # None becomes nan


def round_for_json(values: np.ndarray) -> Any:
    """A list of the values, rounded to four decimals for JSON; None in place of nan."""
    return np.where(np.isnan(values), np.array(None), values.round(4).astype(object)).tolist()
