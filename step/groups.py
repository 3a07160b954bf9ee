"""
The groups of a step: the rewards of their completions, and which groups are trained.

What is left out: sampling and judging (train.py), and the arithmetic of advantages (grpo.py).

Axes: B prompts a step, G completions a prompt, N = B * G rows, T completion positions, K rewards or turns.
"""

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np

import grpo
import sampler
from config import Config
from judging import rubrics
from problems.examples import Example
from problems.rewards import Logged
from step import objectives
from step.objectives import Advantage
from turns.episodes import Episodes
from turns.seats import spans


class Rewards(NamedTuple):
    """Rewards of one rollout, numpy float64."""

    total: np.ndarray  # (B, G), weighted sum of the parts; nan where every one is unreadable
    filled: np.ndarray  # (B, G), the same without nan: the sum of the filled parts everywhere
    parts: np.ndarray  # (K, B, G), each reward before weighting; `fill` replaced unreadable values
    weights: list[float]  # K, none is 0: what weighs 0 is among the components only
    components: dict[str, np.ndarray]  # name -> (N,), before weighting; nan where unreadable
    judgement: rubrics.Judgement | None
    completions: list[str]
    turns: np.ndarray | None = None  # (B, G, K), those of each turn, which sum to `filled`; nan beyond a row's last
    logged: Logged = Logged({}, {})  # by the rewards' `log_metric` and `log_extra`


class Draw(NamedTuple):
    """One batch of prompts with its completions and their rewards."""

    examples: list[Example]  # B
    prompts: list[list[int]]  # B
    rollout: sampler.Rollout
    rewards: Rewards
    talk: Episodes | None = None  # its conversations with tools


def weigh(
    config: Config,
    by_name: Mapping[str, float],
    components: dict[str, np.ndarray],
    judgement: rubrics.Judgement | None,
    completions: list[str],
) -> Rewards:
    """
    The weighted sum of the components, (N,) each. One of weight 0 is a metric: it is recorded and nothing else.

    An unreadable score becomes the mean that it would be compared with. So the judge neither rewards nor punishes that
    completion, and its verifiers count in full. A reward function that gave None for a completion is left out of that
    completion's sum.
    """
    counted = {name: values for name, values in components.items() if by_name[name]}
    weights = [by_name[name] for name in counted]
    for (name, values), weight in zip(counted.items(), weights, strict=True):
        if (np.abs(weight * values) >= 1e15).any():  # `rewards.call_reward` has the same limit before weighting
            raise ValueError(
                f"reward {name} times its weight {weight:g} passes 1e15; start again with lower --reward-weights"
            )
    shape = len(weights), config.sampling.batch, config.sampling.groups
    given = np.array(list(counted.values()), np.float64).reshape(shape)
    axis = None if config.objective.advantage == "reinforce" else 1
    filled_parts = [
        fill(part, axis) if name == "rubric" else np.nan_to_num(part) for name, part in zip(counted, given, strict=True)
    ]
    parts = np.array(filled_parts).reshape(shape)
    # no BLAS: its rounding may depend on the position, and equal rewards must stay equal
    filled = sum((weight * part for weight, part in zip(weights, parts, strict=True)), np.zeros(shape[1:]))
    total = np.where(np.isnan(given).all(axis=0), np.nan, filled)
    return Rewards(total, filled, parts, weights, components, judgement, completions)


def by_turn(rewards: Rewards, rollout: sampler.Rollout, earned: list[list[float]]) -> Rewards:
    """The rewards with those of each turn; what no turn earned belongs to the last one. earned: see `Episodes`."""
    num_turns = [len(spans(places)) for places in rollout.places or []]
    turns = np.full((len(earned), max(num_turns)), np.nan)
    for row, (num, its, total) in enumerate(zip(num_turns, earned, rewards.filled.reshape(-1), strict=True)):
        turns[row, :num] = [*its, *[0.0] * (num - len(its))]  # a turn that was cut off earned nothing
        turns[row, num - 1] += total - sum(its)
    return rewards._replace(turns=turns.reshape(*rewards.filled.shape, -1))


def fill(values: np.ndarray, axis: int | None) -> np.ndarray:
    """(B, G) with each nan replaced by the mean of the readable values along `axis` (None: of all), 0 without any."""
    readable = ~np.isnan(values)
    total, number = (part.sum(axis, keepdims=True) for part in (np.where(readable, values, 0), readable))
    return np.where(readable, values, total / np.maximum(number, 1))


def advantages_of(config: Config, draws: list[Draw], chosen: list[int], own: Advantage | None = None) -> np.ndarray:
    """
    Advantages of the chosen groups, (B, G) float32, by `own` if a user has one. Groups are numbered through all draws.

    Where turns are paid they are (B, G, K), of each turn. They are 0 in groups of one, which only a teacher trains.
    """
    if config.sampling.groups == 1:
        return np.zeros((len(chosen), 1), np.float32)
    if config.objective.combine_rewards == "normalize":
        parts = np.concatenate([draw.rewards.parts for draw in draws], axis=1)[:, chosen]
        return grpo.decoupled_advantages(parts, draws[0].rewards.weights, grpo.SIGNAL_FLOOR)
    if turns := [draw.rewards.turns for draw in draws if draw.rewards.turns is not None]:
        most = max(one.shape[2] for one in turns)
        padded = [np.pad(one, [(0, 0), (0, 0), (0, most - one.shape[2])], constant_values=np.nan) for one in turns]
        return grpo.turn_advantages(np.concatenate(padded)[chosen], config.objective.scale_rewards, grpo.SIGNAL_FLOOR)
    rewards = np.concatenate([draw.rewards.filled for draw in draws])[chosen]
    if own is not None:
        return objectives.advantages(config.objective.advantage, own, rewards)
    return grpo.group_advantages(rewards, config.objective.scale_rewards, config.objective.advantage, grpo.SIGNAL_FLOOR)


def of_tokens(advantages: np.ndarray, rollout: sampler.Rollout) -> np.ndarray:
    """The advantages of a step's rows, (B, G) -> (N,), or those of turns given to their tokens, (B, G, K) -> (N, T)."""
    if advantages.ndim == 2:
        return advantages.reshape(-1)
    found = np.zeros(rollout.mask.shape, np.float32)
    for row, its in enumerate(advantages.reshape(len(found), -1)):
        lengths = [end - begin for begin, end in spans((rollout.places or [])[row])]
        found[row, : sum(lengths)] = np.repeat(its[: len(lengths)], lengths)
    return found


class Choice(NamedTuple):
    """The B groups of a step that are trained, numbered through all draws."""

    groups: list[int]  # ascending
    advantages: np.ndarray  # (B, G), or (B, G, K) where turns have their own
    is_full: bool  # whether each of them has a signal
    num_signal: int  # groups of all draws that have one
    num_unlike: int  # groups of all draws whose rewards differ by more than noise


def choose_groups(config: Config, draws: list[Draw], own: Advantage | None = None) -> Choice:
    """
    Takes the first groups with a signal, an advantage other than 0 in a row that is trained; if there are too few, the
    first without one fill up the batch.

    own: a user's advantages, in place of ours.
    """
    chosen = list(range(len(draws) * config.sampling.batch))
    advantages = each = advantages_of(config, draws, chosen, own)
    reasons = np.array([reason for draw in draws for reason in draw.rollout.finish_reasons])
    kept = ((reasons != "length") | (config.objective.truncated != "mask")).reshape(each.shape[:2])

    def teaches(its: np.ndarray, groups: list[int]) -> np.ndarray:
        moves = (its != 0).reshape(len(its), config.sampling.groups, -1).any(-1)
        return (moves & kept[groups]).any(-1)

    signal = teaches(each, chosen)
    if len(draws) > 1:
        chosen = sorted(np.argsort(~signal, kind="stable")[: config.sampling.batch].tolist())
        advantages = advantages_of(config, draws, chosen, own)
    if own is not None or config.objective.advantage == "reinforce":  # by which equal rewards may teach
        rewards = np.concatenate([draw.rewards.filled for draw in draws])
        each = grpo.group_advantages(rewards, "none", signal_floor=grpo.SIGNAL_FLOOR)
    num_unlike = int((each != 0).reshape(len(each), -1).any(-1).sum())
    return Choice(chosen, advantages, bool(teaches(advantages, chosen).all()), int(signal.sum()), num_unlike)


def gather(config: Config, draws: list[Draw], chosen: list[int]) -> tuple[list[list[int]], sampler.Rollout]:
    """
    The prompt of every row, and one rollout of the chosen groups; a row that is not trained has an empty mask.

    --truncated mask drops the rows that hit --max-tokens.
    """
    rows = [group * config.sampling.groups + member for group in chosen for member in range(config.sampling.groups)]
    prompts = [prompt for draw in draws for prompt in draw.prompts for _ in range(config.sampling.groups)]
    reasons = [reason for draw in draws for reason in draw.rollout.finish_reasons]
    width = max(draw.rollout.mask.shape[1] for draw in draws)

    def merged(arrays: list[mx.array]) -> mx.array:  # the padding lies outside the mask
        return mx.concatenate([mx.pad(a, [(0, 0), (0, width - a.shape[1])]) for a in arrays])[mx.array(rows)]

    fields = ("completion_ids", "logprobs", "mask")
    ids, logprobs, mask = (merged([getattr(draw.rollout, name) for draw in draws]) for name in fields)
    reasons = [reasons[row] for row in rows]
    if config.objective.truncated == "mask":
        mask = mask * mx.array([[reason != "length"] for reason in reasons])
    rollout = draws[-1].rollout._replace(
        completion_ids=ids, logprobs=logprobs, mask=mask, finish_reasons=reasons, entropy=None
    )
    if rollout.sequences is not None:
        sequences = [ids for draw in draws for ids in draw.rollout.sequences or []]
        places = [held for draw in draws for held in draw.rollout.places or []]
        rollout = rollout._replace(sequences=[sequences[row] for row in rows], places=[places[row] for row in rows])
    return [prompts[row] for row in rows], rollout
