"""
Writes the trained model of a run as files for other programs, and uploads them to the hub.

This file does not cover merged models and GGUF files (export.py).
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from disk import adapters, hub, model_card
from disk.files import first_line_of_error
from flags import add_path_to_os_errors


def write_peft_files(
    adapter: Path, out: Path, base: str, tokenizer: Any, run_dir: Path, step: int
) -> None:
    """
    Write an adapter in PEFT format, its tokenizer and a model card to the new directory `out`.

    adapter: the directory of an adapter in mlx_lm's layout.
    base: the base model. A bundled model is named by its path.
    step: the step after which the adapter was saved.
    """
    if base in hub.BUNDLED:
        base = str(hub.BUNDLED[base])
    matrices = adapters.read_lora_adapter(adapter)
    adapters.write_peft_adapter(matrices._replace(base=base), out)
    tokenizer.save_pretrained(str(out))
    write_model_card(out, run_dir, step, "peft")


def write_model_card(out: Path, run_dir: Path, step: int, library: str) -> None:
    """
    Write the README for the files in `out`.

    library: the library that loads the files, such as "peft".
    """
    card = model_card.make_model_card(str(run_dir), step, library)
    (out / "README.md").write_text(card, encoding="utf-8")


def move_files_into(source: Path, target: Path) -> None:
    """Move all files in `source` to the directory `target`, and replace files of the same names."""
    with add_path_to_os_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            os.replace(file, target / file.name)


def make_temporary_directory_beside(target: Path) -> "tempfile.TemporaryDirectory[str]":
    """Make a temporary directory beside `target`, on the same disk."""
    parent = target.resolve().parent
    with add_path_to_os_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=parent)


def upload_to_hub(folder: Path, repo_id: str, *, private: bool, commit_message: str) -> str:
    """
    Upload the files in a folder to a model repository on the hub, and return the repository's URL.

    private: whether a new repository is private.

    Raises ValueError if the hub refuses the name or the upload, or cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import errors

    api = huggingface_hub.HfApi()
    try:
        created = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            folder_path=str(folder), repo_id=created.repo_id, commit_message=commit_message
        )
    except errors.HFValidationError as error:
        raise ValueError(
            f"push_to_hub: {repo_id!r} is not a valid name of a repository; write OWNER/NAME"
        ) from error
    except Exception as error:  # any error from the hub client or its libraries
        raise ValueError(
            f"push_to_hub: the upload to {repo_id} failed ({first_line_of_error(error)}); "
            "log in with `hf auth login`, and check the connection"
        ) from error
    return str(created)
