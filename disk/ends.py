"""
End tokens: which ids end a completion, and which control tokens stand inside one.

A model's files may leave its end tokens out, or name other ones than its chat template writes. A completion ends at
those of the configuration, the tokenizer's, and the one by which the template ends a reply. It also ends at the
tokenizer's padding, at control tokens that are known as ends, and at those of `--end-tokens`.
Left out: texts that end a completion (sampler.py).
"""

import dataclasses
import difflib
from collections.abc import Collection, Sequence
from typing import Any

from disk.hub import ModelConfig

# Source: https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp: the texts that end a generation there.
KNOWN_ENDS = {
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "</s>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|end_of_sentence|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's, with a wide bar and a low block
}
THOUGHT_TAGS = ("<think>", "</think>")


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The control tokens of a tokenizer, by id; decoding an answer leaves them out."""
    added = tokenizer.added_tokens_decoder
    return {number: token.content for number, token in added.items() if token.special}


def find_token_ids(tokenizer: Any, end_tokens: Sequence[str]) -> list[int]:
    """The ids of `--end-tokens`, texts of tokens or ids. Raises ValueError for one that is not in the vocabulary."""
    vocabulary, numbers = tokenizer.get_vocab(), []
    ids = set(vocabulary.values())
    for token in end_tokens:
        if token in vocabulary:
            numbers.append(vocabulary[token])
        elif token.isdecimal() and int(token) in ids:
            numbers.append(int(token))
        else:
            close = difflib.get_close_matches(token, special_tokens(tokenizer).values(), n=1)
            fix = f", did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"--end-tokens {token!r:.60}: the vocabulary has no such token or id{fix}"
            )
    return numbers


def end_of_reply(tokenizer: Any) -> int | None:
    """The id by which the chat template ends a reply; None without a template, and where it ends none by a token."""
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    if not tokenizer.chat_template:
        return None
    try:
        text = tokenizer.apply_chat_template(talk, tokenize=False, enable_thinking=False)
    except Exception:  # a template may raise what it likes; who renders a prompt says so
        return None
    ids = tokenizer.encode(text.rpartition("two")[2], add_special_tokens=False)
    return next((number for number in ids if number in tokenizer.added_tokens_decoder), None)


def add_end_tokens(
    config: ModelConfig, tokenizer: Any, end_tokens: Sequence[str] = ()
) -> tuple[ModelConfig, dict[int, str]]:
    """
    The configuration with all end tokens of the model, and where those come from that its files do not name.

    end_tokens: as `ids_of` reads them. Raises ValueError where there is no end token at all.
    """
    special, sources = special_tokens(tokenizer), dict[int, str]()
    eos_ids = list(config.eos_ids)

    def add_eos(number: int | None, source: str) -> None:
        if number is not None and number not in eos_ids:
            eos_ids.append(number)
            sources[number] = source

    add_eos(tokenizer.eos_token_id, "the tokenizer's eos_token")
    add_eos(end_of_reply(tokenizer), "the chat template ends a reply with it")

    others = dict.fromkeys(find_token_ids(tokenizer, end_tokens), "as --end-tokens says")
    for number, token in special.items():
        is_begin = number in (tokenizer.bos_token_id, tokenizer.unk_token_id)
        if token in KNOWN_ENDS:
            others.setdefault(number, "it is known as an end")
        elif number == tokenizer.pad_token_id and not is_begin:
            others.setdefault(number, "the tokenizer's pad_token")
    others = {number: source for number, source in others.items() if number not in eos_ids}
    if not eos_ids and not others:
        fix = "add eos_token_id to its generation_config.json, or name one with --end-tokens"
        raise ValueError(f"no end token in its configuration, tokenizer and chat template; {fix}")
    return dataclasses.replace(
        config, eos_ids=tuple(eos_ids), other_end_ids=tuple(others)
    ), sources | others


def describe_sources(config: ModelConfig, tokenizer: Any, sources: dict[int, str]) -> str:
    """A line on the end tokens that the model's files do not name; empty where they name all."""
    if not sources:
        return ""
    given = [number for number in config.eos_ids if number not in sources]
    listed = [
        f"{tokenizer.convert_ids_to_tokens(number)!r}, id {number} ({why})"
        for number, why in sources.items()
    ]
    files = (
        f"the end ids of its configuration are {given}"
        if given
        else "its configuration names no end token"
    )
    return f"{files}; completions end {'also ' if given else ''}at {'; '.join(listed)}; --end-tokens adds others"


def find_controls(prompt: Sequence[int], own: Sequence[int], controls: dict[int, str]) -> list[str]:
    """
    The control tokens in the own ids of an answer, each once.

    controls: by id, without end tokens. Tags of thoughts count only where the prompt has closed the thought.
    """
    tokens = sorted({controls[number] for number in own if number in controls})
    tags = [controls[number] for number in prompt if controls.get(number) in THOUGHT_TAGS]
    if tags[-1:] != [THOUGHT_TAGS[1]]:
        tokens = [token for token in tokens if token not in THOUGHT_TAGS]
    return tokens


def control_tokens(tokenizer: Any, end_ids: Collection[int]) -> dict[int, str]:
    """The control tokens that end nothing, by id."""
    return {
        number: token
        for number, token in special_tokens(tokenizer).items()
        if number not in end_ids
    }
