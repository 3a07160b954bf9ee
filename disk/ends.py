"""
End tokens: which ids end a completion, and which control tokens are inside one.

A model's files may leave its end tokens out, or name other tokens than those that its chat template
writes. A completion ends at the end tokens of the configuration and of the tokenizer, and at the
token with which the template ends a reply. It also ends at the tokenizer's padding token, at
control tokens in `KNOWN_ENDS`, and at the tokens of `--end-tokens`. This file does not cover texts
that end a completion (sampler.py).
"""

import dataclasses
import difflib
from collections.abc import Collection, Sequence
from typing import Any

from disk.hub import ModelConfig

# The texts that end a generation in llama.cpp.
# Source: https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
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
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's, with a full-width bar and a low block
}
THOUGHT_TAGS = ("<think>", "</think>")


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The control tokens of a tokenizer, by id. The decoded text of an answer leaves them out."""
    added = tokenizer.added_tokens_decoder
    return {number: token.content for number, token in added.items() if token.special}


def find_token_ids(tokenizer: Any, end_tokens: Sequence[str]) -> list[int]:
    """
    Return the ids of the values of `--end-tokens`, each of which is a token's text or id.

    Raises ValueError for a token that is not in the vocabulary.
    """
    vocabulary = tokenizer.get_vocab()
    valid_ids = set(vocabulary.values())
    ids = []
    for token in end_tokens:
        if token in vocabulary:
            ids.append(vocabulary[token])
        elif token.isdecimal() and int(token) in valid_ids:
            ids.append(int(token))
        else:
            similar = difflib.get_close_matches(token, special_tokens(tokenizer).values(), n=1)
            hint = f", did you mean {similar[0]!r}?" if similar else ""
            raise ValueError(
                f"--end-tokens {token!r:.60}: the vocabulary has no such token or id{hint}"
            )
    return ids


def end_of_reply_id(tokenizer: Any) -> int | None:
    """
    The id of the token with which the chat template ends a reply.

    It is None if there is no template, or if the template writes no token after a reply.
    """
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=False)
    except Exception:  # a template may raise anything; rendering a prompt reports it
        return None
    ids = tokenizer.encode(text.rpartition("two")[2], add_special_tokens=False)
    return next((number for number in ids if number in tokenizer.added_tokens_decoder), None)


def with_end_tokens(
    config: ModelConfig, tokenizer: Any, end_tokens: Sequence[str] = ()
) -> tuple[ModelConfig, dict[int, str]]:
    """
    Return a copy of the configuration with all end tokens, and the sources of the added ones.

    end_tokens: texts or ids, as `find_token_ids` reads them.
    The sources say, by id, where each end token comes from that the model's configuration lacks.

    Raises ValueError if there is no end token at all.
    """
    special = special_tokens(tokenizer)
    sources: dict[int, str] = {}
    eos_ids = list(config.eos_ids)

    def add_eos(number: int | None, source: str) -> None:
        if number is not None and number not in eos_ids:
            eos_ids.append(number)
            sources[number] = source

    add_eos(tokenizer.eos_token_id, "the tokenizer's eos_token")
    add_eos(end_of_reply_id(tokenizer), "the chat template ends a reply with it")

    candidates = dict.fromkeys(find_token_ids(tokenizer, end_tokens), "as --end-tokens says")
    for number, token in special.items():
        is_begin = number in (tokenizer.bos_token_id, tokenizer.unk_token_id)
        if token in KNOWN_ENDS:
            candidates.setdefault(number, "it is known as an end")
        elif number == tokenizer.pad_token_id and not is_begin:
            candidates.setdefault(number, "the tokenizer's pad_token")
    other_ends = {number: source for number, source in candidates.items() if number not in eos_ids}

    if not eos_ids and not other_ends:
        raise ValueError(
            "no end token in its configuration, tokenizer and chat template; "
            "add eos_token_id to its generation_config.json, or name one with --end-tokens"
        )
    config = dataclasses.replace(config, eos_ids=tuple(eos_ids), other_end_ids=tuple(other_ends))
    return config, sources | other_ends


def describe_sources(config: ModelConfig, tokenizer: Any, sources: dict[int, str]) -> str:
    """Describe the end tokens that the model's configuration lacks; "" if it lacks none."""
    if not sources:
        return ""
    descriptions = []
    for number, source in sources.items():
        token = tokenizer.convert_ids_to_tokens(number)
        descriptions.append(f"{token!r}, id {number} ({source})")
    tokens = "; ".join(descriptions)

    in_files = [number for number in config.eos_ids if number not in sources]
    if in_files:
        beginning = f"the end ids of its configuration are {in_files}; completions end also at"
    else:
        beginning = "its configuration names no end token; completions end at"
    return f"{beginning} {tokens}; --end-tokens adds others"


def find_controls(
    prompt: Sequence[int], response_ids: Sequence[int], controls: dict[int, str]
) -> list[str]:
    """
    Find the control tokens in an answer, each once.

    response_ids: the ids in the answer that the policy wrote.
    controls: control tokens by id, without the end tokens.
    `THOUGHT_TAGS` count only if the last such tag in the prompt closes a thought.
    """
    tokens = sorted({controls[number] for number in response_ids if number in controls})
    prompt_tags = [controls[number] for number in prompt if controls.get(number) in THOUGHT_TAGS]
    if prompt_tags[-1:] != [THOUGHT_TAGS[1]]:
        tokens = [token for token in tokens if token not in THOUGHT_TAGS]
    return tokens


def control_tokens(tokenizer: Any, end_ids: Collection[int]) -> dict[int, str]:
    """The control tokens that end nothing, by id."""
    return {
        number: token
        for number, token in special_tokens(tokenizer).items()
        if number not in end_ids
    }
