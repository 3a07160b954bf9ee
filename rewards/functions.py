"""
Imports users' functions and classes from FILE.py:function or MODULE:function, and locates their
errors.

This file does not cover their use as rewards (rewards/rewards.py), tools, environments, losses or
advantages.
"""

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from prompts.examples import format_error, suggest_nearest

# The module that holds the functions without a global name that a program passes in.
NAMELESS = "functions_of_a_program"
ELSEWHERE = "only the program that began the run has it"

# Imported files, by path and content.
_modules: dict[tuple[Path, bytes], ModuleType] = {}


# ---- import


def load_function(flag: str, spec: str, hint: str = "") -> tuple[str, Callable[..., Any]]:
    """The name and the function that a spec names; see `load_functions`."""
    if not spec.rpartition(":")[2].isidentifier():
        raise ValueError(f"{flag} {spec!r} is not FILE.py:function{hint}")
    functions = load_functions(flag, spec, hint)
    ((name, function),) = functions.items()
    return name, function


def load_functions(
    flag: str, spec: str, hint: str = "", kind: str = "function"
) -> dict[str, Callable[..., Any]]:
    """
    The functions that a spec names, by their names.

    spec: FILE.py:function,function or MODULE:function. A file is executed with its own directory on
    the path. A module is imported; `__main__` is the caller's program or notebook.

    flag: the flag whose value the spec is, for errors.
    hint: what else the flag's value could be, for errors.
    kind: "function" or "class".

    Raises ValueError if the file, one of the names or an import in the file is missing, or if a
    name is not that of a `kind`.
    """
    file, colon, joined_names = spec.rpartition(":")
    names = joined_names.split(",")
    if not colon or not file or not all(name.isidentifier() for name in names):
        raise ValueError(f"{flag} {spec!r} is not FILE.py:{kind}{hint}")

    module = _import_module(f"{flag} {spec}", file, Path(file).absolute())
    functions = {}
    for name in names:
        if name not in vars(module):
            raise ValueError(f"{flag} {spec}: {_explain_absence(module, file, name, kind)}")
        value = vars(module)[name]
        is_kind = inspect.isclass(value) if kind == "class" else callable(value)
        if not is_kind:
            raise ValueError(
                f"{flag} {spec}: {name} is of type {type(value).__name__}, not a {kind}"
            )
        functions[name] = value
    return functions


def _explain_absence(module: Any, file: str, name: str, kind: str) -> str:
    if file == "__main__":
        return f"{ELSEWHERE}; in a file of its own, imported by the program, all commands find it"
    is_kind = inspect.isclass if kind == "class" else inspect.isfunction
    present_names = [key for key, value in vars(module).items() if is_kind(value)]
    listed = ", ".join(present_names) or "none"
    return f"{file} has no {kind} {name!r}{suggest_nearest(name, present_names)}; it has {listed}"


def _import_module(source: str, file: str, path: Path) -> Any:
    """
    The module that a Python file or a module name gives.

    source: the flag and its value, for errors. Raises ValueError if the import fails.
    """
    try:
        if path.suffix == ".py":
            return _module_of(path, path.read_bytes())
        return importlib.import_module(file)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{source}: {_explain_import(error, file, path)}") from error


def _explain_import(error: BaseException, file: str, path: Path) -> str:
    if file == NAMELESS:
        return (
            f"{ELSEWHERE}; it is a lambda, or inside a function; "
            "the top level of a module can be found again"
        )
    is_absent = False
    if isinstance(error, ModuleNotFoundError):
        # Otherwise the module exists, and one of its own imports is absent.
        is_absent = f"{file}.".startswith(f"{error.name}.")
    if is_absent or (file.startswith(".") and path.suffix != ".py"):
        hint = "; is its folder in PYTHONPATH?"
        if Path(f"{file}.py").is_file():
            hint = f", did you mean {file}.py?"
        return f"{file} is neither a Python file nor an installed module{hint}"
    return f"importing {path.name} failed, {_describe_error(error, str(path))}"


def _module_of(path: Path, content: bytes) -> ModuleType:
    """
    The module that a file gives.

    A file is loaded once for each content. A second copy would have its own classes, and its
    functions would not recognize objects of the first copy's classes.
    """
    module = _modules.get((path, content))
    if module is not None:
        return module
    module_spec = importlib.util.spec_from_file_location(f"file of a user {path}", path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look up their module there
    sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    finally:
        if str(path.parent) in sys.path:
            sys.path.remove(str(path.parent))
    _modules[path, content] = module
    return module


# ---- the spec of a function


def spec_of(fn: Callable[..., Any]) -> str:
    """
    The spec FILE.py:function or MODULE:function from which `load_function` loads this function.

    A function without a global name is stored in the module `NAMELESS`, which only this process
    has.
    """
    module_name = getattr(fn, "__module__", "")
    name = getattr(fn, "__qualname__", type(fn).__name__)
    module = sys.modules.get(module_name)
    if module is None or getattr(module, name, None) is not fn:
        return f"{NAMELESS}:{_store_nameless(fn, name)}"

    file = Path(getattr(module, "__file__", None) or "")
    is_importable = "." in module_name or "site-packages" in file.parts
    if module_name == "__main__" or is_importable or not file.is_file():
        return f"{module_name}:{name}"
    # The file may be in the program's directory, where other processes cannot import it by name.
    _modules.setdefault((file, file.read_bytes()), module)
    return f"{file}:{name}"


def _store_nameless(fn: Callable[..., Any], name: str) -> str:
    """Stores a function under a free name, and returns the name."""
    module = sys.modules.setdefault(NAMELESS, ModuleType(NAMELESS))
    name = re.sub(r"\W", "", name.rpartition(".")[2])
    while getattr(module, name, fn) is not fn:
        name += "_"
    setattr(module, name, fn)
    return name


def names_functions_of_this_program(settings: dict[str, Any]) -> bool:
    """Whether settings name functions that exist only in the program that started the run."""
    text = str(settings)
    return f"{NAMELESS}:" in text or "'__main__:" in text


def file_of(spec: str) -> str:
    """
    The file that FILE.py:function or MODULE:function names.

    It is the part before the colon if that part is the caller's program, or not a module that has a
    file.
    """
    name = spec.rpartition(":")[0]
    if name == "__main__":
        return name
    return getattr(sys.modules.get(name), "__file__", None) or name


def source_of(spec: str) -> str:
    """
    The source code of a function in the caller's program, whose file may change.

    "" for other functions.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        name = spec.partition("__main__:")[2]
        return inspect.getsource(getattr(sys.modules["__main__"], name))
    return ""


# ---- errors


def describe_raised(error: BaseException, fn: Callable[..., Any]) -> str:
    """The error that a user's function raised, and the line in its file, in words."""
    module = sys.modules.get(getattr(fn, "__module__", ""))
    return f"raised {_describe_error(error, getattr(module, '__file__', None))}"


def place_suffix(fn: Callable[..., Any]) -> str:
    """The file and line where a function begins, as a suffix; "" for other callable objects."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _describe_error(error: BaseException, file: str | None) -> str:
    """An error in one line, with the last line of the user's file in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if not lines:
        return format_error(error)
    return f"{format_error(error)}, at {file}:{lines[-1]}"
