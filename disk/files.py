"""
Reads single files: objects from JSON files, and tensors from safetensors files.

Each error names the file and describes the problem. hub.py reads whole model directories.
"""

import shlex
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from text.documents import read_json

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the first bytes of a Git LFS pointer


def first_line_of_error(error: Exception) -> str:
    """The first line of the message of an error, or the error's type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def refuse_lfs_pointer(path: Path) -> None:
    """
    Raise ValueError if a file is only a Git LFS pointer.

    A pointer is a few lines of text that Git LFS writes in place of a file that it has not
    downloaded.
    """
    try:
        with path.open("rb") as file:
            beginning = file.read(len(LFS_POINTER))
    except OSError:  # This error is reported later, when the file is read.
        return
    if beginning == LFS_POINTER:
        folder = shlex.quote(str(path.parent))
        raise ValueError(
            f"{path} is a Git LFS pointer and not the file itself; "
            f"download the file with: git -C {folder} lfs pull"
        )


def load_json_object(path: Path) -> dict[str, Any]:
    """
    Load a JSON file whose content is an object.

    Raises ValueError if the file cannot be read or contains something else.
    """
    refuse_lfs_pointer(path)
    try:
        content = read_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {first_line_of_error(error)}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{path} contains a {kind}, not an object; is it the right file?")
    return content


def load_safetensors(path: Path) -> dict[str, mx.array]:
    """
    Load all tensors of a safetensors file, and return them by name.

    Raises ValueError if the file is missing, truncated or invalid.
    """
    refuse_lfs_pointer(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; the download or copy of the model is incomplete")
    try:
        tensors = mx.load(str(path), format="safetensors")
    except RuntimeError as error:
        reason = first_line_of_error(error)
        raise ValueError(f"{path} is not a complete safetensors file: {reason}") from error
    assert isinstance(tensors, dict)
    return tensors
