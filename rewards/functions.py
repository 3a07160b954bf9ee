"""
Imports users' functions and classes from FILE.py:function or MODULE:function.

If one of them raises an error, this file also finds the line that raised the error.

A specification may end with arguments, as in FILE.py:function(weight=0.5). Then the function is
called with these arguments in addition to its usual ones, as with `functools.partial`.

This file does not cover the use of these functions as rewards (rewards/rewards.py), tools,
environments, losses or advantages.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from machine.output import restore_streams_after_call
from prompts.examples import did_you_mean, format_error
from text.function_specs import format_arguments, parse_arguments, split_off_arguments

T = TypeVar("T")
# The functions in these settings are used only for updates, so evaluate.py does not load them.
UPDATE_FUNCTIONS = ("advantage", "loss_type", "optimizer")
# This module stores functions of the caller's program that have no global name, such as lambdas.
NAMELESS = "functions_of_a_program"
ELSEWHERE = "the function exists only in the program that started the run"

# The modules of imported files, by the path and content of the file.
_modules: dict[tuple[Path, bytes], ModuleType] = {}
_files_being_imported: list[Path] = []  # files of the user that Gwen is importing now


# ---- import


def load_function(flag: str, spec: str, hint: str = "") -> tuple[str, Callable[..., Any]]:
    """
    Loads the function in a specification, and returns its name and the function.

    Raises ValueError if the specification does not name exactly one function. `load_functions`
    explains the arguments and the other errors.
    """
    without_arguments, _ = split_off_arguments(spec)
    if not without_arguments.rpartition(":")[2].isidentifier():
        raise ValueError(f"{flag} is {spec!r}, but should be FILE.py:function{hint}")
    functions = load_functions(flag, spec, hint)
    ((name, function),) = functions.items()
    return name, function


def load_functions(
    flag: str, spec: str, hint: str = "", kind: str = "function"
) -> dict[str, Callable[..., Any]]:
    """
    The functions or classes in a specification, by name.

    spec: FILE.py:function,function or MODULE:function. A file is executed with its own directory on
    Python's search path. A module is imported; the module `__main__` is the caller's program or
    notebook. If there is only one function, arguments for it may follow in parentheses.

    flag: the command-line flag with the specification, for error messages.
    hint: a description of other values that the flag accepts, for error messages.
    kind: "function" or "class".

    Raises ValueError if the import fails, if a name is missing, or if the object with that name is
    not of the required kind.
    """
    without_arguments, arguments = split_off_arguments(spec)
    file, colon, joined_names = without_arguments.rpartition(":")
    names = joined_names.split(",")
    if not colon or not file or not all(name.isidentifier() for name in names):
        raise ValueError(f"{flag} is {spec!r}, but should be FILE.py:{kind}{hint}")

    module = _import_module(f"{flag} {spec}", file, Path(file).absolute())
    functions = {}
    for name in names:
        if name not in vars(module):
            raise ValueError(f"{flag} {spec}: {_explain_missing_name(module, file, name, kind)}")
        value = vars(module)[name]
        is_kind = inspect.isclass(value) if kind == "class" else callable(value)
        if not is_kind:
            raise ValueError(
                f"{flag} {spec}: {name} is an object of type {type(value).__name__}, not a {kind}"
            )
        functions[name] = value
    if arguments:
        functions[name] = _bind_arguments(f"{flag} {spec}", name, functions[name], arguments)
    return functions


def _bind_arguments(
    flag_and_spec: str, name: str, function: Callable[..., Any], arguments: str
) -> Callable[..., Any]:
    """
    The function, bound to the arguments in its specification, such as `(weight=0.5)`.

    Raises ValueError if the arguments cannot be read, or if the function does not accept them.
    """
    try:
        positional, by_name = parse_arguments(arguments)
        if inspect.isclass(function):
            raise TypeError("a class takes no arguments here; leave them out")
        inspect.signature(function).bind_partial(*positional, **by_name)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{flag_and_spec}: {error}") from None
    bound = functools.partial(function, *positional, **by_name)
    # error messages contain the name of the function and of its module
    vars(bound).update(__module__=function.__module__, __name__=name, __qualname__=name)
    return bound


def _explain_missing_name(module: Any, file: str, name: str, kind: str) -> str:
    if file == "__main__":
        return f"{ELSEWHERE}; move it to a file of its own, from which every command can import it"
    is_kind = inspect.isclass if kind == "class" else inspect.isfunction
    present_names = [key for key, value in vars(module).items() if is_kind(value)]
    listed = ", ".join(present_names) or "none"
    return f"{file} has no {kind} {name!r}{did_you_mean(name, present_names)}; it has {listed}"


def _import_module(flag_and_spec: str, file_or_module: str, path: Path) -> Any:
    """
    The module that is loaded from a Python file, or imported by its name.

    flag_and_spec: the flag and its value, for error messages.
    Raises ValueError if the import fails.
    """
    try:
        if path.suffix == ".py":
            return _load_file_once(path, path.read_bytes())
        return importlib.import_module(file_or_module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{flag_and_spec}: {_explain_failed_import(error, file_or_module, path)}"
        ) from None


def _explain_failed_import(error: BaseException, file_or_module: str, path: Path) -> str:
    if isinstance(error, RunStartedDuringImport):
        return str(error)
    if file_or_module == NAMELESS:
        return (
            f"{ELSEWHERE}, because it is a lambda or is defined inside another function; "
            "define it at the top level of a module"
        )
    is_absent = False
    if isinstance(error, ModuleNotFoundError):
        # Either the module itself or a module that it imports may be absent.
        is_absent = f"{file_or_module}.".startswith(f"{error.name}.")
    if is_absent or (file_or_module.startswith(".") and path.suffix != ".py"):
        hint = "; if it is a module, add its folder to PYTHONPATH"
        if Path(f"{file_or_module}.py").is_file():
            hint = f", did you mean {file_or_module}.py?"
        return f"{file_or_module} is neither a Python file nor an installed module{hint}"
    return f"importing {path.name} failed with {_describe_error_with_line(error, str(path))}"


def _load_file_once(path: Path, content: bytes) -> ModuleType:
    """
    Loads a Python file as a module, and returns the module.

    A file is loaded again only if its content has changed. A second copy of the module would have
    its own classes, and its functions would not recognize objects of the first copy's classes.
    """
    module = _modules.get((path, content))
    if module is not None:
        return module
    module_spec = importlib.util.spec_from_file_location(f"file of a user {path}", path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look up their module in sys.modules
    sys.path.insert(0, str(path.parent))
    _files_being_imported.append(path)
    try:
        module_spec.loader.exec_module(module)
    finally:
        _files_being_imported.remove(path)
        if str(path.parent) in sys.path:
            sys.path.remove(str(path.parent))
    _modules[path, content] = module
    return module


class RunStartedDuringImport(ValueError):
    """A file of the user starts a run while Gwen imports the file."""


def refuse_to_start_run_during_import() -> None:
    """Raises RunStartedDuringImport if Gwen is importing a file of the user."""
    if _files_being_imported:
        raise RunStartedDuringImport(
            f"{_files_being_imported[-1].name} starts a run whenever it is imported; put the lines "
            'that start the run below `if __name__ == "__main__":`'
        )


# ---- the specification of a function


def spec_of_function(fn: Callable[..., Any]) -> str:
    """
    The specification FILE.py:function or MODULE:function with which `load_function` loads `fn`.

    The arguments of a `functools.partial` are part of the specification if they are literals.
    A function without a global name is stored in the module `NAMELESS`, which exists only in this
    process.
    """
    if isinstance(fn, functools.partial):
        arguments = format_arguments(fn)
        if arguments is None:
            name = getattr(fn.func, "__name__", "partial")
            return f"{NAMELESS}:{_store_under_unused_name(fn, name)}"
        return spec_of_function(fn.func) + arguments

    module_name = getattr(fn, "__module__", "")
    name = getattr(fn, "__qualname__", type(fn).__name__)
    module = sys.modules.get(module_name)
    if module is None or getattr(module, name, None) is not fn:
        return f"{NAMELESS}:{_store_under_unused_name(fn, name)}"

    file = Path(getattr(module, "__file__", None) or "")
    is_importable = "." in module_name or "site-packages" in file.parts
    if module_name == "__main__" or is_importable or not file.is_file():
        return f"{module_name}:{name}"
    # Other processes may be unable to import the file by name if it is in the program's directory.
    _modules.setdefault((file, file.read_bytes()), module)
    return f"{file}:{name}"


def _store_under_unused_name(fn: Callable[..., Any], name: str) -> str:
    """Stores a function in the module `NAMELESS` under an unused name, and returns the name."""
    module = sys.modules.setdefault(NAMELESS, ModuleType(NAMELESS))
    name = re.sub(r"\W", "", name.rpartition(".")[2])
    while getattr(module, name, fn) is not fn:
        name += "_"
    setattr(module, name, fn)
    return name


def function_name_with_arguments(fn: Callable[..., Any]) -> str:
    """The name of a function or callable object, with the arguments of a `functools.partial`."""
    if isinstance(fn, functools.partial):
        return function_name_with_arguments(fn.func) + (format_arguments(fn) or "(...)")
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def only_place_that_has_functions(settings: dict[str, Any]) -> str:
    """
    Returns the only place in which all functions that the settings name can be found.

    The place is "this process" if one of the functions has no global name, or else "this program"
    if one of them is defined in the program that started the run. Returns "" if every program can
    import all of these functions.
    """
    text = str(settings)
    if f"{NAMELESS}:" in text:
        return "this process"
    return "this program" if "'__main__:" in text else ""


def advice_to_set_parts(parts: Mapping[str, str]) -> str:
    """
    Returns what a program must do after `Trainer.resume`, and before the first step.

    parts: the names of the objects that only a Python program can set, by attribute of the trainer.
    """
    attributes = " and ".join(f"trainer.{attribute}" for attribute in parts)
    advice = f"set {attributes} before the first step"
    name = parts.get("on_samples", "")
    if name.endswith(".on_samples"):
        owner = name.split(".")[-2]
        advice += f" (if {owner} is a subclass of Trainer, call {owner}.resume instead)"
    return advice


def settings_without_update_functions(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without the functions for updates, which evaluations do not need."""
    return {name: value for name, value in settings.items() if name not in UPDATE_FUNCTIONS}


def explain_why_no_other_program_can_resume(settings: dict[str, Any]) -> str:
    """
    A line that says why no other program can resume or evaluate the run; "" if others can.

    The reason is that settings name functions that exist only in this program or process.
    """
    place = only_place_that_has_functions(settings)
    if not place:
        return ""
    names = []
    for value in settings.values():
        for spec in value if isinstance(value, list) else [value]:
            module, _, name = split_off_arguments(str(spec))[0].rpartition(":")
            if module in (NAMELESS, "__main__"):
                names.append(name)
    listed = ", ".join(dict.fromkeys(names))
    needs_evaluation = only_place_that_has_functions(settings_without_update_functions(settings))
    actions = "resume or evaluate" if needs_evaluation else "resume"
    return (
        f"only {place} can {actions} the run, because only {place} defines {listed}; to allow "
        "other programs, move the functions to the top level of a file, and import them from there"
    )


def file_that_defines_function(spec: str) -> str:
    """
    The path of the file that defines a function given as FILE.py:function or MODULE:function.

    If no such file is known, as for the module `__main__`, returns the part of `spec` before the
    colon.
    """
    name = split_off_arguments(spec)[0].rpartition(":")[0]
    if name == "__main__":
        return name
    return getattr(sys.modules.get(name), "__file__", None) or name


def source_code_if_in_main_program(spec: str) -> str:
    """
    The source code of a function that is defined in the caller's program or notebook.

    A resumed run compares this source code and not the whole file, since the rest of the program
    may change. Returns "" for all other functions.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        name = split_off_arguments(spec)[0].partition("__main__:")[2]
        return inspect.getsource(getattr(sys.modules["__main__"], name))
    return ""


# ---- errors


class UserFunctionError(ValueError):
    """A user's function raised an error or returned a wrong value; the user must correct it."""


def call_or_raise_with_location(label: str, fn: Callable[..., T], *args: Any) -> T:
    """
    Calls a user's function, and returns its result.

    If the function replaced `sys.stdout` or `sys.stderr`, restores the stream.

    label: what the error message calls the function.

    Raises a one-line UserFunctionError with the file and line if the function raises an exception.
    """
    try:
        with restore_streams_after_call(label):
            return fn(*args)
    except Exception as error:
        raise UserFunctionError(f"{label} {describe_error_in_function(error, fn)}") from None


def is_caused_by_user_code(error: BaseException) -> bool:
    """
    Whether an error, or one of its causes, arose in a user's code.

    Such an error is a `UserFunctionError`, or its traceback leads through one of the user's files.
    """
    user_files = {str(path) for path, _ in _modules}
    cause: BaseException | None = error
    while isinstance(cause, Exception):
        frames = traceback.extract_tb(cause.__traceback__)
        is_in_user_file = any(frame.filename in user_files for frame in frames)
        if isinstance(cause, UserFunctionError) or is_in_user_file:
            return True
        cause = cause.__cause__
    return False


def describe_error_in_function(error: BaseException, fn: Callable[..., Any]) -> str:
    """A description of the error that a function raised, with the file and line that raised it."""
    module = sys.modules.get(getattr(fn, "__module__", ""))
    return f"raised {_describe_error_with_line(error, getattr(module, '__file__', None))}"


def file_and_line_suffix(fn: Callable[..., Any]) -> str:
    """The suffix " (FILE:LINE)" for a function or a class; "" for other callable objects."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if inspect.isclass(fn):
        try:
            return f" ({inspect.getsourcefile(fn)}:{inspect.getsourcelines(fn)[1]})"
        except (OSError, TypeError):  # the class was defined without a file, as in a notebook
            return ""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _describe_error_with_line(error: BaseException, file: str | None) -> str:
    """
    A one-line description of an error, with the line of `file` at which the error occurred.

    This is the line of `file` that the error's traceback names last. If the error was raised in
    another file, such as a library's, the description also names the line in that file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if not lines:
        return format_error(error)
    description = f"{format_error(error)}, at {file}:{lines[-1]}"
    last = frames[-1]
    if last.filename != file:
        description += f" (raised in {last.name}, at {last.filename}:{last.lineno})"
    return description
