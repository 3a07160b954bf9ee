"""
A sample: one response to one prompt, with everything that a run computes for this response.

A step is a list of samples. The functions in this directory take the list and return a copy of it
with more fields set: step/generation.py sets the responses, step/scoring.py sets the rewards, and
step/advantages.py sets the advantages and the weights. step/batch.py pads the samples for the
model. reporting/journal.py writes a record of each sample to `rollouts.jsonl`.

Axes: G samples of a group, N samples, T tokens of a sample that the policy wrote.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from prompts.examples import Example

EMPTY: dict[str, Any] = {}  # the default of fields that are not set yet; never add anything to it


class Sample(NamedTuple):
    """One completion of a prompt, or one given reply for supervised fine-tuning."""

    prompt: list[int]  # token ids
    response_ids: list[int]  # all ids after the prompt, including tool results

    # the T indices in `response_ids` of the tokens that the policy wrote
    loss_positions: Sequence[int]
    group: int  # the index of the group in the step; samples with the same index are compared

    # ---- set by step/generation.py
    logprobs: np.ndarray | None = None  # (T,) recorded by the sampler; None for a given reply

    # (T,) the entropy of the distribution from which each token was drawn, in nats; recorded for
    # `Trainer.on_samples` and in evaluations, otherwise None; None for a given reply
    entropies: np.ndarray | None = None
    finish_reason: str = "stop"
    example: Example = EMPTY  # the row of the data set from which the prompt was made
    text: str = ""
    columns: dict[str, Any] = EMPTY  # more arguments for reward functions
    controls: Sequence[str] = ()  # distinct control tokens in the response that do not end a turn

    # the conversation in the format of `rollouts.jsonl`; None if there are no tools
    conversation: dict[str, Any] | None = None
    # the environment's weighted reward for each complete turn; None if turns are not rewarded
    turn_rewards: list[float] | None = None
    # ---- set by step/scoring.py
    reward_components: dict[str, float] = EMPTY  # values before weighting, nan if unreadable

    # the components whose weight is not 0; an unreadable component is replaced by an average
    imputed_components: dict[str, float] = EMPTY
    reward: float = 0.0  # the weighted sum of the imputed components
    scores: list[float] | None = None  # the judge's scores; an unreadable score is nan
    extra_columns: dict[str, Any] = EMPTY  # the values that reward functions passed to `log_extra`

    # whether an earlier policy wrote the sample, so that `logprobs` are its old log-probabilities
    is_replayed: bool = False

    # ---- set by step/advantages.py
    # False if --train-completions or a user's advantage leaves the sample out of the update
    is_chosen: bool = True
    advantage: float | np.ndarray = 0.0  # a single number, or (T,) with one number per token

    # whether any sample in the group has an advantage other than 0 and counts toward the loss
    has_signal: bool = True
    rewards_differ: bool = True  # whether the rewards in the group differ by more than noise
    has_gradient: bool = True
    # the number of tokens that each token of the sample represents in statistics such as the
    # entropy; 0 if the sample is left out of the update
    weight: float = 1.0

    @property
    def completion_ids(self) -> list[int]:
        """The T token ids that the policy wrote."""
        return [self.response_ids[position] for position in self.loss_positions]

    @property
    def reward_or_nan_if_unreadable(self) -> float:
        """The reward, or nan if every component whose weight is not 0 is unreadable."""
        if all(math.isnan(self.reward_components[name]) for name in self.imputed_components):
            return math.nan
        return self.reward

    @property
    def turn_begins_and_ends(self) -> list[tuple[int, int]]:
        """For each turn of the policy, its start and its exclusive end in `response_ids`."""
        spans: list[tuple[int, int]] = []
        for position in self.loss_positions:
            if spans and spans[-1][1] == position:
                spans[-1] = (spans[-1][0], position + 1)
            else:
                spans.append((position, position + 1))
        return spans


def new_samples(
    examples: Sequence[Example], prompts: list[list[int]], group_size: int
) -> list[Sample]:
    """For each prompt, makes `group_size` samples whose responses are still empty."""
    samples = []
    for group, (prompt, example) in enumerate(zip(prompts, examples, strict=True)):
        samples += [Sample(prompt, [], (), group, example=example)] * group_size
    return samples


def sample_from_conversation(
    prompt_and_reply_ids: list[int], loss_positions: list[int], group: int = 0
) -> Sample:
    """
    Makes a sample with an advantage of 1 from a given prompt and reply.

    loss_positions: the indices in `prompt_and_reply_ids` of the tokens to be learned. The response
    begins at the first of them.
    """
    begin = loss_positions[0]
    return Sample(
        prompt_and_reply_ids[:begin],
        prompt_and_reply_ids[begin:],
        [position - begin for position in loss_positions],
        group,
        advantage=1.0,
    )


def group_samples(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Divides the samples into groups, which are in the order of their first samples."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


def mark_replayed_samples(samples: list[Sample], fresh: list[Sample]) -> list[Sample]:
    """
    Copies of the samples with `is_replayed` set.

    fresh: the samples that the current policy wrote. A sample counts as replayed unless a fresh
    sample has the very same array object in `logprobs`. A given reply has no log-probabilities and
    is not replayed.
    """
    # a sample that `_replace` changed still has the same array of log-probabilities
    fresh_arrays = {id(sample.logprobs) for sample in fresh}
    marked = []
    for sample in samples:
        is_replayed = sample.logprobs is not None and id(sample.logprobs) not in fresh_arrays
        marked.append(sample._replace(is_replayed=is_replayed))
    return marked


def pad_rows(rows: Sequence[Sequence[float] | np.ndarray], padding: float = 0.0) -> np.ndarray:
    """The rows as one float64 array, padded on the right to the length of the longest row."""
    padded = np.full((len(rows), max(map(len, rows))), padding)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
