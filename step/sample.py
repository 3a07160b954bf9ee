"""
A sample: what follows one prompt, and all that is known of it, from the sampler or a data set to `rollouts.jsonl`.

A step is a list of samples. Functions here take the list and return it with more known: its rewards, its advantages,
which of it is computed. Left out: the sampler, the judge, the arithmetic of advantages (grpo.py), how samples
go through the model (step/batch.py).

Axes: B groups trained a step, G samples of a group, N samples, T tokens of a sample that the policy wrote, K turns.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import grpo
import gwen
import sampler
from config import Config
from disk import ends
from judging.rubrics import Grader, Judgement
from machine import memory, world
from problems.episodes import Episodes, Toolbox
from problems.examples import Example, prompt_text
from problems.rewards import Logged, Reward, call_rewards
from problems.statements import opened_thought, strip_thoughts

PROMPT_END = 64  # tokens of a prompt's end that are looked at for a thought it opens
MEASURED_OF = 8  # one of so many samples without a gradient is measured
Weights = dict[str, float]  # of rewards, by name
Advantage = Callable[[np.ndarray], np.ndarray]  # of rewards (B, G) float64, nan where a group has fewer
NOTHING: dict[str, Any] = {}  # of what is not known yet; nobody writes to it


class Sample(NamedTuple):
    """A completion of a prompt, or a reply to learn."""

    prompt: list[int]
    ids: list[int]  # all after the prompt: what the policy wrote, and what it was told in between
    own: Sequence[int]  # the places in `ids` of what it wrote, its T tokens
    group: int  # samples of a group are compared; counted through the step
    logprobs: np.ndarray | None = None  # (T,) as the sampler recorded them; None for a given reply
    entropies: np.ndarray | None = None  # (T,) of each token's distribution, if asked for
    finish_reason: str = "stop"
    example: Example = NOTHING  # what the prompt was made of
    text: str = ""
    columns: dict[str, Any] = NOTHING  # what rewards may ask for besides
    controls: Sequence[str] = ()  # the control tokens in what it wrote that end nothing, each once
    conversation: dict[str, Any] | None = None  # with tools, as `rollouts.jsonl` has it
    paid: list[float] | None = None  # what an environment pays for each whole turn, weighted; None: for none
    # ---- rewarded
    parts: dict[str, float] = NOTHING  # each reward before weighting; nan where unreadable
    filled: dict[str, float] = NOTHING  # those with a weight; an unreadable one is what it is compared with
    value: float = 0.0  # weighted sum of the filled parts
    scores: list[float] | None = None  # the judge's, nan where unreadable
    extra: dict[str, Any] = NOTHING  # what rewards gave to `log_extra`
    # ---- compared
    advantage: float | np.ndarray = 0.0  # of the sample, or (T,) of each token
    signal: bool = True  # whether its group teaches: a sample of it that is trained has an advantage other than 0
    unlike: bool = True  # whether the rewards of its group differ by more than noise, trained or not
    # ---- computed
    has_gradient: bool = True
    weight: float = 1.0  # in means over tokens (entropy, KL): it stands for those left out; 0: it is left out itself

    @property
    def tokens(self) -> list[int]:
        """What the policy wrote, T."""
        return [self.ids[place] for place in self.own]

    @property
    def reward(self) -> float:
        """Its value; nan where every part that counts is unreadable."""
        return math.nan if all(math.isnan(self.parts[name]) for name in self.filled) else self.value

    @property
    def spans(self) -> list[list[int]]:
        """[begin, end) in `ids` of each of its turns."""
        found: list[list[int]] = []
        for place in self.own:
            if found and found[-1][1] == place:
                found[-1][1] += 1
            else:
                found.append([place, place + 1])
        return found


def asked(examples: Sequence[Example], prompts: list[list[int]], size: int) -> list[Sample]:
    """`size` samples of each prompt that are yet to be written."""
    pairs = zip(prompts, examples, strict=True)
    once = [Sample(prompt, [], (), group, example=example) for group, (prompt, example) in enumerate(pairs)]
    return [one for one in once for _ in range(size)]


def answered(
    model: gwen.Model,
    tokenizer: Any,
    samples: list[Sample],
    params: sampler.SamplingParams,
    *,
    key: int,
    batch_size: memory.BatchSize,
    toolbox: Toolbox | None = None,
    seed: str = "",
    weights: Mapping[str, float] = NOTHING,
) -> tuple[list[Sample], sampler.RolloutStats]:
    """
    The samples as the model writes them, and what that cost; of several machines each writes some, whole groups.

    key: for another draw another, as a row's random numbers follow from it and the row's place here. batch_size: see
    `sampler.rollout`. toolbox: what they may call, with the seed of its environments and the weights of what these pay.
    """
    talk = None
    if toolbox:
        talk = Episodes(toolbox, [one.example for one in samples], [one.group for one in samples], seed)
        pairs = zip(samples, talk.asked, talk.prompts, strict=True)
        samples = [one._replace(example=example, prompt=prompt) for one, example, prompt in pairs]
    mine = world.part_together(tuple(one.prompt) for one in samples)
    found: dict[int, dict[str, Any]] = {}
    stats, speed = sampler.RolloutStats(0.0, 0.0, 0), 0.0
    if mine:
        its = [samples[row] for row in mine]
        try:
            how: Any = {"group_size": 1, "key": key, "rows": mine, "batch_size": batch_size, "talk": talk}
            rollout = sampler.rollout(model, [one.prompt for one in its], params, **how)
        except sampler.NotFinite as error:
            said = prompt_text(its[error.row].example["prompt"])
            raise ValueError(f"{error}. The prompt: {said!r:.200}") from error
        texts = texts_with_thoughts(tokenizer, rollout, [one.prompt for one in its], model.config.end_ids)
        found = dict(zip(mine, written(rollout, texts), strict=True))
        stats = rollout.stats
        speed = float(rollout.lengths.sum()) / (stats.prefill_s + stats.decode_s)
    stats = stats._replace(speeds=tuple(world.share(speed)))
    every = sorted({tuple(one.prompt) for one in samples})
    known = world.collect(found, f"samples of the prompts {zlib.crc32(repr(every).encode()):x}")
    samples = [one._replace(**its) for one, its in zip(samples, known, strict=True)]
    controls = ends.controls_of(tokenizer, params.eos_ids)
    samples = [one._replace(controls=ends.inside(one.prompt, one.tokens, controls)) for one in samples]
    return talk.of_samples(samples, weights) if talk else samples, stats


def texts_with_thoughts(
    tokenizer: Any, rollout: sampler.Rollout, prompts: Sequence[list[int]], eos_ids: Sequence[int]
) -> list[str]:
    """
    The text of each row, (N,). It begins with the thought that its prompt opens, as if the policy had opened it.

    Some chat templates end a prompt with "<think>". Without that tag nobody could tell a thought that was cut off from
    an answer. With tools, each turn after a tool's result begins so too.
    """
    texts = sampler.texts(tokenizer, rollout, eos_ids)
    openings = {tuple(prompt[-PROMPT_END:]): "" for prompt in prompts}
    for prompt_end in openings:
        openings[prompt_end] = opened_thought(tokenizer.decode(list(prompt_end), skip_special_tokens=False))
    if not any(openings.values()):
        return texts

    for row, prompt in enumerate(prompts):
        opening = openings[tuple(prompt[-PROMPT_END:])]
        if not opening:
            continue
        if rollout.sequences is None or rollout.places is None:
            texts[row] = opening + texts[row]
        else:
            turns = turns_of(rollout.sequences[row], rollout.places[row], set(eos_ids))
            turn_texts = [opening + tokenizer.decode(turn, skip_special_tokens=True) for turn in turns]
            text = "\n".join(turn_texts)
            texts[row] = rollout.stop.cut(text) if rollout.stop else text
    return texts


def turns_of(sequence: list[int], places: Sequence[int], ends: set[int]) -> list[list[int]]:
    """The ids that the policy wrote in each turn, without end tokens. Turns are apart in the sequence."""
    turns: list[list[int]] = []
    for number, place in enumerate(places):
        if number == 0 or places[number - 1] != place - 1:
            turns.append([])
        if sequence[place] not in ends:
            turns[-1].append(sequence[place])
    return turns


def written(rollout: sampler.Rollout, texts: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """What a rollout and its texts give to samples."""
    whole, logprobs = rollout.sequences or rollout.ids, np.array(rollout.logprobs)
    entropy = None if rollout.entropy is None else np.array(rollout.entropy)
    own: Sequence[Sequence[int]] = rollout.places or [range(len(ids)) for ids in whole]
    return [
        {
            "ids": whole[row],
            "own": own[row],
            "logprobs": logprobs[row, : len(own[row])],
            "entropies": None if entropy is None else entropy[row, : len(own[row])],
            "finish_reason": reason,
            "text": texts[row] if texts else "",
        }
        for row, reason in enumerate(rollout.finish_reasons)
    ]


def of_reply(ids: list[int], places: list[int], group: int = 0) -> Sample:
    """A given reply, from token ids and the places in them of those to learn; its advantage is 1."""
    begin = places[0]
    return Sample(ids[:begin], ids[begin:], [place - begin for place in places], group, advantage=1.0)


def table(rows: Sequence[Sequence[float] | np.ndarray], padding: float = 0.0) -> np.ndarray:
    """Rows of numbers as one padded array, (N, T) float64."""
    found = np.full((len(rows), max(map(len, rows))), padding)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return found


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each group, wherever they stand; groups in the order of their first."""
    groups = dict[int, list[Sample]]()
    for one in samples:
        groups.setdefault(one.group, []).append(one)
    return list(groups.values())


# ---- rewards


def called(
    rewards: dict[str, Reward], samples: list[Sample], weights: dict[str, float] | None = None
) -> tuple[dict[str, np.ndarray], Logged]:
    """The values of each sample, (N,), by each reward or verifier, and what these logged."""
    examples, texts, ids = [one.example for one in samples], [one.text for one in samples], [o.tokens for o in samples]
    beside: dict[str, list[Any]] = {"completion_ids": ids, "num_tokens": list(map(len, ids))}
    beside |= {name: [one.columns[name] for one in samples] for name in samples[0].columns}
    found, logged = call_rewards(rewards, examples, texts, beside, weights)
    return {name: np.array(values) for name, values in found.items()}, logged


def judged(grader: Grader, samples: list[Sample]) -> Judgement:
    """What the judge says of the samples. It reads what follows a thought: a thought that never ends is no answer."""
    prompts = [prompt_text(sample.example["prompt"]) for sample in samples]
    return grader.score(prompts, [strip_thoughts(sample.text) for sample in samples])


def rewarded(
    samples: list[Sample],
    components: dict[str, np.ndarray],
    weights: Weights,
    scores: np.ndarray | None = None,
    extra: dict[str, list[Any]] | None = None,
    together: bool = False,
) -> list[Sample]:
    """
    The samples with their rewards, from components (N,) by name, a judge's scores (N, J) and what rewards logged, (N,)
    by name. A component of weight 0 is a metric: it is recorded and nothing else. together: a group is all of them.

    An unreadable score becomes the mean that it would be compared with. So the judge neither rewards nor punishes that
    completion, and its verifiers count in full. A reward function that gave None for a completion is left out of that
    completion's sum.
    """
    counted = {name: values for name, values in components.items() if weights[name]}
    for name, values in counted.items():
        if (np.abs(weights[name] * values) >= 1e15).any():  # `rewards.call_reward` has the same limit before weighting
            fault = f"reward {name} times its weight {weights[name]:g} passes 1e15"
            raise ValueError(f"{fault}; start again with lower --reward-weights")
    filled = {name: np.nan_to_num(values) for name, values in counted.items()}
    if "rubric" in filled:
        filled["rubric"] = fill(counted["rubric"], np.array([0 if together else one.group for one in samples]))
    # no BLAS: its rounding may depend on the position, and equal rewards must stay equal
    total = sum((weights[name] * values for name, values in filled.items()), np.zeros(len(samples)))
    return [
        sample._replace(
            parts={name: float(values[row]) for name, values in components.items()},
            filled={name: float(values[row]) for name, values in filled.items()},
            value=float(total[row]),
            scores=None if scores is None else scores[row].tolist(),
            extra={name: values[row] for name, values in (extra or {}).items()},
        )
        for row, sample in enumerate(samples)
    ]


def values_of_turns(sample: Sample) -> list[float]:
    """What each turn is worth: its pay, nothing where it was cut off; the last one also gets what no turn was paid."""
    paid = sample.paid or []
    values = paid + [0.0] * (len(sample.spans) - len(paid))
    values[-1] += sample.value - sum(paid)
    return values


def fill(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Values (N,) with each nan replaced by the mean of the readable ones of its group (N,), 0 without any."""
    filled = np.nan_to_num(values)
    for group in set(groups[np.isnan(values)].tolist()):
        its = groups == group
        filled[its & np.isnan(values)] = filled[its].sum() / max((~np.isnan(values[its])).sum(), 1)
    return filled


# ---- advantages


def advantages(
    config: Config, groups: list[list[Sample]], weights: Weights, own: Advantage | None = None
) -> np.ndarray:
    """Advantages of groups, (B, G) float32, or (B, G, K) where turns are paid. own: a user's, in place of ours."""
    settings, (first, *_) = config.objective, groups[0]
    if max(map(len, groups)) == 1:  # which only a teacher trains
        return np.zeros((len(groups), 1), np.float32)
    if settings.combine_rewards == "normalize":
        parts = [table([[one.filled[name] for one in group] for group in groups], np.nan) for name in first.filled]
        return grpo.decoupled_advantages(np.array(parts), [weights[name] for name in first.filled], grpo.SIGNAL_FLOOR)
    if first.paid is not None:
        turns = [[values_of_turns(one) for one in group] for group in groups]
        return grpo.turn_advantages(turns, settings.scale_rewards, grpo.SIGNAL_FLOOR)
    rewards = values_of(groups)
    if own is not None:
        return own(rewards)
    return grpo.group_advantages(rewards, settings.scale_rewards, settings.advantage, grpo.SIGNAL_FLOOR)


def values_of(groups: list[list[Sample]]) -> np.ndarray:
    """What the samples of groups are worth, (B, G) float64, nan where a group has fewer."""
    return table([[sample.value for sample in group] for group in groups], np.nan)


def of_tokens(sample: Sample, advantages: np.ndarray) -> float | np.ndarray:
    """The advantage of a sample, or those of its turns (K,) as those of its tokens (T,)."""
    if advantages.ndim == 0:
        return float(advantages)
    lengths = [end - begin for begin, end in sample.spans]
    return np.repeat(advantages[: len(lengths)], lengths)


def advanced(config: Config, samples: list[Sample], weights: Weights, own: Advantage | None = None) -> list[Sample]:
    """The samples with their advantages, of turns with those of their tokens, and what their groups tell."""
    groups = by_group(samples)
    compared = found = advantages(config, groups, weights, own)
    if own is not None or config.objective.advantage == "reinforce":  # by which equal rewards may teach
        compared = grpo.group_advantages(values_of(groups), "none", signal_floor=grpo.SIGNAL_FLOOR)
    samples = []
    for group, row, differences in zip(groups, found, compared, strict=True):
        group = [one._replace(advantage=of_tokens(one, its)) for one, its in zip(group, row, strict=False)]
        signal = any(moves(one) and is_kept(config, one) for one in group)
        samples += [one._replace(signal=signal, unlike=bool((differences != 0).any())) for one in group]
    return samples


def is_kept(config: Config, sample: Sample) -> bool:
    """Whether a sample is trained: --truncated mask leaves out what hit --max-tokens."""
    return config.objective.truncated != "mask" or sample.finish_reason != "length"


def moves(sample: Sample) -> bool:
    """Whether a sample has an advantage other than 0."""
    return bool(np.any(sample.advantage != 0))


# ---- which of them are computed


def trained(config: Config, samples: list[Sample], step: int, all_teach: bool = False) -> list[Sample]:
    """
    The samples of a step's loss, N. One that --truncated mask leaves out has no tokens, so that none counts in a mean.

    One whose advantage is 0 has no gradient, unless `all_teach`, and is not computed; but one in MEASURED_OF of these,
    others every step, is measured for all of them, by their share of the tokens.
    """
    found = [one if is_kept(config, one) else one._replace(own=(), weight=0.0) for one in samples]
    found = [one._replace(has_gradient=one.weight > 0 and (all_teach or moves(one))) for one in found]
    idle = [row for row, one in enumerate(found) if one.weight and not one.has_gradient]
    if not idle:
        return found
    num = math.ceil(len(idle) / MEASURED_OF)  # neighbours, which mostly share a prompt
    measured = [idle[place % len(idle)] for place in range(step * num, (step + 1) * num)]
    lengths = [sum(len(found[row].own) for row in rows) for rows in (idle, measured)]
    for row in idle:
        found[row] = found[row]._replace(weight=lengths[0] / lengths[1] if row in measured else 0.0)
    return found
