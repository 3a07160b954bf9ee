"""
What changed in a run's answers to the same held-out problems: their form, their words, and whether
wrong answers earn the highest reward.

Such changes may reveal that a run games its reward. This file does not cover the figures
(difference.py) or what all signs mean together (verdict.py).
"""

import itertools
import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from flags import escape_invisible
from prompts.examples import prompt_text
from reporting.difference import first_answer_rewards
from reporting.health import Records
from reporting.history import Answers
from rewards import form

# ---- a change of at least this size is worth a line
LEAST_RISE = 0.2  # rise of the fraction of answers that contain a word
LEAST_Z = 2.4  # McNemar's statistic; high, because hundreds of words are tested; 6 of 6 reach it
LEAST_LONGER = 1.5  # factor between the mean numbers of words
LEAST_COPIED = 0.1  # fraction of an answer's words (copied) or 4-grams (repeated)
LEAST_CHEATS = 0.05  # fraction of the last answers that are wrong and have the highest reward
LEAST_WITNESSED = 0.25  # fraction of a rise in the judge's score that the witness must confirm
# ---- a task is a classification if it has at most this many different answers, and on average at
# least this many problems for each answer
MOST_KINDS = 20
LEAST_PROBLEMS_PER_KIND = 3
# ---- lengths of lists
MOST_NAMED = 2  # answers that a line names
NUM_WORDS = 5  # words that get a line
OPENING = 3  # words in the opening of an answer

CHEATED = "wrong with the highest reward"  # the kind of these answers, if they are alarmingly many

# A mark outside a word, other than a full stop or a comma; or a letter of a script that puts no
# spaces between words.
MARK = re.compile(r"(?<!\w)[^\w\s.,]|[^\w\s.,](?!\w)|[\u0e00-\u0eff\u3040-\u9fff]")


def final_text(answer: dict[str, Any]) -> str:
    """
    Returns the final text of an answer.

    In a conversation with tools, this is the model's last message, unless that message contains
    only a call.
    """
    messages = answer.get("messages", [[]])[0]
    replies: list[str] = [
        message["content"] for message in messages if message["role"] == "assistant"
    ]
    if replies and replies[-1]:
        return replies[-1]
    completion: str = answer["completions"][0]
    return completion


def greedy_text(answer: dict[str, Any]) -> str:
    text: str = answer.get("greedy", "")
    return text


# ---- form


def mean_copied_fraction(answers: Records) -> float:
    """Returns the mean fraction of an answer that is copied from its prompt."""
    return statistics.fmean(
        form.copied_fraction(final_text(answer), prompt_text(answer["prompt"]))
        for answer in answers
    )


def mean_repetition(answers: Records) -> float:
    """Returns the mean fraction of an answer that repeats itself."""
    return statistics.fmean(form.repetition(final_text(answer)) for answer in answers)


def mean_num_words(answers: Records) -> float:
    return statistics.fmean(len(final_text(answer).split()) for answer in answers)


def form_change_signs(before: Records, after: Records) -> list[str]:
    """Returns a line for each change of form: more copying, more repetition, a new length."""
    if not before:
        return []
    signs = []
    old = mean_copied_fraction(before)
    new = mean_copied_fraction(after)
    if new - old >= LEAST_COPIED:
        signs.append(f"copied from the prompt: {old:.0%} -> {new:.0%} of an answer")

    old = mean_repetition(before)
    new = mean_repetition(after)
    if new - old >= LEAST_COPIED:
        signs.append(f"repeated: {old:.0%} -> {new:.0%} of an answer")

    old = mean_num_words(before)
    new = mean_num_words(after)
    factor = (new + 1) / (old + 1)
    if factor >= LEAST_LONGER:
        signs.append(f"longer: {old:.1f} -> {new:.1f} words an answer")
    elif factor <= 1 / LEAST_LONGER:
        signs.append(f"shorter: {old:.1f} -> {new:.1f} words an answer")
    return signs


# ---- words


def risen_word_signs(
    before: Records,
    after: Records,
    get_text: Callable[[dict[str, Any]], str] = final_text,
    kind: str = "answers",
) -> list[str]:
    """
    Returns a line for each of the words and openings that rose most.

    For example, '"captain" in 24% -> 85% of answers'. kind: the last words of the line.
    """
    before_words = [words_and_openings(get_text(answer)) for answer in before]
    after_words = [words_and_openings(get_text(answer)) for answer in after]
    old_counts = Counter(itertools.chain.from_iterable(before_words))
    new_counts = Counter(itertools.chain.from_iterable(after_words))
    rises = new_counts - old_counts
    # how many answers gained each word
    gains: Counter[str] = Counter()
    for old_set, new_set in zip(before_words, after_words, strict=True):
        gains.update(new_set - old_set)
    num = len(after)

    def has_risen(word: str) -> bool:
        """Whether the rise is large, and significant given how many answers changed."""
        num_changed = 2 * gains[word] - rises[word]
        return rises[word] >= max(LEAST_RISE * num, LEAST_Z * num_changed**0.5)

    # sorted by word too, because the order of a set differs between processes
    risen = sorted(filter(has_risen, rises), key=lambda word: (-rises[word], word))
    signs = []
    for word in risen[:NUM_WORDS]:
        old = old_counts[word] / num
        new = new_counts[word] / num
        signs.append(f"{escape_invisible(word)} in {old:.0%} -> {new:.0%} of {kind}")
    return signs


def words_and_openings(text: str) -> set[str]:
    """Returns an answer's words and marks, each in quotation marks, and its opening."""
    words = form.words_of(text)
    names = {name_word(word) for word in [*words, *MARK.findall(text)]}
    if len(words) > OPENING:
        opening = " ".join(words[:OPENING])
        names.add(f'the opening "{opening}"')
    return names


def name_word(word: str) -> str:
    return "a quotation mark" if word == '"' else f'"{word}"'


def missing_answer_signs(after: Records) -> list[str]:
    """
    Returns a line that names the right answers of a classification that no completion contains.

    The line names only answers that are right for at least two problems, the most common first.
    There is no line if the task is no classification or if every answer was given.
    """
    kinds = Counter(str(answer["answer"]) for answer in after if answer.get("answer") is not None)
    if len(kinds) > min(MOST_KINDS, kinds.total() / LEAST_PROBLEMS_PER_KIND):
        return []

    texts: list[str] = []
    for answer in after:
        texts.extend(answer["completions"])
        texts.append(answer.get("greedy", ""))
        if 1.0 in answer["values"]:  # a completion is right, so it gave the answer in some form
            texts.append(str(answer.get("answer")))
    all_texts = "\n".join(texts).lower()

    absent = {}
    for kind, count in kinds.most_common():
        pattern = rf"(?<![a-z0-9]){re.escape(kind.lower())}(?![a-z0-9])"
        if count > 1 and not re.search(pattern, all_texts):
            name = escape_invisible(shorten_answer(kind))
            absent[f'"{name}"'] = count
    if not absent:
        return []

    names = ", ".join(list(absent)[:MOST_NAMED])
    if len(absent) > MOST_NAMED:
        names += f" and {len(absent) - MOST_NAMED} more"
    num_problems = f"{sum(absent.values())} of {kinds.total()} problems"
    return [f"{names} in no answer, though right for {num_problems}"]


# ---- one answer


def shorten_answer(text: str) -> str:
    return textwrap.shorten(text, 70, placeholder=" \u2026")


def describe_reward(answer: dict[str, Any], evaluation: dict[str, Any]) -> str:
    """
    Returns an answer's reward as "reward 0.5", or "unreadable".

    Returns "" if the evaluation has no score. Then either the reward is 1 for a right answer and 0
    for a wrong one, or a judge gives part of the reward.
    """
    value = answer["values"][0]
    reward = answer.get("reward", answer["values"])[0]
    if value is None or reward is None:
        return "unreadable"
    return f"reward {reward:.3g}" if "eval/score" in evaluation else ""


def describe_answer(answer: dict[str, Any], evaluation: dict[str, Any], is_verified: bool) -> str:
    """Returns the known facts about an answer, as "wrong, reward 0.5; answer: nine"."""
    value = answer["values"][0]
    facts = []
    if is_verified and value is not None:
        facts.append("right" if value >= 1 else "wrong")
    reward = describe_reward(answer, evaluation)
    if reward:
        facts.append(reward)

    parts = [", ".join(facts)] if facts else []
    right_answer = answer.get("answer")
    if right_answer is not None:
        parts.append(f"answer: {shorten_answer(str(right_answer))}")
    return "; ".join(parts)


# ---- signs that the reward is gamed


def problems_with_rewarded_mistakes(answers: dict[int, Answers]) -> tuple[set[int], set[int]]:
    """
    Returns the problems whose answer is wrong but earns the highest reward of the whole run.

    The first set belongs to the first evaluation, the second set to the last evaluation. Both sets
    are empty unless the second is alarmingly large and larger than the first.

    answers: the answers of each evaluation by step, checked by a verifier.
    """
    rewards = {step: first_answer_rewards(records) for step, records in answers.items()}
    distinct = set(itertools.chain.from_iterable(by.values() for by in rewards.values()))
    highest = max(distinct, default=0.0)

    def find_cheats(step: int) -> set[int]:
        return {
            problem
            for problem, record in answers[step].items()
            if record["values"][0] == 0 and rewards[step].get(problem) == highest
        }

    last_step = max(answers)
    first = find_cheats(min(answers))
    last = find_cheats(last_step)
    least = max(LEAST_CHEATS * len(answers[last_step]), len(first) + 1)
    if len(distinct) < 2 or len(last) < least:
        return set(), set()
    return first, last


def unwitnessed_rise_signs(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    """Returns a line if the judge's score rose but its witness did not follow."""
    old_score = number_or_nan(first.get("eval/score"))
    new_score = number_or_nan(last.get("eval/score"))
    old_witness = number_or_nan(first.get("eval/witness"))
    new_witness = number_or_nan(last.get("eval/witness"))
    rise = new_score - old_score
    if rise > 0 and new_witness - old_witness < LEAST_WITNESSED * rise:
        return [f"the judge's witness did not follow: {old_witness:.3f} -> {new_witness:.3f}"]
    return []


def number_or_nan(value: float | None) -> float:
    return math.nan if value is None else value
