"""
Applies a tokenizer's chat template: turns messages into text and token ids.

Special tokens that users write stay text: "<|im_end|>" in a message does not end the message. This
file does not cover which messages a task has (tasks/) or how users' messages are read
(prompts/messages.py).
"""

import contextlib
import datetime
import functools
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from prompts.examples import Example, format_error, shorten_value
from prompts.messages import THOUGHTS

_day = [datetime.date.today()]  # the day that templates use as today


def set_template_date(day: str) -> None:
    """
    Sets the day that templates use as today.

    day: a date such as "2026-11-23". The templates of Llama 3 and SmolLM3 show it. A run keeps its
    first day, so that its prompts stay the same.
    """
    _day[0] = datetime.date.fromisoformat(day)


def _dated_template(template: Any) -> str | None:
    """The template with the day that was set as today's date; None if it shows no date."""
    if not isinstance(template, str) or "strftime_now" not in template:
        return None
    # The day is put into the template's text, since transformers turns a function among the
    # template's variables into a string.
    call = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
    return call.sub(lambda match: repr(_day[0].strftime(match[2])), template)


def mark_as_text(
    tokenizer: Any, messages: list[dict[str, Any]], *, all_added_tokens: bool = False
) -> list[dict[str, Any]]:
    """
    Returns messages whose special tokens are marked, so that `encode_marked` reads them as text.

    all_added_tokens: also mark control tokens that are not special, such as <tool_call>.
    """
    # here: importing it takes seconds
    from transformers.utils.chat_template_utils import mark_control_tokens

    tokens = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if all_added_tokens or token.special
    ]
    longest_first = sorted(tokens, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"  # the last matches nothing
    return mark_control_tokens(messages, re.compile(pattern))


def encode_marked(tokenizer: Any, text: str) -> list[int]:
    """The token ids of rendered text. For text without marks, the tokenizer gives the same ids."""
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
    Renders messages with the chat template, up to the beginning of the next reply.

    thinking: None leaves the choice to the template. opened: whether the text opens the next reply;
    if false, the text ends with the last message. tools: JSON schemas. variables: further template
    variables, from a row's `chat_template_kwargs`; `enable_thinking` may be among them. A template
    ignores variables that it does not know.

    Raises ValueError if the template fails, or if the tokenizer has none.
    """
    template = tokenizer.chat_template
    if not template:
        raise ValueError(
            f"{tokenizer.name_or_path} has no chat template, as base models; take the instruct "
            "version of the model, or add chat_template.jinja to its folder"
        )
    if variables:
        variables = _check_variables(tokenizer, variables)
    if thinking is not None:
        variables = {"enable_thinking": thinking} | (variables or {})
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=opened,
            tools=tools or None,
            chat_template=_dated_template(template),
            **(variables or {}),
        )
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"the model's chat template refuses {shorten_value(messages)} ({format_error(error)})"
        ) from error
    return str(text)


def _check_variables(tokenizer: Any, variables: dict[str, Any]) -> dict[str, Any]:
    """
    A row's template variables, with special tokens marked as text.

    Raises ValueError if a variable has the name of a parameter.
    """
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    marked = mark_as_text(tokenizer, [variables])[0]
    reserved = sorted(marked.keys() & parameters.keys())
    if reserved:
        raise ValueError(
            f"chat_template_kwargs holds {reserved[0]}, which is no variable of the template; "
            "remove it"
        )
    return marked


def make_messages(prompt: Any, system: str | None) -> list[dict[str, Any]]:
    """
    The chat messages of a prompt, after the system message if one is given.

    prompt: a text or messages.
    """
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = list(prompt)
    if system is None:
        return messages
    return [{"role": "system", "content": system}, *messages]


# ---- a message's keys besides its content

# keys that every message may have, and keys that only number or name a call
USUAL_KEYS = ("role", "content", "tool_call_id", "weight")


def prepare_messages(tokenizer: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Messages for the template: each thought is under the template's key for it, or in the content.

    Raises ValueError if the template does not render one of a message's keys, or a tool's result.
    """
    prepared = [_place_thought(tokenizer, message) for message in messages]
    for place, message in enumerate(prepared):
        is_reply = message["role"] == "assistant"
        through_message = prepared[: place + 1]
        for key in sorted(message.keys() - {*USUAL_KEYS, *THOUGHTS}):
            if not _repeats_call_name(prepared[:place], message, key):
                _refuse_unrendered(tokenizer, through_message, key)
        if message["role"] == "tool":
            _refuse_unrendered_result(tokenizer, through_message)
        if not is_reply:
            for key in sorted(message.keys() & {*THOUGHTS}):
                _refuse_unrendered(tokenizer, through_message, key)
    return [_remove_key(message, "weight") for message in prepared]


def _remove_key(message: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != key}


def _place_thought(tokenizer: Any, message: dict[str, Any]) -> dict[str, Any]:
    """The message, with a reply's thought moved to the place that the template shows."""
    key = next((name for name in THOUGHTS if name in message), None)
    if key is None or message["role"] != "assistant":
        return message
    thought = message[key]
    rest = _remove_key(message, key)
    template_key = _thought_key(tokenizer, json.dumps(tokenizer.chat_template))
    if template_key:
        return rest | {template_key: thought}
    return rest | {"content": f"<think>\n{thought.strip()}\n</think>\n\n{message['content']}"}


@functools.lru_cache(maxsize=8)
def _thought_key(tokenizer: Any, template: str) -> str | None:
    """
    The template's key for a reply's thought; None if the template has no such key.

    template: the template's text, so that the cache tells changed templates apart.
    """
    question = {"role": "user", "content": "one"}
    for key in THOUGHTS:
        reply = {"role": "assistant", "content": "two", key: "pondered"}
        with contextlib.suppress(ValueError):  # a template may refuse a key that it does not know
            if "pondered" in render_chat(tokenizer, [question, reply], True, opened=False):
                return key
    return None


def _repeats_call_name(
    earlier_messages: list[dict[str, Any]], message: dict[str, Any], key: str
) -> bool:
    """Whether this key of a tool's result only repeats the name of an earlier call."""
    if message["role"] != "tool" or key != "name":
        return False
    calls = [call for earlier in earlier_messages for call in earlier.get("tool_calls", [])]
    return any(call["function"]["name"] == message[key] for call in calls)


def _changes_text(
    tokenizer: Any, messages: list[dict[str, Any]], reduced: list[dict[str, Any]]
) -> bool:
    """Whether reduced messages render to a different text, or the template refuses them."""
    text = render_chat(tokenizer, messages, True, opened=False)
    try:
        return text != render_chat(tokenizer, reduced, True, opened=False)
    except ValueError:
        return True


def _refuse_unrendered(tokenizer: Any, messages: list[dict[str, Any]], key: str) -> None:
    """Raises ValueError if this key in the last message makes no difference to the text."""
    last = messages[-1]
    if _changes_text(tokenizer, messages, [*messages[:-1], _remove_key(last, key)]):
        return
    fix = "take a model with tools" if key == "tool_calls" else "write it as content"
    raise ValueError(
        f"message {len(messages)}, of role {last['role']}, has {key} {shorten_value(last[key])}, "
        f"which the model's chat template does not render; remove it, or {fix}"
    )


def _refuse_unrendered_result(tokenizer: Any, messages: list[dict[str, Any]]) -> None:
    """Raises ValueError if the template leaves out the last message, which is a tool's result."""
    if not _changes_text(tokenizer, messages, messages[:-1]):
        raise ValueError(
            f"message {len(messages)}, of role tool, {shorten_value(messages[-1]['content'])}, is "
            "not rendered by the model's chat template; take a model with tools"
        )


# ---- prompts


def shared_opening(examples: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """
    The messages with which every row's prompt begins. The last message is never one of them.

    Also returns the number of different system prompts. A missing system prompt counts as one. The
    list of messages is empty unless that number is 1.
    """
    openings = [
        make_messages(example["prompt"], example.get("system"))[:-1] for example in examples
    ]
    systems = set()
    for opening in openings:
        has_system = bool(opening) and opening[0]["role"] == "system"
        systems.add(opening[0]["content"] if has_system else None)

    shared: list[dict[str, Any]] = []
    if len(systems) == 1:
        for messages in zip(*openings, strict=False):
            if messages.count(messages[0]) < len(messages):
                break
            shared.append(messages[0])
    return shared, len(systems)


def encode_chat(
    tokenizer: Any,
    prompt: Any,
    *,
    system: str | None = None,
    thinking: bool | None = False,
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """
    The token ids of a prompt, up to the beginning of the reply.

    prompt: a text or messages. The other parameters are those of `render_chat`.
    """
    messages = prepare_messages(tokenizer, make_messages(prompt, system))
    marked = mark_as_text(tokenizer, messages)
    text = render_chat(tokenizer, marked, thinking, tools=tools, variables=variables)
    return encode_marked(tokenizer, text)


def encode_prompts(
    tokenizer: Any,
    examples: Iterable[Example],
    *,
    max_tokens: int,
    context: int,
    thinking: bool,
    kind: str,
) -> list[list[int]]:
    """
    The token ids of each example's prompt.

    kind: the word for these prompts in error messages.
    Raises ValueError if a prompt leaves no room for `max_tokens` more tokens in the context.
    """
    encoded = []
    for number, example in enumerate(examples, 1):
        name = f"{kind} {number}, {shorten_value(example['prompt'])}"
        try:
            prepare_messages(tokenizer, make_messages(example["prompt"], None))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        ids = encode_chat(
            tokenizer,
            example["prompt"],
            system=example.get("system"),
            thinking=thinking,
            variables=example.get("chat_template_kwargs"),
        )
        if len(ids) + max_tokens > context:
            raise ValueError(
                f"{name}, has {len(ids)} tokens; with --max-tokens {max_tokens} it passes the "
                f"model's context of {context}; shorten it or lower --max-tokens"
            )
        encoded.append(ids)
    return encoded


# ---- templates for other programs


def fix_template(tokenizer: Any, system: str | None, thinking: bool) -> str:
    """
    Changes a tokenizer's templates so that other programs render prompts as in training.

    Most other programs do not pass `enable_thinking`. llama.cpp passes true, and mlx_lm passes
    whether the tokenizer has a token <think>. Returns a description of the additions, or "".
    Raises ValueError if a prompt's ids would still differ from those in training.
    """
    user_messages = make_messages("Hi", None)
    training_messages = make_messages("Hi", system)
    thinking_elsewhere = (None, True, "<think>" in tokenizer.get_vocab())
    training_ids = encode_chat(tokenizer, training_messages, thinking=thinking)
    training_text = render_chat(tokenizer, training_messages, thinking)

    statements = ""
    added = []
    if any(
        render_chat(tokenizer, training_messages, choice) != training_text
        for choice in thinking_elsewhere
    ):
        statements += "{%- set enable_thinking = " + str(thinking).lower() + " %}\n"
        added.append("thinking on" if thinking else "thinking off")
    if render_chat(tokenizer, user_messages, thinking) != training_text:
        content = json.dumps(system, ensure_ascii=False)
        with_system = f"[{{'role': 'system', 'content': {content}}}] + messages"
        condition = "messages[0]['role'] == 'system'"
        statements += (
            "{%- set messages = messages if " + condition + " else " + with_system + " %}\n"
        )
        added.append(f"the system prompt {shorten_value(system)}")
    if added:
        tokenizer.chat_template = _prepend(statements, tokenizer.chat_template)

    if any(
        encode_chat(tokenizer, user_messages, thinking=choice) != training_ids
        for choice in thinking_elsewhere
    ):
        raise ValueError(
            "no template gives other programs the prompts of training; "
            "--keep-template leaves the base's"
        )
    return " and ".join(added)


def _prepend(statements: str, template: str | dict[str, str]) -> str | dict[str, str]:
    """A template, or a dictionary of templates, with these statements put before each template."""
    if isinstance(template, dict):
        return {name: statements + text for name, text in template.items()}
    return statements + template
