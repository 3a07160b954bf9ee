"""
The paths of a run's files, and their new paths after the project folder has moved.

A run's settings hold absolute paths. Its env.json holds the run's own directory, the working
directory, and a digest of each file. After a move, a file is looked for at its old path relative to
the run or to the working directory. The file there is taken if its digest is the same.

This file does not cover which settings name files (settings/sources.py), or whether a resumed run
may use other files (checkpoint.py).
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

LARGE = 2**28  # bytes; the digest of a larger file covers only its size, beginning and end
END = 2**24  # bytes of such a beginning or end

Moves = dict[str, str]  # new paths, by old path


# ---- paths in settings


def map_paths(text: str, find: Callable[[str], str | None]) -> str:
    """
    A setting's text, in which `find` has replaced each path for which it does not return None.

    A text is one path or several, separated by commas. A path may have a name and `=` before it,
    and `:` and the name of a function or a split after it.
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
    """The settings after `map_paths` of every text in them."""
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
    """The absolute paths in settings at which a file or directory exists."""
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
    The first 16 digits of the SHA-256 of a file's bytes.

    For a file above LARGE, the digest covers its size, beginning and end. For a directory, it
    covers the names and sizes of the files; a model's directory is compared again by its weights'
    digest.
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
    """The part of env.json about the files of a run whose settings name these paths."""
    return {
        "run": os.path.abspath(run_dir),
        "working_directory": os.getcwd(),
        "files": {path: digest_of_path(path) for path in paths if is_readable_file_or_folder(path)},
    }


def is_readable_file_or_folder(path: str) -> bool:
    """Whether a path is a readable directory or regular file. A pipe or device may be endless."""
    return (os.path.isdir(path) or os.path.isfile(path)) and os.access(path, os.R_OK)


def read_record(run_dir: Path) -> dict[str, Any]:
    """The record in a run's env.json; an empty one if there is none or it is damaged."""
    empty: dict[str, Any] = {"run": "", "working_directory": "", "files": {}}
    try:
        record = read_json((run_dir / "env.json").read_text(encoding="utf-8"))["places"]
        is_whole = all(type(record[key]) is type(value) for key, value in empty.items())
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
    ):  # the record of an older run, or a damaged one
        return empty
    return record if is_whole else empty


# ---- after a move


def find_moves(run_dir: Path, named: Iterable[str] = ()) -> Moves:
    """
    The new paths of a run's files that are no longer at their old paths. Prints a line for each.

    A file is looked for at the same path relative to the run, then to the working directory, then
    among the `named` paths. A candidate is taken only if its digest is the recorded one.
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
        candidates = list(filter(is_readable_file_or_folder, (*places, *named)))
        equal = [path for path in candidates if digest_of_path(path) == digest]
        if equal:
            moves[old] = equal[0]
            print_once(f"{old} is no longer there; the same bytes are taken from {equal[0]}")
        elif candidates and candidates[0] in places:
            print_once(f"{old} is no longer there, and {candidates[0]} holds something else")
    return moves


@functools.cache
def print_once(line: str) -> None:
    """Prints a line on stderr, but only once per process."""
    print(escape_invisible(line), file=sys.stderr)


def relocate_settings(settings: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """A run's settings with the new paths of moved files; see `find_moves`."""
    return map_settings(settings, find_moves(run_dir).get)
