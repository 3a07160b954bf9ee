"""
Turns messages into text and token ids with a tokenizer's chat template.

Special tokens in a user's text are encoded as plain text, so "<|im_end|>" in a message does not end
the message. The code in tasks/ chooses a task's messages, and prompts/messages.py reads users'
messages.
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

_day = [datetime.date.today()]  # the day that templates show as today's date


def set_template_date(iso_date: str) -> None:
    """
    Sets the day that chat templates show as today's date.

    The templates of Llama 3 and SmolLM3 show today's date. A run keeps the day on which it started,
    so that its prompts stay the same.
    iso_date: a date such as "2026-11-23".
    """
    _day[0] = datetime.date.fromisoformat(iso_date)


def _template_with_date_calls_replaced(template: Any) -> str | None:
    """
    The template, with each call of `strftime_now` replaced by the date from `set_template_date`.

    Returns None if the template has no such calls.
    """
    if not isinstance(template, str) or "strftime_now" not in template:
        return None
    # The day is written into the template's text because transformers would turn a function that is
    # passed as a template variable into a string.
    call = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
    return call.sub(lambda match: repr(_day[0].strftime(match[2])), template)


def mark_special_tokens_as_text(
    tokenizer: Any, messages: list[dict[str, Any]], *, all_added_tokens: bool = False
) -> list[dict[str, Any]]:
    """
    A copy of the messages, with marks that make `encode_marked_text` encode special tokens as text.

    all_added_tokens: whether to also mark control tokens that are not special, such as <tool_call>.
    """
    # imported here because it takes seconds
    from transformers.utils.chat_template_utils import mark_control_tokens

    tokens = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if all_added_tokens or token.special
    ]
    longest_first = sorted(tokens, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"  # "(?!)" matches nothing
    return mark_control_tokens(messages, re.compile(pattern))


def encode_marked_text(tokenizer: Any, text: str) -> list[int]:
    """The token ids of rendered text, in which marked special tokens are encoded as text."""
    from transformers.utils.chat_template_utils import encode_marked_chat

    return list(encode_marked_chat(tokenizer, text))


def render_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    thinking: bool | None,
    *,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
) -> str:
    """
    Renders messages with the tokenizer's chat template.

    thinking: whether the model thinks; None leaves the choice to the template.
    add_generation_prompt: whether the text ends with the beginning of the next reply. Otherwise it
        ends after the last message.
    tools: the JSON schemas of the tools.
    variables: further template variables from a row's `chat_template_kwargs`, which may include
        `enable_thinking`. Templates ignore unknown variables.

    Raises ValueError if the template fails, or if the tokenizer has no template.
    """
    template = tokenizer.chat_template
    if not template:
        raise ValueError(
            f"{tokenizer.name_or_path} has no chat template, probably because it is a base model; "
            "use the instruct version, or add chat_template.jinja to the model's folder"
        )
    if variables:
        variables = _check_and_mark_variables(tokenizer, variables)
    if thinking is not None:
        variables = {"enable_thinking": thinking} | (variables or {})
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            tools=tools or None,
            chat_template=_template_with_date_calls_replaced(template),
            **(variables or {}),
        )
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"the model's chat template cannot render {shorten_value(messages)} "
            f"({format_error(error)})"
        ) from error
    return str(text)


def _check_and_mark_variables(tokenizer: Any, variables: dict[str, Any]) -> dict[str, Any]:
    """
    Checks a row's template variables, and returns a copy with special tokens marked as text.

    Raises ValueError if a variable has the same name as a parameter of `apply_chat_template`.
    """
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    marked = mark_special_tokens_as_text(tokenizer, [variables])[0]
    reserved = sorted(marked.keys() & parameters.keys())
    if reserved:
        raise ValueError(
            f"chat_template_kwargs contains {reserved[0]}, which is not a template variable; "
            "remove it"
        )
    return marked


def make_messages(prompt: Any, system: str | None) -> list[dict[str, Any]]:
    """
    The chat messages of a prompt, preceded by a system message if `system` is not None.

    prompt: a string or chat messages.
    """
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = list(prompt)
    if system is None:
        return messages
    return [{"role": "system", "content": system}, *messages]


# ---- a message's keys besides its content

# keys that any message may have, and a key that only identifies a call
USUAL_KEYS = ("role", "content", "tool_call_id", "weight")


def prepare_messages_for_template(
    tokenizer: Any, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """
    Copies of the messages, changed so that the template can render them.

    The key `weight` is removed. Each thought moves to the key that the template uses for thoughts,
    or into the content if there is no such key.

    Raises ValueError if the template does not render a key of a message, or if it does not render a
    tool's result.
    """
    prepared = [_copy_with_thought_at_template_key(tokenizer, message) for message in messages]
    for index, message in enumerate(prepared):
        is_reply = message["role"] == "assistant"
        through_message = prepared[: index + 1]
        for key in sorted(message.keys() - {*USUAL_KEYS, *THOUGHTS}):
            if not _repeats_call_name(prepared[:index], message, key):
                _raise_if_key_is_not_rendered(tokenizer, through_message, key)
        if message["role"] == "tool":
            _raise_if_result_is_not_rendered(tokenizer, through_message)
        if not is_reply:
            for key in sorted(message.keys() & {*THOUGHTS}):
                _raise_if_key_is_not_rendered(tokenizer, through_message, key)
    return [_copy_without_key(message, "weight") for message in prepared]


def _copy_without_key(message: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != key}


def _copy_with_thought_at_template_key(tokenizer: Any, message: dict[str, Any]) -> dict[str, Any]:
    """
    A copy of a message, in which the thought of a reply is under the key that the template renders.

    If the template renders no such key, the thought is at the beginning of the content.
    """
    key = next((name for name in THOUGHTS if name in message), None)
    if key is None or message["role"] != "assistant":
        return message
    thought = message[key]
    rest = _copy_without_key(message, key)
    template_key = _find_thought_key(tokenizer, json.dumps(tokenizer.chat_template))
    if template_key:
        return rest | {template_key: thought}
    return rest | {"content": f"<think>\n{thought.strip()}\n</think>\n\n{message['content']}"}


@functools.lru_cache(maxsize=8)
def _find_thought_key(tokenizer: Any, template: str) -> str | None:
    """
    The key from which the template takes a reply's thought; None if the template has no such key.

    template: the template's text. It is a parameter only so that, if the template changes, the
        cache does not return the result for the old template.
    """
    question = {"role": "user", "content": "one"}
    for key in THOUGHTS:
        reply = {"role": "assistant", "content": "two", key: "pondered"}
        with contextlib.suppress(ValueError):  # a template may raise an error for an unknown key
            if "pondered" in render_chat(
                tokenizer, [question, reply], True, add_generation_prompt=False
            ):
                return key
    return None


def _repeats_call_name(
    earlier_messages: list[dict[str, Any]], message: dict[str, Any], key: str
) -> bool:
    """Whether a key of a tool's result only repeats the name in an earlier tool call."""
    if message["role"] != "tool" or key != "name":
        return False
    calls = [call for earlier in earlier_messages for call in earlier.get("tool_calls", [])]
    return any(call["function"]["name"] == message[key] for call in calls)


def _renders_differently(
    tokenizer: Any, messages: list[dict[str, Any]], reduced: list[dict[str, Any]]
) -> bool:
    """
    Whether the reduced messages render to a different text than the original messages.

    Returns True if the reduced messages cannot be rendered.
    """
    text = render_chat(tokenizer, messages, True, add_generation_prompt=False)
    try:
        return text != render_chat(tokenizer, reduced, True, add_generation_prompt=False)
    except ValueError:
        return True


def _raise_if_key_is_not_rendered(tokenizer: Any, messages: list[dict[str, Any]], key: str) -> None:
    """Raises ValueError if a key of the last message makes no difference to the rendered text."""
    last = messages[-1]
    if _renders_differently(tokenizer, messages, [*messages[:-1], _copy_without_key(last, key)]):
        return
    fix = "move it into the content"
    if key == "tool_calls":
        fix = "use a model whose template supports tools"
    raise ValueError(
        f"message {len(messages)}, of role {last['role']}, has {key} {shorten_value(last[key])}, "
        f"which the model's chat template does not render; remove it, or {fix}"
    )


def _raise_if_result_is_not_rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> None:
    """Raises ValueError if the template ignores the last message, which is a tool's result."""
    if not _renders_differently(tokenizer, messages, messages[:-1]):
        raise ValueError(
            f"the model's chat template does not render message {len(messages)}, of role tool, "
            f"{shorten_value(messages[-1]['content'])}; use a model whose template supports tools"
        )


# ---- prompts


def shared_opening_and_num_systems(
    examples: Iterable[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], int]:
    """
    The messages with which all prompts begin, and the number of different system prompts.

    "No system prompt" counts as a system prompt. If there are several different system prompts, the
    list of messages is empty. A prompt's last message is never included.
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
    The token ids of a prompt up to the beginning of the reply.

    prompt: a string or chat messages.
    system: a system prompt; None for no system prompt.
    thinking, tools, variables: see `render_chat`.
    """
    messages = prepare_messages_for_template(tokenizer, make_messages(prompt, system))
    marked = mark_special_tokens_as_text(tokenizer, messages)
    text = render_chat(tokenizer, marked, thinking, tools=tools, variables=variables)
    return encode_marked_text(tokenizer, text)


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

    kind: the name for these prompts in error messages.

    Raises ValueError if a prompt and `max_tokens` more tokens do not fit into the context.
    """
    encoded = []
    for number, example in enumerate(examples, 1):
        name = f"{kind} {number}, {shorten_value(example['prompt'])}"
        try:
            # checked without the system prompt, so that an error counts the user's messages
            prepare_messages_for_template(tokenizer, make_messages(example["prompt"], None))
            ids = encode_chat(
                tokenizer,
                example["prompt"],
                system=example.get("system"),
                thinking=thinking,
                variables=example.get("chat_template_kwargs"),
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if len(ids) + max_tokens > context:
            raise ValueError(
                f"{name}, has {len(ids)} tokens; with a reply of --max-tokens {max_tokens} tokens, "
                f"it does not fit into the model's context of {context} tokens; shorten the prompt "
                "or lower --max-tokens"
            )
        encoded.append(ids)
    return encoded


# ---- templates for other programs


def add_settings_to_template_and_describe(
    tokenizer: Any, system: str | None, thinking: bool
) -> str:
    """
    Makes other programs that use the tokenizer's chat templates render the same prompts as Gwen.

    Adds statements to the templates. These statements set whether the model thinks, and add the
    system prompt. Returns a description of what was added, or "" if nothing was added.

    Most other programs do not pass `enable_thinking` to a template. llama.cpp passes true; mlx_lm
    passes true if the tokenizer has a token <think>, and false otherwise.

    Raises ValueError if prompts would still have different token ids than in training.
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
        tokenizer.chat_template = _prepend_to_templates(statements, tokenizer.chat_template)

    if any(
        encode_chat(tokenizer, user_messages, thinking=choice) != training_ids
        for choice in thinking_elsewhere
    ):
        raise ValueError(
            "the chat template cannot be changed so that other programs render the same prompts "
            "as in training; set --keep-template to keep the base model's template"
        )
    return " and ".join(added)


def _prepend_to_templates(statements: str, template: str | dict[str, str]) -> str | dict[str, str]:
    """The template, or each template of a dictionary, with statements added at the beginning."""
    if isinstance(template, dict):
        return {name: statements + text for name, text in template.items()}
    return statements + template
