"""
Generates the responses of a step's samples with the model.

Tokens are sampled in sampler.py, and tool calls are answered in tools/episodes.py.

Axes: N samples.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

import gwen
import sampler
from disk import ends
from machine import memory, world
from machine.output import restore_streams_after_call
from prompts.examples import Example, last_user_text
from rewards.statements import unclosed_thought_in_prompt
from step.sample import EMPTY, Sample
from tools.episodes import Episodes
from tools.toolbox import Toolbox

# only this many tokens at the end of a prompt are searched for a tag that opens a thought
PROMPT_END = 64


class Player(Protocol):
    """
    The interface of an object that lets an outside program play whole episodes.

    `step.player.HarnessPlayer` implements this interface.
    """

    context: int  # the maximum number of tokens in a conversation

    def encode_prompt(self, example: Example) -> list[int]: ...

    def play_samples(
        self,
        model: gwen.Model,
        samples: list[Sample],
        params: sampler.SamplingParams,
        *,
        key: int,
        batch_size: memory.BatchSize,
        seed: str,
        is_evaluation: bool,
    ) -> tuple[list[Sample], sampler.RolloutStats]: ...


# Tools run in several threads at the same time, so stdout and stderr are restored only after all
# tools have finished.
@restore_streams_after_call("a tool or an environment")
def generate_completions(
    model: gwen.Model,
    tokenizer: Any,
    samples: list[Sample],
    params: sampler.SamplingParams,
    *,
    key: int,
    batch_size: memory.BatchSize,
    toolbox: Toolbox | None = None,
    player: Player | None = None,
    environment_seed: str = "",
    is_evaluation: bool = False,
    environment_reward_weights: Mapping[str, float] = EMPTY,
) -> tuple[list[Sample], sampler.RolloutStats]:
    """
    Copies of the samples with their responses, and statistics on the speed of the generation.

    Each rank generates the responses for some of the prompts, and all ranks return all samples.

    key: all random numbers depend only on this key and on the row, so pass a new key for each
    rollout. batch_size: see `sampler.rollout`. toolbox: the tools and environments that the policy
    may call. player: the object that plays the episodes of the samples; if it is given, the toolbox
    is not used, and in training, samples whose episodes fail are left out. environment_seed: the
    seed of the environments. is_evaluation: see `Episodes`.
    environment_reward_weights: the weights of the rewards that the environments give.

    Raises ValueError, which names the prompt, if a log-probability is not finite.
    """
    if player:
        generated, stats = player.play_samples(
            model,
            samples,
            params,
            key=key,
            batch_size=batch_size,
            seed=environment_seed,
            is_evaluation=is_evaluation,
        )
        return record_control_tokens(tokenizer, generated, params.eos_ids), stats

    episodes = None
    if toolbox:
        examples = [sample.example for sample in samples]
        groups = [sample.group for sample in samples]
        episodes = Episodes(
            toolbox, examples, groups, environment_seed, is_evaluation=is_evaluation
        )
        samples = [
            sample._replace(example=example, prompt=prompt)
            for sample, example, prompt in zip(
                samples, episodes.examples, episodes.prompts, strict=True
            )
        ]

    local_rows = world.own_item_indices_by_key(tuple(sample.prompt) for sample in samples)
    local_fields: dict[int, dict[str, Any]] = {}
    stats = sampler.RolloutStats(0.0, 0.0, 0)
    tokens_per_second = 0.0
    if local_rows:
        local_samples = [samples[row] for row in local_rows]
        prompts = [sample.prompt for sample in local_samples]
        try:
            rollout = sampler.rollout(
                model,
                prompts,
                params,
                group_size=1,
                key=key,
                rows=local_rows,
                batch_size=batch_size,
                episodes=episodes,
            )
        except sampler.NonFiniteLogprob as error:
            text = last_user_text(local_samples[error.row].example["prompt"])
            raise ValueError(f"{error}. The prompt was {text!r:.200}") from error
        texts = decode_with_opening_think_tags(tokenizer, rollout, prompts, model.config.end_ids)
        local_fields = dict(zip(local_rows, rollout_fields(rollout, texts), strict=True))
        stats = rollout.stats
        tokens_per_second = float(rollout.lengths.sum()) / (stats.prefill_s + stats.decode_s)

    stats = stats._replace(speeds=tuple(world.all_gather(tokens_per_second)))
    distinct_prompts = sorted({tuple(sample.prompt) for sample in samples})
    prompts_crc = zlib.crc32(repr(distinct_prompts).encode())
    all_fields = world.gather_sorted_by_number(
        local_fields, f"samples of the prompts {prompts_crc:x}"
    )
    generated = [
        sample._replace(**fields) for sample, fields in zip(samples, all_fields, strict=True)
    ]
    generated = record_control_tokens(tokenizer, generated, params.eos_ids)
    if episodes:
        generated = episodes.add_episode_results_to_samples(generated, environment_reward_weights)
    return generated, stats


def record_control_tokens(
    tokenizer: Any, samples: list[Sample], eos_ids: Sequence[int]
) -> list[Sample]:
    """
    Copies of the samples, whose field `controls` lists the control tokens in the response.

    eos_ids: the tokens that end a turn; they are not listed.
    """
    control_tokens = ends.control_tokens_without_ends(tokenizer, eos_ids)
    copies = []
    for sample in samples:
        controls = ends.control_tokens_in_response(
            sample.prompt, sample.completion_ids, control_tokens
        )
        copies.append(sample._replace(controls=controls))
    return copies


def rollout_fields(
    rollout: sampler.Rollout, texts: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """For each row of a rollout, the values of the fields that the rollout sets in a `Sample`."""
    response_ids = rollout.sequences or rollout.ids
    loss_positions: Sequence[Sequence[int]] = rollout.places or [
        range(len(ids)) for ids in response_ids
    ]
    logprobs = np.array(rollout.logprobs)
    entropies = None if rollout.entropy is None else np.array(rollout.entropy)
    fields = []
    for row, finish_reason in enumerate(rollout.finish_reasons):
        num_tokens = len(loss_positions[row])
        fields.append(
            {
                "response_ids": response_ids[row],
                "loss_positions": loss_positions[row],
                "logprobs": logprobs[row, :num_tokens],
                "entropies": None if entropies is None else entropies[row, :num_tokens],
                "finish_reason": finish_reason,
                "text": texts[row] if texts else "",
            }
        )
    return fields


def decode_with_opening_think_tags(
    tokenizer: Any, rollout: sampler.Rollout, prompts: Sequence[list[int]], eos_ids: Sequence[int]
) -> list[str]:
    """
    The text of each row, which begins with an opening thought tag if the prompt ends with one.

    Some chat templates put the tag "<think>" at the end of the prompt. If the text did not begin
    with this tag, a thought that was cut off would look like an answer. With tools, each turn after
    a tool result also begins with the tag.
    """
    texts = sampler.decode_texts(tokenizer, rollout, eos_ids)
    openings: dict[tuple[int, ...], str] = {}
    for prompt in prompts:
        prompt_end = tuple(prompt[-PROMPT_END:])
        if prompt_end not in openings:
            text = tokenizer.decode(list(prompt_end), skip_special_tokens=False)
            openings[prompt_end] = unclosed_thought_in_prompt(text)
    if not any(openings.values()):
        return texts

    for row, prompt in enumerate(prompts):
        opening = openings[tuple(prompt[-PROMPT_END:])]
        if not opening:
            continue
        if rollout.sequences is None or rollout.places is None:
            texts[row] = opening + texts[row]
        else:
            turns = policy_ids_by_turn(rollout.sequences[row], rollout.places[row], set(eos_ids))
            turn_texts = [
                opening + tokenizer.decode(turn, skip_special_tokens=True) for turn in turns
            ]
            text = "\n".join(turn_texts)
            texts[row] = rollout.stop.trim(text) if rollout.stop else text
    return texts


def policy_ids_by_turn(
    response_ids: list[int], loss_positions: Sequence[int], eos_ids: set[int]
) -> list[list[int]]:
    """
    The ids that the policy wrote in each turn, without end tokens.

    A new turn begins wherever `loss_positions` has a gap.
    """
    turns: list[list[int]] = []
    previous_position = None
    for position in loss_positions:
        if previous_position is None or position != previous_position + 1:
            turns.append([])
        if response_ids[position] not in eos_ids:
            turns[-1].append(response_ids[position])
        previous_position = position
    return turns
