"""
Problems without end: the data sets of reasoning-gym, an extra, made when needed and scored by their own rules.

A problem is a function of data set, level and number. Held-out numbers lie below `FIRST`, each seed of a run has as
many of its own above, and a run leaves out every prompt that is held out or that it had before. Problems are made by
workers, since hashes of strings decide what four of the generators draw. Others score: sealed, since some scorers loop
on hostile text, and apart, so that no answer comes near a problem. Where a scorer would run the answer as Python, a
reader of `problems/formulas.py` takes its place.
What is left out: which problem a step gets, which is in `tasks/draws.py`.
"""

# ruff: noqa: RUF001  (logic has an or that looks like a v)

import bisect
import functools
import importlib.util
import itertools
import json
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flags import load_yaml
from problems.examples import Example, format_error, prompt_key, shorten_value, suggest_nearest
from problems.formulas import prepare_sympy, read_formula, read_list
from problems.rewards import Reward
from problems.workers import Answer, Pool
from tasks.task import Task

INSTALL = "reasoning-gym is not installed; begin the command with: uv run --extra tasks"
SYSTEM = (
    "Think step by step about the problem, then give the answer in this form:\n<answer>answer here</answer>\n"
    "Write nothing but the final answer inside the tags. Where the problem shows an example, follow its format."
)
FIRST = 2**20  # numbers of the held-out side, and of each seed of a run
SEEDS = 2**12 - 1  # seeds that have numbers of their own: reasoning-gym's must stay below 2^32
MAKERS, SCORERS = 2, 4  # processes at most, of 100 MB each
SIZE = 500  # problems of one data set object, which is its default; four of them know no more than their size
LIMIT = 5.0  # seconds for one score
MAKING = 60.0  # and for one problem
GOLDEN = 0.6180339887498949  # its multiples, modulo 1, fall evenly into every mix of weights

LONGEST = 100_000  # characters of an answer; the longest right ones have a few thousand

# The scorers that evaluate text as Python, and what reads it instead; `tests/test_seal.py` finds them in the sources.
# Those of bitwise_arithmetic and number_sorting evaluate the problem only.
READERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"),
        read_list,
    ),
    **dict.fromkeys(("bitwise_arithmetic", "countdown", "intermediate_integration"), read_formula),
    **dict.fromkeys(("polynomial_multiplication", "puzzle24", "simple_integration"), read_formula),
}

# what must hold besides, where a scorer of 0.1.25 gives 1 to answers that are wrong
RULES: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    # they compare with nan, from which no number differs
    "complex_arithmetic": lambda answer, entry: "nan" not in answer.lower(),
    "number_sorting": lambda answer, entry: "nan" not in answer.lower(),
    # it compares the digits as far as both go: "0" is taken for 0.3125
    "coin_flip": lambda answer, entry: abs(float(answer) - float(entry["answer"])) <= 1e-4,
    # it compares whether texts are empty
    "game_of_life_halting": lambda answer, entry: answer.lower() == str(entry["answer"]).lower(),
    # it takes any text for a variable, and of premises that contradict each other any statement follows
    "propositional_logic": lambda answer, entry: (
        set(re.split(r"[()¬∧∨→↔\s]+", answer)) <= {"", *entry["metadata"]["variables"]}
    ),
    # it takes any four numbers that make 24
    "puzzle24": lambda answer, entry: (
        sorted(map(int, re.findall(r"\d+", answer))) == sorted(entry["metadata"]["numbers"])
    ),
}


# ---- what a user asks for


class Mix(NamedTuple):
    """The data sets of a task, and how they are made."""

    weights: dict[str, float]
    settings: dict[str, dict[str, Any]]  # of each data set, in reasoning-gym's words; maybe `level`
    num_held_out: int
    system: str
    unused: tuple[str, ...] = ()  # data sets that the configuration knows and the task leaves out


def parse_mix(task: str, config: str | None) -> Mix:
    """
    What `rg:countdown=2,leg_counting` and --task-config say together.

    Raises ValueError naming the part of the task, or the key of the file, that is wrong. Keys of data sets that the
    task leaves out are `unused`; whether they are data sets is known to reasoning-gym, which a worker asks.
    """
    weights: dict[str, float] = {}
    for part in task.removeprefix("rg:").split(","):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(text) if equals else 1.0
        except ValueError:
            weight = 0.0
        if not name or name in weights or not 0 < weight < 1e6:
            way = "NAME or NAME=WEIGHT, each name once; as rg:countdown=2,lcm"
            raise ValueError(f"--task {task}: {part!r} is not {way}")
        weights[name] = weight
    where = f"--task-config {config}"
    asked = load_yaml(config, where) if config else {}
    if not isinstance(asked, dict):
        raise ValueError(
            f"{where} holds {shorten_value(asked)}, no settings; write lines like `countdown:`"
        )
    num, system = asked.pop("held_out", 256), asked.pop("system", SYSTEM)
    if type(num) is not int or not 0 < num <= SIZE * 100:
        raise ValueError(
            f"{where}: held_out is {shorten_value(num)}; it must be a number of problems, as 256"
        )
    if not isinstance(system, str):
        raise ValueError(f"{where}: system is {shorten_value(system)}; it must be a text")
    settings = {name: asked.pop(name, None) or {} for name in weights}
    for name, own in settings.items():
        if not isinstance(own, dict) or {"seed", "size"} & own.keys():
            raise ValueError(
                f"{where}: {name} is {shorten_value(own)}; it needs settings other than seed and size"
            )
    return Mix(weights, settings, num, system, unused=tuple(map(str, asked)))


# ---- in the process of the run


def make_task(name: str, config: str | None) -> Task:
    problems = Problems(parse_mix(name, config))
    rewards: dict[str, Reward] = {"correct": problems.score, "format": answered_once}
    weights = {"correct": 1.0, "format": 0.1}  # the form alone never pays like the answer
    return Task(
        name, rewards, weights, problems.solved, held_out=problems.held_out, problems=problems
    )


class Problems:
    """The problems of a mix. ValueError where reasoning-gym or a data set is missing, or a setting is wrong."""

    def __init__(self, mix: Mix):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ValueError(f"--task rg:{','.join(mix.weights)}: {INSTALL}")
        self.mix = mix
        self.makers = Pool(
            f"{__name__}:make_maker", (mix.settings, mix.unused), num=MAKERS, limit=MAKING
        )
        num = min(SCORERS, os.cpu_count() or 1)
        self.scorers = Pool(
            f"{__name__}:make_scorer", (mix.settings,), num=num, limit=LIMIT, sealed=True
        )
        # the same in every run of the mix; fewer where a data set has few: no number is tried twice
        held_out = self._make(range(mix.num_held_out), 0)
        self.held_out = list({prompt_key(example): example for example in held_out}.values())

    def make(self, places: Sequence[int], seed: int) -> list[Example]:
        return self._make(places, FIRST * (1 + seed % SEEDS))

    def _make(self, places: Sequence[int], first: int) -> list[Example]:
        # whose turn it is: in every stretch of places each data set as often as it weighs
        known, ends = list(self.mix.weights), list(itertools.accumulate(self.mix.weights.values()))
        names = [known[bisect.bisect(ends, place * GOLDEN % 1.0 * ends[-1])] for place in places]
        questions = [(name, first + place) for name, place in zip(names, places, strict=True)]
        examples = []
        for question, answer in zip(questions, self.makers.answer_all(questions), strict=True):
            if answer.error:
                raise ValueError(
                    f"reasoning-gym cannot make the problem {question}: {answer.error}"
                )
            made = dict(zip(("prompt", "answer", "entry"), answer.value, strict=True))
            examples.append(made | {"system": self.mix.system or None, "category": question[0]})
        return examples

    def score(
        self,
        completions: Sequence[str],
        answer: Sequence[Any],
        category: Sequence[str],
        entry: Sequence[str],
        **_: Any,
    ) -> list[float]:
        """
        What each completion's answer earns by the rules of its data set, from 0 to 1.

        The answer stands in the last <answer>...</answer>. A completion without one earns 0, as does one whose scoring
        fails or takes more than `LIMIT` seconds, or whose scorer gives anything but such a number. So does a right
        answer inside a longer one: reasoning-gym gives "-12" and "not 12" 2/3 of the reward of "12", by their lengths.
        """
        stated = [extract_answer(text) for text in completions]
        asked = [row for row, text in enumerate(stated) if 0 < len(text) <= LONGEST]
        answers = self.scorers.answer_all(
            [(category[row], entry[row], stated[row]) for row in asked]
        )
        scores = [0.0] * len(completions)
        for row, score in zip(asked, map(score_value, answers), strict=True):
            scores[row] = (
                0.0 if score < 1 and answer[row] and str(answer[row]) in stated[row] else score
            )
        return scores

    def solved(self, **columns: Any) -> list[float]:
        """1 for an answer that earns all, else 0."""
        return [float(score >= 1) for score in self.score(**columns)]


def score_value(answer: Answer) -> float:
    """The share of 1 that a scorer gave; 0 where it gave anything else."""
    value = answer.value
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else 0.0


def extract_answer(text: str) -> str:
    """What stands in the last <answer>...</answer>, "" without one. It takes time linear in the text."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else ""


def answered_once(completions: Sequence[str], **_: Any) -> list[float]:
    """1 where a completion ends with its only <answer>...</answer>, which is not empty, else 0."""
    found = [re.split("(</?answer>)", text.rstrip()) for text in completions]
    tags = ["<answer>", "</answer>"]
    return [
        float(parts[1::2] == tags and parts[2].strip() != "" and parts[4] == "") for parts in found
    ]


# ---- in a worker


def make_maker(
    settings: dict[str, dict[str, Any]], unused: Sequence[str] = ()
) -> Callable[[tuple[str, int]], tuple[str, Any, str]]:
    """What a worker makes: prompt, answer and entry of a data set's number. ValueError for a wrong name or setting."""
    from reasoning_gym.factory import DATASETS

    known = sorted(set(DATASETS) - {"composite"})
    for name in settings:
        if name not in known:
            raise ValueError(f"--task rg:{name}: no such data set{suggest_nearest(name, known)}")
    for name in unused:
        if name not in known:
            meant = suggest_nearest(name, [*known, "held_out", "system"])
            raise ValueError(
                f"--task-config: {shorten_value(name)} is no data set and no setting{meant}"
            )

    @functools.lru_cache(maxsize=16)
    def data_set(name: str, seed: int) -> Any:
        return make_data_set(name, seed, settings[name])

    for name in settings:
        data_set(name, 0)

    def make(question: tuple[str, int]) -> tuple[str, Any, str]:
        name, number = question
        _seed_globals(number)
        entry = data_set(name, number - number % SIZE)[number % SIZE]
        return entry["question"], entry["answer"], pack_entry(entry)

    return make


def make_scorer(settings: dict[str, dict[str, Any]]) -> Callable[[tuple[str, str, str]], float]:
    """What a sealed worker does: of a data set's name, an entry and an answer what the answer earns."""
    if any(READERS.get(name) is read_formula for name in settings):
        prepare_sympy()
    from reasoning_gym.factory import DATASETS

    data_sets = {name: make_data_set(name, 0, its) for name, its in settings.items()}
    for name in READERS.keys() & settings.keys():
        vars(sys.modules[DATASETS[name][0].__module__]).update(
            eval=READERS[name], parse_expr=READERS[name]
        )

    def score(question: tuple[str, str, str]) -> float:
        name, answer = question[0], question[2]
        entry = unpack_entry(question[1])
        if name in RULES and not RULES[name](answer, entry):
            return 0.0
        return float(data_sets[name].score_answer(answer, entry))

    return score


def pack_entry(entry: dict[str, Any]) -> str:
    """JSON of an entry that keeps its tuples, with which two of the scorers compare."""

    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: marked(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return {"tuple": [marked(part) for part in value]}
        return [marked(part) for part in value] if isinstance(value, list) else value

    return json.dumps(marked(entry))


def unpack_entry(text: str) -> Any:
    """An entry as it was before `packed`, but for numbers as keys, which are texts now."""
    return json.loads(
        text, object_hook=lambda held: tuple(held["tuple"]) if held.keys() == {"tuple"} else held
    )


def _seed_globals(number: int) -> None:  # from which some generators draw too
    import numpy as np

    random.seed(number)
    np.random.seed(number)


def make_data_set(name: str, seed: int, settings: dict[str, Any]) -> Any:
    """A data set of `SIZE` problems; of a level, where the curriculum's settings win. ValueError for wrong settings."""
    from reasoning_gym.factory import CURRICULA, DATASETS

    kind, config = DATASETS[name]
    _seed_globals(seed)
    given = settings | {"seed": seed, "size": SIZE}
    try:
        if "level" not in given:
            return kind(config=config(**given))
        level, curriculum = given.pop("level"), CURRICULA[name]()
        num_levels = max(len(one.levels) for one in curriculum.attributes.values())
        if type(level) is not int or not 0 <= level < num_levels:  # it would take the highest
            raise ValueError(f"it has {num_levels} levels, from 0")
        curriculum.set_global_level(level)
        return kind(config=curriculum.generate_configuration(given))
    except (TypeError, AssertionError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"--task-config: {name} does not take {shorten_value(settings)} ({format_error(error)})"
        ) from error
