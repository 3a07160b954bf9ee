"""
Judges the form of an answer by its words alone: does it repeat itself, copy the prompt, or say
nothing?

A reward that a policy can exploit pays for such answers, and the accuracy may not show this.
`apply_gate` takes those rewards away (--reward-gate form).

This file does not cover languages without spaces between words. An answer in such a language counts
as a single word here.
"""

import re
from typing import Any

from prompts.examples import Example, answers_of, prompt_text
from rewards.statements import strip_thoughts

# The fewest words in an answer. Fewer words, such as "yes or no", are no copy of the prompt either.
LEAST_WORDS = 4
WINDOW = 20  # the number of consecutive words that are compared with each other
LEAST_DISTINCT = 0.7  # least fraction of distinct words in a window; English text has 0.85
COPIED_RUN = 5  # consecutive words that are also in the prompt; "the capital of France" has four
MOST_COPIED = 0.5  # most words in such runs, as a fraction of the answer
# The largest fraction of repeated 4-grams. It finds loops of numbers, or longer than the window.
MOST_REPEATED = 0.5

NEEDED = (
    f"ends before --max-tokens, has at least {LEAST_WORDS} words, "
    "and neither repeats itself nor copies the prompt"
)

_WORD = re.compile(r"\w+(?:[-'\u2019]\w+)*")
_TAG = re.compile(r"<[^<>]{1,40}>")
_REFUSAL = re.compile(
    r"\W*(?:unfortunately,? )?(?:(?:(?:i'm|i am) (?:so |very )?)?sorry,? (?:but|i)\b|"
    r"i (?:can't|cannot|can not|won't)\b|(?:i'm|i am) (?:unable|not able)\b)",
    re.IGNORECASE,
)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without tags such as <answer>."""
    return _WORD.findall(_TAG.sub(" ", text).lower())


def word_runs(words: list[str], length: int) -> list[tuple[str, ...]]:
    """All runs of `length` consecutive words."""
    shifted = [words[begin:] for begin in range(length)]
    return list(zip(*shifted, strict=False))


def repetition(text: str) -> float:
    """
    The fraction of an answer's word 4-grams that occurred earlier in it; 0 below four words.
    """
    runs = word_runs(text.lower().split(), 4)
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def distinctness(text: str) -> float:
    """
    The fraction of distinct words, counted in every run of `WINDOW` consecutive words.

    It is 1 for answers with few words. Numbers are not counted.
    """
    words = [word for word in words_of(text) if not word[0].isdigit()]
    if len(words) < LEAST_WORDS:
        return 1.0
    chunks = [words[begin : begin + WINDOW] for begin in range(0, len(words), WINDOW)]
    return sum(len(set(chunk)) for chunk in chunks) / len(words)


def copied_fraction(text: str, prompt: str) -> float:
    """
    The fraction of an answer's words that are in runs which also occur in the prompt.

    A run has `COPIED_RUN` words, or all words of a shorter answer.
    """
    words = words_of(text)
    if len(words) < LEAST_WORDS:
        return 0.0
    length = min(COPIED_RUN, len(words))
    prompt_runs = set(word_runs(words_of(prompt), length))
    copied_places: set[int] = set()
    for place, run in enumerate(word_runs(words, length)):
        if run in prompt_runs:
            copied_places.update(range(place, place + length))
    return len(copied_places) / len(words)


def is_degenerate(text: str, prompt: str) -> bool:
    return (
        distinctness(text) < LEAST_DISTINCT
        or repetition(text) > MOST_REPEATED
        or copied_fraction(text, prompt) > MOST_COPIED
    )


def has_form(text: str, prompt: str) -> bool:
    """
    Whether a text looks like an answer: enough words, not degenerate, not only an unclosed thought.
    """
    is_only_thought = text.strip() and not strip_thoughts(text).strip()
    if is_only_thought:
        return False
    return len(words_of(text)) >= LEAST_WORDS and not is_degenerate(text, prompt)


def is_refusal(text: str) -> bool:
    """
    Whether an answer opens with "I can't", "I cannot", "I won't", "I'm unable" or "I'm sorry, but".
    """
    return bool(_REFUSAL.match(text.replace("\u2019", "'")))


# ---- --reward-gate form


def passes_gate(text: str, prompt: str, finish_reason: str) -> bool:
    """Whether `apply_gate` lets a completion keep its reward. `NEEDED` says the same in words."""
    return finish_reason == "stop" and has_form(text, prompt)


def keeps_own_answer(row: dict[str, Any]) -> bool:
    """
    Whether a row's own `answer`, as a completion, would keep its reward in `apply_gate`.

    True for a row without an answer.
    """
    answers = answers_of(row)
    if not answers:
        return True
    prompt = prompt_text(row["prompt"])
    return any(has_form(answer, prompt) for answer in answers)


def apply_gate(
    components: dict[str, Any],
    examples: list[Example],
    completions: list[str],
    finish_reasons: list[str],
) -> dict[str, Any]:
    """
    The reward components, each of shape (N,), limited to 0 for completions that are cut off or
    have no form.
    """
    import numpy as np  # here: reading data and scoring answers need no NumPy

    rows = zip(completions, examples, finish_reasons, strict=True)
    passes = [
        passes_gate(text, prompt_text(example["prompt"]), finish_reason)
        for text, example, finish_reason in rows
    ]
    gated = {}
    for name, values in components.items():
        gated[name] = np.where(passes, values, np.minimum(values, 0.0))
    return gated
