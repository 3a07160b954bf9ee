"""
A user's functions: found by FILE.py:function or MODULE:function, which a flag gives, and where in a file one failed.

Left out: what is done with them: rewards (problems/rewards.py), tools, environments, losses and advantages.
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

from problems.examples import format_error, suggest_nearest


def load_function(flag: str, spec: str, hint: str = "") -> tuple[str, Callable[..., Any]]:
    """(name, function) of FILE.py:function or MODULE:function; see `load_functions`."""
    if not spec.rpartition(":")[2].isidentifier():
        raise ValueError(f"{flag} {spec!r} is not FILE.py:function{hint}")
    ((name, fn),) = load_functions(flag, spec, hint).items()
    return name, fn


def load_functions(
    flag: str, spec: str, hint: str = "", kind: str = "function"
) -> dict[str, Callable[..., Any]]:
    """
    The functions of FILE.py:function,function or MODULE:function by their names, which a flag gives; or classes.

    A file is executed with its own directory on the path. A module is imported; `__main__` is the caller's program or
    notebook. Raises ValueError when one of them, the function or an import in it is missing, or it is no function.
    hint: what else the flag could name.
    """
    file, colon, names = spec.rpartition(":")
    if not (colon and file and all(name.isidentifier() for name in names.split(","))):
        raise ValueError(f"{flag} {spec!r} is not FILE.py:{kind}{hint}")
    module = _import_module(f"{flag} {spec}", file, Path(file).absolute())
    given = {name: vars(module).get(name) for name in names.split(",")}
    for name, value in given.items():
        if name not in vars(module):
            if file == "__main__":
                raise ValueError(
                    f"{flag} {spec}: {ELSEWHERE}; in a file of its own, imported by it, all find it"
                )
            known = [
                key for key, other in vars(module).items() if getattr(inspect, f"is{kind}")(other)
            ]
            hint = f"{suggest_nearest(name, known)}; it has {', '.join(known) or 'none'}"
            raise ValueError(f"{flag} {spec}: {file} has no {kind} {name!r}{hint}")
        if not (inspect.isclass(value) if kind == "class" else callable(value)):
            raise ValueError(
                f"{flag} {spec}: {name} is of type {type(value).__name__}, not a {kind}"
            )
    return given


def spec_of(fn: Callable[..., Any]) -> str:
    """A function as FILE.py:function, or MODULE:function; one without a name is kept under one of this process."""
    module, name = getattr(fn, "__module__", ""), getattr(fn, "__qualname__", type(fn).__name__)
    if getattr(sys.modules.get(module), name, None) is fn:
        file = Path(getattr(sys.modules[module], "__file__", None) or "")
        if (
            module == "__main__"
            or "." in module
            or "site-packages" in file.parts
            or not file.is_file()
        ):
            return f"{module}:{name}"  # else it may lie beside a program, where no other finds it by its name
        _modules.setdefault((file, file.read_bytes()), sys.modules[module])
        return f"{file}:{name}"
    kept = sys.modules.setdefault(NAMELESS, ModuleType(NAMELESS))
    name = re.sub(r"\W", "", name.rpartition(".")[2])
    while getattr(kept, name, fn) is not fn:
        name += "_"
    setattr(kept, name, fn)
    return f"{NAMELESS}:{name}"


NAMELESS = "functions_of_a_program"  # the module that holds them
ELSEWHERE = "only the program that began the run has it"


def uses_program_functions(settings: dict[str, Any]) -> bool:
    """Whether a run's settings name functions which only the program that began it has."""
    return any(module in str(settings) for module in (f"{NAMELESS}:", "'__main__:"))


def file_of(spec: str) -> str:
    """The file of FILE.py:function or MODULE:function; the name itself where there is none, and of a program's own."""
    name = spec.rpartition(":")[0]
    return (name != "__main__" and getattr(sys.modules.get(name), "__file__", None)) or name


def source_of(spec: str) -> str:
    """The text of a program's own function, whose file may change elsewhere; "" of others and where none is known."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        return inspect.getsource(getattr(sys.modules["__main__"], spec.partition("__main__:")[2]))
    return ""


def _import_module(what: str, file: str, path: Path) -> Any:
    """The module of a Python file, or of a name. ValueError for one that cannot be imported."""
    try:
        return (
            _module_of(path, path.read_bytes())
            if path.suffix == ".py"
            else importlib.import_module(file)
        )
    except (Exception, SystemExit) as error:
        if file == NAMELESS:
            fix = (
                "it is a lambda, or inside a function; the top level of a module can be found again"
            )
            raise ValueError(f"{what}: {ELSEWHERE}; {fix}") from error
        is_absent = isinstance(error, ModuleNotFoundError) and f"{file}.".startswith(
            f"{error.name}."
        )
        if is_absent or (file.startswith(".") and path.suffix != ".py"):
            hint = (
                f", did you mean {file}.py?"
                if Path(f"{file}.py").is_file()
                else "; is its folder in PYTHONPATH?"
            )
            raise ValueError(
                f"{what}: {file} is neither a Python file nor an installed module{hint}"
            ) from error
        raise ValueError(
            f"{what}: importing {path.name} failed, {_describe_error(error, str(path))}"
        ) from error


_modules: dict[tuple[Path, bytes], ModuleType] = {}


def _module_of(path: Path, content: bytes) -> ModuleType:
    """The module of a file, the same one while its bytes stay as they are: its functions may ask for its classes."""
    if found := _modules.get((path, content)):
        return found
    module_spec = importlib.util.spec_from_file_location(f"file of a user {path}", path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up there
    sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    finally:
        if str(path.parent) in sys.path:
            sys.path.remove(str(path.parent))
    _modules[path, content] = module
    return module


def describe_raised(error: BaseException, fn: Callable[..., Any]) -> str:
    """What a user's function raised, and the line of its file."""
    return f"raised {_describe_error(error, getattr(sys.modules.get(getattr(fn, '__module__', '')), '__file__', None))}"


def place_of(fn: Callable[..., Any]) -> str:
    """The file and line where a function begins, to stand after its name; "" of other objects that can be called."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _describe_error(error: BaseException, file: str | None) -> str:
    """An error in a line, and the last line of the user's file that it came through."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == file
    ]
    return format_error(error) + (f", at {file}:{lines[-1]}" if lines else "")
