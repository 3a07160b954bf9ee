"""
Turns the records of a user's data source into examples.

An invalid record raises a one-line ValueError that names the file, the place, the value and the
fix. This file needs no model and no array library. It does not cover files (prompts/files.py),
message layouts (prompts/messages.py), notes on odd data (prompts/data_notes.py), the held-out side
(prompts/held_out.py), or the use of examples in tasks (tasks/).
"""

import json
import re
from collections.abc import Callable, Collection
from hashlib import sha256
from typing import Any

from flags import names_path
from prompts import arrow, data_notes
from prompts.examples import RESERVED, Example, format_error, shorten_value, suggest_nearest
from prompts.files import Records, describe_nulls, read_records
from prompts.messages import (
    CONVERSATIONS,
    check_order,
    check_prompt,
    check_text,
    conversation_column_name,
    is_conversation,
    parse_messages,
    read_messages,
    remove_thought,
)

# names that other data sets give the prompt column, the likeliest first
PROMPT_NAMES = ("question", "instruction", "problem", "input", "query", "text")
# columns with a meaning
COLUMNS = (
    "prompt",
    "answer",
    "system",
    "category",
    "split",
    *CONVERSATIONS,
    "chat_template_kwargs",
)


# ---- all records of a source


def load_data(
    spec: str,
    columns: str | None = None,
    read: Callable[[Example], Example] | None = None,
    notes: list[str] | None = None,
    read_columns: Collection[str] = (),
) -> list[Example]:
    """
    The examples in --data. All have the same keys, `prompt` first, with None for missing values.

    spec, columns: as in docs/data.md. A renamed column keeps both names, unless the old name has
    another meaning here.
    read: turns a renamed record into an example; default `read_prompt`.
    notes: a list that gets a line for everything that was read in an unexpected way.
    read_columns: the columns that `read` uses. A note names other columns that hold text.

    Raises ValueError, which names the file, the line or record, and the fix.
    """
    read = read or read_prompt
    notes = [] if notes is None else notes
    records = read_records(spec, notes)
    for place, record in records:
        if not isinstance(record, dict):
            raise ValueError(
                f"{spec}, {place}: {shorten_value(record)} is not an object; "
                'write {"prompt": "..."}'
            )

    renamed, num_joined = _rename_columns(spec, columns, records)
    if num_joined:
        notes.append(
            f"data: in {num_joined} rows the column input is appended to the prompt, "
            "after an empty line, as Alpaca means it"
        )
    examples = []
    for place, record in renamed:
        try:
            examples.append(read(record))
        except ValueError as error:
            raise ValueError(f"{spec}, {place}: {error}") from error

    rows = [record for _, record in renamed]
    notes.extend(data_notes.describe_conversations(rows, examples))
    notes.extend(data_notes.describe_answers(examples))
    if read_columns:
        used = {*read_columns, *parse_renames(columns).values()}
        if num_joined:
            used.add("input")
        unread = [name for name in data_notes.text_columns(rows) if name not in used]
        if unread:
            notes.append(data_notes.describe_unread_columns(unread, "no conversation uses"))

    names = {"prompt": None}
    for example in examples:
        names |= dict.fromkeys(example)
    return [{name: example.get(name) for name in names} for example in examples]


def parse_renames(columns: str | None) -> dict[str, str]:
    """The renamed columns in --columns: Gwen's name -> the name in the data."""
    renames = dict[str, str]()
    for part in columns.split(",") if columns else []:
        names = [name.strip() for name in part.split("=", 1)]
        if len(names) < 2 or not all(names) or names[0] in renames:
            raise ValueError(
                f"--columns: {part!r} is not NEW=OLD, each NEW once; "
                "write prompt=question,answer=answer"
            )
        renames[names[0]] = names[1]
    return renames


def _rename_columns(spec: str, columns: str | None, records: Records) -> tuple[Records, int]:
    """
    The records with columns renamed according to --columns.

    Also returns the number of prompts to which an Alpaca row's column `input` was appended.
    """
    renames = parse_renames(columns)
    present = dict.fromkeys(name for _, record in records for name in record)
    for new_name, old_name in renames.items():
        if old_name not in present:
            hint = suggest_nearest(old_name, present)
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


def cache_rows(data: Any) -> tuple[str, list[str]]:
    """
    Writes a program's rows to a cache file, whose name is a hash of the rows.

    data: see `arrow.rows_of_program`. Returns the path for `load_data`, and notes.
    Raises ValueError for a row that JSON cannot hold.
    """
    rows, num_nulls = arrow.rows_of_program(data)
    notes = []
    if num_nulls:
        notes.append(
            describe_nulls("the rows have the form that dataset.to_list() gives", num_nulls)
        )
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"data: row {number}, {shorten_value(row)}, is not JSON: {format_error(error)}"
            ) from error
        lines.append(line + "\n")

    import cpu_blas  # here: a worker that reads answers does not need it

    text = "".join(lines)
    name = sha256(text.encode()).hexdigest()[:16]
    path = cpu_blas.cache_directory() / "rows" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with names_path(path):
        path.write_text(text, encoding="utf-8")
    return str(path), notes


# ---- one record


def read_prompt(example: Example) -> Example:
    """
    A checked example: a prompt, with messages in one layout, and the checked other columns.

    A row without a `prompt` may hold a conversation. The conversation's last reply becomes the
    `answer` if the row has none. A row with a column `environment` needs no prompt; a missing one
    becomes "". An `answer` with several texts is a list in which each text is right.
    """
    reserved = [name for name in RESERVED if name in example]
    if reserved:
        raise ValueError(
            f"column {reserved[0]!r} is an argument of rewards; "
            f"rename it: --columns my_{reserved[0]}={reserved[0]}"
        )
    column = conversation_column_name(example)
    if column:
        example = _split_conversation(example, column)

    prompt = example.get("prompt")
    if "prompt" not in example and "environment" in example:
        prompt = ""  # the environment may give it
    if prompt is None:
        raise ValueError(_explain_missing_prompt(example))
    if isinstance(prompt, list):
        messages = read_messages("prompt", prompt)
        prompt = check_prompt([_remove_weight(message) for message in messages])
    elif not isinstance(prompt, str):
        raise ValueError(
            f"prompt {shorten_value(prompt)} is a {type(prompt).__name__}; "
            "it must be a string or chat messages"
        )
    elif prompt or "prompt" in example:
        check_text("prompt", prompt)

    example = check_columns(example, prompt) | {"prompt": prompt}
    if "answer" in example:
        example = example | {"answer": read_answer(example["answer"])}
    return example


def _split_conversation(example: Example, column: str) -> Example:
    """Splits a column's conversation into the prompt and, if the row has no answer, the answer."""
    messages = read_messages(column, example[column])
    check_order(column, messages)
    rest = {name: value for name, value in example.items() if name not in CONVERSATIONS}
    last = messages[-1]
    if last["role"] != "assistant":
        return rest | {"prompt": messages}
    answer = None
    if "tool_calls" not in last:
        answer = remove_thought(last["content"]) or None
    return {"answer": answer} | rest | {"prompt": messages[:-1]}


def _remove_weight(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its weight. A prompt's messages are never trained."""
    return {key: value for key, value in message.items() if key != "weight"}


def _explain_missing_prompt(example: Example) -> str:
    """The error message for a row without a prompt, with the column that may be meant."""
    names = [name for name in example if name != "prompt"]
    start = f"no prompt, only {shorten_value(names)}"
    conversations = [name for name in names if is_conversation(parse_messages(example[name]))]
    if conversations:
        return f"{start}; name the conversation: --columns messages={conversations[0]}"

    texts = [
        name for name in names if isinstance(example[name], (str, list)) and name.isidentifier()
    ]
    order = [*PROMPT_NAMES, *texts]
    name = min({*texts} - {*COLUMNS}, key=order.index, default="COLUMN")
    return f"{start}; add one or name the column: --columns prompt={name}"


def read_answer(answer: Any) -> str | list[str] | None:
    """
    An answer as a text, or as a list of texts, each of which is right; None without an answer.

    Several answers are a list of texts or numbers, or SQuAD's {"text": [...], "answer_start":
    [...]}. Any other object becomes JSON text.

    Raises ValueError for a list of letters, which may mean any or all of them, and for other lists.
    """
    has_texts = isinstance(answer, dict) and isinstance(answer.get("text"), list)
    if has_texts and answer.keys() <= {"text", "answer_start"}:
        return _read_alternatives(answer["text"])
    if isinstance(answer, dict):
        return json.dumps(answer, ensure_ascii=False)
    if isinstance(answer, list):
        if len(answer) > 1 and all(map(_is_letter, answer)):
            raise ValueError(
                f"answer {shorten_value(answer)} is a list of letters: any or all? "
                f'write {{"text": {json.dumps(answer)}}} if any of them is right, '
                f'"{", ".join(answer)}" if all are'
            )
        return _read_alternatives(answer)
    is_missing = answer is None or answer != answer  # pandas writes nan
    return None if is_missing else str(answer)


def _is_letter(item: Any) -> bool:
    """Whether an answer is a choice's letter."""
    return isinstance(item, str) and re.fullmatch("[A-Z]", item) is not None


def _is_text_or_number(item: Any) -> bool:
    return isinstance(item, (str, int, float)) and not isinstance(item, bool)


def _read_alternatives(answers: list[Any]) -> list[str] | None:
    """The different texts in a list of answers; None if none has text."""
    if not all(map(_is_text_or_number, answers)):
        raise ValueError(
            f"answer {shorten_value(answers)} is a list with more than texts and numbers; "
            "write it as JSON text, or rename the column: --columns answers=answer"
        )
    texts = [str(item) for item in answers if str(item).strip()]
    return list(dict.fromkeys(texts)) or None


def check_columns(example: Example, prompt: Any) -> Example:
    """
    The example with its system prompt, category and template variables checked.

    Variables that are null are removed, since Arrow fills up rows with them.
    """
    for name in ("system", "category"):
        if example.get(name) is not None:
            check_text(name, example[name])
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    has_system_message = isinstance(first, dict) and first.get("role") == "system"
    if example.get("system") is not None and has_system_message:
        raise ValueError("both a system column and a system message in prompt; keep one of them")

    variables = example.get("chat_template_kwargs")
    if variables is None:
        return example
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        raise ValueError(
            f"chat_template_kwargs {shorten_value(variables)} is a {type(variables).__name__}; "
            'it must be a dictionary, as {"enable_thinking": true}'
        )
    given_variables = {name: value for name, value in variables.items() if value is not None}
    return example | {"chat_template_kwargs": given_variables}
