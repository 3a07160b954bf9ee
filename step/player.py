"""
Lets an outside harness play the episodes of a rollout, and makes a sample from each episode.

The harness has the environment, writes the prompts, runs the tools and computes the rewards. Gwen
only samples the model's turns. Each episode becomes a sample with its token ids, the positions of
the model's tokens, their log-probabilities and a reward. An episode that fails is left out in
training, and has no reward in evaluations.

Axes: N samples.
"""

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import gwen
import sampler
from disk.hub import ModelConfig
from machine import memory, world
from prompts import chat_template
from prompts.examples import Example, last_user_text, shorten_value
from serving.endpoint import MODEL_NAME
from serving.episodes import ServedEpisode, ServedEpisodes
from serving.harness import REWARD_NAME, Harness
from step.generation import decode_with_opening_think_tags, rollout_fields
from step.sample import Sample
from tools.episodes import TextWithMessages
from tools.toolbox import max_conversation_tokens


class HarnessPlayer:
    """
    Lets a harness play a run's episodes. context: the maximum number of tokens in a conversation.
    """

    def __init__(self, harness: Harness, config: Any, tokenizer: Any, model: ModelConfig):
        """
        Tells the harness about the policy.

        Raises ValueError if there are several machines, or if the harness has ended.
        """
        if world.size() > 1:
            raise ValueError(
                "--env-server works only on a single machine; start the run on one machine"
            )
        self.harness = harness
        self.tokenizer = tokenizer
        self.thinking = config.sampling.thinking
        self.timeout = config.tools.env_timeout
        self.vocabulary_size = model.vocab_size
        self.context = max_conversation_tokens(config.tools, model.max_position_embeddings)
        self._tokenizer_directory = tempfile.TemporaryDirectory(prefix="gwen-tokenizer-")
        tokenizer.save_pretrained(self._tokenizer_directory.name)
        self.policy = {
            "type": "policy",
            "url": harness.endpoint.url,
            "model": MODEL_NAME,
            "tokenizer": self._tokenizer_directory.name,
            "context": self.context,
            "end_ids": list(model.end_ids),
            "thinking": self.thinking,
            "chat_template": str(tokenizer.chat_template),
        }
        harness.tell_policy(self.policy)

    def encode_prompt(self, example: Example) -> list[int]:
        """
        The token ids of an example's prompt, from which the memory that the run needs is estimated.

        The ids include no tools. For an episode, the harness encodes the prompt itself. Raises
        ValueError if the prompt leaves no room for the model's turns.
        """
        ids = chat_template.encode_chat(
            self.tokenizer,
            example["prompt"],
            system=example.get("system"),
            thinking=self.thinking,
        )
        if len(ids) >= self.context:
            raise ValueError(
                f"the prompt {shorten_value(last_user_text(example['prompt']))} has {len(ids)} "
                f"tokens, but a conversation may have only {self.context}; raise --max-context"
            )
        return ids

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
    ) -> tuple[list[Sample], sampler.RolloutStats]:
        """
        Returns copies of the samples with their episodes filled in, and sampling statistics.

        In training, samples whose episodes failed are left out. In evaluations, they have an empty
        response and no reward. The field `failures` of the statistics lists the errors of these
        episodes.

        seed: a text. The harness receives it, followed by the number of the group, and may use both
        to seed the episodes of the group.

        The harness plays at most `harness.most_at_once` episodes at the same time.

        Raises ValueError if the harness has ended, or if all episodes failed.
        """
        self.harness.tell_policy(self.policy)
        size = self.harness.most_at_once or len(samples)
        played: list[Sample] = []
        failures: list[str] = []
        stats = sampler.RolloutStats(0.0, 0.0, 0)
        for begin in range(0, len(samples), size):
            part = samples[begin : begin + size]
            episodes, fields, part_stats = self._play_at_once(
                model, part, params, key=key, first_row=begin, batch_size=batch_size, seed=seed
            )
            stats = add_stats(stats, part_stats)
            for sample, episode in zip(part, episodes, strict=True):
                if not episode.error:
                    played.append(sample_with_episode(sample, episode, fields[episode.number]))
                elif is_evaluation:
                    played.append(empty_sample_of_failed_episode(sample, params.eos_ids[0]))
            failures += [episode.error for episode in episodes if episode.error]

        if len(failures) == len(samples):
            raise ValueError(
                f"--env-server {self.harness.command}: all {len(samples)} episodes failed; the "
                f"first: {failures[0]}; the output of the harness is in {self.harness.log}"
            )
        num_tokens = sum(len(sample.loss_positions) for sample in played)
        speed = num_tokens / max(stats.prefill_s + stats.decode_s, 1e-9)
        return played, stats._replace(speeds=(speed,), failures=failures)

    def _play_at_once(
        self,
        model: gwen.Model,
        samples: list[Sample],
        params: sampler.SamplingParams,
        *,
        key: int,
        first_row: int,
        batch_size: memory.BatchSize,
        seed: str,
    ) -> tuple[list[ServedEpisode], dict[int, dict[str, Any]], sampler.RolloutStats]:
        """
        Plays one episode for each sample, all at the same time.

        first_row: the number of the first sample's row. The number of a row determines the random
        numbers with which the row is sampled.

        Returns the episodes, the values that the rollout gives to the samples (by episode number),
        and the statistics of sampling.
        """
        episodes = ServedEpisodes(
            self.harness,
            len(samples),
            params,
            context=self.context,
            vocabulary_size=self.vocabulary_size,
            timeout=self.timeout,
        )
        fields: dict[int, dict[str, Any]] = {}
        stats = sampler.RolloutStats(0.0, 0.0, 0)
        try:
            for sample, episode in zip(samples, episodes.episodes, strict=True):
                self._ask_for_episode(sample, episode.number, params, seed)
            while wave := episodes.gather_wave():
                prompts = [episode.prompt for episode in wave]
                rollout = sampler.rollout(
                    model,
                    prompts,
                    params,
                    group_size=1,
                    key=key,
                    rows=[first_row + episodes.episodes.index(episode) for episode in wave],
                    batch_size=batch_size,
                    episodes=episodes,
                )
                texts = decode_with_opening_think_tags(
                    self.tokenizer, rollout, prompts, params.eos_ids
                )
                numbers = [episode.number for episode in wave]
                fields |= zip(numbers, rollout_fields(rollout, texts), strict=True)
                stats = add_stats(stats, rollout.stats)
            episodes.wait_for_results()
        finally:
            episodes.cancel_episodes_and_refuse_requests()
        return episodes.episodes, fields, stats._replace(wait_s=episodes.wait_s)

    def _ask_for_episode(
        self, sample: Sample, episode_number: int, params: sampler.SamplingParams, seed: str
    ) -> None:
        """Sends the harness a request to play an episode of the sample's example."""
        assert isinstance(params.max_tokens, int)
        self.harness.send(
            {
                "type": "play",
                "episode": episode_number,
                "split": sample.example["split"],
                "example": sample.example["number"],
                "seed": f"{seed} {sample.group}",
                "max_tokens": params.max_tokens,
            }
        )


def add_stats(total: sampler.RolloutStats, part: sampler.RolloutStats) -> sampler.RolloutStats:
    """The statistics of two parts of a rollout together."""
    return sampler.RolloutStats(
        prefill_s=total.prefill_s + part.prefill_s,
        decode_s=total.decode_s + part.decode_s,
        cache_bytes=max(total.cache_bytes, part.cache_bytes),
        wait_s=total.wait_s + part.wait_s,
    )


def sample_with_episode(sample: Sample, episode: ServedEpisode, fields: dict[str, Any]) -> Sample:
    """
    The sample with the results of an episode that did not fail.

    fields: the values that the rollout gives to the sample. If a row was cut off, it may end with
    token ids from the environment, after which the model wrote nothing. These ids are left out.
    """
    outcome = episode.outcome
    assert outcome is not None
    own = episode.own_positions
    num_prompt = len(episode.prompt)
    positions = [place - num_prompt for place in own]
    response_ids = episode.conversation_ids[num_prompt : own[-1] + 1]
    assert list(fields["loss_positions"]) == positions, "the sampler has other turns"
    assert fields["response_ids"][: len(response_ids)] == response_ids, "the sampler has other ids"

    text = TextWithMessages(fields["text"])
    text.messages = outcome.messages
    conversation = {
        "messages": outcome.messages,
        "turns": len(episode.turns),
        "tool_calls": list_tool_calls(outcome.messages),
    }
    return sample._replace(
        **fields
        | {"response_ids": response_ids, "text": text}
        | {"finish_reason": episode.end_reason or "stop"},
        prompt=episode.prompt,
        conversation=conversation,
        columns={"environments": outcome, "earned": (REWARD_NAME, outcome.reward)},
    )


def empty_sample_of_failed_episode(sample: Sample, end_id: int) -> Sample:
    """The sample with an empty response and no reward, for an episode that failed."""
    return sample._replace(
        response_ids=[end_id],
        loss_positions=[0],
        logprobs=np.zeros(1, np.float32),
        entropies=np.zeros(1, np.float32),
        conversation={"messages": [], "turns": 0, "tool_calls": []},
        columns={"environments": None, "earned": (REWARD_NAME, None)},
    )


def list_tool_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    The tool calls in messages, in the format of `rollouts.jsonl`.

    The harness reports neither how long a call took nor whether the call failed.
    """
    records = []
    turn = -1
    for message in messages:
        if message["role"] == "assistant":
            turn += 1
        for call in message.get("tool_calls", ()):
            records.append({"turn": turn, **call["function"], "seconds": 0.0, "error": None})
    return records
