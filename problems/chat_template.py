"""
A tokenizer's chat template.

What users write stays text: "<|im_end|>" in it ends no message. Left out: which messages a task has.
"""

import contextlib
import datetime
import functools
import inspect
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from problems.examples import Example, format_error, shorten_value
from problems.messages import THOUGHTS

_day = [datetime.date.today()]  # that templates take for today


def set_template_date(day: str) -> None:
    """Makes this the day, "2026-11-23", that templates of Llama 3 and SmolLM3 take for today: a run's prompts stay."""
    _day[0] = datetime.date.fromisoformat(day)


def _dated_template(template: Any) -> dict[str, str]:
    """Where a template asks for today's date, itself with the kept day, as an argument; else none."""
    if not isinstance(template, str) or "strftime_now" not in template:
        return {}
    # in the text, as transformers turns a function among a template's variables into a string
    asked = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
    return {"chat_template": asked.sub(lambda match: repr(_day[0].strftime(match[2])), template)}


def mark_as_text(
    tokenizer: Any, messages: list[dict[str, Any]], every: bool = False
) -> list[dict[str, Any]]:
    """Messages whose special tokens `encode` takes for text; every: other control tokens too, as <tool_call>."""
    from transformers.utils.chat_template_utils import (
        mark_control_tokens,
    )  # here: importing it takes seconds

    tokens = [
        token.content for token in tokenizer.added_tokens_decoder.values() if every or token.special
    ]
    longest_first = sorted(tokens, key=len, reverse=True)
    return mark_control_tokens(
        messages, re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    )


def encode_marked(tokenizer: Any, text: str) -> list[int]:
    """The ids of rendered text. Where nothing is marked, these are the tokenizer's own."""
    from transformers.utils.chat_template_utils import encode_marked_chat

    return list(encode_marked_chat(tokenizer, text))


def render_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    thinking: bool | None,
    *,
    opened: bool = True,
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
) -> str:
    """
    Messages in the chat template, up to where the next reply begins; not `opened`: with nothing after the last.

    thinking: None is the template's own choice. tools: JSON schemas. variables: what it gets besides, a row's
    `chat_template_kwargs`; one of them may be `enable_thinking`.
    Templates that do not know a variable ignore it. Raises ValueError where the template fails, or there is none.
    """
    if not tokenizer.chat_template:
        fix = "take the instruct version of the model, or add chat_template.jinja to its folder"
        raise ValueError(f"{tokenizer.name_or_path} has no chat template, as base models; {fix}")
    if variables:
        variables = mark_as_text(tokenizer, [variables])[0]
        if taken := sorted(
            variables.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        ):
            raise ValueError(
                f"chat_template_kwargs holds {taken[0]}, which is no variable of the template; remove it"
            )
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=opened,
            **({} if thinking is None else {"enable_thinking": thinking}) | (variables or {}),
            **_dated_template(tokenizer.chat_template),
            **({"tools": tools} if tools else {}),
        )
    except Exception as error:  # a template may raise what it likes
        raise ValueError(
            f"the model's chat template refuses {shorten_value(messages)} ({format_error(error)})"
        ) from error
    return str(text)


def make_messages(prompt: Any, system: str | None) -> list[dict[str, Any]]:
    """A prompt, the user's words or chat messages, with the system message before it."""
    found = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return found if system is None else [{"role": "system", "content": system}, *found]


# ---- what a message says besides its content

# what every message may have, and what only numbers or names a call
USUAL_KEYS = ("role", "content", "tool_call_id", "weight")


def as_rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Messages as the template takes them: thoughts under the key that it has for them, else in the content.

    Raises ValueError for a key of a message, and for a tool's result, that the template does not render.
    """
    rendered = [_with_thought(tokenizer, message) for message in messages]
    for place, message in enumerate(rendered):
        for key in sorted(message.keys() - {*USUAL_KEYS, *THOUGHTS}):
            if not _is_repeated(rendered[:place], message, key):
                _refuse_unrendered(tokenizer, rendered[: place + 1], key)
        if message["role"] == "tool":
            _refuse_unrendered_result(tokenizer, rendered[: place + 1])
        if message["role"] != "assistant":
            for key in sorted(message.keys() & {*THOUGHTS}):
                _refuse_unrendered(tokenizer, rendered[: place + 1], key)
    return [
        {key: value for key, value in message.items() if key != "weight"} for message in rendered
    ]


def _with_thought(tokenizer: Any, message: dict[str, Any]) -> dict[str, Any]:
    """A reply whose thought stands where the template shows it."""
    key = next((name for name in THOUGHTS if name in message), None)
    if key is None or message["role"] != "assistant":
        return message
    thought = message[key]
    rest = {name: value for name, value in message.items() if name != key}
    template = tokenizer.chat_template
    theirs = _thought_key(tokenizer, json.dumps(template))
    if theirs:
        return rest | {theirs: thought}
    return rest | {"content": f"<think>\n{thought.strip()}\n</think>\n\n{message['content']}"}


@functools.lru_cache(maxsize=8)
def _thought_key(tokenizer: Any, template: str) -> str | None:
    """The key under which a template shows a reply's thought, None if it has none. template: for the cache."""
    question = {"role": "user", "content": "one"}
    reply = {"role": "assistant", "content": "two"}
    for key in THOUGHTS:
        with contextlib.suppress(ValueError):  # a template may refuse a key that it does not know
            if "pondered" in render_chat(
                tokenizer, [question, reply | {key: "pondered"}], True, opened=False
            ):
                return key
    return None


def _is_repeated(before: list[dict[str, Any]], message: dict[str, Any], key: str) -> bool:
    """Whether a tool's result only repeats the name of a call before it."""
    if message["role"] != "tool" or key != "name":
        return False
    calls = [call for earlier in before for call in earlier.get("tool_calls", [])]
    return any(call["function"]["name"] == message[key] for call in calls)


def _is_rendered(
    tokenizer: Any, messages: list[dict[str, Any]], without: list[dict[str, Any]]
) -> bool:
    """Whether the template renders messages otherwise than those without a part, which it may also refuse."""
    text = render_chat(tokenizer, messages, True, opened=False)
    try:
        return text != render_chat(tokenizer, without, True, opened=False)
    except ValueError:
        return True


def _refuse_unrendered(tokenizer: Any, messages: list[dict[str, Any]], key: str) -> None:
    """Raises ValueError where the template renders messages alike with and without a key of the last."""
    last = messages[-1]
    without = {name: value for name, value in last.items() if name != key}
    if not _is_rendered(tokenizer, messages, [*messages[:-1], without]):
        where = (
            f"message {len(messages)}, of role {last['role']}, has {key} {shorten_value(last[key])}"
        )
        fix = "take a model with tools" if key == "tool_calls" else "write it as content"
        raise ValueError(
            f"{where}, which the model's chat template does not render; remove it, or {fix}"
        )


def _refuse_unrendered_result(tokenizer: Any, messages: list[dict[str, Any]]) -> None:
    """Raises ValueError where the template leaves out the last message, what a tool returned."""
    if not _is_rendered(tokenizer, messages, messages[:-1]):
        where = f"message {len(messages)}, of role tool, {shorten_value(messages[-1]['content'])}"
        raise ValueError(
            f"{where}, is not rendered by the model's chat template; take a model with tools"
        )


def shared_opening(examples: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The messages that the prompts of all rows begin with, and how many system prompts, or none, they have."""
    before = [make_messages(one["prompt"], one.get("system"))[:-1] for one in examples]
    systems = {its[0]["content"] if its and its[0]["role"] == "system" else None for its in before}
    same = itertools.takewhile(
        lambda its: its.count(its[0]) == len(its), zip(*before, strict=False)
    )
    return [its[0] for its in same] if len(systems) == 1 else [], len(systems)


def encode_chat(
    tokenizer: Any,
    prompt: Any,
    *,
    system: str | None = None,
    thinking: bool | None = False,
    **how: Any,
) -> list[int]:
    """Token ids of a prompt, words or messages, up to where the reply begins; how: as `render`, tools, variables."""
    talk = as_rendered(tokenizer, make_messages(prompt, system))
    return encode_marked(
        tokenizer, render_chat(tokenizer, mark_as_text(tokenizer, talk), thinking, **how)
    )


def fix_template(tokenizer: Any, system: str | None, thinking: bool) -> str:
    """
    Makes a tokenizer's templates render, by themselves, what training did; returns what they got, in words, or "".

    Others leave `enable_thinking` out, llama.cpp passes true, mlx_lm whether there is a token <think>.
    Raises ValueError where the ids of a prompt would still not be those of training.
    """
    user, asked, front, said = make_messages("Hi", None), make_messages("Hi", system), "", []
    others = (None, True, "<think>" in tokenizer.get_vocab())
    wanted, trained = (
        encode_chat(tokenizer, asked, thinking=thinking),
        render_chat(tokenizer, asked, thinking),
    )
    if any(render_chat(tokenizer, asked, theirs) != trained for theirs in others):
        front += "{%- set enable_thinking = " + str(thinking).lower() + " %}\n"
        said.append(f"thinking {'on' if thinking else 'off'}")
    if render_chat(tokenizer, user, thinking) != trained:
        own = f"[{{'role': 'system', 'content': {json.dumps(system, ensure_ascii=False)}}}] + messages"
        front += (
            "{%- set messages = messages if messages[0]['role'] == 'system' else " + own + " %}\n"
        )
        said.append(f"the system prompt {shorten_value(system)}")
    if said:
        held = tokenizer.chat_template
        of_each = (
            {name: front + text for name, text in held.items()}
            if isinstance(held, dict)
            else front + held
        )
        tokenizer.chat_template = of_each
    if any(encode_chat(tokenizer, user, thinking=theirs) != wanted for theirs in others):
        raise ValueError(
            "no template gives other programs training's prompts; --keep-template leaves the base's"
        )
    return " and ".join(said)


def encode_prompts(
    tokenizer: Any,
    examples: Iterable[Example],
    *,
    max_tokens: int,
    context: int,
    thinking: bool,
    kind: str,
) -> list[list[int]]:
    """Ids of each example's prompt. ValueError for one without room for `max_tokens`; `kind` says of which prompts."""
    rendered = []
    for number, example in enumerate(examples, 1):
        its_own = {
            "system": example.get("system"),
            "variables": example.get("chat_template_kwargs"),
        }
        try:
            as_rendered(tokenizer, make_messages(example["prompt"], None))
        except ValueError as error:
            raise ValueError(
                f"{kind} {number}, {shorten_value(example['prompt'])}: {error}"
            ) from error
        ids = encode_chat(tokenizer, example["prompt"], thinking=thinking, **its_own)
        if len(ids) + max_tokens > context:
            passes = f"with --max-tokens {max_tokens} it passes the model's context of {context}"
            it = f"{kind} {number}, {shorten_value(example['prompt'])}, has {len(ids)} tokens"
            raise ValueError(f"{it}; {passes}; shorten it or lower --max-tokens")
        rendered.append(ids)
    return rendered
