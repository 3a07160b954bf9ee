"""
The recipe of the second demo model: `uv run --extra tasks python -m demo.make_rg`.

A Qwen3 of 0.8 million parameters learns four data sets of reasoning-gym, at the sizes of `data/demo_rg.yaml`: sums
(chain_sum), legs of animals (leg_counting), letters (letter_counting) and words spelled backward (spell_backward).
All of its lessons are right. Most of them give the answer at once, which it does by habit and badly; of the first
three data sets some show working first (`WORKING`), and with working it is right more often. Training with GRPO has to
find out which habit pays, and to make fewer slips.

A lesson's number lies above 2^32, a run's below, and no lesson has the prompt of one of the first `HELD_OUT` held-out
numbers. On one machine two runs give the same files.

The model reads other texts letter by letter and makes nothing of them.
"""

import random
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
from transformers import PreTrainedTokenizerFast

import evaluate
import gwen
import tasks
from config import Config
from demo import make
from problems import chat_template
from tasks import rg

FIRST = 2**33  # the number of the first lesson of a data set
HELD_OUT = 256
HABIT = 1200  # the step after which most lessons give the answer at once
WORKING = {"chain_sum": 0.4, "leg_counting": 0.4, "letter_counting": 0.35, "spell_backward": 0.0}  # share from there on
WORKED = 0.85  # and up to there, of the data sets that have any
LESSONS = {"chain_sum": 24, "leg_counting": 20, "letter_counting": 10, "spell_backward": 10}  # a step
SIZES = make.FOLDER.parent / "data" / "demo_rg.yaml"
TASK = "rg:" + ",".join(LESSONS)
Entry = dict[str, Any]  # a problem as reasoning-gym makes it


# ---- lessons


def sums(entry: Entry) -> str:
    """5 - 3 + 9 -> "5-3=2,2+9=11"."""
    first, *rest = entry["metadata"]["expression"].split()
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        before, total = total, total + int(sign + term)
        steps.append(f"{before}{sign}{term}={total}")
    return ",".join(steps)


def legs(entry: Entry) -> str:
    """3 cats, 2 ducks, 1 ant -> "12;4:16;6:22": the legs of each kind, and of all up to it."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    total, steps = 0, list[str]()
    for animal, count in entry["metadata"]["animals"].items():
        own = count * ANIMALS[animal]
        total += own
        steps.append(f"{own}:{total}" if steps else str(own))
    return ";".join(steps)


def letters(entry: Entry) -> str:
    """The e of "here they are" -> "here 2 they 3 are 4": the words that have it, each with the count so far."""
    letter, total, steps = entry["metadata"]["target_letter"], 0, list[str]()
    for word in entry["metadata"]["span"]:
        if own := word.lower().count(letter):
            total += own
            steps.append(f"{word} {total}")
    return " ".join(steps)


SHOW: dict[str, Callable[[Entry], str]] = {"chain_sum": sums, "leg_counting": legs, "letter_counting": letters}


@lru_cache
def data_set(name: str) -> Any:
    mix = rg.parse_mix(TASK, str(SIZES))
    return rg.make_data_set(name, None, 0, mix.settings[name])


@lru_cache
def held_out(name: str) -> set[str]:
    """The prompts of the first numbers, which evaluations ask."""
    return {data_set(name)[number]["question"] for number in range(HELD_OUT)}


def reply(entry: Entry, working: bool) -> str:
    shown = SHOW[entry["metadata"]["source_dataset"]](entry) + "\n" if working else ""
    return f"{shown}<answer>{entry['answer']}</answer>"


def problems(name: str) -> Any:
    """The data set's problems for lessons, without end."""
    number = FIRST
    while True:
        entry = data_set(name)[number]
        if entry["question"] not in held_out(name):
            yield entry
        number += 1


# ---- tokenizer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """
    Words are whole where every problem of a data set has them, or its list of animals, or the system message.

    Everything else is read and written byte by byte: digits, and the words that are to be spelled or counted in.
    """
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    texts, words = [rg.parse_mix(TASK, str(SIZES)).system, "system", "user", "assistant"], set[str]()
    for name in LESSONS:
        asked = [data_set(name)[FIRST + number]["question"] for number in range(1000)]
        words |= set.intersection(*(set(re.findall("[A-Za-z]{2,}", question)) for question in asked))
        texts += asked
    words |= set(re.findall("[A-Za-z]{2,}", " ".join(texts[:4])))
    words |= {word + ending for animal in ANIMALS for word in animal.split() for ending in ("", "s")}
    whole = "|".join(sorted(words - {"sun", "nus"}, key=lambda word: (-len(word), word)))
    return make.trained_tokenizer(texts, rf"</?answer>| ?\b(?:{whole})\b|[\s\S]", 10_000)


# ---- training


class Lessons:
    """The lessons of a step, from one seeded stream."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.rng = tokenizer, random.Random(0)
        self.eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.system = rg.parse_mix(TASK, str(SIZES)).system
        self.streams = {name: problems(name) for name in LESSONS}

    def lesson(self, name: str, step: int) -> make.Lesson:
        entry = next(self.streams[name])
        share = WORKED if step <= HABIT and WORKING[name] else WORKING[name]
        text = reply(entry, self.rng.random() < share)
        prompt = chat_template.chat_ids(self.tokenizer, entry["question"], system=self.system)
        return make.Lesson(prompt, [*self.tokenizer.encode(text), self.eos], {})

    def batches(self, step: int) -> list[make.Batch]:
        lessons = [self.lesson(name, step) for name, num in LESSONS.items() for _ in range(num)]
        return make.batches_by_length(lessons, num_batches=4)


def report(model: gwen.Model, tokenizer: Any) -> dict[str, float]:
    """Right answers to held-out problems and the share of answers that show working, sampled, by data set."""
    task, figures = tasks.make(Config.of(task=TASK, task_config=str(SIZES))), dict[str, float]()
    _, details = evaluate.evaluate(model, tokenizer, task, evaluate.EvalParams(max_tokens=64, limit=256))
    for name in LESSONS:
        its = [detail for detail in details if detail["category"] == name]
        figures[name] = sum(detail["values"][0] for detail in its) / len(its)
        figures[f"{name}/greedy"] = sum(detail["greedy_value"] for detail in its) / len(its)
        figures[f"{name}/working"] = sum(not d["completions"][0].startswith("<answer>") for d in its) / len(its)
    return figures


if __name__ == "__main__":
    make.in_one_stage("rg", str(__doc__), make_tokenizer, lambda known: Lessons(known).batches, 1400, report)
