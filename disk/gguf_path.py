"""Finds the GGUF file that a path names. Unlike disk/gguf.py, this file does not need MLX."""

import os
from pathlib import Path


def find_gguf_file(path: str | Path) -> Path | None:
    """
    Return the GGUF file that a path names, or None.

    path: the path of the file itself, or of a directory like those that `export.py --export gguf`
        writes, which contain exactly one GGUF file and no config.json.
    """
    if Path(path).is_dir():
        files = list(Path(path).glob("*.gguf"))
        is_only_model = len(files) == 1 and not (Path(path) / "config.json").exists()
        return files[0] if is_only_model else None
    is_gguf_file = Path(path).suffix == ".gguf" and os.path.isfile(path)
    return Path(path) if is_gguf_file else None
