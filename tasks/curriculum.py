"""
Checks a user's own object that draws the prompts of each step (`trainer.run.prompts`).

The base class of such objects is in tasks/draws.py.
"""

from collections.abc import Callable
from typing import Any

from prompts.examples import Example, copy_as_json, shorten_value
from rewards.functions import call_or_raise_with_location
from tasks.draws import Draw


def refuse_unusable_curriculum(prompts: Any) -> None:
    """
    Raises ValueError if a user's object cannot draw prompts, or cannot restore its state.

    The inherited `load_state` only sets the attribute `state`. If a class has a method `commit` or
    a property `state` that makes the state from other attributes, these attributes would not be
    restored. Such a class must therefore define `load_state`.
    """
    label = f"run.prompts is an object of the class {type(prompts).__qualname__}"
    for method in ("next_prompts", "commit", "state", "load_state"):
        if not hasattr(prompts, method):
            raise ValueError(
                f"{label}, which has no {method}; derive the class from tasks.draws.EpochPrompts"
            )
    for owner in type(prompts).__mro__:
        members = vars(owner)
        if "load_state" in members:
            return
        for name in ("commit", "state"):
            if name in members and (name == "commit" or isinstance(members[name], property)):
                raise ValueError(
                    f"{label}, which defines {name} but no load_state, so a resumed run would "
                    "lose the state without a warning; add a method def load_state(self, state) "
                    f"that restores the attributes from which {name} makes the state"
                )


def draw_checked_prompts(
    prompts: Any, step: int, encode: Callable[[list[Example]], list[list[int]]] | None
) -> Draw:
    """
    The examples that a user's object draws for a step, and the token ids of their prompts.

    step: the number of completed steps.
    encode: a function that encodes the prompts of examples as token ids. None if the rollout
    encodes the prompts itself, as in a run with tools. In this case, the ids that the object
    returns are neither checked nor used.

    Raises ValueError if the object fails, draws nothing, or returns ids of other prompts.
    """
    label = "run.prompts.next_prompts"
    drawn = call_or_raise_with_location(label, prompts.next_prompts, step)
    fix = (
        "return a tuple of a list of examples and a list with the token ids of each example's "
        "prompt"
    )
    if not isinstance(drawn, tuple) or len(drawn) != 2:
        raise ValueError(f"{label} returned {shorten_value(drawn)} for step {step + 1}; {fix}")
    examples, prompt_ids = (list(part) for part in drawn)
    if not examples:
        raise ValueError(f"{label} returned no prompts for step {step + 1}; return at least one")
    if len(examples) != len(prompt_ids):
        raise ValueError(
            f"{label} returned {_count(len(examples), 'example')}, but the ids of "
            f"{_count(len(prompt_ids), 'prompt')} for step {step + 1}; {fix}"
        )
    for example in examples:
        if not isinstance(example, dict) or "prompt" not in example:
            raise ValueError(
                f"{label} returned {shorten_value(example)} as an example for step {step + 1}; "
                'return dictionaries with the key "prompt", such as the elements of self.train'
            )
    if encode is not None:
        for number, (ids, own_ids) in enumerate(zip(prompt_ids, encode(examples), strict=True)):
            if list(ids) != own_ids:
                text = shorten_value(examples[number]["prompt"])
                raise ValueError(
                    f"{label} returned, for example {number + 1} of step {step + 1} ({text}), the "
                    "ids of another prompt; return self.prompt_ids at the index of the example in "
                    "self.train, or run.encode_prompts(examples)"
                )
    return examples, prompt_ids


def describe_unusual_prompt_count(num_prompts: int, batch: int, step: int) -> str:
    """Returns a line if the number of prompts drawn for a step differs from --batch, else ""."""
    if num_prompts == batch:
        return ""
    return (
        f"run.prompts.next_prompts returned {_count(num_prompts, 'prompt')} for step {step + 1}, "
        f"not the {batch} of --batch; each step trains on all prompts that next_prompts returns, "
        "but the estimates of memory and time assume --batch"
    )


def observe_and_commit(prompts: Any, figures: dict[str, Any] | None) -> None:
    """
    Tells a user's object that a step has ended, and calls its `commit`.

    figures: the metrics of the step. None if the run was only made or restored; in this case, only
    `commit` is called.

    Raises ValueError if the object fails, or if JSON cannot express its state.
    """
    observe_step = getattr(prompts, "observe_step", None)
    if figures is not None and observe_step is not None:
        call_or_raise_with_location("run.prompts.observe_step", observe_step, figures)
    call_or_raise_with_location("run.prompts.commit", prompts.commit)
    copy_as_json("run.prompts.state is", prompts.state)


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"
