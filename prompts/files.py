"""
Reads unchecked records from data files and from the hub, each with its place.

JSON lines, JSON and CSV have their own readers here, because `datasets` and pyarrow lose the line
number of a mistake. Also, `datasets` reads a CSV answer "007" as 7.0 and "None" as missing, and
pyarrow refuses JSON answers with different types. A file whose content contradicts its name is
refused, and the error names its true kind. This file does not cover the meaning of a record
(prompts/data.py) or the rows of Arrow tables (prompts/arrow.py).
"""

import csv
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prompts import arrow
from prompts.examples import format_error, shorten_value, suggest_nearest
from text.documents import read_json

Records = list[tuple[str, Any]]  # a record's place ("line 3"), and its content
SPLITS = ("train", "held_out", "test", "validation")  # all splits but the first are held out


# ---- any source


def read_records(spec: str, notes: list[str] | None = None) -> Records:
    """
    The records of a data file, folder or hub data set, before any check; docs/data.md lists these.

    Raises ValueError if the source cannot be read, or if it has no records.
    """
    folder = spec
    split = ""
    if not os.path.isdir(spec):
        folder, _, split = spec.rpartition(":")
    if os.path.isdir(folder):  # Path.is_dir() would raise for names that are too long
        records = _saved_records(spec, folder, split)
    elif os.path.isfile(spec):
        records = _file_records(spec, notes)
    else:
        records = _named_hub_records(spec)
    if not records:
        raise ValueError(f"--data {spec} holds no records; it needs at least one with a prompt")
    return records


def _file_records(spec: str, notes: list[str] | None) -> Records:
    """The records in one file."""
    ending = Path(spec).suffix
    if ending.lower() not in _READERS:
        raise ValueError(
            f"--data {spec} has the unknown ending {ending!r}; "
            f"the endings read are {', '.join(_READERS)}"
        )
    try:
        content = Path(spec).read_bytes()
    except OSError as error:
        raise ValueError(f"--data {spec} cannot be read: {error.strerror}") from error
    _refuse_other_kinds(spec, content)
    records = list(_READERS[ending.lower()](spec, content))
    if ending.lower() in (".jsonl", ".json"):
        records = _remove_nulls_of_pandas(spec, content, records, notes)
    return records


def _named_hub_records(spec: str) -> Records:
    """The records in a hub data set, which is named owner/name:config:split."""
    # a config has no [...], which a split may have
    hub = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([^:\[\]]*))?(?::(.+))?", spec)
    if hub is None or re.fullmatch(r"\.[A-Za-z]+", Path(spec).suffix):
        raise ValueError(
            f"--data {spec}: no such file; give {', '.join(_READERS)} "
            "or a hub dataset owner/name:config:split"
        )
    name, config, split = hub.groups()
    if split is None and config in SPLITS:  # a split without a config
        split = config
        config = None
    try:
        return hub_records(name, config or None, split or "train")
    except Exception as error:  # the hub's client raises its own types
        raise ValueError(
            f"--data {spec}: no such file, and no hub dataset that can be loaded "
            f"({format_error(error)}); check the spelling and the network"
        ) from error


def describe_nulls(reason: str, num: int) -> str:
    """The line about nulls that were read as absent keys. reason: a clause that says why."""
    return (
        f"data: {reason}, so {num} nulls inside objects are keys that their rows lack; "
        "to keep them, write JSON lines with spaces, as json.dumps does"
    )


def _remove_nulls_of_pandas(
    spec: str, content: bytes, records: Records, notes: list[str] | None
) -> Records:
    """The records without nulls that Arrow added, if pandas or `Dataset.to_json` wrote them."""
    rows = [record for _, record in records]
    if not arrow.is_filled_up(rows):
        return records
    notes = [] if notes is None else notes
    num = arrow.count_nulls(rows)
    if not arrow.is_written_by_pandas(content.decode("utf-8-sig")):
        notes.append(
            f"data: {num} nulls inside objects of {spec} are kept as its user wrote them; "
            "if Arrow made them, give its parquet file or Dataset.to_json's"
        )
        return records
    notes.append(describe_nulls(f"{spec} has the form that Dataset.to_json writes", num))
    places = [place for place, _ in records]
    return list(zip(places, arrow.rows_without_nulls(rows), strict=True))


# ---- the kind of a file


# first bytes of a file -> message, for files whose suffix hides what they are
_SIGNATURES = {
    b"version https://git-lfs": "a Git LFS pointer and no data; fetch the file: git lfs pull",
    b"\x1f\x8b": "packed by gzip; unpack it: gunzip FILE",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet; unpack it, or save it as CSV",
    b"<!doctype html": "a web page; download the file itself",
    b"<html": "a web page; download the file itself",
}


def _refuse_other_kinds(spec: str, content: bytes) -> None:
    """Raises ValueError if a file's content contradicts its name."""
    start = content[:64].lstrip().lower()
    for signature, kind in _SIGNATURES.items():
        if start.startswith(signature.lower()):
            raise ValueError(f"--data {spec} is {kind}")
    for magic, ending in ((b"PAR1", ".parquet"), (b"ARROW1", ".arrow")):
        if content.startswith(magic) and not spec.lower().endswith(ending):
            raise ValueError(f"--data {spec} is a {ending[1:]} file; name it {ending}")


def read_text_file(spec: str, content: bytes) -> str:
    """The text of a UTF-8 file. Raises ValueError, which names the line of an invalid byte."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or _is_utf16(content):
        raise ValueError(
            f"{spec}, line 1: the file is UTF-16 and not UTF-8; save the file as UTF-8"
        )
    if b"\0" in content:
        line = content[: content.index(b"\0")].count(b"\n") + 1
        raise ValueError(
            f"{spec}, line {line}: a NUL byte, which no text has; save the file as UTF-8"
        )
    try:
        return content.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{spec}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; "
            "save the file as UTF-8"
        ) from error


def _is_utf16(content: bytes) -> bool:
    """
    Whether a text without a byte order mark looks like UTF-16.

    In UTF-16, most characters have one byte that is zero: always the first, or always the second.
    """
    start = content[: 2**16]
    fewer, more = sorted([start[::2].count(0), start[1::2].count(0)])
    return more > len(start) / 4 and fewer < more / 8


# ---- JSON


def parse_json(spec: str, place: str, text: str) -> Any:
    """The value of a JSON text. place: where the text is, such as "line 3", for the ValueError."""
    try:
        return read_json(text)
    except ValueError as error:
        if "\n" in text and isinstance(error, json.JSONDecodeError):
            place = f"line {error.lineno}"
        reason = str(error).split(": ")[0]
        raise ValueError(
            f"{spec}, {place}: not JSON ({reason}): {shorten_value(text.strip())}; "
            "correct that line"
        ) from error


def read_or_none(text: str) -> Any:
    """The value of a JSON text; None if the text is not JSON."""
    try:
        return read_json(text)
    except ValueError:
        return None


def jsonl_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """The records in a JSON lines file. A file that is one JSON list is read as that list."""
    text = read_text_file(spec, content)
    if text.lstrip().startswith("["):
        records = read_or_none(text)
        if isinstance(records, list):
            yield from number_lines(records)
            return

    lines = list(split_lines(spec, content))
    starts_object = len(lines) > 1 and lines[0][1].lstrip().startswith("{")
    if starts_object and isinstance(read_or_none(text), dict):
        raise ValueError(
            f"{spec}, line 1: one object over several lines; write each row in one line"
        )
    for place, line in lines:
        yield place, parse_json(spec, place, line)


def _json_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """The records in a JSON list. Raises ValueError for JSON lines in a file named .json."""
    text = read_text_file(spec, content)
    all_lines = text.strip().split("\n")
    lines = [line for line in all_lines if line.strip()]
    if len(all_lines) > 1 and all(isinstance(read_or_none(line), dict) for line in lines):
        raise ValueError(f"--data {spec} holds JSON lines; name it .jsonl")
    records = parse_json(spec, "line 1", text) if text.strip() else []
    if not isinstance(records, list):
        raise ValueError(
            f"{spec} holds {shorten_value(records)}, not a list of records; "
            "write [{...}, ...] or use .jsonl"
        )
    return number_lines(records)


# ---- lines and cells


def split_lines(spec: str, content: bytes) -> Iterator[tuple[str, str]]:
    """The lines in a text file that are not blank, each with its place."""
    lines = read_text_file(spec, content).split("\n")  # not splitlines: strings may hold U+2028
    return ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip())


def number_lines(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Rows, each with its place."""
    return ((f"record {number}", row) for number, row in enumerate(rows, 1))


def _text_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """A prompt for each line. Raises ValueError for JSON lines, JSON or CSV in a text file."""
    lines = [(place, line.strip("\r")) for place, line in split_lines(spec, content)]
    kind = _kind_of_text([line for _, line in lines])
    if kind:
        raise ValueError(
            f"--data {spec}: each line of a text file is a prompt, and this looks like {kind}"
        )
    return ((place, {"prompt": line}) for place, line in lines)


def _kind_of_text(lines: list[str]) -> str:
    """The kind and the right suffix of a file whose lines are not prompts; "" for prompts."""
    if not lines:
        return ""
    kind = _kind_of_json(lines)
    if kind:
        return kind
    separator = max(",;\t", key=lines[0].count)
    names = [name.strip().strip('"') for name in lines[0].split(separator)]
    if len(names) > 1 and "prompt" in names and all(name.isidentifier() for name in names):
        return "CSV; name it .csv"
    return ""


def _kind_of_json(lines: list[str]) -> str:
    """The kind and the right suffix of a file whose lines are JSON; "" for other lines."""
    if not lines or not lines[0].lstrip().startswith(("[", "{")):
        return ""
    if all(isinstance(read_or_none(line), dict) for line in lines):
        return "JSON lines; name it .jsonl"
    is_json = isinstance(read_or_none("\n".join(lines)), (list, dict))
    return "JSON; name it .json" if is_json else ""


def _csv_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """
    The rows of a CSV file as dictionaries. Their keys are the names in the header.

    The separator is the one in the header. An empty cell counts as missing. Raises ValueError for a
    row with a wrong number of fields.
    """
    # a cell may be a document; the default limit is 131,072 characters
    csv.field_size_limit(2**31 - 1)
    text = read_text_file(spec, content)
    kind = _kind_of_json([line for line in text.split("\n") if line.strip()])
    if kind:
        raise ValueError(f"--data {spec} is no CSV but {kind}")
    separator = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = list(rows.fieldnames or [])
        wrong = [name for name in names if not name.strip() or names.count(name) > 1]
        if wrong:
            raise ValueError(
                f"{spec}, line 1: column {shorten_value(wrong[0])} is empty or occurs twice; "
                "rename it"
            )
        for row in rows:
            if None in row or None in row.values():
                raise ValueError(
                    f"{spec}, line {rows.line_num}: not {len(names)} fields, as the header has; "
                    f"quote fields that hold {separator!r}"
                )
            yield f"line {rows.line_num}", {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        raise ValueError(
            f"{spec}, line {rows.line_num}: not CSV ({format_error(error)}); quote that field"
        ) from error


# ---- tables


def _table_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """The rows of a parquet file, an Arrow file, or an Arrow stream as `datasets` saves it."""
    import pyarrow.parquet  # here: importing it takes half a second

    is_parquet = spec.lower().endswith(".parquet")
    file = io.BytesIO(content)
    try:
        if is_parquet:
            table = pyarrow.parquet.read_table(file)
        elif content.startswith(b"ARROW1"):
            table = pyarrow.ipc.open_file(file).read_all()
        else:
            table = pyarrow.ipc.open_stream(file).read_all()
        return number_lines(arrow.rows_of_table(table))
    except Exception as error:  # damaged files raise many types of errors
        kind = "parquet" if is_parquet else "arrow"
        raise ValueError(
            f"{spec} is not a readable {kind} file ({format_error(error)}); write it again"
        ) from error


_READERS = {
    ".jsonl": jsonl_records,
    ".json": _json_records,
    ".csv": _csv_records,
    ".txt": _text_records,
    ".parquet": _table_records,
    ".arrow": _table_records,
}


def _saved_records(spec: str, folder: str, split: str) -> Records:
    """
    The records in a directory that `datasets` saved.

    split: "" for all splits; then each record also holds the name of its split.
    """
    import datasets  # here: importing it takes seconds

    try:
        saved = datasets.load_from_disk(folder)
    except Exception as error:  # `datasets` raises many types of errors
        raise ValueError(
            f"--data {folder} is a directory that datasets did not save ({format_error(error)}); "
            f"name one file in it ({', '.join(_READERS)})"
        ) from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    first = next(iter(splits))
    is_unknown = bool(split) and split not in splits
    is_ambiguous = not split and len(splits) > 1 and not splits.keys() <= set(SPLITS)
    if is_unknown or is_ambiguous:
        raise ValueError(
            f"--data {spec}{suggest_nearest(split, splits)}: {folder} has the splits "
            f"{', '.join(splits)}; name one, as {folder}:{first}"
        )
    if split or len(splits) == 1:
        return list(number_lines(arrow.rows_of_dataset(splits[split or first])))
    rows, _ = arrow.rows_of_program(splits)
    return list(number_lines(rows))


def hub_records(name: str, config: str | None, split: str) -> Records:
    """The records in a hub data set."""
    import datasets  # here: importing it takes seconds

    # Messages about retries would fill a screen. Gwen's error says the outcome in one line.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    dataset = datasets.load_dataset(name, config, split=split)
    return list(number_lines(arrow.rows_of_dataset(dataset)))
