"""
Keeps the state that an environment class shares among its instances, such as a level.

A class with state has the class methods `get_state`, which returns the state as a JSON value, and
`set_state`, which restores the state from this value. A run stores the state in its checkpoints.
This file does not cover the state of a single episode, which begins with `reset`.
"""

import inspect
import json
import weakref
from collections.abc import Mapping
from typing import Any

from prompts.examples import copy_as_json
from rewards.functions import describe_error_in_function

STATE_METHODS = ("get_state", "set_state")
States = dict[str, Any]  # the state of each class by the name of the environment

# the state of each class before its first run in this process
_first_states: "weakref.WeakKeyDictionary[type, Any]" = weakref.WeakKeyDictionary()


def has_state_methods_or_raise(environment_class: type) -> bool:
    """
    Whether a class has the class methods `get_state` and `set_state`.

    Raises ValueError if the class has only one of them.
    """
    present = []
    for name in STATE_METHODS:
        method = inspect.getattr_static(environment_class, name, None)
        if isinstance(method, classmethod):
            present.append(name)
    if len(present) == 1:
        [missing] = set(STATE_METHODS) - set(present)
        raise ValueError(
            f"environment {environment_class.__name__} has the class method {present[0]}, but no "
            f"class method {missing}; add it, so that a resumed run keeps the state"
        )
    return bool(present)


def collect_states(environments: Mapping[str, type]) -> States:
    """
    The states of the environments that have one.

    Raises ValueError if `get_state` fails, or returns a value that JSON cannot express.
    """
    states = {}
    for name, environment_class in environments.items():
        if has_state_methods_or_raise(environment_class):
            states[name] = _get_state(environment_class)
    return states


def _get_state(environment_class: Any) -> Any:
    label = f"environment {environment_class.__name__}: get_state"
    try:
        state = environment_class.get_state()
    except Exception as error:
        reason = describe_error_in_function(error, environment_class.get_state)
        raise ValueError(f"{label} {reason}") from None
    return copy_as_json(f"{label} returned", state)


def set_states(environments: Mapping[str, type], states: States) -> None:
    """
    Passes each state to `set_state` of the environment with the same name.

    States of unknown environments are ignored. Raises ValueError if `set_state` fails.
    """
    for name, state in states.items():
        environment_class: Any = environments.get(name)
        if environment_class is None or not has_state_methods_or_raise(environment_class):
            continue
        try:
            environment_class.set_state(json.loads(json.dumps(state)))
        except Exception as error:
            reason = describe_error_in_function(error, environment_class.set_state)
            raise ValueError(
                f"environment {environment_class.__name__}: set_state {reason}"
            ) from None


def record_or_restore_first_states(environments: Mapping[str, type]) -> None:
    """
    Resets the environments to the states that they had before their first run in this process.

    The first call for a class records its state.
    """
    for name, environment_class in environments.items():
        if has_state_methods_or_raise(environment_class):
            if environment_class not in _first_states:
                _first_states[environment_class] = _get_state(environment_class)
            set_states({name: environment_class}, {name: _first_states[environment_class]})


# ---- state that would be lost


def unsaved_class_attribute_values(environments: Mapping[str, type]) -> dict[str, str]:
    """
    For environments without `get_state`, returns the values of the class attributes as texts.

    The keys have the form CLASS.ATTRIBUTE. Only attributes with plain values, such as numbers,
    texts and lists, are included.
    """
    values: dict[str, str] = {}
    for environment_class in environments.values():
        if has_state_methods_or_raise(environment_class):
            continue
        for owner in environment_class.__mro__[:-1]:
            for name, value in vars(owner).items():
                if isinstance(value, (bool, int, float, str, list, dict)) and name[:2] != "__":
                    values.setdefault(f"{environment_class.__name__}.{name}", repr(value))
    return values


def warning_of_lost_state(before: dict[str, str], after: dict[str, str]) -> str:
    """
    A warning that names the class attributes that changed during a run; "" if none changed.

    before, after: results of `unsaved_class_attribute_values`.
    """
    changed = [name for name, value in after.items() if before.get(name) != value]
    if not changed:
        return ""
    names = ", ".join(changed)
    return (
        f"{names} changed during the run, and a resumed run starts without these changes; to keep "
        "them, add the class methods get_state and set_state to the environment"
    )
