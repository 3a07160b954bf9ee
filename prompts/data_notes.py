"""
Notes on data: tells the user about columns, conversations and answers that may be read in a
surprising way.

Nothing here changes an example. This file does not cover mistakes, which prompts/data.py refuses.
"""

import ast
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from prompts.examples import Example, shorten_value
from prompts.files import read_or_none
from prompts.messages import conversation_column_name, is_conversation, parse_messages, raw_role

# keys under which data sets keep several right answers
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
# columns whose name shows which of Gwen's columns they are
SYNONYMS = {"system_prompt": "system", "system_message": "system", "messages": "messages"}


# ---- columns


def text_columns(rows: Sequence[Example]) -> list[str]:
    """The columns that hold text in at least one row, at any depth."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if any(has_text(row.get(name)) for row in rows)]


def has_text(value: Any) -> bool:
    """Whether a value is, or contains, a text that is not blank."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, dict):
        return any(map(has_text, value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_text, value))


def describe_unread_columns(names: Sequence[str], reader: str) -> str:
    """
    The line about columns that nothing reads, with the flag for a column whose name is known.

    reader: the subject and verb of the line, such as "no conversation uses".
    """
    noun = "columns" if len(names) > 1 else "column"
    line = f"data: {reader} the text of the {noun} {', '.join(names)}"
    renamable = [name for name in names if SYNONYMS.get(name, name) != name]
    if renamable:
        line += f"; use it with --columns {SYNONYMS[renamable[0]]}={renamable[0]}"
    return line


# ---- conversations


def describe_conversations(records: list[Example], examples: list[Example]) -> Iterator[str]:
    """Lines on conversations in which some parts are not used as a user may expect."""
    num_without_answer = 0
    num_unanswered = 0
    num_other_prompts = 0
    num_opened_by_reply = 0
    for record, example in zip(records, examples, strict=True):
        is_sft = "completion" in example
        column = conversation_column_name(record, is_sft=is_sft)
        messages = parse_messages(record[column]) if column else None
        if not is_conversation(messages):
            continue
        assert isinstance(messages, list)
        roles = [raw_role(message) for message in messages]
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
            f"data: {num_without_answer} conversations end in a reply that is a call or only "
            "a thought, so they have no answer"
        )
    if num_unanswered:
        yield (
            f"data: {num_unanswered} conversations end in messages without a reply; "
            "these messages are not used"
        )
    if num_other_prompts:
        yield (
            f"data: {num_other_prompts} rows have a prompt that is not in their conversation; "
            "the conversation is learned"
        )
    if num_opened_by_reply:
        yield (
            f"data: {num_opened_by_reply} conversations begin with a reply; "
            "it is context and not trained"
        )


# ---- answers


def describe_answers(examples: list[Example]) -> Iterator[str]:
    """Lines on lists of answers that are compared as one text, and on repeated prompts."""
    answers = [example.get("answer") for example in examples]
    objects = list(filter(_holds_alternatives, answers))
    if objects:
        yield (
            f"data: {len(objects)} answers are objects, as {shorten_value(objects[0])}, and each "
            "is compared as a whole; if any text of a list inside is right, make that list the "
            "answer"
        )
    list_texts = list(filter(_is_list_text, answers))
    if list_texts:
        yield (
            f"data: {len(list_texts)} answers are texts that hold a list, as "
            f"{shorten_value(list_texts[0])}, and each is compared as one text; "
            "write a list of texts, not a text, if any of them is right"
        )
    yield from _describe_repeated_prompts(examples)


def _describe_repeated_prompts(examples: list[Example]) -> Iterator[str]:
    """A line on prompts that are in several rows with different answers."""
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
            f"data: {len(repeated)} prompts have several answers, as {prompt}: {texts}; "
            "each row rewards only its own; write one row with a list if any of them is right"
        )


def _is_list_text(answer: Any) -> bool:
    """Whether an answer is a text that holds a list of texts, as JSON or as Python writes it."""
    if not isinstance(answer, str) or not answer.lstrip().startswith("["):
        return False
    items = read_or_none(answer)
    if items is None:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            items = ast.literal_eval(answer.strip())  # Python writes lists like this to CSV files
    if not isinstance(items, list) or len(items) < 2:
        return False
    return all(isinstance(item, str) for item in items)


def _holds_alternatives(answer: Any) -> bool:
    """Whether an answer is a JSON object with a list of texts under one of `ALTERNATIVES`."""
    if not isinstance(answer, str) or not answer.startswith("{"):
        return False
    waiting = [read_or_none(answer)]
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
