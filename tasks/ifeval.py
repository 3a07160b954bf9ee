"""
The task `ifeval`, with endless prompts that ask for a text and give instructions for writing it.

Each prompt names the topic of the text. The task name `ifeval:NAME,NAME` selects kinds of
instructions from IFEval (arXiv:2311.07911). Three quarters of the prompts have one instruction, and
the others have two. The kinds of instructions, and the topics, keywords and wordings of prompts,
are in `data/ifeval.yaml`. The topics, keywords and wordings of held-out prompts occur in no
training prompt. Completions are verified by the rules of IFEval, with the optional package
if-verifiable. The package searches completions with regular expressions. A completion may be
written to attack the program that reads it, so the worker processes that use the package are sealed
(sandbox/seal.py).

The task differs from the benchmark IFEval in two ways. First, a keyword must occur as a whole word
in this task, while the benchmark finds "honest" in "honesty". Second, this task counts sentences
with the simple sentence splitter that is part of IFEval, while the benchmark uses the tokenizer
punkt of the library nltk. Punkt needs data files that no package index provides. The instruction
`change_case:capital_word_frequency` also needs such files, so no prompt contains it.
"""

import functools
import importlib.util
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prompts.examples import Example, did_you_mean, hash_prompt_without_system
from rewards import form
from rewards.rewards import Reward
from sandbox.workers import WorkerPool
from tasks import rg
from tasks.task import DATA, Task
from text.commands import advice_to_install_extra
from text.documents import load_yaml

VERIFIERS = 2  # the largest number of worker processes, which use 90 MB each
LIMIT = 5.0  # the limit on processor time for one completion, in seconds
HELD_OUT = 256  # the number of held-out prompts
PAIRS = 0.25  # the fraction of prompts with two instructions

# the kinds of instructions that a model with 135 million parameters can learn
USUAL = ("words", "opening", "keyword", "sentences", "no_comma")
# ending of a plural topic -> ending of its singular
PLURALS = {"s": "", "oes": "o", "xes": "x", "ies": "y", "ves": "f"}

# instructions, prompt and completion; an instruction is the name of a verifier and its arguments
Question = tuple[list[tuple[str, dict[str, Any]]], str, str]


# ---- words and kinds


@functools.cache
def load_instruction_data() -> dict[str, Any]:
    """The content of `data/ifeval.yaml`."""
    path = DATA / "ifeval.yaml"
    return dict(load_yaml(path, str(path)))


def draw_argument(specification: Any, rng: random.Random, side: str) -> Any:
    """
    Draws a value for an argument of an instruction.

    The comment at the top of `data/ifeval.yaml` describes the specifications of arguments.

    side: "train" or "held_out".
    """
    match specification:
        case list():
            return [draw_argument(item, rng, side) for item in specification]
        case {"from": low, "to": high}:
            return rng.randint(low, high)
        case {"one of": choices}:
            if isinstance(choices, str):
                choices = load_instruction_data()[choices][side]
            return rng.choice(choices)
        case {"two of": choices}:
            return rng.sample(choices, 2)
    return specification


def singular_and_plural_of(topic: str) -> set[str]:
    """The singular and the plural of a topic, such as "wolf" and "wolves"."""
    word = topic.removeprefix("the ")
    singulars = [
        word.removesuffix(ending) + singular
        for ending, singular in PLURALS.items()
        if word.endswith(ending)
    ]
    return {word, *singulars} if singulars else {word, word + "s"}


def parse_instruction_kinds(task_name: str) -> tuple[str, ...]:
    """
    The kinds of instructions that a task name such as `ifeval` or `ifeval:words,title` selects.

    Raises ValueError if a kind is unknown or is named twice; the message names the kind.
    """
    _, colon, names = task_name.partition(":")
    kinds = tuple(name.strip() for name in names.split(",")) if colon else USUAL
    all_kinds = load_instruction_data()["kinds"]
    for name in kinds:
        if name not in all_kinds or kinds.count(name) > 1:
            hint = did_you_mean(name, all_kinds)
            raise ValueError(
                f"--task {task_name}: {name!r} is unknown or is named twice{hint}; "
                f"the kinds are {', '.join(all_kinds)}"
            )
    return kinds


# ---- functions of the main process


def make_task(name: str) -> Task:
    """The task with the name `ifeval` or `ifeval:NAME,NAME`."""
    problems = InstructionProblems(parse_instruction_kinds(name))
    rewards: dict[str, Reward] = {
        "followed": problems.fraction_followed,
        "on_topic": problems.score_topic,
    }
    weights = {"followed": 1.0, "on_topic": 0.5}
    return Task(
        name, rewards, weights, problems.verify, held_out=problems.held_out, problems=problems
    )


class InstructionProblems:
    """
    Endless prompts with some kinds of instructions, and the rewards for completions.

    Raises ValueError if the package if-verifiable is missing.
    """

    def __init__(self, kinds: Iterable[str]):
        if importlib.util.find_spec("if_verifiable") is None:
            raise ValueError(
                "--task ifeval needs the package if-verifiable, which is not installed; "
                + advice_to_install_extra("ifeval")
            )
        self.mix = tuple(kinds)
        num = min(VERIFIERS, os.cpu_count() or 1)
        self.verifiers = WorkerPool(
            f"{__name__}:make_instruction_checker", (), num=num, limit=LIMIT, sealed=True
        )
        examples = {}
        for index in range(2 * HELD_OUT):
            example = self._make_example(index, f"held out {index}", "held_out")
            examples[hash_prompt_without_system(example)] = example
        self.held_out = list(examples.values())[:HELD_OUT]

    def make_examples(self, indices: Sequence[int], seed: int) -> list[Example]:
        """The training examples at the given indices in the order of the seed."""
        return [self._make_example(index, f"{seed} {index}", "train") for index in indices]

    def _make_example(self, index: int, seed: str, side: str) -> Example:
        """A training or held-out example; its index decides the kind of its first instruction."""
        rng = random.Random(seed)
        words = load_instruction_data()
        instructions = []
        wordings = []
        kinds = self._choose_kinds(index, rng)
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

    def _choose_kinds(self, index: int, rng: random.Random) -> list[str]:
        """The kind of instruction for an index, sometimes with a second, compatible kind."""
        first = self.mix[index % len(self.mix)]
        incompatible_pairs = [set(pair) for pair in load_instruction_data()["apart"]]
        others = [
            kind for kind in self.mix if kind != first and {kind, first} not in incompatible_pairs
        ]
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
        """The fraction of instructions that each completion follows, by IFEval's strict rules."""
        questions = [list(row) for row in zip(instructions, prompts, completions, strict=True)]
        return [rg.score_or_zero(answer) for answer in self.verifiers.answer_all(questions)]

    def score_topic(
        self, completions: Sequence[str], topic: Sequence[str], **_: Any
    ) -> list[float]:
        """1 for each completion that names the topic of its prompt, else 0."""
        scores = []
        for text, row_topic in zip(completions, topic, strict=True):
            shared_words = set(form.lowercase_words(text)) & singular_and_plural_of(row_topic)
            scores.append(float(bool(shared_words)))
        return scores

    def verify(self, **columns: Any) -> list[float]:
        """1 for each completion that follows all of its instructions, else 0."""
        return [float(fraction >= 1) for fraction in self.fraction_followed(**columns)]


# ---- functions of a worker


def make_instruction_checker() -> Callable[[Question], float]:
    """Makes a worker's function, which returns the fraction of instructions followed."""
    spec = importlib.util.find_spec("if_verifiable")
    assert spec is not None and spec.submodule_search_locations is not None
    # an empty module in place of the package, whose __init__ would download 120 MB of prompts
    bare = types.ModuleType("if_verifiable")
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules["if_verifiable"] = bare
    import langdetect
    from if_verifiable.common import evaluate_instructions
    from if_verifiable.ifeval import instructions_registry, instructions_util

    def count_sentences(text: str) -> int:
        return len(instructions_util.split_into_sentences(text))

    instructions_util.count_sentences = count_sentences
    langdetect.DetectorFactory.seed = 0  # without a seed, the results of langdetect are random
    langdetect.detect("It reads its profiles once.")
    registry = instructions_registry.INSTRUCTION_DICT

    def fraction_followed(question: Question) -> float:
        instructions, prompt, text = question
        names = [name for name, _ in instructions]
        arguments = [
            keywords_to_whole_word_patterns(instruction[1]) for instruction in instructions
        ]
        return evaluate_instructions(text, names, arguments, prompt, registry)[1].partial_strict

    return fraction_followed


def keywords_to_whole_word_patterns(arguments: dict[str, Any]) -> dict[str, Any]:
    """
    The arguments of an instruction, in which patterns replace the keywords.

    A pattern matches its keyword only as a whole word.

    Without the patterns, the verifiers would find the keyword "honest" in "honesty", but not in
    "_honest_".
    """
    patterns = {
        "keywords": [rf"\b_*{word}_*\b" for word in arguments.get("keywords", [])],
        "keyword": rf"\b_*{arguments.get('keyword')}_*\b",
        "forbidden_words": [f"_*{word}_*" for word in arguments.get("forbidden_words", [])],
    }
    return arguments | {name: pattern for name, pattern in patterns.items() if name in arguments}
