"""
What a model may call, what it calls, and what it is told: schemas of functions, the calls in a turn by its chat
template's format, and the ids between two turns.

Two formats are read. `json`: <tool_call>{"name": …, "arguments": {…}}</tool_call> (Qwen2.5, Qwen3). `coder`:
<tool_call><function=…><parameter=…>…</parameter></function></tool_call> (Qwen3-Coder, Qwen3.5). A call that cannot be
read says why, and the model is told. Token in, token out: what the model wrote is never rendered again.
Left out: calling (episodes.py).
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flags import read_json
from problems import chat_template
from problems.examples import nearest, one_line, short

Tool = Callable[..., Any]
Schemas = dict[str, dict[str, Any]]  # name -> the function as a chat template shows it


class Call(NamedTuple):
    """A call in a turn; `error` says in a line why it cannot be made."""

    name: str | None
    arguments: Any
    error: str = ""


# ---- what may be called


def schema_of(flag: str, tool: Tool) -> dict[str, Any]:
    """The JSON schema of a typed and documented function. ValueError names the function and what it lacks."""
    from transformers.utils import get_json_schema  # here: importing it takes seconds

    name = getattr(tool, "__name__", type(tool).__name__)
    try:
        return dict(get_json_schema(tool))
    except Exception as error:
        fix = "give each argument a type and a line in the docstring's Args"
        raise ValueError(f"{flag}: the tool {name} has no schema ({one_line(error)}); {fix}") from error


def schemas_of(flag: str, tools: list[Tool]) -> Schemas:
    schemas = [schema_of(flag, tool) for tool in tools]
    return {schema["function"]["name"]: schema for schema in schemas}


def schemas_in(kind: type) -> Schemas:
    """The schemas of an environment's tools: its public methods but reset and get_reward. ValueError without reset."""
    if not callable(getattr(kind, "reset", None)):
        raise ValueError(f"--env: {kind.__name__} has no method reset, which begins an episode; add one")
    tools = []
    for name, _ in inspect.getmembers(kind, inspect.isroutine):
        if not name.startswith("_") and name not in ("reset", "get_reward"):
            method = inspect.getattr_static(kind, name)
            # bound to anything, so that its first argument is none of the model's
            is_method = isinstance(method, types.FunctionType)
            tools.append(types.MethodType(method, kind) if is_method else getattr(kind, name))
    return schemas_of(f"--env {kind.__name__}", tools)


def pays_turns(kind: type) -> bool:
    """Whether what its `get_reward` gives is of one turn."""
    return bool(getattr(kind, "reward_per_turn", False))


# ---- what is called


def format_of(template: str | None) -> str:
    """The format of calls that a chat template teaches. ValueError where it knows no tools."""
    for mark, kind in (("<function=", "coder"), ("<tool_call>", "json")):
        if mark in (template or ""):
            return kind
    raise ValueError(
        "the model's chat template has no tools that Gwen reads (<tool_call> with JSON, or with <function=…>); take "
        "Qwen2.5, Qwen3 or a later one, or demo:tools"
    )


_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def read_calls(text: str, kind: str, schemas: Schemas) -> list[Call]:
    """The calls of a turn after its thought, in order; each is checked against its schema."""
    calls = []
    for body, end in _CALL.findall(text.rpartition("</think>")[2]):
        if not end:
            calls.append(Call(None, None, "the call has no </tool_call>"))
            continue
        call = _read_json(body) if kind == "json" else _read_coder(body, schemas)
        try:
            json.dumps(call.arguments, allow_nan=False)  # Python reads NaN and 1e999, which no record can hold
        except ValueError:
            call = Call(call.name, None, "the call is not JSON: it has a number that is none, or is too large")
        calls.append(call if call.error else call._replace(error=_mistake(call, schemas)))
    return calls


def _read_json(body: str) -> Call:
    try:
        content = read_json(body)
    except ValueError as error:
        return Call(None, None, f"the call is not JSON: {one_line(error)}")
    match content:
        case {"name": str(name), "arguments": dict(arguments)}:
            return Call(name, arguments)
    return Call(None, None, 'the call is not {"name": "...", "arguments": {...}}')


def _read_coder(body: str, schemas: Schemas) -> Call:
    match = _FUNCTION.fullmatch(body)
    if match is None:
        return Call(None, None, "the call is not <function=NAME>...</function>")
    name, rest = match[1].strip(), match[2]
    properties, arguments, place = _properties(schemas.get(name)), dict[str, Any](), 0
    while part := _PARAMETER.match(rest, place):
        key, value = part[1].strip(), part[2]
        place = part.end()
        if key in arguments:
            return Call(name, None, f"the parameter {short(key)} stands twice")
        kinds = _kinds(properties.get(key, {}))
        try:
            arguments[key] = value if "string" in kinds or not kinds else read_json(value)
        except ValueError:
            arguments[key] = value  # of the wrong type, which is told
    if rest[place:].strip():
        return Call(name, None, f"what is between parameters is no parameter: {short(rest[place:].strip())}")
    return Call(name, arguments)


_TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
_TYPES |= {"array": list, "object": dict, "null": type(None)}


def _properties(schema: dict[str, Any] | None) -> dict[str, Any]:
    return schema["function"]["parameters"].get("properties", {}) if schema else {}


def _kinds(schema: dict[str, Any]) -> list[str]:
    """The JSON types that a schema allows; empty: any."""
    if "anyOf" in schema:
        each = [_kinds(one) for one in schema["anyOf"]]
        return [kind for kinds in each for kind in kinds] if all(each) else []
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    return [*kinds, "null"] if kinds and schema.get("nullable") else kinds


def _mistake(call: Call, schemas: Schemas) -> str:
    """Why no such tool is there, or its arguments are not those of its schema; empty if the call can be made."""
    name = str(call.name)
    if name not in schemas:
        return f"there is no tool {short(name)}{nearest(name[:40], schemas)}; the tools are {', '.join(schemas)}"
    properties = _properties(schemas[name])
    required = schemas[name]["function"]["parameters"].get("required", [])
    if missing := [one for one in required if one not in call.arguments]:
        return f"{name} needs the argument {missing[0]}"
    for key, value in call.arguments.items():
        if key not in properties:
            return f"{name} has no argument {short(key)}; it has {', '.join(properties) or 'none'}"
        kinds, allowed = _kinds(properties[key]), properties[key].get("enum")
        fits = any(isinstance(value, _TYPES[kind]) for kind in kinds if kind in _TYPES)
        if isinstance(value, bool):
            fits = "boolean" in kinds
        if kinds and not fits:
            return f"{name}: {key} is {short(value)}; it must be of type {' or '.join(kinds)}"
        if allowed is not None and value not in allowed:
            return f"{name}: {key} is {short(value)}; it must be one of {', '.join(map(str, allowed))}"
    return ""


def as_error(text: str) -> str:
    """What a model is told of a call that failed, one line of JSON."""
    return json.dumps({"error": text}, ensure_ascii=False)


# ---- what is told

MARK = "\ufdd0"  # no character; it stands inside what looks like a control token and is none
CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": {}}}
# a turn that ends with a call, for the template
EXCHANGE: list[dict[str, Any]] = [
    {"role": "user", "content": "."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]


class Frames:
    """Renders what a model is told between its turns. end_ids: its end tokens."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], *, thinking: bool):
        from tokenizers import Tokenizer

        self.tokenizer, self.thinking = tokenizer, thinking
        self.end_ids, self.ends = set(end_ids), [str(tokenizer.convert_ids_to_tokens(one)) for one in end_ids]
        self.control = {str(one.content): number for number, one in tokenizer.added_tokens_decoder.items()}
        longest_first = sorted(self.control, key=len, reverse=True)
        self.pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        # without added tokens: it knows no control token, so no text becomes one
        backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"added_tokens": []}
        self.plain = Tokenizer.from_str(json.dumps(backend))

    def between(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """
        The ids of messages after a turn of the model, from its end token on up to where its next turn begins.

        What the messages say stays text. It is encoded with the template's words around it in one piece, as a tokenizer
        does; only the template's control tokens are control tokens.
        """
        before = self._render(EXCHANGE, tools, opened=False)
        after = self._render([*EXCHANGE, *self._marked(messages)], tools, opened=True)
        found = [(before.rfind(end), end) for end in self.ends]
        place, end = max(found)
        if place < 0:
            raise ValueError(
                f"the model's chat template ends a turn with none of its end tokens, {', '.join(self.ends)}"
            )
        pieces = after.split(end)
        return self._encode(end.join(pieces[before.count(end) :]))

    def rewrites(self) -> bool:
        """Whether the template shows an earlier turn otherwise than it was written, for example without its thought."""
        asked, wrote = EXCHANGE[0], EXCHANGE[1] | {"content": "x"}
        told = [{"role": "tool", "name": "f", "content": "y"}, {"role": "assistant", "content": "z"}]
        later = self._render([asked, wrote, *told], None, opened=False)
        return not later.startswith(self._render([asked], None, opened=True) + "x")

    def text(self, ids: Sequence[int]) -> str:
        """What the model wrote in a turn, without its end token."""
        return str(self.tokenizer.decode([one for one in ids if one not in self.end_ids], skip_special_tokens=False))

    def cut(self, text: str, most: int) -> str:
        """At most `most` tokens of a text, and a line that says so."""
        text = text.encode("utf-8", "replace").decode()
        shown = text[: 100 * most]  # no token of use is longer
        encoded = self.plain.encode(shown, add_special_tokens=False)
        if len(encoded.ids) > most:
            shown = shown[: encoded.offsets[most][0]]
        if len(shown) == len(text):
            return text
        return f"{shown}\n[cut: {len(shown)} of {len(text)} characters]"

    def _marked(self, held: Any) -> Any:
        """The same with a mark in each text that looks like a control token."""
        if isinstance(held, str):
            return self.pattern.sub(lambda found: f"{found[0][:1]}{MARK}{found[0][1:]}", held.replace(MARK, ""))
        if isinstance(held, dict):
            return {key: self._marked(value) for key, value in held.items()}
        return [self._marked(one) for one in held] if isinstance(held, list) else held

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, opened: bool) -> str:
        return chat_template.render(self.tokenizer, messages, self.thinking, opened=opened, tools=tools)

    def _encode(self, text: str) -> list[int]:
        ids = list[int]()
        for number, piece in enumerate(self.pattern.split(text)):  # text, control token, text, …
            if number % 2:
                ids.append(self.control[piece])
            elif piece:
                ids += self.plain.encode(piece.replace(MARK, ""), add_special_tokens=False).ids
        return ids
