"""
Finds answers that repeat themselves, copy the prompt or say nothing, by comparing words.

A model can exploit some rewards with answers that repeat themselves or copy the prompt, and the
model's accuracy may not show that it does so. With --reward-gate form,
`rewards_capped_at_0_if_form_gate_fails` gives such answers no reward above 0.

In languages that are written without spaces, a whole sentence counts as one word, so these checks
do not work.
"""

import re
from typing import TYPE_CHECKING, Any

from prompts.examples import Example, answers_of, last_user_text
from rewards.statements import strip_thoughts

if TYPE_CHECKING:
    import numpy as np

# The smallest number of words in a well-formed answer. An answer with fewer words, such as "yes or
# no", never counts as copied from the prompt.
LEAST_WORDS = 4
WINDOW = 20  # distinct words are counted in chunks of this many consecutive words
LEAST_DISTINCT = 0.7  # the smallest fraction of distinct words; English text has about 0.85
COPIED_RUN = 5  # this many consecutive words from the prompt count as copied; four words
# such as "the capital of France" do not
MOST_COPIED = 0.5  # the largest fraction of an answer's words that may be copied

# The largest fraction of repeated word 4-grams. This limit also catches loops of numbers, and loops
# that are longer than `WINDOW`.
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


def lowercase_words(text: str) -> list[str]:
    """The words of a text in lower case, without tags such as <answer>."""
    return _WORD.findall(_TAG.sub(" ", text).lower())


def word_ngrams(words: list[str], length: int) -> list[tuple[str, ...]]:
    """All sequences of `length` consecutive words."""
    shifted = [words[begin:] for begin in range(length)]
    return list(zip(*shifted, strict=False))


def repeated_4gram_fraction(text: str) -> float:
    """
    The fraction of a text's word 4-grams that occurred earlier in the text.

    The result is 0 for a text of fewer than four words.
    """
    runs = word_ngrams(text.lower().split(), 4)
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def distinct_word_fraction_in_chunks(text: str) -> float:
    """
    The fraction of distinct words, averaged over chunks of `WINDOW` consecutive words.

    The fraction is 1 for a text of fewer than `LEAST_WORDS` words. Numbers do not count as words.
    """
    words = [word for word in lowercase_words(text) if not word[0].isdigit()]
    if len(words) < LEAST_WORDS:
        return 1.0
    chunks = [words[begin : begin + WINDOW] for begin in range(0, len(words), WINDOW)]
    return sum(len(set(chunk)) for chunk in chunks) / len(words)


def fraction_copied_from_prompt(text: str, prompt: str) -> float:
    """
    The fraction of a text's words that are copied from the prompt.

    A word counts as copied if it belongs to a sequence of `COPIED_RUN` words that also occurs in
    the prompt. If the text has fewer words than that, the sequence is the whole text. The fraction
    is 0 for a text of fewer than `LEAST_WORDS` words.
    """
    words = lowercase_words(text)
    if len(words) < LEAST_WORDS:
        return 0.0
    length = min(COPIED_RUN, len(words))
    prompt_runs = set(word_ngrams(lowercase_words(prompt), length))
    copied_places: set[int] = set()
    for place, run in enumerate(word_ngrams(words, length)):
        if run in prompt_runs:
            copied_places.update(range(place, place + length))
    return len(copied_places) / len(words)


def repeats_itself_or_copies_prompt(text: str, prompt: str) -> bool:
    """Whether a text violates `LEAST_DISTINCT`, `MOST_REPEATED` or `MOST_COPIED`."""
    return (
        distinct_word_fraction_in_chunks(text) < LEAST_DISTINCT
        or repeated_4gram_fraction(text) > MOST_REPEATED
        or fraction_copied_from_prompt(text, prompt) > MOST_COPIED
    )


def is_long_enough_and_not_degenerate(text: str, prompt: str) -> bool:
    """
    Whether a text has at least `LEAST_WORDS` words, and does not repeat itself or copy the prompt.

    The result is False if the text consists only of a thought.
    """
    is_only_thought = text.strip() and not strip_thoughts(text).strip()
    if is_only_thought:
        return False
    return len(lowercase_words(text)) >= LEAST_WORDS and not repeats_itself_or_copies_prompt(
        text, prompt
    )


def opens_with_refusal(text: str) -> bool:
    """
    Whether a text begins by refusing, as with "I can't", "I'm unable" or "I'm sorry, but".
    """
    return bool(_REFUSAL.match(text.replace("\u2019", "'")))


# ---- --reward-gate form


def passes_form_gate(text: str, prompt: str, finish_reason: str) -> bool:
    """Whether a completion meets the conditions in `NEEDED`, so that it keeps its reward."""
    return finish_reason == "stop" and is_long_enough_and_not_degenerate(text, prompt)


def right_answer_passes_form_gate(row: dict[str, Any]) -> bool:
    """
    Whether a completion that repeats a right answer of the row word for word keeps its reward.

    The result is True for a row without an answer.
    """
    answers = answers_of(row)
    if not answers:
        return True
    prompt = last_user_text(row["prompt"])
    return any(is_long_enough_and_not_degenerate(answer, prompt) for answer in answers)


def rewards_capped_at_0_if_form_gate_fails(
    rewards_by_name: "dict[str, np.ndarray]",
    examples: list[Example],
    completions: list[str],
    finish_reasons: list[str],
) -> "dict[str, np.ndarray]":
    """
    The values of each reward, but at most 0 for completions that fail `passes_form_gate`.

    rewards_by_name: the values of each reward, (N,) each.
    """
    import numpy as np  # imported here, since reading data and scoring answers need no NumPy

    rows = zip(completions, examples, finish_reasons, strict=True)
    passes = [
        passes_form_gate(text, last_user_text(example["prompt"]), finish_reason)
        for text, example, finish_reason in rows
    ]
    gated = {}
    for name, values in rewards_by_name.items():
        gated[name] = np.where(passes, values, np.minimum(values, 0.0))
    return gated
