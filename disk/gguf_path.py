"""Finds the GGUF file that a path names. Unlike disk/gguf.py, this file does not need MLX."""

import os
from pathlib import Path


def find_gguf_file(path: str | Path) -> Path | None:
    """
    The GGUF file that a path names, or None.

    The path is that of the file itself, or of a directory that contains exactly one GGUF file and
    no config.json, such as `export.py --export gguf` writes.
    """
    if Path(path).is_dir():
        files = list(Path(path).glob("*.gguf"))
        is_only_model = len(files) == 1 and not (Path(path) / "config.json").exists()
        return files[0] if is_only_model else None
    is_gguf_file = Path(path).suffix == ".gguf" and os.path.isfile(path)
    return Path(path) if is_gguf_file else None
