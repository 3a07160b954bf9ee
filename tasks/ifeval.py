"""
Written instructions: prompts without end, of topics times instructions, and the field's own verifiers.

`ifeval:NAME,NAME` asks for kinds of IFEval's instructions (arXiv:2311.07911), one in three prompts of four, two in the
others; `data/ifeval.yaml` has the kinds and all words. Topics, keywords and wordings of the held-out side occur in no
training prompt. if-verifiable, an extra, verifies; its workers are sealed, since completions are hostile and its
patterns search them.

Keywords are whole words, where the benchmark takes "honesty" for "honest". Sentences are counted by the splitter that
IFEval brings, where it takes punkt: left out is what needs nltk's data, which no package index has, and so
`change_case:capital_word_frequency` is not asked.
"""

import functools
import importlib.util
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flags import load_yaml
from problems import form
from problems.examples import Example, prompt_key, suggest_nearest
from problems.rewards import Reward
from problems.workers import Pool
from tasks import rg
from tasks.task import DATA, Task

INSTALL = "if-verifiable is not installed; begin the command with: uv run --extra ifeval"
VERIFIERS, LIMIT = 2, 5.0  # processes at most, of 90 MB each, and seconds for one completion
HELD_OUT = 256
PAIRS = 0.25  # share of prompts with two instructions
USUAL = (
    "words",
    "opening",
    "keyword",
    "sentences",
    "no_comma",
)  # which a model of 135 million parameters can learn
PLURALS = {
    "s": "",
    "oes": "o",
    "xes": "x",
    "ies": "y",
    "ves": "f",
}  # of topics: their ends, and those of one


@functools.cache
def load_words() -> dict[str, Any]:
    path = DATA / "ifeval.yaml"
    return dict(load_yaml(path, str(path)))


def draw_argument(argument: Any, rng: random.Random, side: str) -> Any:
    """An argument of an instruction for a side, "train" or "held_out"; see the head of `data/ifeval.yaml`."""
    match argument:
        case list():
            return [draw_argument(one, rng, side) for one in argument]
        case {"from": low, "to": high}:
            return rng.randint(low, high)
        case {"one of": known}:
            return rng.choice(load_words()[known][side] if isinstance(known, str) else known)
        case {"two of": known}:
            return rng.sample(known, 2)
    return argument


def topic_words(topic: str) -> set[str]:
    """The words that name a topic: of wolves also wolf, of the sea also seas."""
    word = topic.removeprefix("the ")
    singular = [word.removesuffix(end) + new for end, new in PLURALS.items() if word.endswith(end)]
    return {word, *singular} if singular else {word, word + "s"}


def parse_kinds(task: str) -> tuple[str, ...]:
    """The kinds of `ifeval` or `ifeval:words,title`. Raises ValueError naming one that is unknown or comes twice."""
    _, colon, names = task.partition(":")
    kinds = tuple(name.strip() for name in names.split(",")) if colon else USUAL
    known = load_words()["kinds"]
    for name in kinds:
        if name not in known or kinds.count(name) > 1:
            they = f"the kinds are {', '.join(known)}"
            raise ValueError(
                f"--task {task}: {name!r} is unknown or comes twice{suggest_nearest(name, known)}; {they}"
            )
    return kinds


def make_task(name: str) -> Task:
    problems = Problems(parse_kinds(name))
    rewards: dict[str, Reward] = {
        "followed": problems.fraction_followed,
        "on_topic": problems.on_topic,
    }
    weights = {"followed": 1.0, "on_topic": 0.5}
    return Task(
        name, rewards, weights, problems.followed_all, held_out=problems.held_out, problems=problems
    )


class Problems:
    """Prompts of these kinds. ValueError where if-verifiable is missing."""

    def __init__(self, kinds: Iterable[str]):
        if importlib.util.find_spec("if_verifiable") is None:
            raise ValueError(f"--task ifeval: {INSTALL}")
        self.mix, num = tuple(kinds), min(VERIFIERS, os.cpu_count() or 1)
        self.verifiers = Pool(f"{__name__}:make_verifier", (), num=num, limit=LIMIT, sealed=True)
        made = (
            self._example(place, f"held out {place}", "held_out") for place in range(2 * HELD_OUT)
        )
        self.held_out = list({prompt_key(example): example for example in made}.values())[:HELD_OUT]

    def make(self, places: Sequence[int], seed: int) -> list[Example]:
        return [self._example(place, f"{seed} {place}", "train") for place in places]

    def _example(self, place: int, seed: str, side: str) -> Example:
        """An example of a side; kinds take turns."""
        rng, kinds = random.Random(seed), self.mix
        first, apart = kinds[place % len(kinds)], [set(pair) for pair in load_words()["apart"]]
        others = [kind for kind in kinds if kind != first and {kind, first} not in apart]
        chosen = [first, rng.choice(others)] if others and rng.random() < PAIRS else [first]
        wordings, asked = [], []
        for name in chosen:
            kind = load_words()["kinds"][name]
            arguments = {
                key: draw_argument(value, rng, side)
                for key, value in kind.get("arguments", {}).items()
            }
            wordings.append(rng.choice(kind[side]).format(**arguments))
            asked.append([kind["verifier"], arguments])
        ask, topic = (
            rng.choice(load_words()["asks"][side]),
            rng.choice(load_words()["topics"][side]),
        )
        category = first if len(chosen) == 1 else "two"
        prompt = " ".join([ask.format(topic), *wordings])
        return {"prompt": prompt, "category": category, "instructions": asked, "topic": topic}

    def fraction_followed(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        instructions: Sequence[Any],
        **_: Any,
    ) -> list[float]:
        """The share of its instructions that each completion follows, by the strict verifiers."""
        questions = [list(row) for row in zip(instructions, prompts, completions, strict=True)]
        return [rg.score_value(answer) for answer in self.verifiers.answer_all(questions)]

    def on_topic(self, completions: Sequence[str], topic: Sequence[str], **_: Any) -> list[float]:
        """1 for a completion that names the topic that its prompt asks about, else 0."""
        words = [set(form.words_of(text)) for text in completions]
        return [float(bool(its & topic_words(one))) for its, one in zip(words, topic, strict=True)]

    def followed_all(self, **columns: Any) -> list[float]:
        """1 for a completion that follows all of its instructions, else 0."""
        return [float(share >= 1) for share in self.fraction_followed(**columns)]


# ---- in a worker


def make_verifier() -> Callable[[tuple[list[tuple[str, dict[str, Any]]], str, str]], float]:
    """What a sealed worker does: of instructions, a prompt and a completion the share that is followed."""
    spec = importlib.util.find_spec("if_verifiable")
    assert spec is not None and spec.submodule_search_locations is not None
    bare = types.ModuleType(
        "if_verifiable"
    )  # in place of its __init__, which imports what downloads prompts: 120 MB
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules["if_verifiable"] = bare
    import langdetect
    from if_verifiable.common import evaluate_instructions
    from if_verifiable.ifeval import instructions_registry, instructions_util

    instructions_util.count_sentences = lambda text: len(
        instructions_util.split_into_sentences(text)
    )
    langdetect.DetectorFactory.seed = 0  # else it guesses
    langdetect.detect("It reads its profiles once.")
    registry = instructions_registry.INSTRUCTION_DICT

    def verify(question: tuple[list[tuple[str, dict[str, Any]]], str, str]) -> float:
        instructions, prompt, text = question
        names, arguments = (
            [name for name, _ in instructions],
            [whole_words(given) for _, given in instructions],
        )
        return evaluate_instructions(text, names, arguments, prompt, registry)[1].partial_strict

    return verify


def whole_words(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with words as patterns: to the verifiers "honesty" has the word "honest", and _honest_ has not."""
    patterns = {
        "keywords": [rf"\b_*{word}_*\b" for word in arguments.get("keywords", [])],
        "keyword": rf"\b_*{arguments.get('keyword')}_*\b",
        "forbidden_words": [f"_*{word}_*" for word in arguments.get("forbidden_words", [])],
    }
    return arguments | {name: pattern for name, pattern in patterns.items() if name in arguments}
