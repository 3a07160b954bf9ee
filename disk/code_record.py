"""
Saves the code of a run, as it is when the run starts or resumes, in the run's directory `code`.

`code/step-000000/` contains the code with which the run started:

    gwen.diff     the changes to Gwen that are not committed
    files/        the user's files
    notebook.txt  the cells that a notebook has executed
    files.json    the original path of each of the user's files

If a resumed run uses different code, this code is kept in another directory, whose number is the
step at which the run resumed.

This file does not cover the commit and the versions of packages (machine/versions.py).
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from text.commands import HOME

DIFF = "gwen.diff"
NOTEBOOK = "notebook.txt"
INDEX = "files.json"
MOST_BYTES = 10 * 2**20  # the user's files are kept up to this total size
SOURCE_PATTERNS = ("*.py", "*.yaml", "*.toml", "*.j2", "*.metal", "*.c", "*.cpp")


class CodeSnapshot(NamedTuple):
    """The code of a run."""

    diff: str  # the changes to Gwen that are not committed
    notebook: str  # the executed cells of the user's notebook; "" if there is no notebook
    files: dict[Path, bytes]  # the content of the user's files
    left_out: list[Path]  # the user's files that would exceed MOST_BYTES


def save_code_if_changed(run_dir: Path, files: Iterable[Path], step: int) -> None:
    """
    Write the code of a run to its directory, unless the newest kept code is the same.

    files: the files that the settings name. The modules that these files import are kept too.
    step: the step at which the run starts or resumes.

    Raises OSError if a file cannot be written.
    """
    contents = _contents_by_relative_path(read_code_in_use(files))
    kept_dirs = sorted((run_dir / "code").glob("step-*"))
    if kept_dirs and _read_tree(kept_dirs[-1]) == contents:
        return
    target = run_dir / "code" / f"step-{step:06d}"
    shutil.rmtree(target, ignore_errors=True)
    for name, content in contents.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_code_in_use(files: Iterable[Path]) -> CodeSnapshot:
    """Read the code that this process uses: the given files, and all modules of the user."""
    named_files = [file.resolve() for file in files]
    untracked = _list_untracked_python_files()
    if (HOME / ".git").exists():  # tracked files are in the commit and in the changes to it
        named_files = [
            file for file in named_files if file in untracked or not file.is_relative_to(HOME)
        ]
    code = CodeSnapshot(read_uncommitted_changes(), _read_notebook(), {}, [])
    num_bytes = 0
    for path in dict.fromkeys([*named_files, *_list_imported_user_files(untracked)]):
        try:
            content = path.read_bytes()
        except OSError:  # the module was removed since its import
            continue
        num_bytes += len(content)
        if num_bytes > MOST_BYTES:
            code.left_out.append(path)
        else:
            code.files[path] = content
    return code


def read_uncommitted_changes() -> str:
    """The changes to tracked files of Gwen that are not committed, as `git diff` prints them."""
    return _run_git("diff", "HEAD", "--", *SOURCE_PATTERNS)


def digest_of_uncommitted_changes() -> str | None:
    """The first digits of the SHA-256 of the uncommitted changes; None without changes."""
    diff = read_uncommitted_changes()
    return hashlib.sha256(diff.encode()).hexdigest()[:12] if diff else None


def _run_git(*arguments: str) -> str:
    """The output of a git command in Gwen's checkout; "" if there is no checkout or no git."""
    # On a Mac without developer tools, running git would open a dialog.
    if not (HOME / ".git").exists() or not shutil.which("git"):
        return ""
    result = subprocess.run(["git", *arguments], cwd=HOME, capture_output=True, check=False)
    return result.stdout.decode(errors="replace")


def _list_untracked_python_files() -> set[Path]:
    """The Python files in Gwen's checkout that do not belong to Gwen."""
    mark = "?? "  # how git marks an untracked file
    listed = _run_git("status", "-s", "-uall", "-z", "--", "*.py").split("\0")
    return {HOME / line.removeprefix(mark) for line in listed if line.startswith(mark)}


def _list_imported_user_files(untracked: set[Path]) -> list[Path]:
    """
    The files of all imported modules that do not belong to Gwen, to a package or to Python.

    untracked: the Python files in Gwen's checkout that do not belong to Gwen.
    """
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    user_files = []
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py"):
            continue
        path = Path(name).resolve()
        is_package = "site-packages" in path.parts or "dist-packages" in path.parts
        if is_package or any(path.is_relative_to(folder) for folder in standard):
            continue
        if path in untracked or not path.is_relative_to(HOME):
            user_files.append(path)
    return sorted(user_files)


def _read_notebook() -> str:
    """The cells that the user's notebook has executed so far; "" if there is no notebook."""
    cells = getattr(sys.modules.get("__main__"), "In", None)
    if not isinstance(cells, list):
        return ""
    return "\n\n# %%\n".join(str(cell) for cell in cells)


def _contents_by_relative_path(code: CodeSnapshot) -> dict[str, bytes]:
    """The content of each file to write, by path relative to the directory of the step."""
    common = Path(os.path.commonpath([path.parent for path in code.files] or [HOME]))
    contents = {f"files/{path.relative_to(common)}": text for path, text in code.files.items()}
    origins = {f"files/{path.relative_to(common)}": str(path) for path in code.files}
    index = {"files": origins, "left_out": list(map(str, code.left_out))}
    contents[INDEX] = (json.dumps(index, indent=2) + "\n").encode()
    if code.diff:
        contents[DIFF] = code.diff.encode()
    if code.notebook:
        contents[NOTEBOOK] = code.notebook.encode()
    return contents


def _read_tree(folder: Path) -> dict[str, bytes]:
    """The content of all files below a folder, by relative path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
