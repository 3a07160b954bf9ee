"""
Makes the schemas of tools, parses the tool calls in a turn, and encodes the messages between turns.

mlx_lm parses the calls. The model's chat template decides which of two formats the calls have:
`json_tools`: <tool_call>{"name": …, "arguments": {…}}</tool_call> (Qwen2.5, Qwen3);
`qwen3_coder`: <tool_call><function=…><parameter=…>…</parameter></function></tool_call>
(Qwen3-Coder, Qwen3.5).
If a call cannot be parsed, it becomes a `ToolCall` with an error, which the model is shown. A tool
result that the model wrote itself also becomes a `ToolCall` with an error. The model's own text is
never rendered again; the token ids that it generated stay in the conversation. This file does not
cover how calls are run (tools/episodes.py).
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
from prompts.examples import did_you_mean, format_error, shorten_value
from tools.environment_state import STATE_METHODS, has_state_methods_or_raise

Tool = Callable[..., Any]
# the tool's name -> the tool's schema, in the format that chat templates expect
Schemas = dict[str, dict[str, Any]]


class ToolCall(NamedTuple):
    """A tool call that a model wrote in a turn."""

    name: str | None
    arguments: Any
    error: str = ""  # one line that says why the call cannot be run; "" if it can be run


# ---- schemas


def make_tool_schemas(flag: str, tools: Mapping[str, Tool]) -> Schemas:
    """
    The JSON schemas of tools by name, made from the tools' type annotations and docstrings.

    flag: the flag that named the tools, for error messages.

    Raises ValueError, which names the tool and the reason, if no schema can be made for a tool.
    """
    from transformers.utils import get_json_schema  # imported here because it takes seconds

    schemas = {}
    for name, tool in tools.items():
        try:
            schema = dict(get_json_schema(tool))
        except Exception as error:
            fix = "give each argument a type and a line in the docstring's Args"
            if flag.startswith("--env"):
                fix += ", or begin the name with _ if the method is not a tool"
            raise ValueError(
                f"{flag}: the tool {name} has no schema ({format_error(error)}); {fix}"
            ) from error
        # a decorator may have changed the name of the function
        function = schema["function"] | {"name": name}
        schemas[name] = schema | {"function": function}
    return schemas


def make_environment_schemas(environment_class: type) -> Schemas:
    """
    The schemas of an environment's tools by name.

    The tools are the environment's public methods, except `reset`, `get_reward` and the class
    methods `get_state` and `set_state`.

    Raises ValueError if the environment has no method `reset`.
    """
    if not callable(getattr(environment_class, "reset", None)):
        raise ValueError(
            f"--env: {environment_class.__name__} has no method reset, which begins an episode; "
            "add it"
        )
    not_tools = {"reset", "get_reward"}
    if has_state_methods_or_raise(environment_class):
        not_tools.update(STATE_METHODS)
    tools = {}
    for name, _ in inspect.getmembers(environment_class, inspect.isroutine):
        if name.startswith("_") or name in not_tools:
            continue
        tools[name] = getattr(environment_class, name)
        method = inspect.getattr_static(environment_class, name)
        if isinstance(method, types.FunctionType):
            # a bound method, so that the schema does not contain the argument `self`
            tools[name] = types.MethodType(method, environment_class)
    return make_tool_schemas(f"--env {environment_class.__name__}", tools)


def rewards_each_turn(environment_class: type) -> bool:
    """Whether the environment's `get_reward` is called after each turn, to reward that turn."""
    return bool(getattr(environment_class, "reward_per_turn", False))


# ---- the calls in a turn


# a string in the chat template -> the name of mlx_lm's parser for the template's format
FORMATS = {"<function=": "qwen3_coder", "<tool_call>": "json_tools"}
RESULT_TAG = "<tool_response>"  # the templates of both formats put this tag before a tool's result
CALL_TEXT = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


def choose_call_parser(template: str | None) -> Callable[..., Any]:
    """
    Returns mlx_lm's function that parses tool calls in the format of a chat template.

    Raises ValueError if the template does not support tools in a known format.
    """
    for mark, name in FORMATS.items():
        if mark in (template or ""):
            module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
            parse_call: Callable[..., Any] = module.parse_tool_call
            return parse_call
    raise ValueError(
        "the model's chat template has no tool calls in a format that Gwen can parse, "
        "<tool_call> or <function=…>; use Qwen2.5, Qwen3 or a later Qwen model, or demo:tools"
    )


def parse_calls(turn_text: str, parse_call: Callable[..., Any], schemas: Schemas) -> list[ToolCall]:
    """
    Parses the calls after the thought in a turn. Checks each call against its tool's schema.

    If the model wrote a tool result itself, a call with an error is added at the end.
    """
    answer = turn_text.rpartition("</think>")[2]
    calls = []
    for body, end in CALL_TEXT.findall(answer):
        try:
            calls.append(_parse_and_check_call(body if end else None, parse_call, schemas))
        except Exception as error:  # the model's text can make the parser raise anything
            calls.append(ToolCall(None, None, f"the call cannot be read: {format_error(error)}"))
    forgery = explain_forged_result(answer)
    if forgery:
        calls.append(ToolCall(None, None, forgery))
    return calls


def _parse_and_check_call(
    body: str | None, parse_call: Callable[..., Any], schemas: Schemas
) -> ToolCall:
    """
    Parses one call and checks it against its tool's schema. May raise any error.

    body: the text between the call's tags; None if the closing tag is missing.
    """
    parsed = None
    if body is not None:
        parsed = parse_call(body.strip(), list(schemas.values()))
    if parsed is None:
        return ToolCall(None, None, "the call has no </tool_call>")
    # raises for NaN and 1e999, which Python's JSON parser accepts but which JSON records cannot
    # contain
    json.dumps(parsed, allow_nan=False)
    match parsed:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments, _find_call_mistake(name, arguments, schemas))
    return ToolCall(None, None, 'the call is not {"name": "...", "arguments": {...}}')


def texts_around_calls(answer: str) -> list[str]:
    """
    The texts before, between and after the calls in a turn.

    A turn with n calls has n + 1 texts, which may be empty.
    """
    return CALL_TEXT.split(answer)[:: 1 + CALL_TEXT.groups]


def explain_forged_result(answer: str) -> str:
    """
    The error message if the model itself wrote a tool's result in a turn; "" otherwise.

    A forged result is a text in the tags that the chat template puts around a tool's result. Text
    after the last call also counts as a forged result, because a turn should end with its last
    call.
    """
    texts = texts_around_calls(answer)
    if any(RESULT_TAG in text for text in texts):
        return (
            f"{RESULT_TAG} is what a tool gives, and no tool gave this: call one, "
            "and end the turn with the call"
        )
    if len(texts) > 1 and texts[-1].strip():
        return "text follows the last </tool_call>, before any result: end the turn with the call"
    return ""


def _find_call_mistake(name: str, arguments: dict[str, Any], schemas: Schemas) -> str:
    """
    The mistake in a call, such as an unknown tool or arguments that do not match the schema.

    Returns "" if there is no mistake.
    """
    # imported here because only runs with tools need jsonschema
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    if name not in schemas:
        hint = did_you_mean(name[:40], schemas)
        return f"there is no tool {shorten_value(name)}{hint}; the tools are {', '.join(schemas)}"
    schema = schemas[name]["function"]["parameters"]
    properties = {}
    for key, value in schema.get("properties", {}).items():
        # transformers uses `nullable`, which is not part of JSON Schema
        properties[key] = {"anyOf": [value, {"type": "null"}]} if value.get("nullable") else value
    strict_schema = schema | {"properties": properties, "additionalProperties": False}
    error = best_match(Draft202012Validator(strict_schema).iter_errors(arguments))
    return f"{name}: {error.json_path} {error.message}"[:300] if error else ""


# ---- between two turns

CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": {}}}
TURN = {"role": "assistant", "content": "", "tool_calls": [CALL]}
# A conversation that ends with a call. Rendering it shows what the template writes after a turn.
EXCHANGE: list[dict[str, Any]] = [{"role": "user", "content": "."}, TURN]


class TurnCodec:
    """Encodes the messages between the model's turns, and decodes the turns themselves."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], *, thinking: bool):
        """end_ids: the ids of the model's end tokens."""
        self.tokenizer = tokenizer
        self.render = functools.partial(chat_template.render_chat, tokenizer, thinking=thinking)
        self.end_ids = set(end_ids)
        self.ends = [str(tokenizer.convert_ids_to_tokens(end_id)) for end_id in end_ids]

    def encode_between_turns(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[int]:
        """
        The token ids after a turn's end token, up to the beginning of the next turn.

        messages: the messages between the two turns; control tokens in them are encoded as plain
        text. tools: the schemas of all tools.
        """
        marked = chat_template.mark_special_tokens_as_text(
            self.tokenizer, messages, all_added_tokens=True
        )
        before = self.render(EXCHANGE, tools=tools, add_generation_prompt=False)
        after = self.render([*EXCHANGE, *marked], tools=tools)
        # the position of the last end token in the rendered exchange
        place, end = max((before.rfind(end), end) for end in self.ends)
        if place < 0:
            raise ValueError(
                f"the chat template does not end a turn with any of the model's end tokens "
                f"({', '.join(self.ends)}); use another model"
            )
        # everything in `after` that follows the last end token of `before`
        text = end.join(after.split(end)[before.count(end) :])
        return chat_template.encode_marked_text(self.tokenizer, text)

    def decode_turn(self, ids: Sequence[int]) -> str:
        """The text of a turn that the model wrote, without the end token."""
        content_ids = [token_id for token_id in ids if token_id not in self.end_ids]
        return str(self.tokenizer.decode(content_ids, skip_special_tokens=False))

    def cut_to_tokens_with_note(self, text: str, max_tokens: int) -> str:
        """
        Cuts a text to `max_tokens` tokens.

        If anything is cut off, a line is added that says so.
        """
        text = text.encode("utf-8", "replace").decode()
        shown = text[: 100 * max_tokens]  # hardly any token has more than 100 characters
        encoding = self.tokenizer.backend_tokenizer.encode(shown, add_special_tokens=False)
        if len(encoding.ids) > max_tokens:
            shown = shown[: encoding.offsets[max_tokens][0]]
        if len(shown) == len(text):
            return text
        return f"{shown}\n[cut: {len(shown)} of {len(text)} characters]"


def format_text_or_conversation(text: str, messages: list[dict[str, Any]] | None) -> str:
    """
    Formats an answer for people: its text, or all turns, calls and results of its conversation.

    messages: the messages of the conversation; None if the answer is a single text.
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
