"""
User data: makes examples of records, splits off held-out ones, and says where these are few.

Uses no model and no array library. Left out: files (problems/files.py), the layouts of messages
(problems/messages.py), and what tasks do with examples. An invalid record raises a one-line ValueError that names the
file, the place, the value and the fix.
"""

import ast
import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import sha256
from typing import Any

from flags import names_path
from problems import arrow
from problems.examples import (
    RESERVED,
    Example,
    format_error,
    prompt_key,
    shorten_value,
    suggest_nearest,
)
from problems.files import SPLITS, Records, read_or_none, read_records, tell_nulls
from problems.messages import (
    check_order,
    check_prompt,
    check_text,
    is_conversation,
    raw_role,
    read_messages,
    remove_thought,
)

USUAL = (
    "question",
    "instruction",
    "problem",
    "input",
    "query",
    "text",
)  # names of prompts elsewhere
CONVERSATIONS = (
    "messages",
    "conversations",
)  # columns that hold whole conversations, where there is no prompt
COLUMNS = (
    "prompt",
    "answer",
    "system",
    "category",
    "split",
    *CONVERSATIONS,
    "chat_template_kwargs",
)  # with a meaning
MOST_HELD_OUT = 256  # prompts, if there is no column `split`
POWER = 7.85  # (1.96 + 0.84)^2, for an interval of 95% and a power of 80%
LEAST_PROBLEMS, LEAST_CONVERSATIONS = (
    50,
    10,
)  # with fewer losses than that an interval is too narrow


# ---- all records of a source


def load_data(
    spec: str,
    columns: str | None = None,
    read: Callable[[Example], Example] | None = None,
    notes: list[str] | None = None,
    taken: Collection[str] = (),
) -> list[Example]:
    """
    The examples of --data: all with the same keys, `prompt` first, None where a record lacks a column.

    spec, columns: as in docs/data.md. A renamed column has both names, unless the old one means something else here.
    read: makes an example of a renamed record, else `read_prompt`. notes: gets a line for each thing that was read in a
    way that its user may not expect. taken: the columns that `read` takes; a line names the others that hold text.
    ValueError names file, line or record, and the fix.
    """
    read = read or read_prompt
    notes = [] if notes is None else notes
    records = read_records(spec, notes)
    for where, record in records:
        if not isinstance(record, dict):
            raise ValueError(
                f'{spec}, {where}: {shorten_value(record)} is not an object; write {{"prompt": "..."}}'
            )

    renamed, joined = _rename_all(spec, columns, records)
    if joined:
        notes.append(
            f"data: the column input joins {joined} prompts, after an empty line, as Alpaca's rows mean it"
        )
    examples = []
    for where, record in renamed:
        try:
            examples.append(read(record))
        except ValueError as error:
            raise ValueError(f"{spec}, {where}: {error}") from error
    notes.extend(_tell_conversations([record for _, record in renamed], examples))
    notes.extend(_tell_answers(examples))
    if taken:
        theirs = {*renames_of(columns).values(), *(["input"] if joined else [])}
        rest = [record for _, record in renamed]
        if unread := [
            name for name in text_columns(rest) if name not in taken and name not in theirs
        ]:
            notes.append(tell_unread(unread, "no conversation takes"))
    names = [
        "prompt",
        *dict.fromkeys(name for example in examples for name in example if name != "prompt"),
    ]
    return [{name: example.get(name) for name in names} for example in examples]


def text_columns(rows: Sequence[Example]) -> list[str]:
    """The columns that hold text in some row, at any depth."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if any(has_text(row.get(name)) for row in rows)]


def has_text(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, dict):
        return any(map(has_text, value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_text, value))


def tell_unread(names: Sequence[str], who: str) -> str:
    """The line that names columns which nobody reads, and the flag for one whose name says what it is."""
    usual = {"system_prompt": "system", "system_message": "system", "messages": "messages"}
    hints = [
        f"--columns {usual[name]}={name}" for name in names if name in usual and name != usual[name]
    ]
    hint = f"; take it in with {hints[0]}" if hints else ""
    return (
        f"data: {who} the text of {'columns' if names[1:] else 'column'} {', '.join(names)}{hint}"
    )


def renames_of(columns: str | None) -> dict[str, str]:
    """Our names of columns and theirs, of --columns."""
    renames = dict[str, str]()
    for part in columns.split(",") if columns else []:
        ours, equals, theirs = (piece.strip() for piece in part.partition("="))
        if not (ours and equals and theirs) or ours in renames:
            raise ValueError(
                f"--columns: {part!r} is not OURS=THEIRS, each once; write prompt=question,answer=answer"
            )
        renames[ours] = theirs
    return renames


def _rename_all(spec: str, columns: str | None, records: Records) -> tuple[Records, int]:
    """The records with the columns that --columns names, and how many of their prompts Alpaca's `input` joins."""
    renames = renames_of(columns)
    present = dict.fromkeys(name for _, record in records for name in record)
    for ours, theirs in renames.items():
        if theirs not in present:
            hint = f"{suggest_nearest(theirs, present)}; it has {shorten_value(list(present))}"
            raise ValueError(f"--columns {ours}={theirs}: {spec} has no column {theirs!r}{hint}")

    is_alpaca = renames.get("prompt") == "instruction" and {"input", "output"} <= present.keys()
    is_alpaca = is_alpaca and "input" not in renames.values()
    gone = {*renames} | {*renames.values()}.intersection(COLUMNS + RESERVED)
    renamed, num_joined = [], 0
    for where, record in records:
        kept = {name: value for name, value in record.items() if name not in gone}
        row = kept | {ours: record[theirs] for ours, theirs in renames.items() if theirs in record}
        added = record.get("input") if is_alpaca else None
        if isinstance(added, str) and added.strip() and isinstance(row.get("prompt"), str):
            row["prompt"] = f"{row['prompt']}\n\n{added}"
            num_joined += 1
        renamed.append((where, row))
    return renamed, num_joined


def _tell_conversations(records: list[Example], examples: list[Example]) -> Iterator[str]:
    """Lines on conversations of which a part is not what it may seem."""
    calls, unanswered, opened, others = 0, 0, 0, 0
    for record, example in zip(records, examples, strict=True):
        is_learned = "completion" in example
        name = conversation_column(record, is_learned=is_learned)
        messages = _unpacked(record[name]) if name else None
        if not is_conversation(messages):
            continue
        assert isinstance(messages, list)
        roles = [raw_role(message) for message in messages]
        roles = ["assistant" if role == "call" else role for role in roles]
        prompt = record.get("prompt")
        others += isinstance(prompt, str) and not any(
            prompt in message["content"] for message in example["prompt"]
        )
        ends_in_reply = roles[-1] == "assistant"
        calls += not is_learned and ends_in_reply and example.get("answer") is None
        unanswered += is_learned and not ends_in_reply
        opened += (
            is_learned and next((role for role in roles if role != "system"), "") == "assistant"
        )
    if calls:
        yield f"data: {calls} conversations end in a reply that is a call or only a thought, so they have no answer"
    if unanswered:
        yield f"data: {unanswered} conversations end in messages that no reply follows; these are not used"
    if others:
        yield f"data: {others} rows have a prompt that their conversation does not hold; the conversation is learned"
    if opened:
        yield f"data: {opened} conversations begin with a reply; it is context, and not trained"


def _tell_answers(examples: list[Example]) -> Iterator[str]:
    """Lines on answers that are lists written as texts, and on prompts with several answers."""
    lists = [answer for example in examples if _is_list_text(answer := example.get("answer"))]
    wholes = [
        answer for example in examples if _holds_alternatives(answer := example.get("answer"))
    ]
    if wholes:
        what = f"{len(wholes)} answers are objects, as {shorten_value(wholes[0])}, and are compared as a whole"
        yield f"data: {what}; if any text of a list in them is right, make that list the answer"
    if lists:
        what = f"{len(lists)} answers are texts that hold a JSON list, as {shorten_value(lists[0])}, and are compared as one"
        yield f"data: {what}; write a list of texts, not a text, if any of them is right"

    answers: dict[str, set[str]] = {}
    firsts = dict[str, Example]()
    for example in examples:
        if example.get("answer") is None or "environment" in example:
            continue
        key = repr([example.get(name) for name in ("prompt", "system", "chat_template_kwargs")])
        answers.setdefault(key, set()).add(str(example["answer"]))
        firsts.setdefault(key, example)
    several = [key for key, given in answers.items() if len(given) > 1]
    if several:
        shown = f"{shorten_value(firsts[several[0]]['prompt'])}: {shorten_value(sorted(answers[several[0]]))}"
        fix = "each row pays for its own; write one row with a list if any of them is right"
        yield f"data: {len(several)} prompts have several answers, as {shown}; {fix}"


def _is_list_text(answer: Any) -> bool:
    """Whether an answer is a text that holds a list of texts, in JSON or as Python writes it into a CSV file."""
    if not isinstance(answer, str) or not answer.lstrip().startswith("["):
        return False
    items = read_or_none(answer)
    if items is None:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            items = ast.literal_eval(answer.strip())
    return (
        isinstance(items, list) and len(items) > 1 and all(isinstance(item, str) for item in items)
    )


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


def _holds_alternatives(answer: Any) -> bool:
    """Whether an answer is an object that has a list of texts under such a key, at any depth."""
    if not isinstance(answer, str) or not answer.startswith("{"):
        return False
    waiting = [read_or_none(answer)]
    while waiting:
        value = waiting.pop()
        for name, field in value.items() if isinstance(value, dict) else ():
            is_list = isinstance(field, list) and any(isinstance(item, str) for item in field)
            if is_list and name in ALTERNATIVES:
                return True
            waiting.append(field)
    return False


def cache_rows(data: Any) -> tuple[str, list[str]]:
    """
    Writes a program's rows to a file of the cache, named by what it holds; its path for `load_data`, and notes.

    data: see `arrow.rows_of_program`.
    """
    rows, num_nulls = arrow.rows_of_program(data)
    notes = (
        [tell_nulls("the rows have the form that dataset.to_list() gives", num_nulls)]
        if num_nulls
        else []
    )
    text = ""
    for number, row in enumerate(rows, 1):
        try:
            text += json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"data: row {number}, {shorten_value(row)}, is no JSON: {format_error(error)}"
            ) from error
    import cpu_blas  # a worker that reads answers needs none of it

    path = cpu_blas.cache_directory() / "rows" / f"{sha256(text.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with names_path(path):
        path.write_text(text, encoding="utf-8")
    return str(path), notes


# ---- records to examples


def conversation_column(example: Example, *, is_learned: bool = False) -> str | None:
    """
    The column that holds a row's whole conversation, if one does.

    is_learned: it beats a prompt without a completion, as some data sets repeat the first message there. Else a prompt
    beats it, unless the prompt is in ShareGPT's layout and ends in a reply.
    """
    column = next((name for name in CONVERSATIONS if example.get(name) is not None), None)
    prompt = example.get("prompt")
    if prompt is None:
        return column
    if example.get("completion") is not None:
        return None
    if is_learned:
        return column or ("prompt" if isinstance(prompt, list) else None)
    is_turns = is_conversation(prompt) and "from" in prompt[0]
    return "prompt" if is_turns and raw_role(prompt[-1]) == "assistant" else None


def _unpacked(value: Any) -> Any:
    """Messages that are written as JSON, as a list; anything else as it is."""
    if (
        isinstance(value, str)
        and value.lstrip().startswith("[")
        and is_conversation(items := read_or_none(value))
    ):
        return items
    return value


def read_prompt(example: Example) -> Example:
    """
    A checked example: a prompt, its messages in one layout, and texts `system`, `category`, `answer`.

    Without a `prompt` a conversation replaces it, whose last reply becomes the `answer` if there is none. Rows with a
    column `environment` need no prompt: it is "". An `answer` of several texts is a list: each of them is right.
    """
    if taken := [name for name in RESERVED if name in example]:
        fix = f"rename it: --columns my_{taken[0]}={taken[0]}"
        raise ValueError(f"column {taken[0]!r} is an argument of rewards; {fix}")
    if column := conversation_column(example):
        example = _split_conversation(example, column)

    prompt = example.get(
        "prompt", "" if "environment" in example else None
    )  # an environment may give it
    if prompt is None:
        raise ValueError(_want_of_prompt(example))
    if isinstance(prompt, list):
        prompt = check_prompt(
            [_without_weight(message) for message in read_messages("prompt", prompt)]
        )
    elif not isinstance(prompt, str):
        raise ValueError(
            f"prompt {shorten_value(prompt)} is a {type(prompt).__name__}; it must be a string or chat messages"
        )
    elif prompt or "prompt" in example:
        check_text("prompt", prompt)
    example = check_columns(example, prompt) | {"prompt": prompt}
    return example | ({"answer": read_answer(example["answer"])} if "answer" in example else {})


def _split_conversation(example: Example, column: str) -> Example:
    """The example with the prompt, and the answer if it has none, of the conversation in a column."""
    messages = read_messages(column, example[column])
    check_order(column, messages)
    rest = {name: value for name, value in example.items() if name not in CONVERSATIONS}
    if messages[-1]["role"] != "assistant":
        return rest | {"prompt": messages}
    last = messages[-1]
    answer = None if "tool_calls" in last else remove_thought(last["content"]) or None
    return {"answer": answer} | rest | {"prompt": messages[:-1]}


def _without_weight(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a prompt, of which nothing is trained anyway."""
    return {key: value for key, value in message.items() if key != "weight"}


def _want_of_prompt(example: Example) -> str:
    """What is said of a row without a prompt."""
    others = [name for name in example if name != "prompt"]
    if talks := [name for name in others if is_conversation(_unpacked(example[name]))]:
        return f"no prompt, only {shorten_value(others)}; name the conversation: --columns messages={talks[0]}"
    texts = [
        name for name in others if isinstance(example[name], (str, list)) and name.isidentifier()
    ]
    name = min({*texts} - {*COLUMNS}, key=[*USUAL, *texts].index, default="COLUMN")
    return f"no prompt, only {shorten_value(others)}; add one or name the column: --columns prompt={name}"


def read_answer(answer: Any) -> str | list[str] | None:
    """
    An answer as text, or several of which each is right; None where there is none.

    Several are a list of texts or numbers, or SQuAD's {"text": [...], "answer_start": [...]}. Another object is its
    JSON. ValueError for a list of letters, which may mean any or all, and for other lists.
    """
    is_named = isinstance(answer, dict) and isinstance(answer.get("text"), list)
    if is_named and answer.keys() <= {"text", "answer_start"}:
        return _read_several(answer["text"])
    if isinstance(answer, dict):
        return json.dumps(answer, ensure_ascii=False)
    if isinstance(answer, list):
        if len(answer) > 1 and all(
            isinstance(item, str) and re.fullmatch("[A-Z]", item) for item in answer
        ):
            fix = f'write {{"text": {json.dumps(answer)}}} if any of them is right, "{", ".join(answer)}" if all are'
            raise ValueError(
                f"answer {shorten_value(answer)} is a list of letters: any or all? {fix}"
            )
        return _read_several(answer)
    is_missing = answer is None or answer != answer  # nan, to pandas
    return None if is_missing else str(answer)


def _read_several(answers: list[Any]) -> list[str] | None:
    is_scalar = [
        isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in answers
    ]
    if not all(is_scalar):
        kind = f"answer {shorten_value(answers)} is a list of other things than texts and numbers"
        raise ValueError(
            f"{kind}; write it as JSON text, or rename the column: --columns answers=answer"
        )
    texts = [str(item) for item in answers if str(item).strip()]
    return list(dict.fromkeys(texts)) or None


def check_columns(example: Example, prompt: Any) -> Example:
    """The example with checked system, category and variables; of these what is null goes, as Arrow fills up rows."""
    for name in ("system", "category"):
        if example.get(name) is not None:
            check_text(name, example[name])
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if (
        example.get("system") is not None
        and isinstance(first, dict)
        and first.get("role") == "system"
    ):
        raise ValueError("both a system column and a system message in prompt; keep one of them")
    if (variables := example.get("chat_template_kwargs")) is None:
        return example
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        what = f"chat_template_kwargs {shorten_value(variables)} is a {type(variables).__name__}"
        raise ValueError(f'{what}; it must be a dictionary, as {{"enable_thinking": true}}')
    return example | {
        "chat_template_kwargs": {
            name: value for name, value in variables.items() if value is not None
        }
    }


# ---- what is held out


def load_sides(
    spec: str | None,
    held_out: str | None,
    columns: str | None = None,
    read: Callable[[Example], Example] | None = None,
    *,
    taken: Collection[str] = (),
    begun: Collection[str] = (),
) -> tuple[list[Example], list[Example], list[str]]:
    """
    What is trained on, what is held out, and lines on how rows were read and left out.

    No prompt is on both sides, as training gives way, and held-out rows count once.

    spec: a source, of which `split_examples` holds some out, or two of them, "TRAIN,HELD_OUT". held_out: a source whose
    held-out records, or all where it knows no `split`, take the place of that side. columns, read, taken: see
    `load_data`. begun: see `split_examples`.
    """
    lines: list[str] = []
    if spec and "," in spec and not os.path.exists(spec):
        spec, _, its = spec.rpartition(",")
        held_out = held_out or its
    train, test = load_data(spec, columns, read, lines, taken) if spec else [], list[Example]()
    if held_out is None or _has_split(train):
        if begun and not _has_split(train) and (line := _tell_begun(train, begun)):
            lines.append(line)
        train, test = split_examples(train, begun)
    if held_out is not None:
        test = load_data(held_out, columns, read, lines, taken)
        if _has_split(test):
            test = split_examples(test)[1]
    seen, num_train = {prompt_key(example) for example in test}, len(train)
    train = [example for example in train if prompt_key(example) not in seen]
    notes, num_test = [], len(test)
    if not any(
        "environment" in example for example in test
    ):  # an environment draws a task for each row
        test = list(
            {
                repr([value for name, value in one.items() if name != "split"]): one for one in test
            }.values()
        )
    if doubled := num_train - len(train):
        notes.append(f"{doubled} training rows are left out, as their prompts are held out")
    if repeats := num_test - len(test):
        notes.append(f"{repeats} held-out rows repeat another and count once")
    if spec is not None and not train:
        raise ValueError(
            f"--data {spec} leaves no prompt to train on, all are held out; add prompts"
        )
    return train, test, [*lines, *([f"data: {'; '.join(notes)}"] if notes else [])]


def split_examples(
    examples: list[Example], begun: Collection[str] = ()
) -> tuple[list[Example], list[Example]]:
    """
    Splits a user's examples into (train, held out).

    A column `split` decides if present: "train", or "held_out", "test" or "validation". Otherwise a tenth of the
    distinct prompts is held out, from one to `MOST_HELD_OUT`. They are chosen by hash, not by place, so the choice
    ignores the records' order and mostly survives when a file grows. begun: keys of the prompts that a run holds out
    which has begun. As long as the file has half of them these are held out and nothing else, so that no row changes
    sides and new rows are trained on.

    Raises ValueError if `split` has another value.
    """
    if _has_split(examples):
        if wrong := [
            shorten_value(example["split"])
            for example in examples
            if example["split"] not in SPLITS
        ]:
            raise ValueError(
                f"column split holds {wrong[0]}; write train or held_out in all records, or rename it"
            )
        train = [example for example in examples if example["split"] == "train"]
        return train, [example for example in examples if example["split"] != "train"]
    keys = sorted({prompt_key(example) for example in examples})
    kept = {*begun}.intersection(keys)
    chosen = (
        kept
        if _keeps_sides(kept, begun)
        else set(keys[: min(MOST_HELD_OUT, max(1, len(keys) // 10))] if len(keys) > 1 else [])
    )
    train = [example for example in examples if prompt_key(example) not in chosen]
    return train, [example for example in examples if prompt_key(example) in chosen]


def _keeps_sides(kept: Collection[str], begun: Collection[str]) -> bool:
    return bool(begun) and 2 * len(kept) >= len({*begun})


def _tell_begun(examples: list[Example], begun: Collection[str]) -> str:
    """A line where the sides that a run began with are not those of a new one, or cannot be kept; "" else."""
    keys = {prompt_key(example) for example in examples}
    kept = keys.intersection(begun)
    if begun and not _keeps_sides(kept, begun):
        return f"data: only {len(kept)} of the {len(begun)} prompts that the run held out are left, so others are chosen"
    fresh = {prompt_key(example) for example in split_examples(examples)[1]}
    if begun and kept != fresh:
        kept_sides = f"the run keeps the {len(kept)} prompts that it holds out, of now {len(keys)}"
        return f"data: {kept_sides}; new ones are trained on"
    return ""


def _has_split(examples: list[Example]) -> bool:
    return any(example.get("split") is not None for example in examples)


def advise_on_held_out(num: int, settings: dict[str, Any]) -> str:
    """How to, of now so many problems."""
    how = (
        "a higher --eval-limit"
        if settings.get("eval_limit") == num
        else "--eval-data FILE or --data TRAIN,HELD_OUT"
    )
    return f"hold out more with {how}" + ", or ask each more often" * (
        settings.get("loss_type") != "sft"
    )


def warn_of_few_held_out(num: int, settings: dict[str, Any], deviation: float = 0.0) -> list[str]:
    """A line where so many held-out problems tell little. deviation: of answers to one, over the values' range."""
    if not settings.get("eval_every", True):
        return ["nothing held out is evaluated (--eval-every 0), so there will be no verdict"]
    more = advise_on_held_out(num, settings)
    if settings.get("loss_type") == "sft":
        told = f"with {num} held out the loss says little of other conversations: {more}"
        return [told] if 0 < num < LEAST_CONVERSATIONS else []
    changing = 2 * deviation**2 or 1 / 3  # as if about every third answer changed for good or bad
    least, enough = (
        min(1, math.sqrt(POWER * changing / size)) for size in (max(num, 1), LEAST_PROBLEMS)
    )
    by = "by these answers, " if deviation else "where every third answer changes, "
    told = f"{by}with {num} held out a change shows from {least:.0%} of the values' range on, "
    told += f"with {LEAST_PROBLEMS} from {enough:.0%} on"
    return (
        [f"{told}: {more} when it is trained (evaluate.py --samples 8)"]
        if 0 < num < LEAST_PROBLEMS
        else []
    )
