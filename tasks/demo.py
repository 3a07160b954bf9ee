"""
The task `demo`, in which the bundled model learns to answer sums that are written in words.

A run of the task takes a minute or two on two CPU cores.
"""

import random
import re
from collections.abc import Sequence
from typing import Any

from prompts.examples import Example, last_user_text
from tasks.task import DATA, Sides, Task

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


# ---- numbers written as words


def number_in_words(number: int) -> str:
    """A number from 0 to 99 in English words, such as "forty-two" for 42."""
    if number < 20:
        return _SMALL[number]
    tens, units = divmod(number, 10)
    return f"{_TENS[tens]}-{_SMALL[units]}" if units else _TENS[tens]


_NUMBERS = {number_in_words(number): number for number in range(100)}
_LONGEST_FIRST = sorted(_NUMBERS, key=len, reverse=True)
NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(_LONGEST_FIRST)}|\d+)\b", re.IGNORECASE)


def numbers_in_words_or_digits(text: str) -> list[int]:
    """The numbers in a text, in their order, written as words (0 to 99) or as digits."""
    # casefold is needed, because with IGNORECASE the letter "\u017f" matches s
    words = [word.casefold() for word in NUMBER_WORD.findall(text)]
    return [int(word[:9]) if word.isdigit() else _NUMBERS[word] for word in words]


# ---- problems

_NAMES = ["Ann", "Ben", "Eva", "Tom"]
_THINGS = ["apples", "books", "coins", "eggs"]


def make_problem(a: int, b: int, wording_index: int) -> Example:
    """
    The problem a + b in one of three wordings, with its answer.

    The column `carry` says whether the last digits of a and b add up to at least ten.
    """
    first = number_in_words(a)
    second = number_in_words(b)
    name = _NAMES[(a + b) % 4]
    thing = _THINGS[(a * 3 + b) % 4]
    wordings = [
        f"What is {first} plus {second}?",
        f"Add {first} and {second}.",
        f"{name} has {first} {thing} and gets {second} more. How many {thing} is that?",
    ]
    has_carry = a % 10 + b % 10 >= 10
    return {"prompt": wordings[wording_index], "answer": number_in_words(a + b), "carry": has_carry}


def number_pairs_of_side(held_out: bool) -> list[tuple[int, int]]:
    """
    The pairs (a, b) of numbers from 1 to 49 that are held out, or those that are trained on.

    If a pair (a, b) is held out, so is the pair (b, a).
    """
    pairs = [(a, b) for a in range(1, 50) for b in range(a, 50)]
    random.Random(0).shuffle(pairs)
    quarter = len(pairs) // 4
    chosen = pairs[:quarter] if held_out else pairs[quarter:]
    return sorted({pair for a, b in chosen for pair in ((a, b), (b, a))})


def choose_problems_mostly_with_carry(held_out: bool, num: int) -> list[Example]:
    """
    Chooses `num` different problems, which are the same in every run.

    In two thirds of the problems, adding the last digits gives a carry.
    """
    problems = [
        make_problem(a, b, wording_index)
        for a, b in number_pairs_of_side(held_out)
        for wording_index in range(3)
    ]
    rng = random.Random(0)
    rng.shuffle(problems)
    with_carry = [problem for problem in problems if problem["carry"]]
    without_carry = [problem for problem in problems if not problem["carry"]]
    chosen = with_carry[: num * 2 // 3]
    chosen += without_carry[: num - len(chosen)]
    assert len(chosen) == num, f"there are only {len(chosen)} problems, not {num}"
    rng.shuffle(chosen)
    return chosen


def load_examples() -> Sides:
    """2,000 problems to train on and 512 held-out problems."""
    return choose_problems_mostly_with_carry(
        held_out=False, num=2000
    ), choose_problems_mostly_with_carry(held_out=True, num=512)


# ---- answers

# word or sign in an answer -> "+" if it means plus, "=" if it means equals, or "" for neither
_KINDS = (
    dict.fromkeys("plus and with + &".split(), "+")
    | dict.fromkeys("is are equals equal makes make gives give has have = :".split(), "=")
    | dict.fromkeys(
        "the answer sum total result of that this it so in all together more add adding".split(), ""
    )
    | dict.fromkeys(". , ; ! ( ) * $ \" '".split(), "")
)


_SUM = re.compile(r"=?(?:(?:n\+)+n=)?n=?")  # the shape of "n", "the answer is n" or "n plus n is n"


def correct(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any
) -> list[float]:
    """
    Returns 1 for each completion that states the right answer and nothing false, else 0.

    The last number in the completion must be the right answer. If there are other numbers, they
    must be exactly the numbers in the problem, and the words between the numbers must state the
    sum. A rule that reads only the last number would accept "Twenty-seven plus twenty is
    forty-two.", and a rule that ignores the words would accept "Twenty-seven is forty-two.". A word
    that belongs neither to a sum nor to the problem, such as "minus", "not" or "hundred", could
    change the meaning, and therefore makes the completion wrong.
    """
    return [
        float(_states_right_answer(last_user_text(prompt), text, str(right)))
        for prompt, text, right in zip(prompts, completions, answer, strict=True)
    ]


def _states_right_answer(problem: str, completion: str, right_answer: str) -> bool:
    """Whether a completion states the right answer; see `correct`."""
    numbers = numbers_in_words_or_digits(completion)
    if not numbers or numbers[-1:] != numbers_in_words_or_digits(right_answer):
        return False
    if len(numbers) > 1 and sorted(numbers[:-1]) != sorted(numbers_in_words_or_digits(problem)):
        return False
    kinds = (
        dict.fromkeys(_split_into_words_and_mask_numbers(f"{problem} {right_answer}"), "")
        | _KINDS
        | {"\0": "n"}
    )
    shape = "".join(kinds.get(word, "?") for word in _split_into_words_and_mask_numbers(completion))
    return shape.count("n") == len(numbers) and _SUM.fullmatch(shape) is not None


def _split_into_words_and_mask_numbers(text: str) -> list[str]:
    """The words and signs of a text in lower case, with the sign "\\0" in place of each number."""
    return re.findall(r"\w+|[^\w\s]", NUMBER_WORD.sub("\0", text.lower()))


WEIGHTS = {"correct": 1.0, "rubric": 0.5}
TASK = Task(
    "demo", {"correct": correct}, WEIGHTS, verifier=correct, rubric=DATA / "demo_rubric.yaml"
)
