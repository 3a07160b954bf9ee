"""
Reads users' chat messages in several layouts, and converts them to one layout: a role, a string as
the content, and other keys.

The layouts include OpenAI messages, ShareGPT turns with `from` and `value`, content that is split
into text parts, tool calls in both of OpenAI's formats, and thoughts under several keys. A message
keeps all its other keys, because only a chat template can show whether these keys are rendered.
prompts/chat_template.py refuses keys that are not rendered. This file does not cover which messages
belong to the prompt and which are learned (prompts/data.py, prompts/chats.py).
"""

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

from prompts.examples import Example, shorten_value
from text.documents import read_json

Message = dict[str, Any]

# columns that contain whole conversations
CONVERSATIONS = ("messages", "conversations")

# other names for roles, from ShareGPT and from various programs
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}
KNOWN_ROLES = ("system", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
# the keys under which chat templates expect a reply's thought
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
MEDIA = (
    "image",
    "images",
    "image_url",
    "video",
    "videos",
    "audio",
    "audios",
    "input_audio",
    "file",
    "files",
)
ENDS_OF_THOUGHT = re.compile(r".*</(?:think|thinking|thought|reasoning)>", re.DOTALL)


# ---- one message


def read_messages(label: str, messages: Any) -> list[Message]:
    """
    Reads and checks a list of messages, which may be JSON text.

    Raises ValueError if a message is invalid. label: how the error message names the list.
    """
    if isinstance(messages, str):
        messages = parse_messages_json(label, messages)
    if not isinstance(messages, list):
        raise ValueError(
            f"{label} {shorten_value(messages)} is a {type(messages).__name__}; "
            "write a list of chat messages"
        )
    if not messages:
        raise ValueError(f'{label} is an empty list; write [{{"role": "user", "content": "..."}}]')
    return [
        _read_message(f"message {place} of {label}", message)
        for place, message in enumerate(messages, 1)
    ]


def parse_messages_json(label: str, text: str) -> Any:
    """Parses JSON text that should contain messages. Raises ValueError if the text is not JSON."""
    try:
        return read_json(text)
    except ValueError as error:
        raise ValueError(
            f"{label} {shorten_value(text)} is a string but not JSON; write a list of chat messages"
        ) from error


def _read_message(label: str, message: Any) -> Message:
    """
    Checks a message and converts it to Gwen's layout. label: how error messages name the message,
    such as "message 2 of prompt".
    """
    if not isinstance(message, dict):
        raise ValueError(
            f'{label} is {shorten_value(message)}; write {{"role": "user", "content": "..."}}'
        )

    fields = {}
    for key, value in message.items():
        if key in ("content", "value") or not _is_null_or_empty(value):
            fields[key] = value
    if "role" not in fields and "from" in fields:
        fields["role"] = fields.pop("from")
    if "content" not in fields and "value" in fields:
        fields["content"] = fields.pop("value")
    elif _is_null_or_empty(fields.get("value")):
        fields.pop("value", None)

    role = _read_role(label, fields)
    has_call_key = "tool_calls" in fields or "function_call" in fields
    has_calls = has_call_key and role == "assistant"
    if "content" not in fields and not has_calls:
        raise ValueError(
            f'{label} is {shorten_value(message)}; write {{"role": "user", "content": "..."}}'
        )

    if role == "call":
        fields = _move_content_to_tool_calls(label, fields)
        role = "assistant"
    media = [key for key in MEDIA if key in fields]
    if media:
        raise ValueError(
            f"{label} has the key {media[0]}, whose value is {shorten_value(fields[media[0]])}; "
            "Gwen reads only text, so remove this key"
        )

    read: Message = {"role": role}
    calls = _read_calls(label, role, fields)
    may_be_empty = bool(calls) or role == "tool"
    read["content"] = _read_content(label, role, fields.get("content"), may_be_empty)
    if calls:
        read["tool_calls"] = calls
    if role == "assistant":
        read |= _read_thought_by_key(label, fields, read["content"])
    read |= _read_zero_weight(label, role, fields)

    done = (
        "role",
        "content",
        "tool_calls",
        "function_call",
        "weight",
        "reasoning_details",
        *THOUGHTS,
    )
    rest = {key: value for key, value in fields.items() if key not in done}
    if role != "assistant":
        thoughts = {key: fields[key] for key in ("reasoning_details", *THOUGHTS) if key in fields}
        rest |= thoughts
    return read | rest


def _is_null_or_empty(value: Any) -> bool:
    """Whether a value is null or empty, so that its key can be ignored."""
    return value is None or value in ("", [], {})


def _read_role(label: str, fields: Message) -> str:
    role = fields.get("role")
    if not isinstance(role, str):
        raise ValueError(
            f'{label} is {shorten_value(fields)}; write {{"role": "user", "content": "..."}}'
        )
    read = ROLES.get(role, role)
    if read not in (*KNOWN_ROLES, "call"):
        meant = ROLES.get(role.strip().lower(), role.strip().lower())
        known = "user, assistant or tool, or system for the first message"
        fix = f"write {meant}" if meant in KNOWN_ROLES else f"write {known}"
        raise ValueError(f"{label} has the role {shorten_value(role)}; {fix}")
    return read


# ---- content


def _read_content(label: str, role: str, content: Any, may_be_empty: bool) -> str:
    """
    The text in a message's content, which may be a string or a list of text parts. The content of a
    tool's result may be any JSON value.
    """
    content_label = f"content of {label}"
    parts = [content] if _is_content_part(content, TEXT_PARTS) else content
    # a tool's result may also be a list of objects that are not content parts
    kinds = (*TEXT_PARTS, *MEDIA) if role == "tool" else None
    if isinstance(parts, list) and any(_is_content_part(part, kinds) for part in parts):
        text = "".join(_text_of_part(content_label, part) for part in parts)
    elif role == "tool" and content is not None and not isinstance(content, str):
        text = json.dumps(content, ensure_ascii=False)
    else:
        text = "" if content is None and may_be_empty else content
    if text != "" or not may_be_empty:
        refuse_blank_or_broken_text(content_label, text)
    return str(text)


def _is_content_part(part: Any, kinds: Sequence[str] | None) -> bool:
    """
    Whether a value is a content part of one of the given types. kinds: the types; None means any
    type.

    A part without a type counts as a text part if it has the key `text`.
    """
    if not isinstance(part, dict):
        return False
    kind = part.get("type", "text" if "text" in part else None)
    return isinstance(kind, str) and (kinds is None or kind in kinds)


def _text_of_part(label: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        what = f"a part of type {shorten_value(kind)}" if kind else shorten_value(part)
        raise ValueError(f"{label} contains {what}; Gwen reads only text parts, so remove it")
    other_keys = [
        key
        for key, value in part.items()
        if key not in ("type", "text") and not _is_null_or_empty(value)
    ]
    if other_keys:
        raise ValueError(
            f"{label} contains a part with the key {shorten_value(other_keys[0])}, which Gwen does "
            "not read; remove this key"
        )
    if not isinstance(part.get("text"), str):
        raise ValueError(
            f'{label} contains {shorten_value(part)}; write {{"type": "text", "text": "..."}}'
        )
    return str(part["text"])


def refuse_blank_or_broken_text(label: str, text: Any) -> None:
    """
    Raises ValueError if a value is not a string, is blank, or has characters that a tokenizer
    refuses. label: how the error message names the value.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"{label} {shorten_value(text)} is a {type(text).__name__}; write a string"
        )
    if not text.strip():
        raise ValueError(f"{label} is empty; write some text")
    if re.search("[\ud800-\udfff]", text):
        raise ValueError(
            f"{label} {shorten_value(text)} contains half of a surrogate pair, which is not a "
            "character; remove it"
        )
    if "\0" in text:
        raise ValueError(
            f"{label} {shorten_value(text)} contains a NUL character, perhaps because the file is "
            "in UTF-16; remove it"
        )


# ---- calls


def _move_content_to_tool_calls(label: str, fields: Message) -> Message:
    """
    Converts a ShareGPT turn with the role `function_call`, whose content is tool calls in JSON, to
    a reply with `tool_calls`.
    """
    value = fields.get("content")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = read_json(value)
    return fields | {"content": None, "tool_calls": value}


def _read_calls(label: str, role: str, fields: Message) -> list[Message]:
    """The tool calls in a reply's key `tool_calls`, or in OpenAI's older key `function_call`."""
    if "function_call" in fields and "tool_calls" in fields:
        raise ValueError(f"{label} has both tool_calls and function_call; keep one of them")
    key = "function_call" if "function_call" in fields else "tool_calls"
    calls = fields.get(key)
    if not calls:
        return []
    if role != "assistant":
        raise ValueError(
            f"{label} has the role {role} and {key}, but only the assistant calls tools; "
            f"remove {key}"
        )
    if isinstance(calls, str):
        with contextlib.suppress(ValueError):
            calls = read_json(calls)
    if not isinstance(calls, list):
        calls = [calls]
    return [_read_call(label, key, call) for call in calls]


def _read_call(label: str, key: str, call: Any) -> Message:
    """
    Converts a tool call to Gwen's layout, in which the arguments are a dictionary. In the user's
    data, the arguments may also be JSON text.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = read_json(arguments)
    if not name or not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(
            f"{key} of {label} contains {shorten_value(call)}, which is not a valid tool call; "
            'write it as {"function": {"name": "...", "arguments": {...}}}'
        )
    read = {"type": "function", "function": {"name": name, "arguments": arguments}}
    call_id = call.get("id") if "function" in call else None
    return {"id": call_id} | read if isinstance(call_id, str) and call_id else read


def read_tool_schemas(tools_column: Any) -> list[dict[str, Any]] | None:
    """
    The JSON schemas in a row's column `tools`; None if there are no schemas.

    The column may be a list or JSON text. Each item may be a schema, or an object with a schema
    under the key "function".
    """
    tools = tools_column
    if isinstance(tools_column, str):
        with contextlib.suppress(ValueError):
            tools = read_json(tools_column)
    if not isinstance(tools, list):
        tools = [tools] if tools else []
    read = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise ValueError(
                f"the column tools contains {shorten_value(tool)}; "
                'write JSON schemas, {"function": {"name": ...}}'
            )
        read.append(tool if "function" in tool else {"type": "function", "function": tool})
    return read or None


# ---- thoughts and weights


def _read_thought_by_key(label: str, fields: Message, content: str) -> dict[str, str]:
    """
    A dictionary with a reply's thought under the key that the user chose. The dictionary is empty
    if there is no thought, or if the content already contains the thought.
    """
    thoughts = {key: fields[key] for key in THOUGHTS if key in fields}
    if "reasoning_details" in fields:
        details = _text_of_reasoning_details(label, fields["reasoning_details"])
        thoughts = thoughts or {"reasoning": details}
    for key, thought in thoughts.items():
        refuse_blank_or_broken_text(f"{key} of {label}", thought)
    if not thoughts:
        return {}
    if len({thought.strip() for thought in thoughts.values()}) > 1:
        raise ValueError(
            f"{label} has different thoughts in {' and '.join(thoughts)}; keep one of them"
        )

    key, thought = next(iter(thoughts.items()))
    if "</think>" in content:
        if thought.strip() in content:
            return {}
        raise ValueError(
            f"{label} has a thought in its content and another in {key}; keep one of them"
        )
    return {key: thought}


def _text_of_reasoning_details(label: str, details: Any) -> str:
    """Joins the texts in OpenRouter's `reasoning_details`."""
    texts = []
    for detail in details if isinstance(details, list) else [details]:
        text = detail.get("text") or detail.get("summary") if isinstance(detail, dict) else None
        if not isinstance(text, str):
            raise ValueError(
                f"reasoning_details of {label} contains {shorten_value(detail)}, which has no "
                "text; remove it"
            )
        texts.append(text)
    return "\n".join(texts)


def _read_zero_weight(label: str, role: str, fields: Message) -> dict[str, int]:
    """
    A dictionary with the weight 0 if a reply should not be trained; otherwise an empty dictionary.

    The default weight is 1. Raises ValueError for any weight other than 0 and 1.
    """
    if "weight" not in fields:
        return {}
    weight = fields["weight"]
    is_plain = isinstance(weight, (int, float)) and weight in (0, 1)
    if not is_plain or (role != "assistant" and weight == 1):
        raise ValueError(
            f"{label} has the role {role} and the weight {shorten_value(weight)}; "
            "use weights only for replies: 1, or 0 for a reply that should not be trained"
        )
    return {"weight": 0} if role == "assistant" and weight == 0 else {}


def remove_thought(reply_text: str) -> str:
    """The text of a reply without the thought at its beginning."""
    if ENDS_OF_THOUGHT.match(reply_text):
        return ENDS_OF_THOUGHT.sub("", reply_text).strip()
    return reply_text


# ---- the order of messages


def check_message_order(label: str, messages: list[Message]) -> None:
    """
    Raises ValueError if the messages are in an impossible order.

    Only the first message may be a system message, a tool's result must come after a reply, and at
    least one message must be from the user. label: how the error message names the list.
    """
    has_reply = False
    for place, message in enumerate(messages, 1):
        message_label = f"message {place} of {label}"
        if message["role"] == "system" and place > 1:
            raise ValueError(
                f"{message_label} has the role 'system'; use this role only for the first message"
            )
        if message["role"] == "tool" and not has_reply:
            raise ValueError(
                f"{message_label} has the role 'tool', but no reply comes before it; remove the "
                "message"
            )
        has_reply = has_reply or message["role"] == "assistant"
    if not any(message["role"] == "user" for message in messages):
        first = messages[0]["role"]
        raise ValueError(
            f"message 1 of {label} has the role {first!r}, and no message has the role 'user'; "
            "add a message with the role 'user'"
        )


def check_reply_can_follow(messages: list[Message], label: str = "prompt") -> list[Message]:
    """
    Returns the messages unchanged if a reply can follow them.

    Raises ValueError if the order is impossible, or if the last message is neither from the user
    nor a tool's result.
    """
    check_message_order(label, messages)
    if messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(
            f"the last message of {label} has the role {messages[-1]['role']!r}; "
            "end with a message of the user or a tool"
        )
    return messages


def looks_like_conversation(value: Any) -> bool:
    """Whether a value looks like a list of messages in any layout."""
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and bool({"role", "from"} & {*value[0]})
    )


def parse_messages_if_json(value: Any) -> Any:
    """
    If a value is JSON text with a list of messages, returns this list. Returns any other value
    unchanged.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            items = read_json(value)
            if looks_like_conversation(items):
                return items
    return value


def conversation_column_name(example: Example, *, is_sft: bool = False) -> str | None:
    """
    The name of the column with a row's whole conversation; None if there is no such column, or if
    the row has a separate prompt.

    is_sft: whether the row is for supervised fine-tuning. If true, a prompt without a completion
    does not count as a separate prompt, because some data sets repeat the first message of the
    conversation in the column `prompt`. If there is no other conversation, a prompt that is a list
    is itself the conversation. If false, a prompt counts as a separate prompt, unless it is a
    ShareGPT conversation that ends with a reply.
    """
    column = next((name for name in CONVERSATIONS if example.get(name) is not None), None)
    prompt = example.get("prompt")
    if prompt is None:
        return column
    if example.get("completion") is not None:
        return None
    if is_sft:
        return column or ("prompt" if isinstance(prompt, list) else None)
    is_sharegpt = looks_like_conversation(prompt) and "from" in prompt[0]
    if is_sharegpt and standard_role_or_empty(prompt[-1]) == "assistant":
        return "prompt"
    return None


def standard_role_or_empty(message: Any) -> str:
    """The role of a message in any layout; "" if the message has no role."""
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return ROLES.get(role, role) if isinstance(role, str) else ""
