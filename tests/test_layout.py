"""The layout of the repository: the imports and names of modules, and the effects of an import."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from conftest import ROOT, run_command


def list_files(root: Path) -> list[Path]:
    """
    Returns the files that git tracks. A user's mine.py need not follow the rules of these tests.

    Without git, returns all files except runs and caches.
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
    """Whether a file is in a hidden directory or in a directory that git ignores."""
    for name in path.relative_to(root).parts[:-1]:
        if name in ("runs", "__pycache__") or (name.startswith(".") and name != ".ci"):
            return True
    return False


FILES = list_files(ROOT)
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
    """
    Returns the names of the modules that a node imports.

    A module of the project has its full name. Any other module has its top-level name.
    """
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute here"
        module = f"{node.module}"
        if module in PACKAGES:
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            names = [module]
    else:
        return []
    return [name if name in ROOMS else name.partition(".")[0] for name in names]


def is_main_guard(node: ast.AST) -> bool:
    """Whether a node is `if __name__ == "__main__"`."""
    if not isinstance(node, ast.If):
        return False
    condition = ast.unparse(node.test)
    return "__name__" in condition and "__main__" in condition


def nodes_run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """
    Yields all nodes that an import executes.

    These include decorators and default values, but not the bodies of functions and the main guard.
    """
    for child in ast.iter_child_nodes(node):
        if is_main_guard(child):
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            defaults = [*child.args.defaults, *child.args.kw_defaults]
            defaults = [default for default in defaults if default is not None]
            for part in (*getattr(child, "decorator_list", []), *defaults):
                yield part
                yield from nodes_run_at_import(part)
            continue
        yield child
        yield from nodes_run_at_import(child)


def first_import_of_project_or_mlx(path: Path) -> str:
    """Returns the first module of this project or of MLX that is imported with a file, or ""."""
    modules = {*ROOMS, *PACKAGES, "mlx", "mlx_lm"}
    imports = [node for node in nodes_run_at_import(parse(path)) if imported_names(node)]
    imports.sort(key=lambda node: (node.lineno, node.col_offset))
    for node in imports:
        for name in imported_names(node):
            if name in modules:
                return name
    return ""


def project_imports(path: Path) -> set[str]:
    """Returns the modules of the project that a file imports, at import time or later."""
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        names.update(imported_names(node))
    return names & ROOMS.keys()


def room_of(name: str) -> str:
    """Returns the folder of a module, with a slash, or its file at the root."""
    folder, dot, _ = name.partition(".")
    return f"{folder}/" if dot or folder in PACKAGES else f"{name}.py"


@functools.cache
def imports_by_room() -> dict[str, set[str]]:
    """Returns, for each room, the other rooms that it imports. A room is a folder or root file."""
    imports_of_room: dict[str, set[str]] = {room_of(name): set() for name in ROOMS}
    for name, path in ROOMS.items():
        room = room_of(name)
        imports_of_room[room] |= {room_of(other) for other in project_imports(path)} - {room}
    return imports_of_room


def test_a_room_imports_only_the_rooms_that_contributing_lists_above_it():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \|", text, re.M)
    rooms = [name for row in rows for name in re.findall("`([^`]+)`", row)]
    assert sorted(rooms) == sorted(imports_by_room())
    listed: set[str] = set()
    for room in rooms:
        lower_rooms = imports_by_room()[room] - listed
        assert not lower_rooms, f"CONTRIBUTING.md lists {lower_rooms} below {room}"
        listed.add(room)
    for room in ("text/", "cpu_blas.py"):
        assert not imports_by_room()[room], f"{room} imports {imports_by_room()[room]}"
    assert imports_by_room()["grpo.py"] == {"cpu_blas.py"}


distributions_by_module = functools.cache(packages_distributions)  # it reads many directories


def test_a_module_has_a_docstring_and_a_unique_name_and_imports_no_tests_or_examples():
    # The root is first on sys.path. A library with `import kernels` would import a root kernels.py.
    for path in MODULES + PARTS:
        assert ast.get_docstring(parse(path)), f"{path.name} has no docstring"

        name = path.relative_to(ROOT).with_suffix("").parts[0]
        assert name not in sys.stdlib_module_names, f"the standard library provides {name}"
        distributions = distributions_by_module().get(name)
        assert not distributions, f"{distributions} provide {name}"

        imports: set[str] = set()
        for node in ast.walk(parse(path)):
            imports.update(imported_names(node))
        assert not imports & {"examples", "tests"}, path.name


def test_an_entry_point_imports_cpu_blas_before_any_module_that_imports_mlx():
    for path in PROGRAMS:
        if any(is_main_guard(node) for node in parse(path).body):
            first_import = first_import_of_project_or_mlx(path)
            assert first_import in ("cpu_blas", ""), f"{path.name}: `import cpu_blas` comes first"
    assert first_import_of_project_or_mlx(ROOT / "tests" / "conftest.py") == "cpu_blas"


def imports_of_cpu_blas_and_mlx(path: Path, imported: set[str]) -> Iterator[str]:
    """
    Yields "cpu_blas" and "mlx" in the order in which an import of the file imports them.

    imported: the modules of the project that are already imported; it grows.
    """
    imports = [node for node in nodes_run_at_import(parse(path)) if imported_names(node)]
    imports.sort(key=lambda node: (node.lineno, node.col_offset))
    for node in imports:
        for name in imported_names(node):
            if name in ("mlx", "mlx_lm"):
                yield "mlx"
            if name == "cpu_blas":
                yield name
            if name in ROOMS and name not in imported:
                imported.add(name)
                yield from imports_of_cpu_blas_and_mlx(ROOMS[name], imported)


def test_every_module_imports_cpu_blas_before_mlx():
    # A user's program may import any module first. If that module imported MLX before cpu_blas, MLX
    # would use its slow BLAS.
    for name, path in ROOMS.items():
        first = next(imports_of_cpu_blas_and_mlx(path, {name}), "cpu_blas")
        assert first == "cpu_blas", f"{name} imports mlx before cpu_blas"


def test_the_name_of_a_test_has_at_most_90_characters():
    too_long = []
    for path in FILES:
        if ROOT / "tests" in path.parents and path.suffix == ".py":
            for node in ast.walk(parse(path)):
                if isinstance(node, ast.FunctionDef) and len(node.name) > 90:
                    too_long.append(node.name)
    assert too_long == []


READS_OR_PRINTS = set(
    "print open input exec read_text read_bytes write_text write_bytes mkdir iterdir glob is_file is_dir exists load "
    "load_dataset safe_load run Popen system from_pretrained snapshot_download".split()
)


def test_no_line_that_runs_at_import_prints_or_reads_files():
    for path in PROGRAMS:
        if path.stem == "cpu_blas":
            continue
        for node in nodes_run_at_import(parse(path)):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func)
                place = f"{path.name}:{node.lineno}"
                assert function.rpartition(".")[2] not in READS_OR_PRINTS, f"{place}: {function}"


def test_importing_every_module_prints_nothing_and_opens_no_file_of_the_repository():
    names = ["cpu_blas"] + [name for name in ROOMS if name != "cpu_blas"]
    program = f"""
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
sys.path.insert(0, {str(ROOT)!r})
import {", ".join(names)}
files = [str(path) for path in opened if str(path).startswith({str(ROOT)!r})]
files = [path for path in files if "/." not in path and not path.endswith((".py", ".pyc"))]
assert not files, files
"""
    process = run_command("-c", program)
    assert process.returncode == 0, process.stderr
    assert process.stdout == ""
    for line in process.stderr.splitlines():
        assert line.startswith("gwen: MLX runs on its slow"), process.stderr


def is_text_file(path: Path) -> bool:
    return (
        path.suffix in {".py", ".md", ".toml", ".yaml", ".yml"}
        or path.parent.name == ".ci"
        or path.name in ("LICENSE", ".gitignore")
    )


def test_no_file_mentions_the_workshop_or_a_registry():
    workshop = [re.escape("/" + "work" + "/"), re.escape(".." + "/" + "shared")]
    hosts = r"pypi[.]org python[h]osted[.]org huggingface[.]co \bhf[.]co\b npmjs[.]org".split()
    forbidden = re.compile("|".join(workshop + hosts))
    matches = []
    for path in filter(is_text_file, FILES):
        text = path.read_text(encoding="utf-8")
        matches += [f"{path_id(path)}: {match.group()}" for match in forbidden.finditer(text)]
    assert not matches, matches
