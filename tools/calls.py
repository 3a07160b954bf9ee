"""
Tool calls: the schemas of functions, the calls in a turn, and the token ids between two turns.

mlx_lm parses the calls. Their format is that of the model's chat template:
`json_tools`: <tool_call>{"name": …, "arguments": {…}}</tool_call> (Qwen2.5, Qwen3);
`qwen3_coder`: <tool_call><function=…><parameter=…>…</parameter></function></tool_call>
(Qwen3-Coder, Qwen3.5).
A call that cannot be read becomes a `Call` with an error, and the model is shown this error. A
tool result that the model wrote itself is treated in the same way. The model's own text is never
rendered again: its token ids are kept.
This file does not cover running the calls (tools/episodes.py).
"""

import functools
import importlib
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from prompts import chat_template
from prompts.examples import format_error, shorten_value, suggest_nearest

Tool = Callable[..., Any]
Schemas = dict[str, dict[str, Any]]  # a tool's name -> its schema, as chat templates take it


class Call(NamedTuple):
    """A call in a turn. `error`: one line that says why the call cannot be run, "" if it can."""

    name: str | None
    arguments: Any
    error: str = ""


# ---- schemas


def tool_schemas(flag: str, tools: Mapping[str, Tool]) -> Schemas:
    """
    The JSON schemas of functions that have types and docstrings, by name.

    flag: the beginning of error messages. Raises ValueError with the name of a function that has no
    schema, and the reason.
    """
    from transformers.utils import get_json_schema  # imported here because it takes seconds

    schemas = {}
    for name, tool in tools.items():
        try:
            schema = dict(get_json_schema(tool))
        except Exception as error:
            fix = "give each argument a type and a line in the docstring's Args"
            if flag.startswith("--env"):
                fix += ", or begin the name with _ if the method is no tool"
            raise ValueError(
                f"{flag}: the tool {name} has no schema ({format_error(error)}); {fix}"
            ) from error
        # a decorator may have changed the function's own name
        function = schema["function"] | {"name": name}
        schemas[name] = schema | {"function": function}
    return schemas


def environment_schemas(kind: type) -> Schemas:
    """
    The schemas of an environment's tools: its public methods except reset and get_reward.

    Raises ValueError if there is no method `reset`.
    """
    if not callable(getattr(kind, "reset", None)):
        raise ValueError(
            f"--env: {kind.__name__} has no method reset, which begins an episode; add one"
        )
    tools = {}
    for name, _ in inspect.getmembers(kind, inspect.isroutine):
        if name.startswith("_") or name in ("reset", "get_reward"):
            continue
        tools[name] = getattr(kind, name)
        method = inspect.getattr_static(kind, name)
        if isinstance(method, types.FunctionType):
            # a bound method, so that `self` is not among the arguments in the schema
            tools[name] = types.MethodType(method, kind)
    return tool_schemas(f"--env {kind.__name__}", tools)


def rewards_turns(kind: type) -> bool:
    """Whether an environment's `get_reward` is called after each turn, to reward that turn."""
    return bool(getattr(kind, "reward_per_turn", False))


# ---- the calls in a turn


# a text in the chat template -> mlx_lm's parser for that format
FORMATS = {"<function=": "qwen3_coder", "<tool_call>": "json_tools"}
RESULT_TAG = "<tool_response>"  # the templates of both formats put it around a tool's result
CALL_TEXT = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


def choose_call_reader(template: str | None) -> Callable[..., Any]:
    """
    The function that parses calls in the format of a chat template.

    Raises ValueError if the template has no tools in a known format.
    """
    for mark, name in FORMATS.items():
        if mark in (template or ""):
            module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
            read_call: Callable[..., Any] = module.parse_tool_call
            return read_call
    raise ValueError(
        "the model's chat template has no tools that Gwen reads, <tool_call> or <function=…>; "
        "take Qwen2.5, Qwen3 or a later one, or demo:tools"
    )


def read_calls(text: str, read_call: Callable[..., Any], schemas: Schemas) -> list[Call]:
    """
    The calls that follow the thought of a turn, in order. Each is checked against its schema.

    If the model wrote a tool result itself, the last call is an error; see `forged_result`.
    """
    answer = text.rpartition("</think>")[2]
    calls = []
    for body, end in CALL_TEXT.findall(answer):
        try:
            calls.append(_read_call(body if end else None, read_call, schemas))
        except Exception as error:  # the model may have written anything
            calls.append(Call(None, None, f"the call cannot be read: {format_error(error)}"))
    forgery = forged_result(answer)
    if forgery:
        calls.append(Call(None, None, forgery))
    return calls


def _read_call(body: str | None, read_call: Callable[..., Any], schemas: Schemas) -> Call:
    """Parses the text of a call; the text is None if its end is missing. May raise any error."""
    parsed = None
    if body is not None:
        parsed = read_call(body.strip(), list(schemas.values()))
    if parsed is None:
        return Call(None, None, "the call has no </tool_call>")
    # Python's JSON parser accepts NaN and 1e999, but no record can hold them
    json.dumps(parsed, allow_nan=False)
    match parsed:
        case {"name": str(name), "arguments": dict(arguments)}:
            return Call(name, arguments, _find_mistake(name, arguments, schemas))
    return Call(None, None, 'the call is not {"name": "...", "arguments": {...}}')


def outside_calls(answer: str) -> list[str]:
    """The texts before, between and after a turn's calls: one text more than there are calls."""
    return CALL_TEXT.split(answer)[:: 1 + CALL_TEXT.groups]


def forged_result(answer: str) -> str:
    """
    Why a turn is refused if the model itself wrote a tool's result in it; "" for other turns.

    A forged result is inside the template's tags. Text after the last call counts as a forged
    result too, because the turn should end with the call.
    """
    texts = outside_calls(answer)
    if any(RESULT_TAG in text for text in texts):
        return (
            f"{RESULT_TAG} is what a tool gives, and no tool gave this: call one, "
            "and end the turn with the call"
        )
    if len(texts) > 1 and texts[-1].strip():
        return "text follows the last </tool_call>, before any result: end the turn with the call"
    return ""


def _find_mistake(name: str, arguments: dict[str, Any], schemas: Schemas) -> str:
    """The mistake of a call: an unknown tool, or arguments that its schema refuses; "" if none."""
    # imported here because only runs with tools need it
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    if name not in schemas:
        hint = suggest_nearest(name[:40], schemas)
        return f"there is no tool {shorten_value(name)}{hint}; the tools are {', '.join(schemas)}"
    schema = schemas[name]["function"]["parameters"]
    properties = {}
    for key, value in schema.get("properties", {}).items():
        # transformers writes `nullable`, which is not part of JSON Schema
        properties[key] = {"anyOf": [value, {"type": "null"}]} if value.get("nullable") else value
    strict_schema = schema | {"properties": properties, "additionalProperties": False}
    error = best_match(Draft202012Validator(strict_schema).iter_errors(arguments))
    return f"{name}: {error.json_path} {error.message}"[:300] if error else ""


# ---- between two turns

CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": {}}}
TURN = {"role": "assistant", "content": "", "tool_calls": [CALL]}
# a conversation that ends with a call, for rendering by the template
EXCHANGE: list[dict[str, Any]] = [{"role": "user", "content": "."}, TURN]


class TurnCodec:
    """Encodes the messages between the model's turns, and decodes the turns."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], *, thinking: bool):
        """end_ids: the model's end tokens."""
        self.tokenizer = tokenizer
        self.render = functools.partial(chat_template.render_chat, tokenizer, thinking=thinking)
        self.end_ids = set(end_ids)
        self.ends = [str(tokenizer.convert_ids_to_tokens(end_id)) for end_id in end_ids]

    def encode_between_turns(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[int]:
        """
        The token ids from a turn's end token to the beginning of the next turn.

        The end token is not included. messages: the messages between the two turns; control tokens
        in them are encoded as text. tools: schemas.
        """
        marked = chat_template.mark_as_text(self.tokenizer, messages, all_added_tokens=True)
        before = self.render(EXCHANGE, tools=tools, opened=False)
        after = self.render([*EXCHANGE, *marked], tools=tools)
        # the last end token in the rendered exchange
        place, end = max((before.rfind(end), end) for end in self.ends)
        if place < 0:
            raise ValueError(
                f"the chat template ends a turn with none of its end tokens, {', '.join(self.ends)}"
            )
        text = end.join(after.split(end)[before.count(end) :])
        return chat_template.encode_marked(self.tokenizer, text)

    def decode_turn(self, ids: Sequence[int]) -> str:
        """The text that the model wrote in a turn, without its end token."""
        content_ids = [token_id for token_id in ids if token_id not in self.end_ids]
        return str(self.tokenizer.decode(content_ids, skip_special_tokens=False))

    def shorten(self, text: str, max_tokens: int) -> str:
        """A text cut to `max_tokens` tokens. A longer text gets a line that says it was cut."""
        text = text.encode("utf-8", "replace").decode()
        shown = text[: 100 * max_tokens]  # no useful token has more than 100 characters
        encoding = self.tokenizer.backend_tokenizer.encode(shown, add_special_tokens=False)
        if len(encoding.ids) > max_tokens:
            shown = shown[: encoding.offsets[max_tokens][0]]
        if len(shown) == len(text):
            return text
        return f"{shown}\n[cut: {len(shown)} of {len(text)} characters]"


def show_with_tools(text: str, messages: list[dict[str, Any]] | None) -> str:
    """
    An answer as people read it: its text, or all turns of its conversation, calls and results.

    messages: the conversation; None if the answer is a text alone.
    """
    lines = []
    for message in messages or [{"role": "assistant", "content": text}]:
        content = message.get("content") or ""
        if content and message["role"] == "assistant":
            lines.append(content)
        elif content:
            lines.append(f"{message.get('name', message['role'])} replies: {content}")
        for call in message.get("tool_calls") or []:
            function = call["function"]
            arguments = [f"{name}={value!r}" for name, value in function["arguments"].items()]
            lines.append(f"calls {function['name']}({', '.join(arguments)})")
    return "\n".join(lines)
