"""
Reads and checks training conversations, and renders them to the exact ids that the model will see.

The ids before a reply are the same ids from which a rollout would sample it:
`chat_template.encode_chat` makes them from the messages before the reply. The reply is trained up
to its end token. If the template only ever appends, a conversation is one row. If the template
rewrites earlier messages (Qwen3 drops the thoughts of earlier replies), each reply is a row of its
own. This file does not cover the loss.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from prompts import chat_template
from prompts.data import check_columns
from prompts.examples import Example, shorten_value
from prompts.held_out import load_sides
from prompts.messages import (
    CONVERSATIONS,
    THOUGHTS,
    check_order,
    check_prompt,
    conversation_column_name,
    is_conversation,
    read_messages,
    read_tools,
)

# The end of a prompt for a model that can think but shall not.
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"

# The columns that a conversation uses. A note names other columns that hold text.
COLUMNS = (
    "prompt",
    "completion",
    *CONVERSATIONS,
    "system",
    "tools",
    "split",
    "chat_template_kwargs",
)


class Row(NamedTuple):
    """Token ids, and the places of the ids that are trained."""

    ids: list[int]
    places: list[int]


# ---- reading


def load_chats(
    spec: str, columns: str | None, held_out_keys: Collection[str] = ()
) -> tuple[list[Any], list[Any], list[str]]:
    """
    The training conversations, the held-out conversations, and lines on how they were read.

    The parameters are those of `load_sides`.
    """
    return load_sides(
        spec, None, columns, read_chat, read_columns=COLUMNS, held_out_keys=held_out_keys
    )


def read_chat(example: Example) -> Example:
    """
    Reads a conversation, for `load_data`.

    `completion` gets the messages from the first reply on, and `prompt` gets the messages before
    it. A reply before the user's first message is part of the prompt. Messages after the last reply
    are dropped. docs/warm-start.md lists the columns.

    Raises ValueError, which names the mistake.
    """
    column = conversation_column_name(example, is_sft=True)
    if column:
        prompt, completion = _split_at_first_reply(column, example[column])
    elif example.get("completion") is not None and example.get("prompt") is not None:
        prompt = _read_side("prompt", example["prompt"], "user")
        completion = _read_side("completion", example["completion"], "assistant")
    else:
        raise ValueError(_explain_missing_conversation(example))

    example = check_columns(example, prompt)
    if example.get("system") is not None:
        prompt = [{"role": "system", "content": example["system"]}, *prompt]
    while completion and not _is_reply(completion[-1]):
        completion = completion[:-1]
    if not completion:
        raise ValueError("no message of the assistant, so there is nothing to learn; add one")
    check_prompt(prompt)
    check_order("the conversation", prompt + completion)
    if not any(map(_is_trained, completion)):
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


def _read_side(name: str, side: Any, role: str) -> list[dict[str, Any]]:
    """The messages in the column `prompt` or `completion`. role: the writer, if side is a text."""
    if isinstance(side, str):
        side = [{"role": role, "content": side}]
    if not isinstance(side, list):
        raise ValueError(
            f"{name} {shorten_value(side)} is a {type(side).__name__}; "
            "it must be a string or chat messages"
        )
    return read_messages(name, side)


def _split_at_first_reply(
    column: str, conversation: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages before the first reply to the user, and the messages from this reply on."""
    name = "the conversation" if column in CONVERSATIONS else column
    messages = read_messages(name, conversation)
    if not any(map(_is_reply, messages)):
        raise ValueError("no message of the assistant, so there is nothing to learn; add one")
    check_order("the conversation", messages)

    user_place = 0
    while messages[user_place]["role"] != "user":
        user_place += 1
    for place in range(user_place, len(messages)):
        if _is_reply(messages[place]):
            return messages[:place], messages[place:]
    raise ValueError(
        f"the only replies are before message {user_place + 1}, the first of the user; "
        "a reply is learned after a message of the user, so add one behind it"
    )


def _explain_missing_conversation(example: Example) -> str:
    """The error message for a row that holds no conversation."""
    conversations = [name for name in example if is_conversation(example[name])]
    hint = "completion=COLUMN"
    if conversations:
        hint = f"messages={conversations[0]}"
    if "instruction" in example and "output" in example:
        hint = "prompt=instruction,completion=output"
    return (
        f"no conversation, only {shorten_value(list(example))}; "
        f"add messages, or prompt and completion, or name the column: --columns {hint}"
    )


def _is_reply(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _is_trained(message: dict[str, Any]) -> bool:
    return _is_reply(message) and message.get("weight") != 0


# ---- rendering


def render_conversation(
    tokenizer: Any, example: Example, *, thinking: bool, end_ids: Collection[int], context: int
) -> list[Row]:
    """
    A conversation's rows. Every reply is trained, except replies with weight 0.

    context: the largest number of tokens in a row.
    Raises ValueError if the template leaves a reply's ids uncertain or drops a part of a message,
    or if a row is too long.
    """
    prompt = example["prompt"]
    messages = prompt + example["completion"]
    rendered = chat_template.prepare_messages(tokenizer, messages)
    rows = []
    for place in range(len(prompt), len(messages)):
        if not _is_trained(messages[place]):
            continue
        try:
            prompt_text, reply_text = _render_reply(
                tokenizer,
                rendered[: place + 1],
                thinking,
                tools=example.get("tools"),
                variables=example.get("chat_template_kwargs"),
            )
            content = shorten_value(rendered[place]["content"])
            row = _encode_reply(tokenizer, prompt_text, reply_text, end_ids, content)
        except ValueError as error:
            keys = [key for key in THOUGHTS if key in messages[place]]
            hint = f" (its thought is under {keys[0]})" if keys else ""
            raise ValueError(f"{error}{hint}") from error
        if len(row.ids) > context:
            raise ValueError(
                f"it has {len(row.ids)} tokens, the model's context {context}; shorten it"
            )
        rows.append(row)

    longest = rows[-1].ids
    if all(row.ids == longest[: len(row.ids)] for row in rows):
        return [Row(longest, [place for row in rows for place in row.places])]
    return rows


def _render_reply(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    thinking: bool,
    *,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any] | None,
) -> tuple[str, str]:
    """The text before the last message, which is a reply, and the text from the reply on."""
    reply = messages[-1]
    content = shorten_value(reply["content"])
    marked = chat_template.mark_as_text(tokenizer, messages)
    prompt = chat_template.render_chat(
        tokenizer, marked[:-1], thinking, tools=tools, variables=variables
    )
    text = chat_template.render_chat(
        tokenizer, marked, thinking, opened=False, tools=tools, variables=variables
    )

    shared = prompt if text.startswith(prompt) else prompt.removesuffix(EMPTY_THOUGHT)
    if not shared or not text.startswith(shared):
        raise ValueError(
            f"the chat template renders the messages before {content} in two ways; drop that reply"
        )
    reply_text = text.removeprefix(shared)
    if shared != prompt and reply_text.startswith("<think>"):
        raise ValueError(
            f"{content} has a thought, and prompts forbid thoughts without --thinking; set that"
        )
    _check_complete(marked[-1], reply, reply_text)
    return prompt, reply_text


def _encode_reply(
    tokenizer: Any, prompt: str, reply: str, end_ids: Collection[int], content: str
) -> Row:
    """The ids up to the reply's end token. content: the reply's text, for error messages."""
    prompt_ids = chat_template.encode_marked(tokenizer, prompt)
    ids = chat_template.encode_marked(tokenizer, prompt + reply)
    num_prompt = len(prompt_ids)
    if ids[:num_prompt] != prompt_ids:
        raise ValueError(
            f"the beginning of {content} melts into one token with its prompt; strip white space"
        )
    ends = [place for place in range(num_prompt, len(ids)) if ids[place] in end_ids]
    if len(ends) != 1 or tokenizer.decode(ids[ends[0] + 1 :]).strip():
        raise ValueError(
            f"{content} has {len(ends)} end tokens in the chat template, not one at its end"
        )
    end = ends[0] + 1
    return Row(ids[:end], list(range(num_prompt, end)))


def _check_complete(marked: dict[str, Any], reply: dict[str, Any], text: str) -> None:
    """
    Raises ValueError if the rendered text lacks a part of the reply.

    marked: the reply with its special tokens marked as text.
    """
    parts = re.split("</?think>", marked["content"])
    parts += [marked[key] for key in THOUGHTS if key in marked]
    if any(part.strip() not in text for part in parts):
        raise ValueError(
            f"the chat template drops a part of {shorten_value(reply['content'])}; remove that part"
        )
    for call in reply.get("tool_calls") or []:
        if call["function"]["name"] not in text:
            raise ValueError(
                f"the chat template drops the call of {call['function']['name']}; "
                "take a model with tools"
            )


def render_conversations(
    examples: list[Example], kind: str, tokenizer: Any, facts: Any, thinking: bool
) -> list[list[Row]]:
    """
    The rows of each conversation.

    kind: the word for these conversations in error messages. facts: the `gwen.ModelConfig`.
    Raises ValueError, which names the first conversation that cannot be rendered.
    """
    end_ids = {*facts.eos_ids, tokenizer.eos_token_id}
    rendered = []
    for number, example in enumerate(examples, 1):
        try:
            rows = render_conversation(
                tokenizer,
                example,
                thinking=thinking,
                end_ids=end_ids,
                context=facts.max_position_embeddings,
            )
        except ValueError as error:
            raise ValueError(
                f"{kind} conversation {number}, {shorten_value(example['prompt'])}: {error}"
            ) from error
        rendered.append(rows)
    return rendered
