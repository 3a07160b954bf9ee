"""
Measures the rewards, grades, lengths, repetition and KL divergence of answers.

evaluation/score_task.py generates the answers, and collects the figures in a record.

Axes: P problems, K samples of each, N = P * K completions in the order of their problems, T
completion positions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

import grpo
import gwen
import lora
import tasks
from disk import statistics
from judging.grader import Grader
from layers import lm_head
from machine import alive, world
from prompts.examples import last_user_text
from rewards.form import (
    opens_with_refusal,
    repeated_4gram_fraction,
    repeats_itself_or_copies_prompt,
)
from rewards.rewards import LoggedValues
from step.batch import completion_hidden_states, make_batches
from step.sample import Sample, pad_rows
from step.scoring import assign_rewards, compute_rewards, judge_samples
from text.printable import print_once

REFERENCE_TOKENS = 2048  # the number of token positions in one batch of the reference model


def assign_rewards_and_verify(
    task: tasks.Task, grader: Grader | None, samples: list[Sample]
) -> tuple[list[Sample], np.ndarray, LoggedValues]:
    """
    Returns the samples with rewards, their values (N,), and what the reward functions logged.

    With a verifier, a sample's value is the verifier's grade, which is 1 for a right answer.
    Without a verifier, the value is the weighted sum of the rewards. As in training, the mean of
    the judge's readable rewards replaces each unreadable one. A value is nan if the verifier gives
    no grade or, without a verifier, if none of the sample's rewards is readable.
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
        return samples, rewards_or_nan_if_unreadable(samples), logged
    verified, _ = compute_rewards({"correct": task.verifier}, samples)
    values = verified["correct"]
    is_grade = (values != 0) & (values != 1) & ~np.isnan(values)
    if is_grade.any():
        print_once(
            "--verifier returned values other than 0 and 1, so eval/accuracy is the mean of its "
            "values and not the share of right answers; return 1 for a right answer and 0 for any "
            "other, and give graded values with --reward"
        )
    return samples, values, logged


def rewards_or_nan_if_unreadable(samples: list[Sample]) -> np.ndarray:
    """Returns the reward of each sample, (N,); nan if none of its components is readable."""
    return np.array([sample.reward_or_nan_if_unreadable for sample in samples])


def mean_kl_to_reference(reference: gwen.Model, samples: list[Sample], temperature: float) -> float:
    """
    Returns an estimate of the KL divergence of the policy from the model before training.

    The estimate, in nats per token, is the mean of k3 = exp(d) - d - 1 over all completion tokens.
    Here, d is a token's log-probability under the reference minus that under the policy, capped at
    `grpo.LARGEST_KL_LOG_RATIO`. The estimate is computed in float64. `grpo.kl_term` names the
    source of k3.

    reference: a model that `lora.use_initial_weights` turns into the model before training.
    """
    batches = make_batches(samples, REFERENCE_TOKENS, "off")
    local_batches = [batch for batch in batches if batch.is_local]
    local_logprobs: dict[int, np.ndarray] = {}  # by row
    with lora.use_initial_weights(reference):
        for batch in alive.Bar(local_batches, desc="reference", unit="part"):
            logprobs, *_ = lm_head.token_logprobs(
                completion_hidden_states(reference, batch),
                reference.head_weight,
                batch.completion_ids,
                temperature=temperature,
                gradient=False,
            )
            rows = np.array(logprobs * batch.mask)  # this computes the lazy arrays
            local_logprobs |= dict(zip(batch.rows, rows, strict=True))

    policy = pad_rows([sample.logprobs for sample in samples if sample.logprobs is not None])
    reference_logprobs = []
    for sample, row in zip(samples, world.gather_sorted_by_number(local_logprobs), strict=True):
        reference_logprobs.append(row[: len(sample.loss_positions)])
    difference = pad_rows(reference_logprobs) - policy
    difference = np.minimum(difference, grpo.LARGEST_KL_LOG_RATIO)
    k3 = np.expm1(difference) - difference
    num_tokens = sum(len(sample.loss_positions) for sample in samples)
    return float(k3.sum() / num_tokens)


def mean_token_entropy(samples: list[Sample]) -> float | None:
    """Returns the mean entropy of all tokens, or None if a server sampled the answers."""
    entropies = [sample.entropies for sample in samples if sample.entropies is not None]
    if not entropies:
        return None
    num_tokens = sum(map(len, entropies))
    return float(pad_rows(entropies).sum() / num_tokens)


def measure_length_refusal_and_repetition(samples: list[Sample]) -> dict[str, np.ndarray]:
    """
    Returns the length of each answer in tokens, and signs that the answer is poor, (N,) each.

    The signs are whether the answer is cut off, whether it is a refusal, the fraction of its
    4-grams that are repeated, and whether it only repeats itself or copies the prompt.
    """
    forms: dict[str, list[float]] = {
        "tokens": [len(sample.loss_positions) for sample in samples],
        "truncated_frac": [sample.finish_reason == "length" for sample in samples],
        "refusals": [opens_with_refusal(sample.text) for sample in samples],
        "repeated": [repeated_4gram_fraction(sample.text) for sample in samples],
        "degenerate": [
            repeats_itself_or_copies_prompt(sample.text, last_user_text(sample.example["prompt"]))
            for sample in samples
        ],
    }
    return {name: np.array(values, np.float64) for name, values in forms.items()}


def compute_figures_per_problem(
    task: tasks.Task, sampled: list[Sample], values: np.ndarray, num_samples: int
) -> dict[str, np.ndarray]:
    """
    Summarizes the values (N,) of the samples, and returns the figures by name, (P,) each.

    Each figure has one number per problem. With a verifier, the figures include pass@1 and pass@K.
    """
    means = mean_over_samples(values, num_samples)
    figures = {task.metric: means, "mean_at_k": means}
    if task.verifier is None:
        return figures

    by_problem = values.reshape(-1, num_samples)
    # with all K samples of a problem, these are the unbiased estimates of pass@1 and pass@K
    figures["pass_at_1"] = by_problem.mean(1)
    figures[f"pass_at_{num_samples}"] = by_problem.max(1)
    has_all_rewards = sampled[0].scores is not None or task.rubric is None
    has_other_reward = any(
        reward is not task.verifier for reward in task.rewards_with_nonzero_weight.values()
    )
    if has_all_rewards and has_other_reward:
        figures["score"] = mean_over_samples(rewards_or_nan_if_unreadable(sampled), num_samples)
    return figures


def split_accuracy_and_judge_by_category(
    figures: dict[str, np.ndarray], categories: Sequence[Any]
) -> dict[str, np.ndarray]:
    """
    Returns the accuracy and the judge's scores in each category, if there are several categories.

    With fewer than two categories, the result is empty.

    categories: the category of each of the P problems, or None for a problem without a category.
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


def mean_over_samples(column: np.ndarray, num_samples: int) -> np.ndarray:
    """Returns the mean over each problem's samples, (N,) -> (P,); nan if none is readable."""
    means = [statistics.mean_ignoring_nan(row) for row in column.reshape(-1, num_samples)]
    return np.array(means, np.float64)  # None becomes nan


def round_with_none_for_nan(values: np.ndarray) -> Any:
    """Returns the values as a list for JSON, rounded to four decimals, with None instead of nan."""
    return np.where(np.isnan(values), np.array(None), values.round(4).astype(object)).tolist()
