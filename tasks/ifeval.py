"""
Following instructions: endless prompts with a topic and instructions, verified as in IFEval.

`ifeval:NAME,NAME` selects kinds of instructions of IFEval (arXiv:2311.07911). Three in four prompts
have one instruction, and the others have two. The kinds and all words are in `data/ifeval.yaml`.
Topics, keywords and wordings of the held-out side occur in no training prompt. The package
if-verifiable, an extra, verifies completions. It searches them with regular expressions, and
completions may be hostile, so its workers are sealed.

There are two differences from the benchmark. Keywords are whole words here, while the benchmark
accepts "honesty" for "honest". Sentences are counted by the splitter that is part of IFEval, not by
punkt. This file leaves out whatever needs the data of nltk, which no package index has. Therefore
no prompt has the instruction `change_case:capital_word_frequency`.
"""

import functools
import importlib.util
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prompts.examples import Example, prompt_key, suggest_nearest
from rewards import form
from rewards.rewards import Reward
from sandbox.workers import Pool
from tasks import rg
from tasks.task import DATA, Task
from text.documents import load_yaml

INSTALL = "if-verifiable is not installed; begin the command with: uv run --extra ifeval"
VERIFIERS = 2  # the most processes, with 90 MB each
LIMIT = 5.0  # the most seconds for one completion
HELD_OUT = 256
PAIRS = 0.25  # the fraction of prompts with two instructions
# kinds that a model of 135 million parameters can learn
USUAL = ("words", "opening", "keyword", "sentences", "no_comma")
# the ending of a plural topic -> the ending of its singular
PLURALS = {"s": "", "oes": "o", "xes": "x", "ies": "y", "ves": "f"}

# instructions, prompt and completion; an instruction is the name of a verifier and its arguments
Question = tuple[list[tuple[str, dict[str, Any]]], str, str]


# ---- words and kinds


@functools.cache
def load_words() -> dict[str, Any]:
    """The content of `data/ifeval.yaml`."""
    path = DATA / "ifeval.yaml"
    return dict(load_yaml(path, str(path)))


def draw_argument(argument: Any, rng: random.Random, side: str) -> Any:
    """
    Draws an argument of an instruction; the comment at the top of `data/ifeval.yaml` says how.

    side: "train" or "held_out".
    """
    match argument:
        case list():
            return [draw_argument(item, rng, side) for item in argument]
        case {"from": low, "to": high}:
            return rng.randint(low, high)
        case {"one of": choices}:
            if isinstance(choices, str):
                choices = load_words()[choices][side]
            return rng.choice(choices)
        case {"two of": choices}:
            return rng.sample(choices, 2)
    return argument


def topic_words(topic: str) -> set[str]:
    """The words that name a topic, as "wolf" and "wolves", or "sea" and "seas"."""
    word = topic.removeprefix("the ")
    singulars = [
        word.removesuffix(ending) + singular
        for ending, singular in PLURALS.items()
        if word.endswith(ending)
    ]
    return {word, *singulars} if singulars else {word, word + "s"}


def parse_kinds(task: str) -> tuple[str, ...]:
    """
    The kinds of instructions that a task such as `ifeval` or `ifeval:words,title` has.

    Raises ValueError that names a kind if it is unknown or repeated.
    """
    _, colon, names = task.partition(":")
    kinds = tuple(name.strip() for name in names.split(",")) if colon else USUAL
    all_kinds = load_words()["kinds"]
    for name in kinds:
        if name not in all_kinds or kinds.count(name) > 1:
            hint = suggest_nearest(name, all_kinds)
            raise ValueError(
                f"--task {task}: {name!r} is unknown or comes twice{hint}; "
                f"the kinds are {', '.join(all_kinds)}"
            )
    return kinds


# ---- in the process of the run


def make_task(name: str) -> Task:
    """The task `ifeval` or `ifeval:NAME,NAME`."""
    problems = Problems(parse_kinds(name))
    rewards: dict[str, Reward] = {
        "followed": problems.fraction_followed,
        "on_topic": problems.score_topic,
    }
    weights = {"followed": 1.0, "on_topic": 0.5}
    return Task(
        name, rewards, weights, problems.verify, held_out=problems.held_out, problems=problems
    )


class Problems:
    """Prompts with some kinds of instructions. Raises ValueError if if-verifiable is missing."""

    def __init__(self, kinds: Iterable[str]):
        if importlib.util.find_spec("if_verifiable") is None:
            raise ValueError(f"--task ifeval: {INSTALL}")
        self.mix = tuple(kinds)
        num = min(VERIFIERS, os.cpu_count() or 1)
        self.verifiers = Pool(f"{__name__}:make_verifier", (), num=num, limit=LIMIT, sealed=True)
        examples = {}
        for place in range(2 * HELD_OUT):
            example = self._make_example(place, f"held out {place}", "held_out")
            examples[prompt_key(example)] = example
        self.held_out = list(examples.values())[:HELD_OUT]

    def make(self, places: Sequence[int], seed: int) -> list[Example]:
        """The training examples at these places of a seed's order."""
        return [self._make_example(place, f"{seed} {place}", "train") for place in places]

    def _make_example(self, place: int, seed: str, side: str) -> Example:
        """An example of one side. The kinds of instructions take turns by place."""
        rng = random.Random(seed)
        words = load_words()
        instructions = []
        wordings = []
        kinds = self._choose_kinds(place, rng)
        for name in kinds:
            kind = words["kinds"][name]
            arguments = {
                key: draw_argument(value, rng, side)
                for key, value in kind.get("arguments", {}).items()
            }
            wording = rng.choice(kind[side])
            wordings.append(wording.format(**arguments))
            instructions.append([kind["verifier"], arguments])
        opening = rng.choice(words["asks"][side])
        topic = rng.choice(words["topics"][side])
        return {
            "prompt": " ".join([opening.format(topic), *wordings]),
            "category": kinds[0] if len(kinds) == 1 else "two",
            "instructions": instructions,
            "topic": topic,
        }

    def _choose_kinds(self, place: int, rng: random.Random) -> list[str]:
        """The kind whose turn it is, sometimes with a second kind that can be combined with it."""
        first = self.mix[place % len(self.mix)]
        apart = [set(pair) for pair in load_words()["apart"]]
        others = [kind for kind in self.mix if kind != first and {kind, first} not in apart]
        if others and rng.random() < PAIRS:
            return [first, rng.choice(others)]
        return [first]

    def fraction_followed(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        instructions: Sequence[Any],
        **_: Any,
    ) -> list[float]:
        """The fraction of instructions that each completion follows, by the strict verifiers."""
        questions = [list(row) for row in zip(instructions, prompts, completions, strict=True)]
        return [rg.score_value(answer) for answer in self.verifiers.answer_all(questions)]

    def score_topic(
        self, completions: Sequence[str], topic: Sequence[str], **_: Any
    ) -> list[float]:
        """1 if a completion names the topic of its prompt, else 0."""
        scores = []
        for text, row_topic in zip(completions, topic, strict=True):
            shared_words = set(form.words_of(text)) & topic_words(row_topic)
            scores.append(float(bool(shared_words)))
        return scores

    def verify(self, **columns: Any) -> list[float]:
        """1 if a completion follows all of its instructions, else 0."""
        return [float(fraction >= 1) for fraction in self.fraction_followed(**columns)]


# ---- in a worker


def make_verifier() -> Callable[[Question], float]:
    """Makes a sealed worker's function, which returns the fraction of followed instructions."""
    spec = importlib.util.find_spec("if_verifiable")
    assert spec is not None and spec.submodule_search_locations is not None
    # stands in for the package, because its __init__ imports code that downloads 120 MB of prompts
    bare = types.ModuleType("if_verifiable")
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules["if_verifiable"] = bare
    import langdetect
    from if_verifiable.common import evaluate_instructions
    from if_verifiable.ifeval import instructions_registry, instructions_util

    def count_sentences(text: str) -> int:
        return len(instructions_util.split_into_sentences(text))

    instructions_util.count_sentences = count_sentences
    langdetect.DetectorFactory.seed = 0  # otherwise its results are random
    langdetect.detect("It reads its profiles once.")
    registry = instructions_registry.INSTRUCTION_DICT

    def verify(question: Question) -> float:
        instructions, prompt, text = question
        names = [name for name, _ in instructions]
        arguments = [match_whole_words(instruction[1]) for instruction in instructions]
        return evaluate_instructions(text, names, arguments, prompt, registry)[1].partial_strict

    return verify


def match_whole_words(arguments: dict[str, Any]) -> dict[str, Any]:
    """
    An instruction's arguments, with patterns for whole words in place of keywords.

    Without the patterns the verifiers would find the word "honest" in "honesty", but not in
    "_honest_".
    """
    patterns = {
        "keywords": [rf"\b_*{word}_*\b" for word in arguments.get("keywords", [])],
        "keyword": rf"\b_*{arguments.get('keyword')}_*\b",
        "forbidden_words": [f"_*{word}_*" for word in arguments.get("forbidden_words", [])],
    }
    return arguments | {name: pattern for name, pattern in patterns.items() if name in arguments}
