"""
A sample: one response to one prompt, with everything that a run finds out about it.

A step is a list of samples. The list passes through the files in this directory, each of which
returns it with more fields set: step/generation.py sets the responses, step/scoring.py the rewards,
and step/advantages.py the advantages and which samples are trained. step/batch.py pads the samples
for the model. reporting/journal.py writes each sample's record to `rollouts.jsonl`.

Axes: G samples of a group, N samples, T tokens of a sample that the policy wrote.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from prompts.examples import Example

EMPTY: dict[str, Any] = {}  # the default of fields that are not set yet; it must stay empty


class Sample(NamedTuple):
    """A completion of a prompt, or a reply to learn."""

    prompt: list[int]
    response_ids: list[int]  # all ids after the prompt, including those that tools inserted
    # the indices in `response_ids` of the T tokens that the policy wrote
    loss_positions: Sequence[int]
    group: int  # the number of its group in the step; samples in one group are compared
    # ---- set by step/generation.py
    logprobs: np.ndarray | None = None  # (T,) as the sampler recorded them; None for a given reply
    entropies: np.ndarray | None = None  # (T,) of each token's distribution, if requested
    finish_reason: str = "stop"
    example: Example = EMPTY  # the data set's row from which the prompt was made
    text: str = ""
    columns: dict[str, Any] = EMPTY  # further arguments for reward functions
    controls: Sequence[str] = ()  # distinct control tokens inside the response that end no turn
    # the conversation if there are tools, in the form that `rollouts.jsonl` has
    conversation: dict[str, Any] | None = None
    # an environment's weighted reward for each complete turn; None if it rewards no turns
    turn_rewards: list[float] | None = None
    # ---- set by step/scoring.py
    reward_components: dict[str, float] = EMPTY  # before weighting; nan where unreadable
    # the components with a weight; an unreadable one has the value of the mean it is compared with
    imputed_components: dict[str, float] = EMPTY
    reward: float = 0.0  # weighted sum of the imputed components
    scores: list[float] | None = None  # the judge's scores, nan where unreadable
    extra_columns: dict[str, Any] = EMPTY  # the values that rewards passed to `log_extra`
    # ---- set by step/advantages.py
    advantage: float | np.ndarray = 0.0  # one for the sample, or (T,) one for each token
    has_signal: bool = True  # whether any trained sample in its group has an advantage
    rewards_differ: bool = True  # whether the rewards of its group differ by more than noise
    has_gradient: bool = True
    # How many tokens each of its tokens represents in statistics (entropy, KL). 0: it is left out.
    weight: float = 1.0

    @property
    def completion_ids(self) -> list[int]:
        """The T ids that the policy wrote."""
        return [self.response_ids[place] for place in self.loss_positions]

    @property
    def logged_reward(self) -> float:
        """The reward; nan if every component with a weight is unreadable."""
        if all(math.isnan(self.reward_components[name]) for name in self.imputed_components):
            return math.nan
        return self.reward

    @property
    def spans(self) -> list[list[int]]:
        """The range [begin, end) in `response_ids` of each of the policy's turns."""
        spans: list[list[int]] = []
        for place in self.loss_positions:
            if spans and spans[-1][1] == place:
                spans[-1][1] += 1
            else:
                spans.append([place, place + 1])
        return spans


def new_samples(
    examples: Sequence[Example], prompts: list[list[int]], group_size: int
) -> list[Sample]:
    """`group_size` samples for each prompt, with empty responses."""
    samples = []
    for group, (prompt, example) in enumerate(zip(prompts, examples, strict=True)):
        samples += [Sample(prompt, [], (), group, example=example)] * group_size
    return samples


def sample_from_conversation(ids: list[int], loss_positions: list[int], group: int = 0) -> Sample:
    """
    The sample for a given prompt and reply. Its advantage is 1.

    ids: the ids of prompt and reply; loss_positions: the indices in `ids` of the tokens to learn.
    """
    begin = loss_positions[0]
    positions = [place - begin for place in loss_positions]
    return Sample(ids[:begin], ids[begin:], positions, group, advantage=1.0)


def group_samples(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each group. The groups are in the order of their first samples."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


def pad_rows(rows: Sequence[Sequence[float] | np.ndarray], padding: float = 0.0) -> np.ndarray:
    """Rows of numbers as one padded array, (N, longest) float64."""
    padded = np.full((len(rows), max(map(len, rows))), padding)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded
