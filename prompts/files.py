"""
Reads unchecked records from data files and from the Hugging Face hub. Each record comes with a
label such as "line 3" for error messages.

This file has its own readers for JSON lines, JSON and CSV, because `datasets` and pyarrow do not
report the line number of a mistake. In addition, `datasets` reads the CSV answer "007" as 7.0 and
"None" as missing, and pyarrow refuses JSON answers of different types. If the content of a file
contradicts its name, the error message names the file's real type. This file does not cover the
meaning of a record (prompts/data.py), or how Arrow tables are converted to rows (prompts/arrow.py).
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
from prompts.examples import did_you_mean, format_error, shorten_value
from text.documents import read_json

LabelledRecord = tuple[str, Any]  # a record's label, such as "line 3", and its content
Records = list[LabelledRecord]
SPLITS = ("train", "held_out", "test", "validation")  # all splits except the first are held out


# ---- all kinds of sources


def read_records(spec: str, notes: list[str] | None = None) -> Records:
    """
    Reads the unchecked records in a data file, a folder or a hub data set. docs/data.md lists all
    kinds of sources.

    Raises ValueError if the source cannot be read or has no records.
    """
    folder = spec
    split = ""
    if not os.path.isdir(spec):
        folder, _, split = spec.rpartition(":")
    if os.path.isdir(folder):  # Path.is_dir() would raise an error for a long name
        records = _load_saved_records(spec, folder, split)
    elif os.path.isfile(spec):
        records = _read_file_records(spec, notes)
    else:
        records = _load_named_hub_records(spec)
    if not records:
        raise ValueError(f"--data {spec} contains no records; add at least one with a prompt")
    return records


def refuse_missing_file(spec: str) -> None:
    """Raises ValueError if a name in `spec` has the suffix of a data file but names no file."""
    if os.path.exists(spec):  # the name of a file may contain a comma
        return
    for name in spec.split(","):
        if Path(name).suffix.lower() in _READERS and not os.path.exists(name):
            raise ValueError(f"--data {name}: there is no such file")


def _read_file_records(spec: str, notes: list[str] | None) -> Records:
    """Reads the records in one file."""
    ending = Path(spec).suffix
    if ending.lower() not in _READERS:
        raise ValueError(
            f"--data {spec} has the unknown suffix {ending!r}; "
            f"use a file that ends in one of {', '.join(_READERS)}"
        )
    try:
        content = Path(spec).read_bytes()
    except OSError as error:
        raise ValueError(f"--data {spec} cannot be read: {error.strerror}") from error
    _raise_if_content_contradicts_name(spec, content)
    records = list(_READERS[ending.lower()](spec, content))
    if ending.lower() in (".jsonl", ".json"):
        records = _without_arrow_nulls_if_by_pandas(spec, content, records, notes)
    return records


def _load_named_hub_records(spec: str) -> Records:
    """Loads the records in a hub data set. spec: in the format owner/name:config:split."""
    # a split may contain [...], but a config may not
    hub = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([^:\[\]]*))?(?::(.+))?", spec)
    if hub is None or re.fullmatch(r"\.[A-Za-z]+", Path(spec).suffix):
        raise ValueError(
            f"--data {spec}: there is no such file; use a file that ends in one of "
            f"{', '.join(_READERS)}, or a hub data set, owner/name:config:split"
        )
    name, config, split = hub.groups()
    # in owner/name:train, the part after the name is a split instead of a config
    if split is None and config in SPLITS:
        split = config
        config = None
    try:
        return load_hub_records(name, config or None, split or "train")
    except Exception as error:  # the hub's client raises errors of its own types
        raise ValueError(
            f"--data {spec}: there is no such file, and no hub data set could be loaded "
            f"({format_error(error)}); check the spelling and the network connection"
        ) from error


def note_on_removed_nulls(reason: str, num_nulls: int) -> str:
    """A note that nulls were removed. reason: a clause that says why Gwen removed them."""
    return (
        f"data: {reason}, so {num_nulls} nulls inside objects were removed; "
        "to keep the nulls, write JSON lines with a space after each comma and colon, as "
        "json.dumps does"
    )


def _without_arrow_nulls_if_by_pandas(
    spec: str, content: bytes, records: Records, notes: list[str] | None
) -> Records:
    """
    Returns the records unchanged if they do not look as if Arrow had added nulls to them.

    Otherwise, appends a note to `notes`. The nulls are then removed if `Dataset.to_json` seems to
    have written the file, and kept if another program seems to have written it.
    """
    rows = [record for _, record in records]
    if not arrow.looks_filled_with_nulls(rows):
        return records
    notes = [] if notes is None else notes
    num = arrow.count_inner_nulls(rows)
    if not arrow.looks_written_by_pandas(content.decode("utf-8-sig")):
        notes.append(
            f"data: {num} nulls inside objects of {spec} were kept; if Arrow added them, "
            "use a parquet file or the file that Dataset.to_json writes"
        )
        return records
    notes.append(note_on_removed_nulls(f"{spec} looks as if Dataset.to_json wrote it", num))
    places = [place for place, _ in records]
    return list(zip(places, arrow.rows_without_inner_nulls(rows), strict=True))


# ---- the type of a file


# the first bytes of a file -> what the file really is, and the fix
_SIGNATURES = {
    b"version https://git-lfs": "a Git LFS pointer without data; fetch the file: git lfs pull",
    b"\x1f\x8b": "compressed by gzip; unpack it: gunzip FILE",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet; unpack it, or save it as CSV",
    b"<!doctype html": "a web page; download the file itself",
    b"<html": "a web page; download the file itself",
}


def _raise_if_content_contradicts_name(spec: str, content: bytes) -> None:
    """Raises ValueError if a file's content contradicts its name."""
    start = content[:64].lstrip().lower()
    for signature, kind in _SIGNATURES.items():
        if start.startswith(signature.lower()):
            raise ValueError(f"--data {spec} is {kind}")
    for magic, ending in ((b"PAR1", ".parquet"), (b"ARROW1", ".arrow")):
        if content.startswith(magic) and not spec.lower().endswith(ending):
            raise ValueError(f"--data {spec} is a {ending[1:]} file; rename it to end in {ending}")


def decode_utf8_file(spec: str, content: bytes) -> str:
    """Decodes the content of a UTF-8 file. If a byte is invalid, the ValueError names its line."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or _looks_like_utf16(content):
        raise ValueError(
            f"{spec}, line 1: the file is in UTF-16 instead of UTF-8; save it as UTF-8"
        )
    if b"\0" in content:
        line = content[: content.index(b"\0")].count(b"\n") + 1
        raise ValueError(
            f"{spec}, line {line}: the file contains a NUL byte, so it is not text; save it as "
            "UTF-8"
        )
    try:
        return content.decode("utf-8-sig")  # "-sig" because some editors write a byte order mark
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{spec}, line {line}: byte 0x{content[error.start]:02x} is not valid UTF-8; "
            "save the file as UTF-8"
        ) from error


def _looks_like_utf16(content: bytes) -> bool:
    """
    Whether the content of a file without a byte order mark looks like UTF-16.

    In UTF-16, a Latin character consists of two bytes, one of which is zero. The byte order of the
    file decides whether this is always the first byte or always the second byte.
    """
    start = content[: 2**16]
    fewer, more = sorted([start[::2].count(0), start[1::2].count(0)])
    return more > len(start) / 4 and fewer < more / 8


# ---- JSON


def parse_json(spec: str, label: str, text: str) -> Any:
    """
    Parses JSON text. Raises ValueError if the text is not valid JSON.

    label: where the text is, such as "line 3", for the error message.
    """
    try:
        return read_json(text)
    except ValueError as error:
        if "\n" in text and isinstance(error, json.JSONDecodeError):
            label = f"line {error.lineno}"
        reason = str(error).split(": ")[0]
        raise ValueError(
            f"{spec}, {label}: the text is not valid JSON ({reason}): "
            f"{shorten_value(text.strip())}; correct this line"
        ) from error


def parse_json_or_none(text: str) -> Any:
    """Parses JSON text. Returns None if the text is not valid JSON."""
    try:
        return read_json(text)
    except ValueError:
        return None


def parse_jsonl_records(spec: str, content: bytes) -> Iterator[LabelledRecord]:
    """
    The records in the content of a JSON lines file. If the whole content is one JSON list, its
    items are the records.
    """
    text = decode_utf8_file(spec, content)
    if text.lstrip().startswith("["):
        records = parse_json_or_none(text)
        if isinstance(records, list):
            yield from label_records_by_number(records)
            return

    lines = list(label_nonblank_lines(spec, content))
    starts_object = len(lines) > 1 and lines[0][1].lstrip().startswith("{")
    if starts_object and isinstance(parse_json_or_none(text), dict):
        raise ValueError(
            f"{spec}, line 1: an object extends over several lines; write each row on a single line"
        )
    for place, line in lines:
        yield place, parse_json(spec, place, line)


def _parse_json_list_records(spec: str, content: bytes) -> Iterator[LabelledRecord]:
    """
    The records in the content of a JSON file, which must be a single JSON list. Raises ValueError
    if the content is JSON lines or any other JSON value.
    """
    text = decode_utf8_file(spec, content)
    all_lines = text.strip().split("\n")
    lines = [line for line in all_lines if line.strip()]
    if len(all_lines) > 1 and all(isinstance(parse_json_or_none(line), dict) for line in lines):
        raise ValueError(f"--data {spec} contains JSON lines; rename it to end in .jsonl")
    records = parse_json(spec, "line 1", text) if text.strip() else []
    if not isinstance(records, list):
        raise ValueError(
            f"{spec} contains {shorten_value(records)} instead of a list of records; "
            "write [{...}, ...], or use .jsonl"
        )
    return label_records_by_number(records)


# ---- lines and cells


def label_nonblank_lines(spec: str, content: bytes) -> Iterator[tuple[str, str]]:
    """The lines of a text file that are not blank, each with a label such as "line 3"."""
    # not splitlines(), which would also split a JSON string that contains U+2028
    lines = decode_utf8_file(spec, content).split("\n")
    return ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip())


def label_records_by_number(rows: Iterable[Any]) -> Iterator[LabelledRecord]:
    """Labels each row with its number, as in "record 3"."""
    return ((f"record {number}", row) for number, row in enumerate(rows, 1))


def _prompts_from_text_lines(spec: str, content: bytes) -> Iterator[LabelledRecord]:
    """
    Makes one prompt from each line of a text file. Raises ValueError if the file is JSON lines,
    JSON or CSV.
    """
    lines = [(place, line.strip("\r")) for place, line in label_nonblank_lines(spec, content)]
    kind = _describe_kind_if_not_prompts([line for _, line in lines])
    if kind:
        raise ValueError(
            f"--data {spec}: each line of a text file is one prompt, but this file looks like "
            f"{kind}"
        )
    return ((place, {"prompt": line}) for place, line in lines)


def _describe_kind_if_not_prompts(lines: list[str]) -> str:
    """
    The type of a text file whose lines are not prompts, and the right suffix; "" if the lines are
    prompts.
    """
    if not lines:
        return ""
    kind = _describe_kind_and_suffix_if_json(lines)
    if kind:
        return kind
    separator = max(",;\t", key=lines[0].count)
    names = [name.strip().strip('"') for name in lines[0].split(separator)]
    if len(names) > 1 and "prompt" in names and all(name.isidentifier() for name in names):
        return "CSV; rename it to end in .csv"
    return ""


def _describe_kind_and_suffix_if_json(lines: list[str]) -> str:
    """
    The type of a file that contains JSON, and the right suffix; "" if the file contains no JSON.
    """
    if not lines or not lines[0].lstrip().startswith(("[", "{")):
        return ""
    if all(isinstance(parse_json_or_none(line), dict) for line in lines):
        return "JSON lines; rename it to end in .jsonl"
    is_json = isinstance(parse_json_or_none("\n".join(lines)), (list, dict))
    return "JSON; rename it to end in .json" if is_json else ""


def _parse_csv_records(spec: str, content: bytes) -> Iterator[LabelledRecord]:
    """
    The rows in the content of a CSV file, as dictionaries whose keys are the names in the header.

    The separator is taken from the header. An empty cell becomes None. Raises ValueError if a row
    has more or fewer fields than the header.
    """
    # a cell may contain a whole document, but the default limit is 131,072 characters
    csv.field_size_limit(2**31 - 1)
    text = decode_utf8_file(spec, content)
    kind = _describe_kind_and_suffix_if_json([line for line in text.split("\n") if line.strip()])
    if kind:
        raise ValueError(f"--data {spec} is not CSV but {kind}")
    separator = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = list(rows.fieldnames or [])
        wrong = [name for name in names if not name.strip() or names.count(name) > 1]
        if wrong:
            raise ValueError(
                f"{spec}, line 1: the column name {shorten_value(wrong[0])} is empty or occurs "
                "twice; rename the column"
            )
        for row in rows:
            if None in row or None in row.values():
                raise ValueError(
                    f"{spec}, line {rows.line_num}: this row does not have as many fields as the "
                    f"header ({len(names)}); quote fields that contain {separator!r}"
                )
            yield f"line {rows.line_num}", {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        raise ValueError(
            f"{spec}, line {rows.line_num}: the row is not valid CSV ({format_error(error)}); "
            "quote its fields"
        ) from error


# ---- tables


def _parse_parquet_or_arrow_records(spec: str, content: bytes) -> Iterator[LabelledRecord]:
    """
    The rows in the content of a parquet file, an Arrow file or an Arrow stream. (`datasets` saves
    Arrow streams.)
    """
    import pyarrow.parquet  # imported here because it takes half a second

    is_parquet = spec.lower().endswith(".parquet")
    file = io.BytesIO(content)
    try:
        if is_parquet:
            table = pyarrow.parquet.read_table(file)
        elif content.startswith(b"ARROW1"):
            table = pyarrow.ipc.open_file(file).read_all()
        else:
            table = pyarrow.ipc.open_stream(file).read_all()
        return label_records_by_number(arrow.rows_from_arrow_table(table))
    except Exception as error:  # damaged files raise errors of many types
        kind = "parquet" if is_parquet else "arrow"
        raise ValueError(
            f"{spec} is a damaged {kind} file ({format_error(error)}); write it again"
        ) from error


_READERS = {
    ".jsonl": parse_jsonl_records,
    ".json": _parse_json_list_records,
    ".csv": _parse_csv_records,
    ".txt": _prompts_from_text_lines,
    ".parquet": _parse_parquet_or_arrow_records,
    ".arrow": _parse_parquet_or_arrow_records,
}


def _load_saved_records(spec: str, folder: str, split: str) -> Records:
    """
    Loads the records in a directory that `datasets` saved.

    split: the name of a split. If `split` is "", all splits are loaded, and the column `split`
    contains each record's split.
    """
    import datasets  # imported here because it takes seconds

    try:
        saved = datasets.load_from_disk(folder)
    except Exception as error:  # `datasets` raises errors of many types
        raise ValueError(
            f"--data {folder} is a directory, but not one that datasets saved "
            f"({format_error(error)}); use a single file in it instead ({', '.join(_READERS)})"
        ) from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    first = next(iter(splits))
    is_unknown = bool(split) and split not in splits
    is_ambiguous = not split and len(splits) > 1 and not splits.keys() <= set(SPLITS)
    if is_unknown or is_ambiguous:
        raise ValueError(
            f"--data {spec}{did_you_mean(split, splits)}: {folder} has the splits "
            f"{', '.join(splits)}; choose one, for example {folder}:{first}"
        )
    if split or len(splits) == 1:
        return list(label_records_by_number(arrow.rows_from_dataset(splits[split or first])))
    rows, _ = arrow.rows_and_num_removed_doubtful_nulls(splits)
    return list(label_records_by_number(rows))


def load_hub_records(name: str, config: str | None, split: str) -> Records:
    """Loads the records in a data set on the Hugging Face hub."""
    import datasets  # imported here because it takes seconds

    # Silences the messages about retries, which would fill the screen. If the download fails, Gwen
    # reports it in one line.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    dataset = datasets.load_dataset(name, config, split=split)
    return list(label_records_by_number(arrow.rows_from_dataset(dataset)))
