"""
Conversations to learn from: read, checked, and rendered to rows of exactly the ids that the model will see.

A reply is trained after the ids that `chat_template.encode_chat` makes of the messages before it, from which a rollout
samples it, and up to its end token. A conversation is one row where the template only ever appends; where it rewrites
what came before (Qwen3 drops the thoughts of earlier replies), each reply is a row of its own. Left out: the loss.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from problems import chat_template
from problems.data import CONVERSATIONS, check_columns, conversation_column, load_sides
from problems.examples import Example, shorten_value
from problems.messages import (
    THOUGHTS,
    check_order,
    check_prompt,
    is_conversation,
    read_messages,
    read_tools,
)

EMPTY_THOUGHT = (
    "<think>\n\n</think>\n\n"  # what prompts of models that think end with when they shall not
)


class Row(NamedTuple):
    """Token ids, and the places in them of the tokens that are trained."""

    ids: list[int]
    places: list[int]


# ---- reading


# what a conversation is read from; other columns are told, if they hold text
COLUMNS = (
    "prompt",
    "completion",
    *CONVERSATIONS,
    "system",
    "tools",
    "split",
    "chat_template_kwargs",
)


def load_chats(
    spec: str, columns: str | None, begun: Collection[str] = ()
) -> tuple[list[Any], list[Any], list[str]]:
    """The conversations to train on, those held out, and lines on how they were read; see `load_sides`."""
    return load_sides(spec, None, columns, read_chat, taken=COLUMNS, begun=begun)


def read_chat(example: Example) -> Example:
    """
    A conversation, for `load_data`: `prompt`, messages up to the user's, and `completion`, from the first reply on.

    Its columns are those of docs/warm-start.md. A reply before the user's first message is part of the prompt. What
    follows the last reply is dropped. ValueError names the mistake.
    """
    if column := conversation_column(example, is_learned=True):
        prompt, completion = _parts_of(column, example[column])
    elif example.get("completion") is not None and example.get("prompt") is not None:
        prompt, completion = (
            _side("prompt", example["prompt"], "user"),
            _side("completion", example["completion"]),
        )
    else:
        raise ValueError(_want_of_conversation(example))

    example = check_columns(example, prompt)
    if example.get("system") is not None:
        prompt = [{"role": "system", "content": example["system"]}, *prompt]
    while completion and not _is_reply(completion[-1]):
        completion = completion[:-1]
    if not completion:
        raise ValueError("no message of the assistant, so there is nothing to learn; add one")
    check_prompt(prompt)
    check_order("the conversation", prompt + completion)
    if not any(_is_trained(message) for message in completion):
        raise ValueError(
            "all replies have weight 0, so there is nothing to learn; leave the row out"
        )
    return {
        "prompt": prompt,
        "completion": completion,
        "split": example.get("split"),
        "tools": read_tools(example.get("tools")),
        "chat_template_kwargs": example.get("chat_template_kwargs"),
    }


def _side(name: str, part: Any, role: str = "assistant") -> list[dict[str, Any]]:
    """The messages of a column `prompt` or `completion`, which may be a text."""
    if not isinstance(part, (str, list)):
        raise ValueError(
            f"{name} {shorten_value(part)} is a {type(part).__name__}; it must be a string or chat messages"
        )
    return read_messages(name, [{"role": role, "content": part}] if isinstance(part, str) else part)


def _parts_of(name: str, conversation: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages up to the first reply to a user, and those from it on."""
    messages = read_messages("the conversation" if name in CONVERSATIONS else name, conversation)
    if not any(map(_is_reply, messages)):
        raise ValueError("no message of the assistant, so there is nothing to learn; add one")
    check_order("the conversation", messages)
    asked = next(place for place, message in enumerate(messages) if message["role"] == "user")
    first = next(
        (place for place in range(asked, len(messages)) if _is_reply(messages[place])),
        len(messages),
    )
    if first == len(messages):
        fix = "a reply is learned after a message of the user's, so add one behind it"
        raise ValueError(
            f"the only replies stand before message {asked + 1}, the user's first; {fix}"
        )
    return messages[:first], messages[first:]


def _want_of_conversation(example: Example) -> str:
    """What is said of a row that holds no conversation."""
    talks = [name for name in example if is_conversation(example[name])]
    hint = f"messages={talks[0]}" if talks else "completion=COLUMN"
    if "instruction" in example and "output" in example:
        hint = "prompt=instruction,completion=output"
    fix = f"add messages, or prompt and completion, or name the column: --columns {hint}"
    return f"no conversation, only {shorten_value(list(example))}; {fix}"


def _is_reply(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _is_trained(message: dict[str, Any]) -> bool:
    return _is_reply(message) and message.get("weight") != 0


# ---- rendering


def render_conversation(
    tokenizer: Any, example: Example, *, thinking: bool, end_ids: Collection[int], context: int
) -> list[Row]:
    """
    A conversation's rows, every reply trained but those of weight 0.

    ValueError where a template leaves ids open, or drops what a message says, or where a row is too long.
    """
    prompt = example["prompt"]
    written = prompt + example["completion"]
    messages = chat_template.as_rendered(tokenizer, written)
    how = {"tools": example.get("tools"), "variables": example.get("chat_template_kwargs")}
    replies = [place for place in range(len(prompt), len(messages)) if _is_trained(written[place])]
    rows = []
    for place in replies:
        try:
            before, ids = _render_reply(tokenizer, messages[: place + 1], how, thinking, end_ids)
        except ValueError as error:
            named = [key for key in THOUGHTS if key in written[place]]
            raise ValueError(
                f"{error} (its thought stands under {named[0]})" if named else str(error)
            ) from error
        if len(ids) > context:
            raise ValueError(f"it has {len(ids)} tokens, the model's context {context}; shorten it")
        rows.append(Row(ids, list(range(before, len(ids)))))
    whole = rows[-1].ids
    if all(row.ids == whole[: len(row.ids)] for row in rows):
        return [Row(whole, [place for row in rows for place in row.places])]
    return rows


def render_conversations(
    examples: list[Example], kind: str, tokenizer: Any, facts: Any, thinking: bool
) -> list[list[Row]]:
    """The rows of each conversation, see `render`, for a model of these facts. ValueError names one that has none."""
    rendered, how = [], {"thinking": thinking, "context": facts.max_position_embeddings}
    how |= {"tokenizer": tokenizer, "end_ids": {*facts.eos_ids, tokenizer.eos_token_id}}
    for number, example in enumerate(examples, 1):
        try:
            rendered.append(render_conversation(example=example, **how))
        except ValueError as error:
            raise ValueError(
                f"{kind} conversation {number}, {shorten_value(example['prompt'])}: {error}"
            ) from error
    return rendered


def _render_reply(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    how: dict[str, Any],
    thinking: bool,
    end_ids: Collection[int],
) -> tuple[int, list[int]]:
    """How many ids stand before the last message, a reply, and all ids up to its end token."""
    content, marked = messages[-1]["content"], chat_template.mark_as_text(tokenizer, messages)
    prompt = chat_template.render_chat(tokenizer, marked[:-1], thinking, **how)
    whole = chat_template.render_chat(tokenizer, marked, thinking, opened=False, **how)
    opened = prompt if whole.startswith(prompt) else prompt.removesuffix(EMPTY_THOUGHT)
    rest = whole.removeprefix(opened)
    if len(rest) == len(whole):
        raise ValueError(
            f"the chat template renders the messages before {shorten_value(content)} in two ways; drop that reply"
        )
    if opened != prompt and rest.startswith("<think>"):
        raise ValueError(
            f"{shorten_value(content)} has a thought, and prompts forbid thoughts without --thinking; set that"
        )
    thoughts = [marked[-1][key] for key in THOUGHTS if key in marked[-1]]
    if any(
        part.strip() not in rest
        for part in [*re.split("</?think>", marked[-1]["content"]), *thoughts]
    ):
        raise ValueError(
            f"the chat template drops a part of {shorten_value(content)}; remove that part"
        )
    for call in messages[-1].get("tool_calls") or []:
        if call["function"]["name"] not in rest:
            raise ValueError(
                f"the chat template drops the call of {call['function']['name']}; take a model with tools"
            )
    before, ids = (
        chat_template.encode_marked(tokenizer, prompt),
        chat_template.encode_marked(tokenizer, prompt + rest),
    )
    if ids[: len(before)] != before:
        raise ValueError(
            f"the beginning of {shorten_value(content)} melts into one token with its prompt; strip white space"
        )
    ends = [place for place in range(len(before), len(ids)) if ids[place] in end_ids]
    if len(ends) != 1 or tokenizer.decode(ids[ends[0] + 1 :]).strip():
        raise ValueError(
            f"{shorten_value(content)} has {len(ends)} end tokens in the chat template, not one at its end"
        )
    return len(before), ids[: ends[0] + 1]
