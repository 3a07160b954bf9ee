"""
The form of an answer, told from its words alone: does it repeat itself, copy the prompt, say anything at all?

A reward that a policy can bend pays for such answers, and accuracy may not notice. Left out: languages that put no
spaces between words, whose answers are one word here.
"""

import re
from typing import Any

from problems.examples import Example, answers_of, prompt_text
from problems.statements import strip_thoughts

LEAST_WORDS = 4  # of an answer; fewer are no copy either, as of "yes or no"
WINDOW, LEAST_DISTINCT = (
    20,
    0.7,
)  # words, and the share of them that must differ; of English text 0.85 do
COPIED_RUN = 5  # words in a row that the prompt has too; "the capital of France" has four
MOST_COPIED = 0.5  # share of the words in such runs
MOST_REPEATED = (
    0.5  # share of an answer's 4-grams: a loop may be longer than the window, or of numbers
)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without the marks of <answer>...</answer>."""
    return re.findall(r"\w+(?:[-'\u2019]\w+)*", re.sub(r"<[^<>]{1,40}>", " ", text).lower())


def repetition(text: str) -> float:
    """The share of an answer's 4-grams of words that occurred earlier in it; 0 below four words."""
    runs = word_runs(text.lower().split(), 4)
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def word_runs(words: list[str], length: int) -> list[tuple[str, ...]]:
    """Every `length` words in a row."""
    return list(zip(*(words[begin:] for begin in range(length)), strict=False))


def distinctness(text: str) -> float:
    """The share of words that differ, of every `WINDOW` words in a row; 1 where they are few. Numbers do not count."""
    words = [word for word in words_of(text) if not word[0].isdigit()]
    chunks = [words[begin : begin + WINDOW] for begin in range(0, len(words), WINDOW)]
    return (
        sum(len(set(chunk)) for chunk in chunks) / len(words) if len(words) >= LEAST_WORDS else 1.0
    )


def copied_fraction(text: str, prompt: str) -> float:
    """The share of words in runs that the prompt has too, of `COPIED_RUN` words or of the whole shorter answer."""
    words = words_of(text)
    if len(words) < LEAST_WORDS:
        return 0.0
    length = min(COPIED_RUN, len(words))
    asked = set(word_runs(words_of(prompt), length))
    begins = [place for place, run in enumerate(word_runs(words, length)) if run in asked]
    return len({place + step for place in begins for step in range(length)}) / len(words)


def is_degenerate(text: str, prompt: str) -> bool:
    return (
        distinctness(text) < LEAST_DISTINCT
        or repetition(text) > MOST_REPEATED
        or copied_fraction(text, prompt) > MOST_COPIED
    )


def has_form(text: str, prompt: str) -> bool:
    """Whether an answer has the form of one: some words, of its own, and not only a thought that never ends."""
    if text.strip() and not strip_thoughts(text).strip():
        return False
    return len(words_of(text)) >= LEAST_WORDS and not is_degenerate(text, prompt)


NEEDED = f"ends before --max-tokens, has at least {LEAST_WORDS} words, and neither repeats itself nor copies the prompt"


def passes_gate(text: str, prompt: str, finish_reason: str) -> bool:
    """Whether `gated` leaves an answer what it earns; in words, `NEEDED`."""
    return finish_reason == "stop" and has_form(text, prompt)


def keeps_own_answer(row: dict[str, Any]) -> bool:
    """Whether `gated` leaves a row's own `answer`, said alone, what it earns; true where there is none."""
    answers = answers_of(row)
    return not answers or any(has_form(answer, prompt_text(row["prompt"])) for answer in answers)


def apply_gate(
    components: dict[str, Any],
    examples: list[Example],
    completions: list[str],
    finish_reasons: list[str],
) -> dict[str, Any]:
    """The components, (N,) each, without what they pay above 0 for completions that are cut off or have no form."""
    import numpy as np  # here: what reads data and scores answers does without

    rows = zip(completions, examples, finish_reasons, strict=True)
    kept = [passes_gate(text, prompt_text(example["prompt"]), why) for text, example, why in rows]
    return {
        name: np.where(kept, values, np.minimum(values, 0.0)) for name, values in components.items()
    }


_REFUSAL = re.compile(
    r"\W*(?:unfortunately,? )?(?:(?:(?:i'm|i am) (?:so |very )?)?sorry,? (?:but|i)\b|"
    r"i (?:can't|cannot|can not|won't)\b|(?:i'm|i am) (?:unable|not able)\b)",
    re.IGNORECASE,
)


def is_refusal(text: str) -> bool:
    """Whether an answer opens with "I can't", "I cannot", "I won't", "I'm unable" or "I'm sorry, but"."""
    return bool(_REFUSAL.match(text.replace("\u2019", "'")))
