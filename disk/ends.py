"""
Finds the tokens that end a completion, and the control tokens inside a completion.

The files of a model may name no end tokens, or end tokens that its chat template does not use. So a
completion ends as soon as it contains any of these tokens: an end token in the configuration or the
tokenizer, the token that the chat template adds after a reply, the padding token, a control token
in `KNOWN_ENDS`, or a token of `--end-tokens`. Stop texts are handled in sampler.py.
"""

import dataclasses
import difflib
from collections.abc import Collection, Sequence
from typing import Any

from disk.hub import ModelConfig

# Tokens that end a generation in llama.cpp.
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
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek uses a full-width bar and a low block
}
THOUGHT_TAGS = ("<think>", "</think>")


def control_tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """Return all control tokens of a tokenizer by id. Decoding omits them from answers."""
    added = tokenizer.added_tokens_decoder
    return {number: token.content for number, token in added.items() if token.special}


def find_ids_of_given_end_tokens(tokenizer: Any, end_tokens: Sequence[str]) -> list[int]:
    """
    Return the ids of the tokens in the value of `--end-tokens`.

    end_tokens: each is the text of a token, or an id in decimal digits.

    Raises ValueError if a token is not in the vocabulary.
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
            similar = difflib.get_close_matches(
                token, control_tokens_by_id(tokenizer).values(), n=1
            )
            hint = f", did you mean {similar[0]!r}?" if similar else ""
            raise ValueError(
                f"--end-tokens {token!r:.60} is not a token or an id in the vocabulary{hint}"
            )
    return ids


def find_end_of_reply_id(tokenizer: Any) -> int | None:
    """
    Return the id of the token that the chat template adds after a reply.

    Returns None if there is no template, or if the template adds no token after a reply.
    """
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=False)
    except Exception:  # An error in the template is reported when a prompt is rendered.
        return None
    ids = tokenizer.encode(text.rpartition("two")[2], add_special_tokens=False)
    return next((number for number in ids if number in tokenizer.added_tokens_decoder), None)


def copy_with_end_tokens(
    config: ModelConfig, tokenizer: Any, end_tokens: Sequence[str] = ()
) -> tuple[ModelConfig, dict[int, str]]:
    """
    Return a copy of the configuration with all end tokens, and the sources of the added ones.

    The sources are a dictionary: for the id of each added token, it says where the token comes
    from, such as "the tokenizer's eos_token".

    end_tokens: the value of `--end-tokens`.

    Raises ValueError if there is no end token at all.
    """
    special = control_tokens_by_id(tokenizer)
    sources: dict[int, str] = {}
    eos_ids = list(config.eos_ids)

    def add_eos_id_if_new(number: int | None, source: str) -> None:
        if number is not None and number not in eos_ids:
            eos_ids.append(number)
            sources[number] = source

    add_eos_id_if_new(tokenizer.eos_token_id, "the tokenizer's eos_token")
    add_eos_id_if_new(find_end_of_reply_id(tokenizer), "the chat template adds it after a reply")

    candidates = dict.fromkeys(
        find_ids_of_given_end_tokens(tokenizer, end_tokens), "from --end-tokens"
    )
    for number, token in special.items():
        is_begin = number in (tokenizer.bos_token_id, tokenizer.unk_token_id)
        if token in KNOWN_ENDS:
            candidates.setdefault(number, "a common end token")
        elif number == tokenizer.pad_token_id and not is_begin:
            candidates.setdefault(number, "the tokenizer's pad_token")
    other_ends = {number: source for number, source in candidates.items() if number not in eos_ids}

    if not eos_ids and not other_ends:
        raise ValueError(
            "the configuration, the tokenizer and the chat template name no end token; add "
            "eos_token_id to generation_config.json, or name an end token with --end-tokens"
        )
    config = dataclasses.replace(config, eos_ids=tuple(eos_ids), other_end_ids=tuple(other_ends))
    return config, sources | other_ends


def describe_added_end_tokens(config: ModelConfig, tokenizer: Any, sources: dict[int, str]) -> str:
    """
    Describe the end tokens that were added to the configuration of a model.

    Returns "" if no id was added.

    config: the configuration after the end tokens were added.
    sources: where each added id comes from.
    """
    if not sources:
        return ""
    descriptions = []
    for number, source in sources.items():
        token = tokenizer.convert_ids_to_tokens(number)
        descriptions.append(f"{token!r}, id {number} ({source})")
    tokens = "; ".join(descriptions)

    in_files = [number for number in config.eos_ids if number not in sources]
    if in_files:
        beginning = f"the end ids in its configuration are {in_files}; completions also end at"
    else:
        beginning = "its configuration contains no end token; completions end at"
    return f"{beginning} {tokens}; more can be added with --end-tokens"


def control_tokens_in_response(
    prompt_ids: Sequence[int], response_ids: Sequence[int], controls: dict[int, str]
) -> list[str]:
    """
    Return the control tokens that occur in an answer, sorted and without repetition.

    `THOUGHT_TAGS` are left out, because a model may think in its answer. They are not left out if
    the last thought tag in the prompt is a closing tag, because the thoughts have then ended.

    prompt_ids: the ids of the prompt.
    response_ids: the ids that the model sampled for its answer.
    controls: control tokens by id, without the end tokens.
    """
    tokens = sorted({controls[number] for number in response_ids if number in controls})
    prompt_tags = [
        controls[number] for number in prompt_ids if controls.get(number) in THOUGHT_TAGS
    ]
    if prompt_tags[-1:] != [THOUGHT_TAGS[1]]:
        tokens = [token for token in tokens if token not in THOUGHT_TAGS]
    return tokens


def control_tokens_without_ends(tokenizer: Any, end_ids: Collection[int]) -> dict[int, str]:
    """Return the control tokens by id, without the tokens that end a completion."""
    return {
        number: token
        for number, token in control_tokens_by_id(tokenizer).items()
        if number not in end_ids
    }
