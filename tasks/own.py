"""A user's own data: the column `answer`, where there is one, verifies."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from problems.examples import Example, prompt_key, short
from problems.rewards import extract_answer, folded, has_words, math_correct, read_number, states_number
from tasks.task import Sides, Task

MOST_WORDS = 8  # of an answer in words: longer ones can hardly be repeated to the letter
_COMMA = re.compile(r"-?(?:0,[0-9]+|[0-9]+,(?![0-9]{3}$)[0-9]+)")  # no thousands
KINDS = {
    "number": "compared as numbers",
    "formula": "as formulas by math-verify",
    "text": "as texts, equal but for case, article and full stop",
    "": "not compared, being prose or stating nothing",
}


def bundled() -> Sides:
    raise ValueError("--task own is your own data; give it with --data FILE")


@functools.lru_cache(maxsize=2**16)
def kind_of(answer: str | None) -> str:
    """How completions are compared with an answer: one of `KINDS`, "" for one that has nothing to compare."""
    said = extract_answer(answer or "") or ""
    if not said.strip(" .$"):
        return ""
    in_words = "text" if len(str(answer).split()) <= MOST_WORDS else ""
    if read_number(said):
        return "number" if states_number(str(answer)) else in_words
    return in_words if has_words(said) or said.strip(" .()").isalpha() else "formula"


def correct(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[Any]:
    """`math_correct`; of texts that hold a number the whole counts; None where there is no answer to compare with."""
    right: list[Any] = list(math_correct(completions, answer))
    for row, (text, known) in enumerate(zip(completions, answer, strict=True)):
        kind = kind_of(known)
        if kind == "text" and read_number(extract_answer(str(known)) or ""):
            right[row] = float(folded(text) == folded(str(known)))
        elif not kind:
            right[row] = None
    return right


def is_checked(example: Example) -> bool:
    return bool(kind_of(example.get("answer")))


def without_answers(task: Task) -> Task:
    """The task without its reward, where no answer can be compared with."""
    return task if any(map(is_checked, task.train or task.held_out)) else task._replace(rewards={}, reward_weights={})


def refuse(task: Task, source: str | None) -> None:
    """ValueError for data that holds nothing to reward."""
    examples, fix = task.train or task.held_out, "give --reward FILE.py:fn or --rubric FILE"
    if prose := next((example["answer"] for example in examples if example.get("answer")), ""):
        raise ValueError(f"--data {source}: answers like {short(prose)} cannot be compared with, being prose; {fix}")
    columns = ", ".join(examples[0])
    fix = f"name one, as --columns answer=COLUMN, or {fix}"
    raise ValueError(f"--data {source} has no answer to compare with, only the columns {columns}; {fix}")


def told(task: Task) -> Task:
    """The task, without prompts that nothing in it can reward, and with what its user should know of it."""
    train, held_out = task.train, task.held_out
    if task.rewards.get("correct") is correct:
        train, held_out = (list(filter(is_checked, side)) for side in (train, held_out))
    said = f"data: {len(train)} prompts to train on" if task.train else "data: none to train on"
    said += f", {len(held_out)} held out"
    if left_out := len(task.train + task.held_out) - len(train + held_out):
        said += f", {left_out} left out for want of an answer to compare with"
    if weights := [f"{weight:g} x {name}" for name, weight in task.reward_weights.items() if weight]:
        said += f"; the reward is {' + '.join(weights)}"
    return task._replace(train=train, held_out=held_out, notes=[*task.notes, said, about_answers(task)])


def about_answers(task: Task) -> str:
    """How completions are compared with the answers, in a line."""
    answers = [example["answer"] for example in task.train + task.held_out if example.get("answer") is not None]
    kinds = {kind: [answer for answer in answers if kind_of(answer) == kind] for kind in KINDS}
    said = [f"{len(its)} {KINDS[kind]}" for kind, its in kinds.items() if its] or ["none"]
    if kinds[""]:
        said[-1] += f", as {short(kinds[''][0])}"
    for answer in kinds["number"] + kinds["formula"] + kinds["text"]:
        if (read := extract_answer(answer) or "") not in (answer, answer[:-1]):
            said.append(f"{short(answer)} is read as {short(read)}")
            break
    if lists := [answer for answer in answers if _COMMA.fullmatch(answer)]:
        said.append(f"{short(lists[0])} is read as a list (write a decimal with a point)")
    known: dict[str, set[str]] = {}
    for example in task.train + task.held_out:
        known.setdefault(prompt_key(example), set()).add(folded(str(example.get("answer"))))
    if num := sum(len(its) > 1 for its in known.values()):
        said.append(f"{num} prompt{'s have' if num > 1 else ' has'} several answers")
    return f"answers: {', '.join(said)}" + ("" if task.verifier else "; evaluations show the reward alone")


OWN = Task(
    name="own",
    rewards={"correct": correct},
    reward_weights={"correct": 1.0},
    verifier=correct,
)
