"""
User data: reads records from a file or the hub, checks them, splits off held-out ones, and says where these are few.

Uses no model and no array library. Left out: what tasks do with examples. An invalid record raises a one-line
ValueError that names the file, the place, the value and the fix.

JSON lines, JSON and CSV have their own readers, because `datasets` and pyarrow lose the line of a mistake. `datasets`
reads a CSV answer "007" as 7.0 and "None" as missing; pyarrow refuses JSON answers of different types.
"""

import contextlib
import csv
import io
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from flags import names_path, read_json
from problems.examples import RESERVED, Example, nearest, one_line, prompt_key, short

Records = list[tuple[str, Any]]  # a record's place ("line 3"), and its content
SPLITS = ("train", "held_out", "test", "validation")  # all but the first are held out
USUAL = ("question", "instruction", "problem", "input", "query", "text")  # names of prompts elsewhere
COLUMNS = ("prompt", "answer", "system", "category", "split", "messages", "chat_template_kwargs")  # that mean something
MOST_HELD_OUT = 256  # prompts, if there is no column `split`
POWER = 7.85  # (1.96 + 0.84)^2, for an interval of 95% and a power of 80%
LEAST_PROBLEMS, LEAST_CONVERSATIONS = 50, 10  # with fewer losses than that an interval is too narrow


# ---- files and the hub


def load_data(spec: str, columns: str | None = None, read: Callable[[Example], Example] | None = None) -> list[Example]:
    """
    The examples of --data: all with the same keys, `prompt` first, None where a record lacks a column.

    spec, columns: as in docs/data.md. A renamed column has both names, unless the old one means something else here.
    read: makes an example of a renamed record, else `read_prompt`. ValueError names file, line or record, and the fix.
    """
    records, read = read_records(spec), read or read_prompt
    for where, record in records:
        if not isinstance(record, dict):
            raise ValueError(f'{spec}, {where}: {short(record)} is not an object; write {{"prompt": "..."}}')
    present, renames = dict.fromkeys(name for _, record in records for name in record), dict[str, str]()
    for part in columns.split(",") if columns else []:
        ours, equals, theirs = (piece.strip() for piece in part.partition("="))
        if not (ours and equals and theirs) or ours in renames:
            raise ValueError(f"--columns: {part!r} is not OURS=THEIRS, each once; write prompt=question,answer=answer")
        if theirs not in present:
            hint = f"{nearest(theirs, present)}; it has {short(list(present))}"
            raise ValueError(f"--columns {ours}={theirs}: {spec} has no column {theirs!r}{hint}")
        renames[ours] = theirs
    gone, examples = {*renames} | {*renames.values()}.intersection(COLUMNS + RESERVED), []
    for where, record in records:
        kept = {name: value for name, value in record.items() if name not in gone}
        try:
            examples.append(read(kept | {ours: record[theirs] for ours, theirs in renames.items() if theirs in record}))
        except ValueError as error:
            raise ValueError(f"{spec}, {where}: {error}") from error
    names = ["prompt", *dict.fromkeys(name for example in examples for name in example if name != "prompt")]
    return [{name: example.get(name) for name in names} for example in examples]


def keep(rows: Iterable[Any]) -> str:
    """Writes a program's rows to a file of the cache, named by what it holds, and returns its path for `load_data`."""
    text = ""
    for number, row in enumerate(rows, 1):
        try:
            text += json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise ValueError(f"data: row {number}, {short(row)}, is no JSON: {one_line(error)}") from error
    import cpu_blas  # a worker that reads answers needs none of it

    path = cpu_blas.cache_directory() / "rows" / f"{sha256(text.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with names_path(path):
        path.write_text(text, encoding="utf-8")
    return str(path)


def read_records(spec: str) -> Records:
    """The unchecked records of `load_data`. Raises ValueError if they cannot be read or there are none."""
    ending, endings = Path(spec).suffix, ", ".join(_READERS)
    folder, _, part = (spec, "", "") if os.path.isdir(spec) else spec.rpartition(":")
    if os.path.isdir(folder):  # Path.is_dir() would raise for names that are too long
        records = _saved_records(spec, folder, part)
    elif not os.path.isfile(spec):
        hub = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([^:\[\]]*))?(?::(.+))?", spec)  # config holds no slice [...]
        if hub is None or re.fullmatch(r"\.[A-Za-z]+", ending):
            raise ValueError(f"--data {spec}: no such file; give {endings} or a hub dataset owner/name:config:split")
        name, config, split = hub.groups()
        if split is None and config in SPLITS:  # a lone split
            config, split = None, config
        try:
            records = hub_records(name, config or None, split or "train")
        except Exception as error:  # the hub's client raises its own types
            why = f"no such file, and no hub dataset that can be loaded ({one_line(error)})"
            raise ValueError(f"--data {spec}: {why}; check the spelling and the network") from error
    elif ending.lower() not in _READERS:
        raise ValueError(f"--data {spec} has the unknown ending {ending!r}; the endings read are {endings}")
    else:
        try:
            content = Path(spec).read_bytes()
        except OSError as error:
            raise ValueError(f"--data {spec} cannot be read: {error.strerror}") from error
        records = list(_READERS[ending.lower()](spec, content))
    if not records:
        raise ValueError(f"--data {spec} holds no records; it needs at least one with a prompt")
    return records


def _text(spec: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        where = f"{spec}, line {line}: byte 0x{content[error.start]:02x}"
        raise ValueError(f"{where} is not UTF-8; save the file as UTF-8") from error


def _json(spec: str, where: str, text: str) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        if "\n" in text and isinstance(error, json.JSONDecodeError):
            where = f"line {error.lineno}"
        reason = str(error).split(": ")[0]
        raise ValueError(f"{spec}, {where}: not JSON ({reason}): {short(text.strip())}; correct that line") from error


def jsonl_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    for where, line in _lines(spec, content):
        yield where, _json(spec, where, line)


def _lines(spec: str, content: bytes) -> Iterator[tuple[str, str]]:
    lines = enumerate(_text(spec, content).split("\n"), 1)  # not splitlines: strings may contain U+2028
    return ((f"line {number}", line) for number, line in lines if line.strip())


def _json_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    records = _json(spec, "line 1", _text(spec, content)) if content.strip() else []
    if not isinstance(records, list):
        raise ValueError(f"{spec} holds {short(records)}, not a list of records; write [{{...}}, ...] or use .jsonl")
    return numbered(records)


def _csv_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """Rows by the header's names, parted as these are; an empty cell is missing, a wrong number of fields an error."""
    csv.field_size_limit(2**31 - 1)  # a cell may be a document; the default limit is 131,072 characters
    text = _text(spec, content)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = list(rows.fieldnames or [])
        if wrong := [name for name in names if not name.strip() or names.count(name) > 1]:
            raise ValueError(f"{spec}, line 1: column {short(wrong[0])} is empty or occurs twice; rename it")
        for row in rows:
            if None in row or None in row.values():
                fix = f"not {len(names)} fields, as the header has; quote fields that hold {separator!r}"
                raise ValueError(f"{spec}, line {rows.line_num}: {fix}")
            yield f"line {rows.line_num}", {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        raise ValueError(f"{spec}, line {rows.line_num}: not CSV ({one_line(error)}); quote that field") from error


def _table_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """Of a parquet file, an Arrow file or an Arrow stream, as which `datasets` keeps its tables."""
    import pyarrow.parquet  # here: importing it takes half a second

    open_arrow = pyarrow.ipc.open_file if content.startswith(b"ARROW1") else pyarrow.ipc.open_stream
    is_parquet, file = spec.lower().endswith(".parquet"), io.BytesIO(content)
    try:
        return numbered((pyarrow.parquet.read_table(file) if is_parquet else open_arrow(file).read_all()).to_pylist())
    except Exception as error:  # damaged files raise many types
        kind = "parquet" if is_parquet else "arrow"
        raise ValueError(f"{spec} is not a readable {kind} file ({one_line(error)}); write it again") from error


def numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"record {number}", row) for number, row in enumerate(rows, 1))


_READERS = {
    ".jsonl": jsonl_records,
    ".json": _json_records,
    ".csv": _csv_records,
    ".txt": lambda *file: ((where, {"prompt": line.strip("\r")}) for where, line in _lines(*file)),
    ".parquet": _table_records,
    ".arrow": _table_records,
}


def _saved_records(spec: str, folder: str, split: str) -> Records:
    """Of a directory that `datasets` saved: of one split, or of all, where each record gets its split's name."""
    import datasets  # here: importing it takes seconds

    try:
        saved = datasets.load_from_disk(folder)
    except Exception as error:  # of many types
        why = f"is a directory that datasets did not save ({one_line(error)})"
        raise ValueError(f"--data {folder} {why}; name one file in it ({', '.join(_READERS)})") from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    first = next(iter(splits))
    if split not in splits if split else len(splits) > 1 and not splits.keys() <= set(SPLITS):
        known = f"the splits {', '.join(splits)}; name one, as {folder}:{first}"
        raise ValueError(f"--data {spec}{nearest(split, splits)}: {folder} has {known}")
    if split or len(splits) == 1:
        return list(numbered(splits[split or first].to_list()))
    return list(numbered(row | {"split": name} for name, rows in splits.items() for row in rows.to_list()))


def hub_records(name: str, config: str | None, split: str) -> Records:
    import datasets  # here: importing it takes seconds

    # retries would fill a screen; our error says the outcome in one line
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return list(numbered(datasets.load_dataset(name, config, split=split).to_list()))


# ---- records to examples


def read_prompt(example: Example) -> Example:
    """
    A checked example: a prompt, its messages reduced to role and content, and texts `system`, `category`, `answer`.

    Without a `prompt`, `messages` replaces it; their last reply becomes the `answer` if there is none. Rows with a
    column `environment` need no prompt: it is "".
    """
    if "prompt" not in example and isinstance(messages := example.get("messages"), list):
        example = {name: value for name, value in example.items() if name != "messages"}
        last = messages[-1] if messages else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            messages, example = messages[:-1], {"answer": last.get("content")} | example
        example = example | {"prompt": messages}
    if taken := [name for name in RESERVED if name in example]:
        fix = f"rename it: --columns my_{taken[0]}={taken[0]}"
        raise ValueError(f"column {taken[0]!r} is an argument of rewards; {fix}")
    prompt = example.get("prompt", "" if "environment" in example else None)  # an environment may give the prompt
    if prompt is None:
        others = [name for name in example if name != "prompt"]
        texts = [name for name in others if isinstance(example[name], (str, list)) and name.isidentifier()]
        name = min({*texts} - {*COLUMNS}, key=[*USUAL, *texts].index, default="COLUMN")
        raise ValueError(f"no prompt, only {short(others)}; add one or name the column: --columns prompt={name}")
    if isinstance(prompt, list):
        prompt = check_prompt(prompt)
    elif not isinstance(prompt, str):
        raise ValueError(f"prompt {short(prompt)} is a {type(prompt).__name__}; it must be a string or chat messages")
    elif prompt or "prompt" in example:
        check_text("prompt", prompt)
    example = check_columns(example, prompt) | {"prompt": prompt}
    if isinstance(answer := example.get("answer"), list):
        kind = f"answer {short(answer)} is a list"
        raise ValueError(f"{kind}; it must be a text or a number, or rename the column: --columns answers=answer")
    if isinstance(answer, dict):
        return example | {"answer": json.dumps(answer, ensure_ascii=False)}
    is_missing = answer is None or answer != answer  # nan, to pandas
    return example | ({"answer": None if is_missing else str(answer)} if "answer" in example else {})


def check_columns(example: Example, prompt: Any) -> Example:
    """The example with checked system, category and variables; of these what is null goes, as Arrow fills up rows."""
    for name in ("system", "category"):
        if example.get(name) is not None:
            check_text(name, example[name])
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if example.get("system") is not None and isinstance(first, dict) and first.get("role") == "system":
        raise ValueError("both a system column and a system message in prompt; keep one of them")
    if (variables := example.get("chat_template_kwargs")) is None:
        return example
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        what = f"chat_template_kwargs {short(variables)} is a {type(variables).__name__}"
        raise ValueError(f'{what}; it must be a dictionary, as {{"enable_thinking": true}}')
    return example | {"chat_template_kwargs": {name: value for name, value in variables.items() if value is not None}}


def check_prompt(prompt: list[Any]) -> list[dict[str, str]]:
    """Checked chat messages: an optional system message, then user and assistant, with the user's last."""
    checked = check_messages("prompt", prompt)
    if checked[-1]["role"] != "user":
        raise ValueError(f"the last message of prompt is the {checked[-1]['role']}'s; it must be the user's")
    return checked


def check_messages(name: str, messages: list[Any], with_tools: bool = False) -> list[dict[str, Any]]:
    """Messages of role and content, `system` only first; with_tools: tools' and calls too. ValueError names `name`."""
    roles = ("user", "assistant", "tool") if with_tools else ("user", "assistant")
    checked = list[dict[str, Any]]()
    if not messages:
        raise ValueError(f'{name} is an empty list; write [{{"role": "user", "content": "..."}}]')
    for place, message in enumerate(messages):
        where = f"message {place + 1} of {name}"
        tool_calls = message.get("tool_calls") if with_tools and isinstance(message, dict) else None
        if tool_calls:
            message = {"content": ""} | message
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'{where} is {short(message)}; write {{"role": "user", "content": "..."}}')
        if message["role"] not in (("system", *roles) if place == 0 else roles):
            fix = f"use {' and '.join(roles)}, and system only for the first message"
            raise ValueError(f"{where} has role {short(message['role'])}; {fix}")
        kept = {"role": message["role"], "content": message["content"]}
        if tool_calls and message["role"] == "assistant":
            kept |= {"content": kept["content"] or "", "tool_calls": _check_calls(where, tool_calls)}
        if kept["content"] or not (message["role"] == "tool" or "tool_calls" in kept):
            check_text(f"content of {where}", kept["content"])
        checked.append(kept)
    return checked


def _check_calls(where: str, tool_calls: Any) -> list[dict[str, Any]]:
    """Calls of tools with their arguments as a dictionary, which may be given as JSON."""
    checked = list[dict[str, Any]]()
    for call in tool_calls if isinstance(tool_calls, list) else [tool_calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else ("", 0)
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = read_json(arguments)
        if not name or not isinstance(name, str) or not isinstance(arguments, dict):
            fix = '{"function": {"name": "...", "arguments": {...}}}'
            raise ValueError(f"tool_calls of {where} holds {short(call)}; write {fix}")
        checked.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return checked


def check_text(name: str, text: Any) -> None:
    """Raises ValueError with `name` if a tokenizer would not accept the text."""
    if not isinstance(text, str):
        raise ValueError(f"{name} {short(text)} is a {type(text).__name__}; it must be a string")
    if not text.strip():
        raise ValueError(f"{name} is empty; write some text")
    if re.search("[\ud800-\udfff]", text):
        raise ValueError(f"{name} {short(text)} holds half of a surrogate pair, which is no character; remove it")


# ---- what is held out


def load_sides(
    spec: str | None, held_out: str | None, columns: str | None = None, read: Callable[[Example], Example] | None = None
) -> tuple[list[Example], list[Example], list[str]]:
    """
    What is trained on, what is held out, and a line if rows were left out: no prompt is on both sides, as training
    gives way, and held-out rows count once.

    spec: a source, of which `split_examples` holds some out, or two of them, "TRAIN,HELD_OUT". held_out: a source whose
    held-out records, or all where it knows no `split`, take the place of that side. columns, read: see `load_data`.
    """
    if spec and "," in spec and not os.path.exists(spec):
        spec, _, its = spec.rpartition(",")
        held_out = held_out or its
    train, test = load_data(spec, columns, read) if spec else [], list[Example]()
    if held_out is None or _has_split(train):
        train, test = split_examples(train)
    if held_out is not None:
        test = load_data(held_out, columns, read)
        if _has_split(test):
            test = split_examples(test)[1]
    seen, num_train = {prompt_key(example) for example in test}, len(train)
    train = [example for example in train if prompt_key(example) not in seen]
    notes, num_test = [], len(test)
    if not any("environment" in example for example in test):  # an environment draws a task for each row
        test = list({repr([value for name, value in one.items() if name != "split"]): one for one in test}.values())
    if doubled := num_train - len(train):
        notes.append(f"{doubled} training rows are left out, as their prompts are held out")
    if repeats := num_test - len(test):
        notes.append(f"{repeats} held-out rows repeat another and count once")
    if spec is not None and not train:
        raise ValueError(f"--data {spec} leaves no prompt to train on, all are held out; add prompts")
    return train, test, [f"data: {'; '.join(notes)}"] if notes else []


def split_examples(examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """
    Splits a user's examples into (train, held out).

    A column `split` decides if present: "train", or "held_out", "test" or "validation". Otherwise a tenth of the
    distinct prompts is held out, from one to `MOST_HELD_OUT`. They are chosen by hash, not by place, so the choice
    ignores the records' order and mostly survives when a file grows.

    Raises ValueError if `split` has another value.
    """
    if _has_split(examples):
        if wrong := [short(example["split"]) for example in examples if example["split"] not in SPLITS]:
            raise ValueError(f"column split holds {wrong[0]}; write train or held_out in all records, or rename it")
        train = [example for example in examples if example["split"] == "train"]
        return train, [example for example in examples if example["split"] != "train"]
    keys = sorted({prompt_key(example) for example in examples})
    chosen = set(keys[: min(MOST_HELD_OUT, max(1, len(keys) // 10))] if len(keys) > 1 else [])
    train = [example for example in examples if prompt_key(example) not in chosen]
    return train, [example for example in examples if prompt_key(example) in chosen]


def _has_split(examples: list[Example]) -> bool:
    return any(example.get("split") is not None for example in examples)


def hold_out_more(num: int, settings: dict[str, Any]) -> str:
    """How to, of now so many problems."""
    how = "a higher --eval-limit" if settings.get("eval_limit") == num else "--eval-data FILE or --data TRAIN,HELD_OUT"
    return f"hold out more with {how}" + ", or ask each more often" * (settings.get("loss_type") != "sft")


def at_the_start(num: int, settings: dict[str, Any], deviation: float = 0.0) -> list[str]:
    """A line where so many held-out problems tell little. deviation: of answers to one, over the values' range."""
    if not settings.get("eval_every", True):
        return ["nothing held out is evaluated (--eval-every 0), so there will be no verdict"]
    more = hold_out_more(num, settings)
    if settings.get("loss_type") == "sft":
        told = f"with {num} held out the loss says little of other conversations: {more}"
        return [told] if 0 < num < LEAST_CONVERSATIONS else []
    changing = 2 * deviation**2 or 1 / 3  # as if about every third answer changed for good or bad
    least, enough = (min(1, math.sqrt(POWER * changing / size)) for size in (max(num, 1), LEAST_PROBLEMS))
    by = "by these answers, " if deviation else "where every third answer changes, "
    told = f"{by}with {num} held out a change shows from {least:.0%} of the values' range on, "
    told += f"with {LEAST_PROBLEMS} from {enough:.0%} on"
    return [f"{told}: {more} when it is trained (evaluate.py --samples 8)"] if 0 < num < LEAST_PROBLEMS else []
