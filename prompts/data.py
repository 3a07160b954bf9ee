"""
Turns the records in a user's data into examples.

If a record is invalid, a one-line ValueError names the file, the line or record, the value and the
fix. This file imports neither a model nor an array library. It does not cover data files
(prompts/files.py), message layouts (prompts/messages.py), notes on surprising data
(prompts/data_notes.py), held-out examples (prompts/held_out.py), or what tasks do with examples
(tasks/).
"""

import json
import re
from collections.abc import Callable, Collection
from hashlib import sha256
from typing import Any

from flags import add_path_to_os_errors
from prompts import arrow, data_notes
from prompts.examples import RESERVED, Example, did_you_mean, format_error, shorten_value
from prompts.files import Records, note_on_removed_nulls, read_records
from prompts.messages import (
    CONVERSATIONS,
    check_message_order,
    check_reply_can_follow,
    conversation_column_name,
    looks_like_conversation,
    parse_messages_if_json,
    read_messages,
    refuse_blank_or_broken_text,
    remove_thought,
)

# common names of the prompt column in data sets, the most likely name first
PROMPT_NAMES = ("question", "instruction", "problem", "input", "query", "text")
# columns whose names have a meaning in Gwen
COLUMNS = (
    "prompt",
    "answer",
    "system",
    "category",
    "split",
    *CONVERSATIONS,
    "chat_template_kwargs",
)


# ---- all records in a data source


def load_data(
    spec: str,
    columns: str | None = None,
    read_record: Callable[[Example], Example] | None = None,
    notes: list[str] | None = None,
    used_columns: Collection[str] = (),
) -> list[Example]:
    """
    Loads the examples in --data. All examples have the same keys, with `prompt` first and None for
    missing values.

    spec, columns: see docs/data.md. A renamed column is also kept under its old name, unless the
    old name has another meaning in Gwen.
    read_record: a function that turns a record with renamed columns into an example. The default is
    `read_prompt_example`.
    notes: a list to which notes for the user are appended, one for each way in which Gwen may read
    the data differently than the user expects.
    used_columns: the columns that `read_record` uses. A note lists any other columns that contain
    text.

    Raises ValueError if a record is invalid; the message names the file, the line or record, and
    the fix.
    """
    read_record = read_record or read_prompt_example
    notes = [] if notes is None else notes
    records = read_records(spec, notes)
    for place, record in records:
        if not isinstance(record, dict):
            raise ValueError(
                f"{spec}, {place}: {shorten_value(record)} is not an object; "
                'write {"prompt": "..."}'
            )

    renamed, num_joined = _rename_columns_and_join_inputs(spec, columns, records)
    if num_joined:
        notes.append(
            f"data: in {num_joined} rows, the column input was appended to the prompt after an "
            "empty line, because the columns look like those of the Alpaca data set"
        )
    examples = []
    for place, record in renamed:
        try:
            examples.append(read_record(record))
        except ValueError as error:
            raise ValueError(f"{spec}, {place}: {error}") from error

    rows = [record for _, record in renamed]
    notes.extend(data_notes.notes_on_conversations(rows, examples))
    notes.extend(data_notes.notes_on_answers(examples))
    if used_columns:
        used = {*used_columns, *parse_old_column_by_new(columns).values()}
        if num_joined:
            used.add("input")
        unread = [name for name in data_notes.columns_with_text(rows) if name not in used]
        if unread:
            notes.append(data_notes.note_on_unread_columns(unread, "no conversation uses"))

    names = {"prompt": None}
    for example in examples:
        names |= dict.fromkeys(example)
    return [{name: example.get(name) for name in names} for example in examples]


def parse_old_column_by_new(columns: str | None) -> dict[str, str]:
    """
    Parses --columns. Returns a dictionary from Gwen's column names to the column names in the data.

    Raises ValueError if a part of --columns is not NEW=OLD, or if NEW occurs twice.
    """
    renames = dict[str, str]()
    for part in columns.split(",") if columns else []:
        names = [name.strip() for name in part.split("=", 1)]
        if len(names) < 2 or not all(names) or names[0] in renames:
            raise ValueError(
                f"--columns: {part!r} is not NEW=OLD, or NEW occurs twice; "
                "write it like prompt=question,answer=solution"
            )
        renames[names[0]] = names[1]
    return renames


def _rename_columns_and_join_inputs(
    spec: str, columns: str | None, records: Records
) -> tuple[Records, int]:
    """
    Renames columns according to --columns.

    In Alpaca data, the column `input` is appended to the prompt. Returns the new records, and the
    number of prompts to which `input` was appended.
    """
    renames = parse_old_column_by_new(columns)
    present = dict.fromkeys(name for _, record in records for name in record)
    for new_name, old_name in renames.items():
        if old_name not in present:
            hint = did_you_mean(old_name, present)
            raise ValueError(
                f"--columns {new_name}={old_name}: {spec} has no column {old_name!r}{hint}; "
                f"it has {shorten_value(list(present))}"
            )

    is_alpaca = renames.get("prompt") == "instruction" and {"input", "output"} <= present.keys()
    is_alpaca = is_alpaca and "input" not in renames.values()
    removed = {*renames} | {*renames.values()}.intersection(COLUMNS + RESERVED)
    renamed = []
    num_joined = 0
    for place, record in records:
        row = {name: value for name, value in record.items() if name not in removed}
        for new_name, old_name in renames.items():
            if old_name in record:
                row[new_name] = record[old_name]
        extra = record.get("input") if is_alpaca else None
        if isinstance(extra, str) and extra.strip() and isinstance(row.get("prompt"), str):
            row["prompt"] = f"{row['prompt']}\n\n{extra}"
            num_joined += 1
        renamed.append((place, row))
    return renamed, num_joined


def write_rows_to_cache_file(data: Any) -> tuple[str, list[str]]:
    """
    Writes rows from a user's program to a cache file whose name is a hash of the rows.

    data: rows of the types that `arrow.rows_and_num_removed_doubtful_nulls` allows. Returns the
    path of the file, and notes for the user.
    Raises ValueError if a row cannot be written as JSON.
    """
    rows, num_nulls = arrow.rows_and_num_removed_doubtful_nulls(data)
    notes = []
    if num_nulls:
        notes.append(
            note_on_removed_nulls("the rows look like those of dataset.to_list()", num_nulls)
        )
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"data: row {number}, {shorten_value(row)}, cannot be written as JSON: "
                f"{format_error(error)}"
            ) from error
        lines.append(line + "\n")

    import cpu_blas  # imported here because the processes that read answers do not need it

    text = "".join(lines)
    name = sha256(text.encode()).hexdigest()[:16]
    path = cpu_blas.make_private_or_temporary_cache() / "rows" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with add_path_to_os_errors(path):
        path.write_text(text, encoding="utf-8")
    return str(path), notes


# ---- one record


def read_prompt_example(example: Example) -> Example:
    """
    Checks an example's columns, and returns an example in which all messages have Gwen's layout.

    A row without a `prompt` may contain a conversation instead; if such a row has no `answer`, the
    last reply of the conversation becomes the answer. A row with a column `environment` needs no
    prompt; a missing prompt becomes "". If there are several right answers, `answer` is a list of
    strings.

    Raises ValueError if a column is invalid or if there is no prompt.
    """
    reserved = [name for name in RESERVED if name in example]
    if reserved:
        raise ValueError(
            f"the column {reserved[0]!r} has the name of a reward function's argument; "
            f"rename it: --columns my_{reserved[0]}={reserved[0]}"
        )
    column = conversation_column_name(example)
    if column:
        example = _split_conversation_into_prompt_and_answer(example, column)

    prompt = example.get("prompt")
    if "prompt" not in example and "environment" in example:
        prompt = ""  # the environment may supply the prompt
    if prompt is None:
        raise ValueError(_explain_missing_prompt(example))
    if isinstance(prompt, list):
        messages = read_messages("prompt", prompt)
        prompt = check_reply_can_follow([_without_weight(message) for message in messages])
    elif not isinstance(prompt, str):
        raise ValueError(
            f"prompt {shorten_value(prompt)} is a {type(prompt).__name__}; "
            "it must be a string or chat messages"
        )
    elif prompt or "prompt" in example:
        refuse_blank_or_broken_text("prompt", prompt)

    check_system_and_category(example, prompt)
    example = copy_without_null_template_variables(example) | {"prompt": prompt}
    if "answer" in example:
        example = example | {"answer": read_answer(example["answer"])}
    return example


def _split_conversation_into_prompt_and_answer(example: Example, column: str) -> Example:
    """
    Splits the conversation in a column into a prompt and, if the row has no answer, an answer.
    """
    messages = read_messages(column, example[column])
    check_message_order(column, messages)
    rest = {name: value for name, value in example.items() if name not in CONVERSATIONS}
    last = messages[-1]
    if last["role"] != "assistant":
        return rest | {"prompt": messages}
    answer = None
    if "tool_calls" not in last:
        answer = remove_thought(last["content"]) or None
    return {"answer": answer} | rest | {"prompt": messages[:-1]}


def _without_weight(message: dict[str, Any]) -> dict[str, Any]:
    """A copy of a message without its weight, because the model never learns prompt messages."""
    return {key: value for key, value in message.items() if key != "weight"}


def _explain_missing_prompt(example: Example) -> str:
    """The error message for a row without a prompt, which suggests the most likely column."""
    names = [name for name in example if name != "prompt"]
    start = f"no prompt, only the columns {shorten_value(names)}"
    conversations = [
        name for name in names if looks_like_conversation(parse_messages_if_json(example[name]))
    ]
    if conversations:
        return (
            f"{start}; name the column with the conversation: --columns messages={conversations[0]}"
        )

    texts = [
        name for name in names if isinstance(example[name], (str, list)) and name.isidentifier()
    ]
    order = [*PROMPT_NAMES, *texts]
    name = min({*texts} - {*COLUMNS}, key=order.index, default="COLUMN")
    return f"{start}; add a prompt or name its column: --columns prompt={name}"


def read_answer(answer: Any) -> str | list[str] | None:
    """
    Converts a row's answer to a string, to a list of alternative right answers, or to None if the
    answer is missing.

    A user may write several right answers as a list of strings or numbers, or in SQuAD's layout: an
    object with the keys `text` and `answer_start`, in which `text` is such a list. Any other object
    is converted to JSON text.

    Raises ValueError if a list contains anything but strings and numbers. Also raises ValueError
    for a list of single capital letters, because it is unclear whether each of them is right by
    itself or only all of them together.
    """
    has_texts = isinstance(answer, dict) and isinstance(answer.get("text"), list)
    if has_texts and answer.keys() <= {"text", "answer_start"}:
        return _read_answer_list(answer["text"])
    if isinstance(answer, dict):
        return json.dumps(answer, ensure_ascii=False)
    if isinstance(answer, list):
        if len(answer) > 1 and all(map(_is_capital_letter, answer)):
            raise ValueError(
                f"answer {shorten_value(answer)} is a list of letters, which has two possible "
                f'meanings; write {{"text": {json.dumps(answer)}}} if each letter is right by '
                f'itself, or "{", ".join(answer)}" if only all of them together are right'
            )
        return _read_answer_list(answer)
    is_missing = answer is None or answer != answer  # pandas uses nan for a missing value
    return None if is_missing else str(answer)


def _is_capital_letter(item: Any) -> bool:
    """Whether an answer is one capital letter, as in multiple choice."""
    return isinstance(item, str) and re.fullmatch("[A-Z]", item) is not None


def _is_text_or_number(item: Any) -> bool:
    return isinstance(item, (str, int, float)) and not isinstance(item, bool)


def _read_answer_list(answers: list[Any]) -> list[str] | None:
    """
    The distinct answers in a list, as strings; None if all answers are blank.

    Raises ValueError if the list contains anything but strings and numbers.
    """
    if not all(map(_is_text_or_number, answers)):
        raise ValueError(
            f"answer {shorten_value(answers)} is a list with values that are neither strings nor "
            "numbers; write it as JSON text, or rename the column: --columns answers=answer"
        )
    texts = [str(item) for item in answers if str(item).strip()]
    return list(dict.fromkeys(texts)) or None


def check_system_and_category(example: Example, prompt: Any) -> None:
    """
    Raises ValueError if an example's `system` or `category` is not text.

    Also raises ValueError if there are two system prompts, one in `system` and one in the prompt.
    """
    for name in ("system", "category"):
        if example.get(name) is not None:
            refuse_blank_or_broken_text(name, example[name])
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    has_system_message = isinstance(first, dict) and first.get("role") == "system"
    if example.get("system") is not None and has_system_message:
        raise ValueError(
            "the row has both a column system and a system message in prompt; keep one of them"
        )


def copy_without_null_template_variables(example: Example) -> Example:
    """
    A copy of an example without the template variables whose value is null.

    Arrow adds these nulls to rows that lack a variable. Raises ValueError if
    `chat_template_kwargs` is not a dictionary whose keys are strings.
    """
    variables = example.get("chat_template_kwargs")
    if variables is None:
        return example
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        raise ValueError(
            f"chat_template_kwargs {shorten_value(variables)} is a {type(variables).__name__}; "
            'write a dictionary such as {"enable_thinking": true}'
        )
    given_variables = {name: value for name, value in variables.items() if value is not None}
    return example | {"chat_template_kwargs": given_variables}
