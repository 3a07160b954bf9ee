"""
Makes notes for the user about columns, conversations and answers that Gwen may read differently
than the user expects.

The functions in this file do not change examples. prompts/data.py reports mistakes in the data.
"""

import ast
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from prompts.examples import Example, shorten_value
from prompts.files import parse_json_or_none
from prompts.messages import (
    conversation_column_name,
    looks_like_conversation,
    parse_messages_if_json,
    standard_role_or_empty,
)

# keys under which data sets list several right answers
ALTERNATIVES = (
    "target",
    "targets",
    "aliases",
    "answers",
    "ground_truth",
    "ground_truths",
    "golden_answers",
    "text",
)
# column name in other data sets -> Gwen's name for the same column
SYNONYMS = {"system_prompt": "system", "system_message": "system", "messages": "messages"}


# ---- columns


def columns_with_text(rows: Sequence[Example]) -> list[str]:
    """The names of the columns that contain text, at any depth, in at least one row."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if any(contains_text(row.get(name)) for row in rows)]


def contains_text(value: Any) -> bool:
    """Whether a value is or contains a string that is not blank."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, dict):
        return any(map(contains_text, value.values()))
    return isinstance(value, (list, tuple)) and any(map(contains_text, value))


def note_on_unread_columns(names: Sequence[str], subject_and_verb: str) -> str:
    """
    A note about columns whose text is not used. If Gwen knows what a column's name means, the note
    suggests a value for --columns.

    subject_and_verb: the subject and the verb of the note, such as "no conversation uses".
    """
    noun = "columns" if len(names) > 1 else "column"
    line = f"data: {subject_and_verb} the text of the {noun} {', '.join(names)}"
    renamable = [name for name in names if SYNONYMS.get(name, name) != name]
    if renamable:
        line += f"; to use {renamable[0]}, set --columns {SYNONYMS[renamable[0]]}={renamable[0]}"
    return line


# ---- conversations


def notes_on_conversations(records: list[Example], examples: list[Example]) -> Iterator[str]:
    """
    Yields notes about conversations whose messages are used differently than a user may expect.
    """
    num_without_answer = 0
    num_unanswered = 0
    num_other_prompts = 0
    num_opened_by_reply = 0
    for record, example in zip(records, examples, strict=True):
        is_sft = "completion" in example
        column = conversation_column_name(record, is_sft=is_sft)
        messages = parse_messages_if_json(record[column]) if column else None
        if not looks_like_conversation(messages):
            continue
        assert isinstance(messages, list)
        roles = [standard_role_or_empty(message) for message in messages]
        roles = ["assistant" if role == "call" else role for role in roles]
        ends_in_reply = roles[-1] == "assistant"

        prompt = record.get("prompt")
        if isinstance(prompt, str):
            contents = [message["content"] for message in example["prompt"]]
            num_other_prompts += not any(prompt in content for content in contents)
        if is_sft:
            first_role = next((role for role in roles if role != "system"), "")
            num_opened_by_reply += first_role == "assistant"
            num_unanswered += not ends_in_reply
        elif ends_in_reply:
            num_without_answer += example.get("answer") is None

    if num_without_answer:
        yield (
            f"data: in {num_without_answer} conversations, the last reply is a tool call or only "
            "a thought, so these conversations have no answer"
        )
    if num_unanswered:
        yield (
            f"data: {num_unanswered} conversations end with messages that have no reply; "
            "these messages are not used"
        )
    if num_other_prompts:
        yield (
            f"data: {num_other_prompts} rows have a prompt that is not in their conversation; "
            "the conversation is used, and the prompt is ignored"
        )
    if num_opened_by_reply:
        yield (
            f"data: {num_opened_by_reply} conversations begin with a reply; "
            "this reply is used as context, but is not trained"
        )


# ---- answers


def notes_on_answers(examples: list[Example]) -> Iterator[str]:
    """
    Yields notes about lists of answers that are compared as a single text, and about prompts that
    occur with different answers.
    """
    answers = [example.get("answer") for example in examples]
    objects = list(filter(_is_json_object_with_alternatives, answers))
    if objects:
        yield (
            f"data: {len(objects)} answers are objects such as {shorten_value(objects[0])}, and "
            "each object is compared as a whole; if an object contains a list of right answers, "
            "write only that list as the answer"
        )
    list_texts = list(filter(_is_string_with_list, answers))
    if list_texts:
        yield (
            f"data: {len(list_texts)} answers are strings that contain a list, such as "
            f"{shorten_value(list_texts[0])}, and each is compared as a single text; "
            "if every text in the list is a right answer, write a list instead of a string"
        )
    yield from _notes_on_conflicting_answers(examples)


def _notes_on_conflicting_answers(examples: list[Example]) -> Iterator[str]:
    """Yields a note if the same prompt is in several rows with different answers."""
    answers: dict[str, set[str]] = {}
    first_examples = dict[str, Example]()
    for example in examples:
        if example.get("answer") is None or "environment" in example:
            continue
        key = repr([example.get(name) for name in ("prompt", "system", "chat_template_kwargs")])
        answers.setdefault(key, set()).add(str(example["answer"]))
        first_examples.setdefault(key, example)

    repeated = [key for key, texts in answers.items() if len(texts) > 1]
    if repeated:
        prompt = shorten_value(first_examples[repeated[0]]["prompt"])
        texts = shorten_value(sorted(answers[repeated[0]]))
        yield (
            f"data: {len(repeated)} prompts are in several rows with different answers, such as "
            f"{prompt} with the answers {texts}; each row rewards only its own answer; if all "
            "these answers are right, write one row with a list of answers"
        )


def _is_string_with_list(answer: Any) -> bool:
    """
    Whether an answer is a string that contains a list of at least two strings, in the syntax of
    JSON or Python.
    """
    if not isinstance(answer, str) or not answer.lstrip().startswith("["):
        return False
    items = parse_json_or_none(answer)
    if items is None:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            # a list that Python wrote to a CSV file has Python's syntax
            items = ast.literal_eval(answer.strip())
    if not isinstance(items, list) or len(items) < 2:
        return False
    return all(isinstance(item, str) for item in items)


def _is_json_object_with_alternatives(answer: Any) -> bool:
    """
    Whether an answer is a JSON object that contains a list of strings under one of the keys in
    `ALTERNATIVES`.
    """
    if not isinstance(answer, str) or not answer.startswith("{"):
        return False
    waiting = [parse_json_or_none(answer)]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, dict):
            continue
        for name, field in value.items():
            has_texts = isinstance(field, list) and any(isinstance(item, str) for item in field)
            if has_texts and name in ALTERNATIVES:
                return True
            waiting.append(field)
    return False
