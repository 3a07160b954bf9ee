"""A user's own data: the column `answer`, where there is one, verifies."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from problems.examples import Example, short
from problems.rewards import extract_answer, has_words, math_correct, read_number
from tasks.task import Sides, Task

MOST_WORDS = 8  # of an answer in words: longer ones can hardly be repeated to the letter
KINDS = {
    "number": "compared as numbers",
    "formula": "as formulas by math-verify",
    "text": "as texts, equal but for case, article and full stop",
    "": "not at all, as they are long prose or state nothing",
}


def bundled() -> Sides:
    raise ValueError("--task own is your own data; give it with --data FILE")


@functools.lru_cache(maxsize=2**16)
def kind_of(answer: str | None) -> str:
    """How completions are compared with an answer: one of `KINDS`, "" for one that has nothing to compare."""
    said = extract_answer(answer or "") or ""
    if not said.strip(" .$"):
        return ""
    if read_number(said):
        return "number"
    if has_words(said) or said.strip(" .()").isalpha():
        return "text" if len(str(answer).split()) <= MOST_WORDS else ""
    return "formula"


def correct(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[Any]:
    """`math_correct`, and None where there is no answer to compare with."""
    right = math_correct(completions, answer)
    return [value if kind_of(known) else None for value, known in zip(right, answer, strict=True)]


def is_checked(example: Example) -> bool:
    return bool(kind_of(example.get("answer")))


def without_answers(task: Task) -> Task:
    """The task without its reward, where no answer can be compared with."""
    return task if any(map(is_checked, task.train or task.held_out)) else task._replace(rewards={}, reward_weights={})


def told(task: Task) -> Task:
    """The task, with prompts that its rewards can tell apart only, and with what its user should know of it."""
    train, weights = task.train, {name: weight for name, weight in task.reward_weights.items() if weight}
    if task.rewards.get("correct") is correct:
        train = list(filter(is_checked, train))
    what = f"{len(train)} prompts to train on" if task.train else "none to train on"
    said = [f"data: {what}, {len(task.held_out)} held out"]
    if left_out := len(task.train) - len(train):
        said[0] += f"; {left_out} left out, for want of an answer to compare with"
    if weights:
        said[0] += f"; the reward is {' + '.join(f'{weight:g} x {name}' for name, weight in weights.items())}"
    answers = [example["answer"] for example in train + task.held_out if example.get("answer") is not None]
    counts = Counter(map(kind_of, answers))
    if task.verifier is None:
        said.append("answers: none on the held-out side to compare with, so evaluations show the reward alone")
    else:
        said.append("answers: " + ", ".join(f"{counts[kind]} {how}" for kind, how in KINDS.items() if counts[kind]))
        read = ((answer, extract_answer(answer)) for answer in answers if kind_of(answer))
        if example := next((f"{short(a)} is read as {short(b)}" for a, b in read if b and b not in (a, a[:-1])), ""):
            said[-1] += f"; {example}"
    return task._replace(train=train, notes=said)


OWN = Task(
    name="own",
    train=[],
    held_out=[],
    rewards={"correct": correct},
    reward_weights={"correct": 1.0},
    rubric=None,
    metric="accuracy",
    verifier=correct,
)
