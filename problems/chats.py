"""
Conversations to learn from: read, checked, and rendered to rows of exactly the ids that the model will see.

A reply is trained after the ids that `chat_template.chat_ids` makes of the messages before it, from which a rollout
samples it, and up to its end token. A conversation is one row where the template only ever appends; where it rewrites
what came before (Qwen3 drops the thoughts of earlier replies), each reply is a row of its own. Left out: the loss.
"""

import contextlib
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from flags import read_json
from problems import chat_template
from problems.data import check_columns, check_messages, check_prompt
from problems.examples import Example, short

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"  # what prompts of models that think end with when they shall not


class Row(NamedTuple):
    """Token ids, and the places in them of the tokens that are trained."""

    ids: list[int]
    places: list[int]


# ---- reading


def read_chat(example: Example) -> Example:
    """
    A conversation, for `load_data`: `prompt`, messages up to the user's, and `completion`, from the first reply on.

    Its columns are those of docs/warm-start.md. What follows the last reply is dropped. ValueError names the mistake.
    """
    if example.get("completion") is not None and example.get("prompt") is not None:
        prompt, completion = (
            [{"role": role, "content": part}] if isinstance(part := example[name], str) else part
            for name, role in (("prompt", "user"), ("completion", "assistant"))
        )
    elif isinstance(messages := example.get("messages"), list):
        first = next((place for place, one in enumerate(messages) if _is_reply(one)), len(messages))
        prompt, completion = messages[:first], messages[first:]
    else:
        fix = "add messages, or prompt and completion, or name the column: --columns completion=COLUMN"
        raise ValueError(f"no conversation, only {short(list(example))}; {fix}")
    for name, part in (("prompt", prompt), ("completion", completion)):
        if not isinstance(part, list):
            raise ValueError(f"{name} {short(part)} is a {type(part).__name__}; it must be a string or chat messages")
    example = check_columns(example, prompt)
    if example.get("system") is not None:
        prompt = [{"role": "system", "content": example["system"]}, *prompt]
    while completion and not _is_reply(completion[-1]):
        completion = completion[:-1]
    if not completion:
        raise ValueError("no message of the assistant, so there is nothing to learn; add one")
    prompt, whole = check_prompt(prompt), check_messages("the conversation", prompt + completion, with_tools=True)
    how = {"tools": _tools_of(example.get("tools")), "chat_template_kwargs": example.get("chat_template_kwargs")}
    return {"prompt": prompt, "completion": whole[len(prompt) :], "split": example.get("split")} | how


def _tools_of(column: Any) -> list[dict[str, Any]] | None:
    """The JSON schemas of a column `tools`, which may hold them as JSON."""
    tools = column
    if isinstance(column, str):
        with contextlib.suppress(ValueError):
            tools = read_json(column)
    tools = tools if isinstance(tools, list) else [tools] if tools else []
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict) or not tool["function"].get("name"):
            raise ValueError(f'column tools holds {short(tool)}; write JSON schemas, {{"function": {{"name": ...}}}}')
    return tools or None


def _is_reply(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


# ---- rendering


def render(tokenizer: Any, example: Example, *, thinking: bool, end_ids: Collection[int], context: int) -> list[Row]:
    """A conversation's rows, every reply trained. ValueError where a template leaves ids open, or a row is too long."""
    prompt = example["prompt"]
    messages = prompt + example["completion"]
    how = {"tools": example.get("tools"), "variables": example.get("chat_template_kwargs")}
    replies = [place for place in range(len(prompt), len(messages)) if _is_reply(messages[place])]
    rows = []
    for place in replies:
        before, ids = _reply(tokenizer, messages[: place + 1], how, thinking, end_ids)
        if len(ids) > context:
            raise ValueError(f"it has {len(ids)} tokens, the model's context {context}; shorten it")
        rows.append(Row(ids, list(range(before, len(ids)))))
    whole = rows[-1].ids
    if all(row.ids == whole[: len(row.ids)] for row in rows):
        return [Row(whole, [place for row in rows for place in row.places])]
    return rows


def render_all(examples: list[Example], kind: str, tokenizer: Any, facts: Any, thinking: bool) -> list[list[Row]]:
    """The rows of each conversation, see `render`, for a model of these facts. ValueError names one that has none."""
    rendered, how = [], {"thinking": thinking, "context": facts.max_position_embeddings}
    how |= {"tokenizer": tokenizer, "end_ids": {*facts.eos_ids, tokenizer.eos_token_id}}
    for number, example in enumerate(examples, 1):
        try:
            rendered.append(render(example=example, **how))
        except ValueError as error:
            raise ValueError(f"{kind} conversation {number}, {short(example['prompt'])}: {error}") from error
    return rendered


def _reply(
    tokenizer: Any, messages: list[dict[str, Any]], how: dict[str, Any], thinking: bool, end_ids: Collection[int]
) -> tuple[int, list[int]]:
    """How many ids stand before the last message, a reply, and all ids up to its end token."""
    content, marked = messages[-1]["content"], chat_template.as_text(tokenizer, messages)
    prompt = chat_template.render(tokenizer, marked[:-1], thinking, **how)
    whole = chat_template.render(tokenizer, marked, thinking, opened=False, **how)
    opened = prompt if whole.startswith(prompt) else prompt.removesuffix(EMPTY_THOUGHT)
    rest = whole.removeprefix(opened)
    if len(rest) == len(whole):
        raise ValueError(f"the chat template renders the messages before {short(content)} in two ways; drop that reply")
    if opened != prompt and rest.startswith("<think>"):
        raise ValueError(f"{short(content)} has a thought, and prompts forbid thoughts without --thinking; set that")
    if any(part.strip() not in rest for part in re.split("</?think>", marked[-1]["content"])):
        raise ValueError(f"the chat template drops a part of {short(content)}; remove that part")
    for call in messages[-1].get("tool_calls") or []:
        if call["function"]["name"] not in rest:
            raise ValueError(f"the chat template drops the call of {call['function']['name']}; take a model with tools")
    before, ids = chat_template.encode(tokenizer, prompt), chat_template.encode(tokenizer, prompt + rest)
    if ids[: len(before)] != before:
        raise ValueError(f"the beginning of {short(content)} melts into one token with its prompt; strip white space")
    ends = [place for place in range(len(before), len(ids)) if ids[place] in end_ids]
    if len(ends) != 1 or tokenizer.decode(ids[ends[0] + 1 :]).strip():
        raise ValueError(f"{short(content)} has {len(ends)} end tokens in the chat template, not one at its end")
    return len(before), ids[: ends[0] + 1]
