"""The shape of the tree: imports, names, and what may happen while a module is imported."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from conftest import ROOT, run_command


def files_of(root: Path) -> list[Path]:
    """
    The files that git tracks: a user's own mine.py need not keep these rules.

    Without git, all files but runs and caches.
    """
    git = ["git", "ls-files", "-z"]
    try:
        output = subprocess.run(git, cwd=root, capture_output=True, text=True).stdout
    except OSError:
        output = ""
    tracked = [root / name for name in output.split("\0") if name]
    files = [path for path in tracked if path.is_file()]
    if not files:
        files = [path for path in root.rglob("*") if path.is_file() and not is_hidden(path, root)]
    return sorted(files)


def is_hidden(path: Path, root: Path) -> bool:
    """Whether a file is in a hidden directory or in one that git ignores."""
    for name in path.relative_to(root).parts[:-1]:
        if name in ("runs", "__pycache__") or (name.startswith(".") and name != ".ci"):
            return True
    return False


FILES = files_of(ROOT)
PACKAGES = (
    "bench deploy disk evaluation forecast judging layers machine problems prompts reporting rewards "
    "sandbox serving settings step tasks text tools"
).split()
MODULES = [path for path in FILES if path.suffix == ".py" and path.parent == ROOT]
PARTS = [
    path
    for path in FILES
    if path.parent.name in PACKAGES and path.suffix == ".py" and path.stem != "__init__"
]
ROOMS = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES + PARTS}
PROGRAMS = [
    path for path in FILES if path.suffix == ".py" and path.parent in (ROOT, ROOT / "bench")
]


def path_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_names(node: ast.AST) -> list[str]:
    """What one node imports: rooms of the tree by their whole name, of anything else the top-level name."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute here"
        module = f"{node.module}"
        names = (
            [f"{module}.{alias.name}" for alias in node.names] if module in PACKAGES else [module]
        )
    else:
        return []
    return [name if name in ROOMS else name.partition(".")[0] for name in names]


def is_main_guard(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and "__name__" in ast.unparse(node.test)
        and "__main__" in ast.unparse(node.test)
    )


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that an import executes: decorators and defaults, but no function body and nothing under the guard."""
    for child in ast.iter_child_nodes(node):
        if is_main_guard(child):
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            defaults = [
                default
                for default in (*child.args.defaults, *child.args.kw_defaults)
                if default is not None
            ]
            for part in (*getattr(child, "decorator_list", []), *defaults):
                yield part
                yield from run_at_import(part)
            continue
        yield child
        yield from run_at_import(child)


def first_line_that_needs_mlx(path: Path) -> str:
    """The first import, at import time, of a module of this project or of MLX."""
    project = {*ROOMS, *PACKAGES, "mlx", "mlx_lm"}
    nodes = sorted(
        (n for n in run_at_import(parse(path)) if imported_names(n)),
        key=lambda n: (n.lineno, n.col_offset),
    )
    return next((name for node in nodes for name in imported_names(node) if name in project), "")


def imports_of(path: Path) -> set[str]:
    """The modules of the tree that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        names.update(imported_names(node))
    return names & ROOMS.keys()


def room_of(name: str) -> str:
    """The room of a module: its folder with a slash, or its file at the root."""
    folder, dot, _ = name.partition(".")
    return f"{folder}/" if dot or folder in PACKAGES else f"{name}.py"


@functools.cache
def arrows() -> dict[str, set[str]]:
    """For each room, the other rooms that it imports."""
    imports_of_room: dict[str, set[str]] = {room_of(name): set() for name in ROOMS}
    for name, path in ROOMS.items():
        room = room_of(name)
        imports_of_room[room] |= {room_of(other) for other in imports_of(path)} - {room}
    return imports_of_room


def test_contributing_lists_the_rooms_from_the_ground_up_and_none_imports_upwards():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \|", text, re.M)
    rooms = [name for row in rows for name in re.findall("`([^`]+)`", row)]
    assert sorted(rooms) == sorted(arrows())
    lower_rooms: set[str] = set()
    for room in rooms:
        upward = arrows()[room] - lower_rooms
        assert not upward, f"{room} imports {upward}, which CONTRIBUTING.md lists above it"
        lower_rooms.add(room)
    for ground in ("text/", "grpo.py", "cpu_blas.py"):
        assert not arrows()[ground], f"{ground} imports {arrows()[ground]}"


provided = functools.cache(packages_distributions)  # it reads the directory of every package


def test_a_module_says_what_it_is_has_a_name_of_its_own_and_imports_nothing_that_stands_beside():
    # The root is first on sys.path: a library that says `import kernels` would execute our kernels.py.
    for path in MODULES + PARTS:
        name = path.relative_to(ROOT).with_suffix("").parts[0]
        assert ast.get_docstring(parse(path)), f"{path.name} does not say what it is"
        assert name not in sys.stdlib_module_names and name not in provided(), (
            f"{provided().get(name)} provide {name}"
        )
        beside = {name for node in ast.walk(parse(path)) for name in imported_names(node)} & {
            "examples",
            "tests",
        }
        assert not beside, f"{path.name} imports {beside}"


def test_an_entry_point_imports_cpu_blas_before_anything_that_imports_mlx():
    for path in PROGRAMS:
        if any(is_main_guard(node) for node in parse(path).body):
            assert first_line_that_needs_mlx(path) in ("cpu_blas", ""), (
                f"{path.name}: `import cpu_blas` comes first"
            )
    assert first_line_that_needs_mlx(ROOT / "tests" / "conftest.py") == "cpu_blas"


def test_no_name_of_a_test_has_more_than_90_characters():
    tests = [path for path in FILES if ROOT / "tests" in path.parents and path.suffix == ".py"]
    functions = [
        node
        for path in tests
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [function.name for function in functions if len(function.name) > 90] == []


READS_OR_PRINTS = set(
    "print open input exec read_text read_bytes write_text write_bytes mkdir iterdir glob is_file is_dir exists load "
    "load_dataset safe_load run Popen system from_pretrained snapshot_download".split()
)


def test_no_line_that_runs_at_import_prints_or_reads_files():
    for path in PROGRAMS:
        for node in run_at_import(parse(path)) if path.stem != "cpu_blas" else ():
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called.rpartition(".")[2] not in READS_OR_PRINTS, (
                    f"{path.name}:{node.lineno} calls {called}"
                )


def test_importing_every_module_prints_nothing_and_opens_no_file_of_the_tree():
    names = list(ROOMS)
    program = f"""
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
sys.path.insert(0, {str(ROOT)!r})
import {", ".join(["cpu_blas"] + [name for name in names if name != "cpu_blas"])}
mine = [str(path) for path in opened if str(path).startswith({str(ROOT)!r})]
mine = [path for path in mine if "/." not in path and not path.endswith((".py", ".pyc"))]
assert not mine, mine
"""
    done = run_command("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert all(
        line.startswith("gwen: MLX runs on its slow") for line in done.stderr.splitlines()
    ), done.stderr


def test_no_file_mentions_the_workshop_or_a_registry():
    workshop = [re.escape("/" + "work" + "/"), re.escape(".." + "/" + "shared")]
    hosts = r"pypi[.]org python[h]osted[.]org huggingface[.]co \bhf[.]co\b npmjs[.]org".split()
    forbidden, found = re.compile("|".join(workshop + hosts)), []
    for path in FILES:
        if (
            path.suffix in {".py", ".md", ".toml", ".yaml", ".yml"}
            or path.parent.name == ".ci"
            or path.name in ("LICENSE", ".gitignore")
        ):
            text = path.read_text(encoding="utf-8")
            found += [f"{path_id(path)}: {match.group()}" for match in forbidden.finditer(text)]
    assert not found, found
