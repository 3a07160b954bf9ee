"""
Where the files of a run are, and where they went with a project folder that moved.

A run's settings hold absolute paths. Its env.json holds, beside them, the run's own place, the
working directory, and a digest of each file. After a move a file is taken where it lies as before,
seen from the run or from the working directory, if its digest is the same.

Left out: which settings name files (settings/sources.py), and whether a resumed run may go on with
other files (checkpoint.py).
"""

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from text.documents import read_json
from text.printable import escape_invisible

LARGE = 2**28  # bytes of a file above which its digest is of its size and its ends
END = 2**24  # bytes of such an end

Moves = dict[str, str]  # new paths by old ones


# ---- paths in settings


def map_paths(text: str, find: Callable[[str], str | None]) -> str:
    """
    A setting's text with each path in it replaced by what `find` returns, unless that is None.

    A text is a path, or several with commas between them. A path may have a name and `=` before it,
    and `:` and a function or a split behind it.
    """
    place = find(text)
    if place is not None:
        return place
    if "," in text:
        return ",".join(map_paths(part, find) for part in text.split(","))
    if "=" in text:
        name, _, path = text.partition("=")
        return f"{name}={map_paths(path, find)}"
    path, _, name = text.rpartition(":")
    return f"{map_paths(path, find)}:{name}" if path else text


def map_settings(settings: dict[str, Any], find: Callable[[str], str | None]) -> dict[str, Any]:
    """Settings whose texts went through `map_paths`."""
    mapped = dict(settings)
    for key, value in settings.items():
        if isinstance(value, str):
            mapped[key] = map_paths(value, find)
        elif isinstance(value, list):
            mapped[key] = [
                map_paths(text, find) if isinstance(text, str) else text for text in value
            ]
    return mapped


def existing_paths(settings: dict[str, Any]) -> list[str]:
    """The absolute paths in settings at which something is."""
    paths: dict[str, None] = {}  # in order, each once

    def note(text: str) -> str | None:
        if not (os.path.isabs(text) and os.path.exists(text)):
            return None
        paths[text] = None
        return text

    map_settings(settings, note)
    return list(paths)


# ---- the record of a run


def digest_of_path(path: str) -> str:
    """
    16 digits of a SHA-256 of a file's bytes.

    Of a file above LARGE it is of its size and its two ends. Of a directory it is of the names and
    sizes of its files: those of a model are compared again by the digest of its weights.
    """
    digest = hashlib.sha256()
    if os.path.isdir(path):
        for file in sorted(Path(path).rglob("*")):
            if file.is_file():
                digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
        return digest.hexdigest()[:16]
    with open(path, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > LARGE:
            digest.update(f"{size} ".encode() + opened.read(END))
            opened.seek(-END, os.SEEK_END)
        for block in iter(lambda: opened.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()[:16]


def make_record(paths: Iterable[str], run_dir: Path) -> dict[str, Any]:
    """What env.json holds about the places of a run whose settings name these paths."""
    return {
        "run": os.path.abspath(run_dir),
        "working_directory": os.getcwd(),
        "files": {path: digest_of_path(path) for path in paths if is_readable(path)},
    }


def is_readable(path: str) -> bool:
    """Whether a path is a directory or a regular file: a pipe or a device may have no end."""
    return (os.path.isdir(path) or os.path.isfile(path)) and os.access(path, os.R_OK)


def read_record(run_dir: Path) -> dict[str, Any]:
    """The record in a run's env.json, without files where there is none."""
    empty: dict[str, Any] = {"run": "", "working_directory": "", "files": {}}
    try:
        record = read_json((run_dir / "env.json").read_text(encoding="utf-8"))["places"]
        is_whole = all(type(record[key]) is type(value) for key, value in empty.items())
    except (OSError, ValueError, LookupError, TypeError):  # of an older run, or damaged
        return empty
    return record if is_whole else empty


# ---- after a move


def find_moves(run_dir: Path, named: Iterable[str] = ()) -> Moves:
    """
    The new places of a run's files that are no longer where they were; prints a line for each.

    A file is looked for at the same place relative to the run, then to the working directory, then
    among the `named` paths. It is taken only where its digest is that of the record.
    """
    record = read_record(run_dir)
    bases = ((record["run"], os.path.abspath(run_dir)), (record["working_directory"], os.getcwd()))
    moves: Moves = {}
    for old, digest in record["files"].items():
        if os.path.exists(old):
            continue
        places = [
            os.path.normpath(os.path.join(new, os.path.relpath(old, base))) for base, new in bases
        ]
        candidates = list(filter(is_readable, (*places, *named)))
        equal = [path for path in candidates if digest_of_path(path) == digest]
        if equal:
            moves[old] = equal[0]
            print_once(f"{old} is no longer there; the same bytes are taken from {equal[0]}")
        elif candidates and candidates[0] in places:
            print_once(f"{old} is no longer there, and {candidates[0]} holds something else")
    return moves


@functools.cache
def print_once(line: str) -> None:
    """Prints a line on stderr, each once in a process."""
    print(escape_invisible(line), file=sys.stderr)


def relocate_settings(settings: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """A run's settings with the new places of files that moved; see `find_moves`."""
    return map_settings(settings, find_moves(run_dir).get)
