"""
Finds the files of a run again after the project's folder has been moved.

The settings of a run contain absolute paths. env.json records the directory of the run, the working
directory, and a digest of each file. After a move, Gwen looks for each file at its old path
relative to the run's directory or to the working directory, and uses a file with the same digest.

settings/sources.py determines which settings name files. checkpoint.py determines whether a resumed
run may use other files.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from text.documents import read_json
from text.function_specs import split_off_arguments
from text.printable import print_once

LARGE = 2**28  # bytes; the digest of a larger file covers only the file's size, beginning and end
END = 2**24  # the number of bytes at the beginning and end of a large file that the digest covers

Moves = dict[str, str]  # the new path of each moved file, by its old path


# ---- paths in settings


def replace_paths(setting_value: str, new_path: Callable[[str], str | None]) -> str:
    """
    Return the value of a setting after replacing each path by `new_path(path)`.

    A path for which `new_path` returns None is not changed.

    setting_value: one path, or several separated by commas. A path may be preceded by a name and
        `=`, and followed by `:` and the name of a function or a split. Arguments of the function
        are kept.
    """
    replacement = new_path(setting_value)
    if replacement is not None:
        return replacement
    text, arguments = split_off_arguments(setting_value)
    if arguments:
        return replace_paths(text, new_path) + arguments
    if "," in text:
        return ",".join(replace_paths(part, new_path) for part in text.split(","))
    if "=" in text:
        name, _, path = text.partition("=")
        return f"{name}={replace_paths(path, new_path)}"
    path, _, name = text.rpartition(":")
    return f"{replace_paths(path, new_path)}:{name}" if path else text


def replace_paths_in_settings(
    settings: dict[str, Any], new_path: Callable[[str], str | None]
) -> dict[str, Any]:
    """Return a copy of settings in which `replace_paths` was applied to every text."""
    mapped = dict(settings)
    for key, value in settings.items():
        if isinstance(value, str):
            mapped[key] = replace_paths(value, new_path)
        elif isinstance(value, list):
            mapped[key] = [
                replace_paths(text, new_path) if isinstance(text, str) else text for text in value
            ]
    return mapped


def list_existing_paths(settings: dict[str, Any]) -> list[str]:
    """List the absolute paths in settings at which a file or directory exists."""
    paths: dict[str, None] = {}  # in order, without repetition

    def note_existing_path(text: str) -> str | None:
        if not (os.path.isabs(text) and os.path.exists(text)):
            return None
        paths[text] = None
        return text  # so that `replace_paths` does not search in the parts of this path

    replace_paths_in_settings(settings, note_existing_path)
    return list(paths)


# ---- the record of paths in env.json


def digest_of_path(path: str) -> str:
    """
    Return the first 16 digits of the SHA-256 of a file or directory.

    The digest covers the bytes of a file, or the names and sizes of the files in a directory. If a
    file is larger than LARGE bytes, the digest covers only its size, beginning and end. So a model
    may have changed although this digest has not. When a run resumes, the weights of its model are
    therefore compared by `checkpoint.digest_of_config_and_weights`.
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


def make_path_record(paths: Iterable[str], run_dir: Path) -> dict[str, Any]:
    """
    Return a record of the directories and files of a run, which is saved in env.json.

    paths: the paths in the settings of the run.
    """
    return {
        "run": os.path.abspath(run_dir),
        "working_directory": os.getcwd(),
        "files": {path: digest_of_path(path) for path in paths if is_readable_file_or_folder(path)},
    }


def is_readable_file_or_folder(path: str) -> bool:
    """Whether a path is a readable directory or regular file, and not a pipe or device."""
    return (os.path.isdir(path) or os.path.isfile(path)) and os.access(path, os.R_OK)


def read_path_record(run_dir: Path) -> dict[str, Any]:
    """Read the record of paths in env.json. Returns an empty record if it is missing or damaged."""
    empty: dict[str, Any] = {"run": "", "working_directory": "", "files": {}}
    try:
        record = read_json((run_dir / "env.json").read_text(encoding="utf-8"))["places"]
        is_whole = all(type(record[key]) is type(value) for key, value in empty.items())
    except (OSError, ValueError, LookupError, TypeError):
        return empty  # The run is older than this record, or the file is damaged.
    return record if is_whole else empty


# ---- after a move


def find_and_print_moved_paths(run_dir: Path, candidate_paths: Iterable[str] = ()) -> Moves:
    """
    Find the new paths of those files of a run that no longer exist at their old paths.

    Gwen looks for each file at its old path relative to the run's directory, then at its old path
    relative to the working directory, and then among `candidate_paths`. A file is used only if it
    has the recorded digest. A line is printed for each moved file.
    """
    record = read_path_record(run_dir)
    bases = ((record["run"], os.path.abspath(run_dir)), (record["working_directory"], os.getcwd()))
    moves: Moves = {}
    for old, digest in record["files"].items():
        if os.path.exists(old):
            continue
        relative_paths = [
            os.path.normpath(os.path.join(new, os.path.relpath(old, base))) for base, new in bases
        ]
        candidates = list(filter(is_readable_file_or_folder, (*relative_paths, *candidate_paths)))
        equal = [path for path in candidates if digest_of_path(path) == digest]
        if equal:
            moves[old] = equal[0]
            print_once(f"{old} no longer exists; {equal[0]}, which is identical, is used instead")
        elif candidates and candidates[0] in relative_paths:
            print_once(
                f"{old} no longer exists; {candidates[0]} is not used instead, because its content "
                "is different"
            )
    return moves


def settings_with_new_paths(settings: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return a copy of a run's settings with the new paths of all files that were moved."""
    return replace_paths_in_settings(settings, find_and_print_moved_paths(run_dir).get)
