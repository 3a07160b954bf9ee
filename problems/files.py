"""
Records of data files and of the hub, unchecked, each with its place.

JSON lines, JSON and CSV have their own readers, because `datasets` and pyarrow lose the line of a mistake. `datasets`
reads a CSV answer "007" as 7.0 and "None" as missing; pyarrow refuses JSON answers of different types. A file that is
something else than its name says is refused by what it is. Left out: what a record means (problems/data.py).
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

from flags import read_json
from problems import arrow
from problems.examples import format_error, shorten_value, suggest_nearest

Records = list[tuple[str, Any]]  # a record's place ("line 3"), and its content
SPLITS = ("train", "held_out", "test", "validation")  # all but the first are held out


def tell_nulls(what: str, num: int) -> str:
    fix = "to keep them, write JSON lines with spaces, as json.dumps does"
    return f"data: {what}, so {num} nulls inside objects are keys that their rows lack; {fix}"


def read_records(spec: str, notes: list[str] | None = None) -> Records:
    """The unchecked records of `load_data`. Raises ValueError if they cannot be read or there are none."""
    ending, endings = Path(spec).suffix, ", ".join(_READERS)
    folder, _, part = (spec, "", "") if os.path.isdir(spec) else spec.rpartition(":")
    if os.path.isdir(folder):  # Path.is_dir() would raise for names that are too long
        records = _saved_records(spec, folder, part)
    elif not os.path.isfile(spec):
        hub = re.fullmatch(
            r"([\w.-]+/[\w.-]+)(?::([^:\[\]]*))?(?::(.+))?", spec
        )  # config holds no slice [...]
        if hub is None or re.fullmatch(r"\.[A-Za-z]+", ending):
            raise ValueError(
                f"--data {spec}: no such file; give {endings} or a hub dataset owner/name:config:split"
            )
        name, config, split = hub.groups()
        if split is None and config in SPLITS:  # a lone split
            config, split = None, config
        try:
            records = hub_records(name, config or None, split or "train")
        except Exception as error:  # the hub's client raises its own types
            why = f"no such file, and no hub dataset that can be loaded ({format_error(error)})"
            raise ValueError(f"--data {spec}: {why}; check the spelling and the network") from error
    elif ending.lower() not in _READERS:
        raise ValueError(
            f"--data {spec} has the unknown ending {ending!r}; the endings read are {endings}"
        )
    else:
        try:
            content = Path(spec).read_bytes()
        except OSError as error:
            raise ValueError(f"--data {spec} cannot be read: {error.strerror}") from error
        _refuse_other_kinds(spec, content)
        records = list(_READERS[ending.lower()](spec, content))
        if ending.lower() in (".jsonl", ".json"):
            records = _without_nulls_of_pandas(spec, content, records, notes)
    if not records:
        raise ValueError(f"--data {spec} holds no records; it needs at least one with a prompt")
    return records


def _without_nulls_of_pandas(
    spec: str, content: bytes, records: Records, notes: list[str] | None
) -> Records:
    """The records of JSON without the nulls that Arrow made, where `Dataset.to_json` or pandas wrote the file."""
    rows = [record for _, record in records]
    if not arrow.is_filled_up(rows):
        return records
    notes = [] if notes is None else notes
    num = arrow.count_nulls(rows)
    if not arrow.is_written_by_pandas(content.decode("utf-8-sig")):
        fix = "if Arrow made them, give its parquet file or Dataset.to_json's"
        notes.append(
            f"data: {num} nulls inside objects of {spec} are kept as its user wrote them; {fix}"
        )
        return records
    notes.append(tell_nulls(f"{spec} has the form that Dataset.to_json writes", num))
    return list(zip((where for where, _ in records), arrow.rows_without_nulls(rows), strict=True))


# how files begin that have another ending than they should
_SIGNATURES = {
    b"version https://git-lfs": "a Git LFS pointer and no data; fetch the file: git lfs pull",
    b"\x1f\x8b": "packed by gzip; unpack it: gunzip FILE",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet; unpack it, or save it as CSV",
    b"<!doctype html": "a web page; download the file itself",
    b"<html": "a web page; download the file itself",
}


def _refuse_other_kinds(spec: str, content: bytes) -> None:
    """Raises ValueError for a file that is something else than its name says."""
    begin = content[:64].lstrip().lower()
    for signature, what in _SIGNATURES.items():
        if begin.startswith(signature.lower()):
            raise ValueError(f"--data {spec} is {what}")
    kind = (
        ".parquet"
        if content.startswith(b"PAR1")
        else ".arrow"
        if content.startswith(b"ARROW1")
        else ""
    )
    if kind and not spec.lower().endswith(kind):
        raise ValueError(f"--data {spec} is a {kind[1:]} file; name it {kind}")


def read_text_file(spec: str, content: bytes) -> str:
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
        where = f"{spec}, line {line}: byte 0x{content[error.start]:02x}"
        raise ValueError(f"{where} is not UTF-8; save the file as UTF-8") from error


def _is_utf16(content: bytes) -> bool:
    """Whether a text without a mark looks like UTF-16: a zero byte is half of most characters, always the same half."""
    begin = content[: 2**16]
    fewer, more = sorted([begin[::2].count(0), begin[1::2].count(0)])
    return more > len(begin) / 4 and fewer < more / 8


def parse_json(spec: str, where: str, text: str) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        if "\n" in text and isinstance(error, json.JSONDecodeError):
            where = f"line {error.lineno}"
        reason = str(error).split(": ")[0]
        raise ValueError(
            f"{spec}, {where}: not JSON ({reason}): {shorten_value(text.strip())}; correct that line"
        ) from error


def jsonl_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """The records of JSON lines; a file that is one list, as .json has it, is read as that list."""
    text = read_text_file(spec, content)
    if text.lstrip().startswith("["):
        try:
            records = read_json(text)
        except ValueError:
            records = None
        if isinstance(records, list):
            yield from number_lines(records)
            return
    lines = list(split_lines(spec, content))
    if (
        len(lines) > 1
        and lines[0][1].lstrip().startswith("{")
        and isinstance(read_or_none(text), dict)
    ):
        raise ValueError(
            f"{spec}, line 1: one object over several lines; write each row in one line"
        )
    for where, line in lines:
        yield where, parse_json(spec, where, line)


def split_lines(spec: str, content: bytes) -> Iterator[tuple[str, str]]:
    lines = enumerate(
        read_text_file(spec, content).split("\n"), 1
    )  # not splitlines: strings may contain U+2028
    return ((f"line {number}", line) for number, line in lines if line.strip())


def _text_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """A prompt a line. Raises ValueError for JSON lines, JSON or CSV under the name of a text."""
    lines = [(where, line.strip("\r")) for where, line in split_lines(spec, content)]
    texts = [line for _, line in lines]
    if kind := _kind_of_text(texts):
        raise ValueError(
            f"--data {spec}: each line of a text file is a prompt, and this looks like {kind}"
        )
    return ((where, {"prompt": line}) for where, line in lines)


def _kind_of_text(lines: list[str]) -> str:
    """What lines that are no prompts look like, and how to name their file; "" for prompts."""
    if not lines:
        return ""
    if kind := _kind_of_json(lines):
        return kind
    separator = max(",;\t", key=lines[0].count)
    names = [name.strip().strip('"') for name in lines[0].split(separator)]
    if len(names) > 1 and "prompt" in names and all(name.isidentifier() for name in names):
        return "CSV; name it .csv"
    return ""


def _kind_of_json(lines: list[str]) -> str:
    """What a file is whose lines are JSON, and how to name it; "" for other lines."""
    if not lines or not lines[0].lstrip().startswith(("[", "{")):
        return ""
    if all(isinstance(read_or_none(line), dict) for line in lines):
        return "JSON lines; name it .jsonl"
    return "JSON; name it .json" if isinstance(read_or_none("\n".join(lines)), (list, dict)) else ""


def read_or_none(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return None


def _json_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    text = read_text_file(spec, content)
    lines = text.strip().split("\n")
    if len(lines) > 1 and all(
        isinstance(read_or_none(line), dict) for line in lines if line.strip()
    ):
        raise ValueError(f"--data {spec} holds JSON lines; name it .jsonl")
    records = parse_json(spec, "line 1", text) if text.strip() else []
    if not isinstance(records, list):
        raise ValueError(
            f"{spec} holds {shorten_value(records)}, not a list of records; write [{{...}}, ...] or use .jsonl"
        )
    return number_lines(records)


def _csv_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """Rows by the header's names, parted as these are; an empty cell is missing, a wrong number of fields an error."""
    csv.field_size_limit(
        2**31 - 1
    )  # a cell may be a document; the default limit is 131,072 characters
    text = read_text_file(spec, content)
    if kind := _kind_of_json([line for line in text.split("\n") if line.strip()]):
        raise ValueError(f"--data {spec} is no CSV but {kind}")
    separator = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = list(rows.fieldnames or [])
        if wrong := [name for name in names if not name.strip() or names.count(name) > 1]:
            raise ValueError(
                f"{spec}, line 1: column {shorten_value(wrong[0])} is empty or occurs twice; rename it"
            )
        for row in rows:
            if None in row or None in row.values():
                fix = f"not {len(names)} fields, as the header has; quote fields that hold {separator!r}"
                raise ValueError(f"{spec}, line {rows.line_num}: {fix}")
            yield f"line {rows.line_num}", {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        raise ValueError(
            f"{spec}, line {rows.line_num}: not CSV ({format_error(error)}); quote that field"
        ) from error


def _table_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """Of a parquet file, an Arrow file or an Arrow stream, as which `datasets` keeps its tables."""
    import pyarrow.parquet  # here: importing it takes half a second

    open_arrow = pyarrow.ipc.open_file if content.startswith(b"ARROW1") else pyarrow.ipc.open_stream
    is_parquet, file = spec.lower().endswith(".parquet"), io.BytesIO(content)
    try:
        table = pyarrow.parquet.read_table(file) if is_parquet else open_arrow(file).read_all()
        return number_lines(arrow.rows_of_table(table))
    except Exception as error:  # damaged files raise many types
        kind = "parquet" if is_parquet else "arrow"
        raise ValueError(
            f"{spec} is not a readable {kind} file ({format_error(error)}); write it again"
        ) from error


def number_lines(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"record {number}", row) for number, row in enumerate(rows, 1))


_READERS = {
    ".jsonl": jsonl_records,
    ".json": _json_records,
    ".csv": _csv_records,
    ".txt": _text_records,
    ".parquet": _table_records,
    ".arrow": _table_records,
}


def _saved_records(spec: str, folder: str, split: str) -> Records:
    """Of a directory that `datasets` saved: of one split, or of all, where each record gets its split's name."""
    import datasets  # here: importing it takes seconds

    try:
        saved = datasets.load_from_disk(folder)
    except Exception as error:  # of many types
        why = f"is a directory that datasets did not save ({format_error(error)})"
        raise ValueError(
            f"--data {folder} {why}; name one file in it ({', '.join(_READERS)})"
        ) from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    first = next(iter(splits))
    if split not in splits if split else len(splits) > 1 and not splits.keys() <= set(SPLITS):
        known = f"the splits {', '.join(splits)}; name one, as {folder}:{first}"
        raise ValueError(f"--data {spec}{suggest_nearest(split, splits)}: {folder} has {known}")
    if split or len(splits) == 1:
        return list(number_lines(arrow.rows_of_dataset(splits[split or first])))
    return list(number_lines(arrow.rows_of_program(splits)[0]))


def hub_records(name: str, config: str | None, split: str) -> Records:
    import datasets  # here: importing it takes seconds

    # retries would fill a screen; our error says the outcome in one line
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return list(
        number_lines(arrow.rows_of_dataset(datasets.load_dataset(name, config, split=split)))
    )
