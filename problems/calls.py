"""
What a model may call, what it calls, and what it is told: schemas of functions, the calls in a turn by its chat
template's format, and the ids between two turns.

mlx_lm reads the calls. `json_tools`: <tool_call>{"name": …, "arguments": {…}}</tool_call> (Qwen2.5, Qwen3).
`qwen3_coder`: <tool_call><function=…><parameter=…>…</parameter></function></tool_call> (Qwen3-Coder, Qwen3.5). A call
that cannot be read says why, and the model is told; so is a result that the model wrote itself. Token in, token out:
what the model wrote is never rendered again.
Left out: calling (episodes.py).
"""

import functools
import importlib
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from problems import chat_template
from problems.examples import format_error, shorten_value, suggest_nearest

Tool = Callable[..., Any]
Schemas = dict[str, dict[str, Any]]  # name -> the function as a chat template shows it


class Call(NamedTuple):
    """A call in a turn; `error` says in a line why it cannot be made."""

    name: str | None
    arguments: Any
    error: str = ""


# ---- what may be called


def schemas_of(flag: str, tools: Mapping[str, Tool]) -> Schemas:
    """The JSON schemas of typed and documented functions by name. ValueError names the function and what it lacks."""
    from transformers.utils import get_json_schema  # here: importing it takes seconds

    schemas = {}
    for name, tool in tools.items():
        try:
            schema = dict(get_json_schema(tool))
        except Exception as error:
            fix = "give each argument a type and a line in the docstring's Args"
            fix += ", or begin the name of what is no tool with _" * flag.startswith("--env")
            raise ValueError(
                f"{flag}: the tool {name} has no schema ({format_error(error)}); {fix}"
            ) from error
        schemas[name] = schema | {
            "function": schema["function"] | {"name": name}
        }  # a decorator may have lost it
    return schemas


def schemas_in(kind: type) -> Schemas:
    """The schemas of an environment's tools: its public methods but reset and get_reward. ValueError without reset."""
    if not callable(getattr(kind, "reset", None)):
        raise ValueError(
            f"--env: {kind.__name__} has no method reset, which begins an episode; add one"
        )
    tools = {}
    for name, _ in inspect.getmembers(kind, inspect.isroutine):
        if not name.startswith("_") and name not in ("reset", "get_reward"):
            method = inspect.getattr_static(kind, name)
            # bound to anything, so that its first argument is none of the model's
            is_method = isinstance(method, types.FunctionType)
            tools[name] = types.MethodType(method, kind) if is_method else getattr(kind, name)
    return schemas_of(f"--env {kind.__name__}", tools)


def rewards_turns(kind: type) -> bool:
    """Whether what its `get_reward` gives is of one turn."""
    return bool(getattr(kind, "reward_per_turn", False))


# ---- what is called


FORMATS = {
    "<function=": "qwen3_coder",
    "<tool_call>": "json_tools",
}  # what a chat template has -> its reader in mlx_lm
RESULT_TAG = "<tool_response>"  # what the templates of both formats put around a tool's result
CALL_TEXT = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


def choose_call_reader(template: str | None) -> Callable[..., Any]:
    """What reads the calls that a chat template teaches. ValueError where it knows no tools."""
    for mark, name in FORMATS.items():
        if mark in (template or ""):
            read: Callable[..., Any] = importlib.import_module(
                f"mlx_lm.tool_parsers.{name}"
            ).parse_tool_call
            return read
    fix = "take Qwen2.5, Qwen3 or a later one, or demo:tools"
    raise ValueError(
        f"the model's chat template has no tools that Gwen reads, <tool_call> or <function=…>; {fix}"
    )


def read_calls(text: str, read: Callable[..., Any], schemas: Schemas) -> list[Call]:
    """
    The calls of a turn after its thought, in order; each is checked against its schema.

    A result that the model wrote itself is a call that cannot be made, see `forged_result`.
    """
    calls = []
    answer = text.rpartition("</think>")[2]
    for body, end in CALL_TEXT.findall(answer):
        try:
            made = read(body.strip(), list(schemas.values())) if end else None
            json.dumps(
                made, allow_nan=False
            )  # Python reads NaN and 1e999, which no record can hold
            match made:
                case {"name": str(name), "arguments": dict(arguments)}:
                    calls.append(Call(name, arguments, _find_mistake(name, arguments, schemas)))
                case None:
                    calls.append(Call(None, None, "the call has no </tool_call>"))
                case _:
                    calls.append(
                        Call(None, None, 'the call is not {"name": "...", "arguments": {...}}')
                    )
        except Exception as error:  # the text is the model's
            calls.append(Call(None, None, f"the call cannot be read: {format_error(error)}"))
    if forgery := forged_result(answer):
        calls.append(Call(None, None, forgery))
    return calls


def outside_calls(answer: str) -> list[str]:
    """The texts before, between and behind the calls of a turn, one more than it has calls."""
    return CALL_TEXT.split(answer)[:: 1 + CALL_TEXT.groups]


def forged_result(answer: str) -> str:
    """
    What is wrong with a turn in which the model writes what only a tool can know; empty where nothing is.

    That is a result in the template's tags, and any text behind the last call: the turn should end there.
    """
    outside = outside_calls(answer)
    if any(RESULT_TAG in text for text in outside):
        return f"{RESULT_TAG} is what a tool gives, and no tool gave this: call one, and end the turn with the call"
    if len(outside) > 1 and outside[-1].strip():
        return "text follows the last </tool_call>, before any result: end the turn with the call"
    return ""


def _find_mistake(name: str, arguments: dict[str, Any], schemas: Schemas) -> str:
    """Why no such tool is there, or its arguments are not those of its schema; empty if the call can be made."""
    from jsonschema import Draft202012Validator  # here: runs without tools do without it
    from jsonschema.exceptions import best_match

    if name not in schemas:
        return f"there is no tool {shorten_value(name)}{suggest_nearest(name[:40], schemas)}; the tools are {', '.join(schemas)}"
    schema = schemas[name]["function"]["parameters"]
    properties = {  # transformers says of what may be null `nullable`, which is no word of JSON Schema
        key: {"anyOf": [one, {"type": "null"}]} if one.get("nullable") else one
        for key, one in schema.get("properties", {}).items()
    }
    strict = schema | {"properties": properties, "additionalProperties": False}
    error = best_match(Draft202012Validator(strict).iter_errors(arguments))
    return f"{name}: {error.json_path} {error.message}"[:300] if error else ""


# ---- what is told

CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": {}}}
TURN = {"role": "assistant", "content": "", "tool_calls": [CALL]}
EXCHANGE: list[dict[str, Any]] = [{"role": "user", "content": "."}, TURN]  # for the template


class Frames:
    """Renders what a model is told between its turns. end_ids: its end tokens."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], *, thinking: bool):
        self.tokenizer, self.render = (
            tokenizer,
            functools.partial(chat_template.render_chat, tokenizer, thinking=thinking),
        )
        self.end_ids, self.ends = (
            set(end_ids),
            [str(tokenizer.convert_ids_to_tokens(one)) for one in end_ids],
        )

    def encode_between_turns(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[int]:
        """The ids from a turn's end token to where the next turn begins; what the messages between say stays text."""
        before = self.render(EXCHANGE, tools=tools, opened=False)
        after = self.render(
            [*EXCHANGE, *chat_template.mark_as_text(self.tokenizer, messages, every=True)],
            tools=tools,
        )
        place, end = max((before.rfind(end), end) for end in self.ends)
        if place < 0:
            raise ValueError(
                f"the chat template ends a turn with none of its end tokens, {', '.join(self.ends)}"
            )
        return chat_template.encode_marked(
            self.tokenizer, end.join(after.split(end)[before.count(end) :])
        )

    def decode_turn(self, ids: Sequence[int]) -> str:
        """What the model wrote in a turn, without its end token."""
        return str(
            self.tokenizer.decode(
                [one for one in ids if one not in self.end_ids], skip_special_tokens=False
            )
        )

    def shorten(self, text: str, most: int) -> str:
        """At most `most` tokens of a text, and a line that says so."""
        text = text.encode("utf-8", "replace").decode()
        shown = text[: 100 * most]  # no token of use is longer
        encoded = self.tokenizer.backend_tokenizer.encode(shown, add_special_tokens=False)
        if len(encoded.ids) > most:
            shown = shown[: encoded.offsets[most][0]]
        return (
            text
            if len(shown) == len(text)
            else f"{shown}\n[cut: {len(shown)} of {len(text)} characters]"
        )


def show_with_tools(text: str, messages: list[dict[str, Any]] | None) -> str:
    """An answer; of a conversation every turn, with what it called and what that replied."""
    said = []
    for message in messages or [{"role": "assistant", "content": text}]:
        is_own, told = message["role"] == "assistant", message.get("content") or ""
        said += (
            [told if is_own else f"{message.get('name', message['role'])} replies: {told}"]
            if told
            else []
        )
        for call in message.get("tool_calls") or []:
            asked = ", ".join(
                f"{name}={value!r}" for name, value in call["function"]["arguments"].items()
            )
            said.append(f"calls {call['function']['name']}({asked})")
    return "\n".join(said)
