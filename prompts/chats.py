"""
Reads and checks conversations for supervised training, and encodes them as token ids.

The token ids before a reply are the same as those of a prompt in a rollout. A reply is trained up
to and including its end token. If the chat template renders earlier messages the same way in every
turn, a conversation becomes one row. If the template changes earlier messages (Qwen3, for example,
drops the thoughts of earlier replies), each reply becomes a separate row.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from prompts import chat_template
from prompts.data import (
    check_system_and_category,
    copy_without_null_template_variables,
    read_answer,
    read_prompt_example,
)
from prompts.examples import Example, shorten_value
from prompts.held_out import load_training_and_held_out
from prompts.messages import (
    CONVERSATIONS,
    THOUGHTS,
    check_message_order,
    check_reply_can_follow,
    conversation_column_name,
    looks_like_conversation,
    read_messages,
    read_tool_schemas,
    remove_thought,
)

# The end of a prompt for a model that can think but should not.
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"

# The columns that a conversation may use. A note lists any other columns that contain text.
COLUMNS = (
    "prompt",
    "completion",
    *CONVERSATIONS,
    "system",
    "tools",
    "split",
    "chat_template_kwargs",
)
PROBLEM = "problem"  # the key under which a conversation keeps the problem to answer


class TrainingRow(NamedTuple):
    """A row's token ids, and the positions of those ids that the model learns to write."""

    ids: list[int]
    places: list[int]


# ---- reading


def load_conversations(
    spec: str,
    columns: str | None,
    held_out_keys: Collection[str] = (),
    *,
    with_problems: bool = False,
) -> tuple[list[Any], list[Any], list[str]]:
    """
    Loads the training conversations, the held-out conversations, and notes on how they were read.

    with_problems: whether each conversation keeps, under the key PROBLEM, the problem that
    `make_problem_if_no_tools` makes from it. The other parameters are the same as in
    `load_training_and_held_out`.
    """
    return load_training_and_held_out(
        spec,
        None,
        columns,
        _read_conversation_and_problem if with_problems else read_conversation_example,
        # with problems, no column counts as unread here, because a reward may read any column
        used_columns=() if with_problems else COLUMNS,
        held_out_keys=held_out_keys,
    )


def _read_conversation_and_problem(example: Example) -> Example:
    """Reads a row's conversation, and adds the problem that is made from the row."""
    conversation = read_conversation_example(example)
    return conversation | {PROBLEM: make_problem_if_no_tools(example, conversation)}


def make_problem_if_no_tools(example: Example, conversation: Example) -> Example | None:
    """
    Turns a row into a problem: a prompt to answer, the right answer and the other columns.

    The prompt consists of the messages before the last reply that is trained. The right answer is
    the row's column `answer`, or else this reply without its thought. Returns None if the
    conversation uses tools, because no tool is called in an evaluation.

    conversation: what `read_conversation_example` returns for the row.
    """
    messages = conversation["prompt"] + conversation["completion"]
    has_tool_calls = any("tool_calls" in message for message in messages)
    if conversation["tools"] or has_tool_calls:
        return None
    place = max(
        index
        for index in range(len(conversation["prompt"]), len(messages))
        if _is_trained_reply(messages[index])
    )
    not_kept = {*CONVERSATIONS, "prompt", "completion", "system", "tools", "split"}
    columns = {name: value for name, value in example.items() if name not in not_kept}
    if example.get("answer") is None:
        columns["answer"] = remove_thought(messages[place]["content"]) or None
    return read_prompt_example({"prompt": messages[:place]} | columns)


def read_conversation_example(example: Example) -> Example:
    """
    Reads the conversation of one row of a data set.

    The returned example contains messages under `prompt` and `completion`. If the row has these two
    columns itself, the messages come from them. If the row has a conversation, `completion` begins
    with the first reply to a message of the user, and `prompt` contains the messages before this
    reply. Messages after the last reply are dropped. docs/warm-start.md lists the columns.

    Raises ValueError if the row has no valid conversation.
    """
    column = conversation_column_name(example, is_sft=True)
    if column:
        prompt, completion = _split_at_first_reply(column, example[column])
    elif example.get("completion") is not None and example.get("prompt") is not None:
        prompt = _read_prompt_or_completion("prompt", example["prompt"], "user")
        completion = _read_prompt_or_completion("completion", example["completion"], "assistant")
    else:
        raise ValueError(_explain_missing_conversation(example))

    check_system_and_category(example, prompt)
    example = copy_without_null_template_variables(example)
    if example.get("system") is not None:
        prompt = [{"role": "system", "content": example["system"]}, *prompt]
    while completion and not _is_reply(completion[-1]):
        completion = completion[:-1]
    if not completion:
        raise ValueError(
            "no message has the role assistant, so there is nothing to learn; add such a message"
        )
    check_reply_can_follow(prompt)
    check_message_order("the conversation", prompt + completion)
    if not any(map(_is_trained_reply, completion)):
        raise ValueError("all replies have weight 0, so there is nothing to learn; remove the row")
    return {
        "prompt": prompt,
        "completion": completion,
        "split": example.get("split"),
        "tools": read_tool_schemas(example.get("tools")),
        "chat_template_kwargs": example.get("chat_template_kwargs"),
    }


def _read_prompt_or_completion(
    column: str, content: Any, default_role: str
) -> list[dict[str, Any]]:
    """
    The messages in the column `prompt` or `completion`.

    A completion that is a number or an object is converted to text, just as an answer is. A single
    message that is not in a list is read as a list of one message.

    default_role: the role of the single message if the column is text.
    """
    if looks_like_conversation([content]):
        content = [content]
    if column == "completion" and isinstance(content, (int, float, dict)):
        content = read_answer(content)
    if isinstance(content, str):
        content = [{"role": default_role, "content": content}]
    if not isinstance(content, list):
        raise ValueError(
            f"{column} {shorten_value(content)} has the type {type(content).__name__}; "
            "it must be a string or chat messages"
        )
    return read_messages(column, content)


def _split_at_first_reply(
    column: str, conversation: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages before the first reply to the user, and the messages from this reply on."""
    name = "the conversation" if column in CONVERSATIONS else column
    messages = read_messages(name, conversation)
    if not any(map(_is_reply, messages)):
        raise ValueError(
            "no message has the role assistant, so there is nothing to learn; add such a message"
        )
    check_message_order("the conversation", messages)

    user_index = 0
    while messages[user_index]["role"] != "user":
        user_index += 1
    for index in range(user_index, len(messages)):
        if _is_reply(messages[index]):
            return messages[:index], messages[index:]
    raise ValueError(
        f"all replies come before message {user_index + 1}, the user's first message, but only "
        "replies after that message are learned; add a reply after it"
    )


def _explain_missing_conversation(example: Example) -> str:
    """The error message for a row that contains no conversation."""
    conversations = [name for name in example if looks_like_conversation(example[name])]
    hint = "completion=COLUMN"
    if conversations:
        hint = f"messages={conversations[0]}"
    if "instruction" in example and "output" in example:
        hint = "prompt=instruction,completion=output"
    return (
        f"no conversation, only the columns {shorten_value(list(example))}; add the column "
        "messages, or the columns prompt and completion, or name the right column with "
        f"--columns {hint}"
    )


def _is_reply(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _is_trained_reply(message: dict[str, Any]) -> bool:
    return _is_reply(message) and message.get("weight") != 0


# ---- rendering


def encode_conversation(
    tokenizer: Any, example: Example, *, thinking: bool, end_ids: Collection[int], context: int
) -> list[TrainingRow]:
    """
    Encodes a conversation as one or more rows.

    All replies are trained except replies with weight 0.
    context: the maximum number of tokens in a row.

    Raises ValueError if it is unclear which ids belong to a reply (for example because a token
    contains the end of the prompt and the beginning of the reply), if the template drops a part of
    a message, or if a row is too long.
    """
    prompt = example["prompt"]
    messages = prompt + example["completion"]
    rendered = chat_template.prepare_messages_for_template(tokenizer, messages)
    rows = []
    for place in range(len(prompt), len(messages)):
        if not _is_trained_reply(messages[place]):
            continue
        try:
            prompt_text, reply_text = _render_prompt_and_reply(
                tokenizer,
                rendered[: place + 1],
                thinking,
                tools=example.get("tools"),
                variables=example.get("chat_template_kwargs"),
            )
            content = shorten_value(rendered[place]["content"])
            row = _encode_training_row(tokenizer, prompt_text, reply_text, end_ids, content)
        except ValueError as error:
            keys = [key for key in THOUGHTS if key in messages[place]]
            hint = f" (its thought is under {keys[0]})" if keys else ""
            raise ValueError(f"{error}{hint}") from error
        if len(row.ids) > context:
            raise ValueError(
                f"it has {len(row.ids)} tokens, but the model's context has {context} tokens; "
                "shorten it"
            )
        rows.append(row)

    longest = rows[-1].ids
    if all(row.ids == longest[: len(row.ids)] for row in rows):
        return [TrainingRow(longest, [place for row in rows for place in row.places])]
    return rows


def _render_prompt_and_reply(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    thinking: bool,
    *,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any] | None,
) -> tuple[str, str]:
    """The rendered text before the last message, which is a reply, and the text of this reply."""
    reply = messages[-1]
    content = shorten_value(reply["content"])
    marked = chat_template.mark_special_tokens_as_text(tokenizer, messages)
    prompt = chat_template.render_chat(
        tokenizer, marked[:-1], thinking, tools=tools, variables=variables
    )
    text = chat_template.render_chat(
        tokenizer, marked, thinking, add_generation_prompt=False, tools=tools, variables=variables
    )

    shared = prompt if text.startswith(prompt) else prompt.removesuffix(EMPTY_THOUGHT)
    if not shared or not text.startswith(shared):
        raise ValueError(
            f"the chat template renders the messages before {content} differently with and without "
            f"this reply; remove the reply"
        )
    reply_text = text.removeprefix(shared)
    if shared != prompt and reply_text.startswith("<think>"):
        raise ValueError(
            f"{content} has a thought, but prompts forbid thoughts unless --thinking is set; set "
            f"--thinking"
        )
    _raise_if_reply_is_incomplete(marked[-1], reply, reply_text)
    return prompt, reply_text


def _encode_training_row(
    tokenizer: Any, prompt_text: str, reply_text: str, end_ids: Collection[int], quoted_reply: str
) -> TrainingRow:
    """
    Encodes a prompt and a reply as a row that ends with the reply's end token.

    quoted_reply: the reply as error messages quote it.
    """
    prompt_ids = chat_template.encode_marked_text(tokenizer, prompt_text)
    ids = chat_template.encode_marked_text(tokenizer, prompt_text + reply_text)
    num_prompt = len(prompt_ids)
    if ids[:num_prompt] != prompt_ids:
        raise ValueError(
            f"the beginning of {quoted_reply} and the end of its prompt form one token; remove "
            "white space at the beginning of the reply"
        )
    ends = [place for place in range(num_prompt, len(ids)) if ids[place] in end_ids]
    if len(ends) != 1 or tokenizer.decode(ids[ends[0] + 1 :]).strip():
        raise ValueError(
            f"the chat template renders {quoted_reply} with {len(ends)} end tokens, but a reply "
            "must have exactly one, at its end"
        )
    end = ends[0] + 1
    return TrainingRow(ids[:end], list(range(num_prompt, end)))


def _raise_if_reply_is_incomplete(
    marked_reply: dict[str, Any], reply: dict[str, Any], rendered_reply: str
) -> None:
    """
    Raises ValueError if a part of the reply is missing from the rendered text.

    marked_reply: the reply with special tokens marked as text.
    rendered_reply: the text to which the chat template rendered the reply.
    """
    parts = re.split("</?think>", marked_reply["content"])
    parts += [marked_reply[key] for key in THOUGHTS if key in marked_reply]
    if any(part.strip() not in rendered_reply for part in parts):
        raise ValueError(
            f"the chat template drops a part of {shorten_value(reply['content'])}; remove that part"
        )
    for call in reply.get("tool_calls") or []:
        if call["function"]["name"] not in rendered_reply:
            raise ValueError(
                f"the chat template drops the call of {call['function']['name']}; "
                "use a model whose template supports tools"
            )


def encode_conversations(
    examples: list[Example],
    split_name: str,
    tokenizer: Any,
    model_config: Any,
    thinking: bool,
) -> list[list[TrainingRow]]:
    """
    Encodes each conversation as a list of rows.

    split_name: "training" or "held-out", for error messages. model_config: a `gwen.ModelConfig`.
    Raises ValueError if a conversation cannot be encoded; the message names the conversation.
    """
    end_ids = {*model_config.eos_ids, tokenizer.eos_token_id}
    rendered = []
    for number, example in enumerate(examples, 1):
        try:
            rows = encode_conversation(
                tokenizer,
                example,
                thinking=thinking,
                end_ids=end_ids,
                context=model_config.max_position_embeddings,
            )
        except ValueError as error:
            raise ValueError(
                f"{split_name} conversation {number}, {shorten_value(example['prompt'])}: {error}"
            ) from error
        rendered.append(rows)
    return rendered
