"""
Endless problems from the data sets of reasoning-gym, an extra, scored by their own rules.

A problem is determined by its data set, its level and its number. Held-out problems have numbers
below `FIRST`, and each seed of a run has `FIRST` numbers of its own above. A run leaves out prompts
that are held out or that it has drawn before.

Workers make the problems, because hashes of strings decide what four of the generators draw, and
all workers use the same hashes. Other workers score the answers. They are sealed, because some
scorers loop on hostile text, and they make no problems, so that no answer can influence a problem.
If a scorer would run the answer as Python, a reader of `rewards/formulas.py` replaces `eval` in it.
This file does not cover the choice of the problems for a step (tasks/draws.py).
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

from prompts.examples import Example, format_error, prompt_key, shorten_value, suggest_nearest
from rewards.formulas import prepare_sympy, read_formula, read_list
from rewards.rewards import Reward
from sandbox.workers import Answer, Pool
from tasks.task import Task
from text.documents import load_yaml

INSTALL = "reasoning-gym is not installed; begin the command with: uv run --extra tasks"
SYSTEM = (
    "Think step by step about the problem, then give the answer in this form:\n"
    "<answer>answer here</answer>\n"
    "Write nothing but the final answer inside the tags. Where the problem shows an example, "
    "follow its format."
)
FIRST = 2**20  # how many numbers the held-out side has, and each seed of a run
SEEDS = 2**12 - 1  # seeds with numbers of their own; reasoning-gym needs numbers below 2^32
# the most processes, with 100 MB each
MAKERS = 2
SCORERS = 4
# the problems of one data set object, as by default in reasoning-gym; four data sets depend on it
SIZE = 500
LIMIT = 5.0  # the most seconds for one score
MAKING = 60.0  # the most seconds for making one problem
GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly, as choices by weight need

LONGEST = 100_000  # the most characters of an answer; right answers have a few thousand at most

# The data sets whose scorers evaluate text as Python, and the reader that replaces `eval` in each.
# `tests/test_seal.py` finds such scorers in the sources. The scorers of bitwise_arithmetic and
# number_sorting evaluate only the problem.
READERS: dict[str, Callable[..., Any]] = {
    "binary_matrix": read_list,
    "n_queens": read_list,
    "number_sorting": read_list,
    "spiral_matrix": read_list,
    "string_insertion": read_list,
    "bitwise_arithmetic": read_formula,
    "countdown": read_formula,
    "intermediate_integration": read_formula,
    "polynomial_multiplication": read_formula,
    "puzzle24": read_formula,
    "simple_integration": read_formula,
}


# Further conditions for data sets whose scorers in reasoning-gym 0.1.25 give 1 to wrong answers.


def _is_without_nan(answer: str, entry: dict[str, Any]) -> bool:
    """Refuses nan, because the scorers' comparisons find nan equal to every number."""
    return "nan" not in answer.lower()


def _is_close_probability(answer: str, entry: dict[str, Any]) -> bool:
    """Compares all digits. The scorer compares only shared digits: it accepts "0" for 0.3125."""
    return abs(float(answer) - float(entry["answer"])) <= 1e-4


def _is_same_word(answer: str, entry: dict[str, Any]) -> bool:
    """Compares the words. The scorer only compares whether the texts are empty."""
    return answer.lower() == str(entry["answer"]).lower()


def _has_known_variables(answer: str, entry: dict[str, Any]) -> bool:
    """
    Refuses unknown variables, because the scorer accepts any text as a variable.

    Premises that contradict each other imply every statement, about any variable.
    """
    words = set(re.split(r"[()¬∧∨→↔\s]+", answer))
    return words <= {"", *entry["metadata"]["variables"]}


def _uses_given_numbers(answer: str, entry: dict[str, Any]) -> bool:
    """Refuses other numbers, because the scorer accepts any four numbers that make 24."""
    numbers = sorted(map(int, re.findall(r"\d+", answer)))
    return numbers == sorted(entry["metadata"]["numbers"])


RULES: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "complex_arithmetic": _is_without_nan,
    "number_sorting": _is_without_nan,
    "coin_flip": _is_close_probability,
    "game_of_life_halting": _is_same_word,
    "propositional_logic": _has_known_variables,
    "puzzle24": _uses_given_numbers,
}


# ---- the settings of a task


class Mix(NamedTuple):
    """The data sets of a task and their settings."""

    weights: dict[str, float]
    # the settings of each data set, with the names of reasoning-gym; `level` may be among them
    settings: dict[str, dict[str, Any]]
    num_held_out: int
    system: str
    unused: tuple[str, ...] = ()  # data sets in the configuration file that the task does not use


def parse_mix(task: str, config: str | None) -> Mix:
    """
    Parses `rg:countdown=2,leg_counting` and the file of --task-config.

    Other keys of the file become `unused`. A worker checks that they are data sets, because only
    reasoning-gym knows its data sets.
    Raises ValueError that names the wrong part of the task or the wrong key of the file.
    """
    weights = _parse_weights(task)
    flag = f"--task-config {config}"
    content = load_yaml(config, flag) if config else {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{flag} holds {shorten_value(content)}, no settings; write lines like `countdown:`"
        )
    num_held_out = content.pop("held_out", 256)
    system = content.pop("system", SYSTEM)
    if type(num_held_out) is not int or not 0 < num_held_out <= SIZE * 100:
        raise ValueError(
            f"{flag}: held_out is {shorten_value(num_held_out)}; "
            "it must be a number of problems, as 256"
        )
    if not isinstance(system, str):
        raise ValueError(f"{flag}: system is {shorten_value(system)}; it must be a text")
    settings = {name: content.pop(name, None) or {} for name in weights}
    for name, values in settings.items():
        if not isinstance(values, dict) or {"seed", "size"} & values.keys():
            raise ValueError(
                f"{flag}: {name} is {shorten_value(values)}; "
                "it needs settings other than seed and size"
            )
    return Mix(weights, settings, num_held_out, system, unused=tuple(map(str, content)))


def _parse_weights(task: str) -> dict[str, float]:
    """The weight of each data set in a task such as `rg:countdown=2,leg_counting`."""
    weights: dict[str, float] = {}
    for part in task.removeprefix("rg:").split(","):
        name, equals, text = part.partition("=")
        name = name.strip()
        try:
            weight = float(text) if equals else 1.0
        except ValueError:
            weight = 0.0
        if not name or name in weights or not 0 < weight < 1e6:
            raise ValueError(
                f"--task {task}: {part!r} is not NAME or NAME=WEIGHT, each name once; "
                "as rg:countdown=2,lcm"
            )
        weights[name] = weight
    return weights


# ---- in the process of the run


def make_task(name: str, config: str | None) -> Task:
    """The task `rg:NAME=WEIGHT,...`. config: the path of --task-config."""
    problems = Problems(parse_mix(name, config))
    rewards: dict[str, Reward] = {"correct": problems.score, "format": score_format}
    weights = {"correct": 1.0, "format": 0.1}  # the form alone never pays like the answer
    return Task(
        name, rewards, weights, problems.verify, held_out=problems.held_out, problems=problems
    )


class Problems:
    """
    The problems of a mix.

    Raises ValueError if reasoning-gym or a data set is missing, or if a setting is wrong.
    """

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
        # Every run of the mix has the same held-out problems. If problems repeat, there are fewer
        # than `num_held_out`, because no further numbers are tried.
        examples = self._make(range(mix.num_held_out), 0)
        self.held_out = list({prompt_key(example): example for example in examples}.values())

    def make(self, places: Sequence[int], seed: int) -> list[Example]:
        """The training examples at these places of a seed's order."""
        return self._make(places, FIRST * (1 + seed % SEEDS))

    def _make(self, places: Sequence[int], first: int) -> list[Example]:
        """The examples at these places. The number of a problem is `first` plus its place."""
        questions = [(self._choose_data_set(place), first + place) for place in places]
        examples = []
        for question, answer in zip(questions, self.makers.answer_all(questions), strict=True):
            if answer.error:
                raise ValueError(
                    f"reasoning-gym cannot make the problem {question}: {answer.error}"
                )
            prompt, right_answer, entry = answer.value
            example = {
                "prompt": prompt,
                "answer": right_answer,
                "entry": entry,
                "system": self.mix.system or None,
                "category": question[0],
            }
            examples.append(example)
        return examples

    def _choose_data_set(self, place: int) -> str:
        """The data set of a place. In any range, data sets are as frequent as their weights."""
        names = list(self.mix.weights)
        ends = list(itertools.accumulate(self.mix.weights.values()))
        return names[bisect.bisect(ends, place * GOLDEN % 1.0 * ends[-1])]

    def score(
        self,
        completions: Sequence[str],
        answer: Sequence[Any],
        category: Sequence[str],
        entry: Sequence[str],
        **_: Any,
    ) -> list[float]:
        """
        The score of each completion by the rules of its data set, from 0 to 1.

        The answer is the content of the last <answer>...</answer>. The score is 0 if there is no
        answer, if scoring fails or takes more than `LIMIT` seconds, or if the scorer returns
        anything other than a number from 0 to 1. The score is also 0 if the answer contains the
        right answer and other text. reasoning-gym itself compares lengths there: if "12" is
        right, it gives "-12" two thirds of the reward.
        """
        texts = [extract_answer(completion) for completion in completions]
        rows = [row for row, text in enumerate(texts) if 0 < len(text) <= LONGEST]
        questions = [(category[row], entry[row], texts[row]) for row in rows]
        scores = [0.0] * len(completions)
        for row, result in zip(rows, self.scorers.answer_all(questions), strict=True):
            score = score_value(result)
            contains_answer = bool(answer[row]) and str(answer[row]) in texts[row]
            scores[row] = 0.0 if score < 1 and contains_answer else score
        return scores

    def verify(self, **columns: Any) -> list[float]:
        """1 for an answer with the full score, else 0."""
        return [float(score >= 1) for score in self.score(**columns)]


def score_value(answer: Answer) -> float:
    """The score that a scorer returned; 0 if it is not a number from 0 to 1."""
    value = answer.value
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else 0.0


def extract_answer(text: str) -> str:
    """The content of the last <answer>...</answer>, or "". Takes linear time."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else ""


def score_format(completions: Sequence[str], **_: Any) -> list[float]:
    """1 if a completion ends with <answer>...</answer>, not empty and the only one, else 0."""
    return [float(_ends_with_only_answer(text)) for text in completions]


def _ends_with_only_answer(text: str) -> bool:
    parts = re.split("(</?answer>)", text.rstrip())
    if parts[1::2] != ["<answer>", "</answer>"]:
        return False
    return parts[2].strip() != "" and parts[4] == ""


# ---- in a worker


def make_maker(
    settings: dict[str, dict[str, Any]], unused: Sequence[str] = ()
) -> Callable[[tuple[str, int]], tuple[str, Any, str]]:
    """
    Makes a worker's function, which returns a problem's prompt, answer and packed entry.

    The question is the name of a data set and a number. Raises ValueError for a wrong name or
    setting.
    """
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})
    for name in settings:
        if name not in names:
            raise ValueError(f"--task rg:{name}: no such data set{suggest_nearest(name, names)}")
    for name in unused:
        if name not in names:
            hint = suggest_nearest(name, [*names, "held_out", "system"])
            raise ValueError(
                f"--task-config: {shorten_value(name)} is no data set and no setting{hint}"
            )

    @functools.lru_cache(maxsize=16)
    def get_data_set(name: str, seed: int) -> Any:
        return make_data_set(name, seed, settings[name])

    for name in settings:
        get_data_set(name, 0)

    def make(question: tuple[str, int]) -> tuple[str, Any, str]:
        name, number = question
        _seed_globals(number)
        offset = number % SIZE
        entry = get_data_set(name, number - offset)[offset]
        return entry["question"], entry["answer"], pack_entry(entry)

    return make


def make_scorer(settings: dict[str, dict[str, Any]]) -> Callable[[tuple[str, str, str]], float]:
    """
    Makes a sealed worker's function, which returns the score of an answer.

    The question is the name of a data set, a packed entry and the answer.
    """
    if any(READERS.get(name) is read_formula for name in settings):
        prepare_sympy()
    from reasoning_gym.factory import DATASETS

    data_sets = {name: make_data_set(name, 0, values) for name, values in settings.items()}
    for name in READERS.keys() & settings.keys():
        module = sys.modules[DATASETS[name][0].__module__]
        vars(module).update(eval=READERS[name], parse_expr=READERS[name])

    def score(question: tuple[str, str, str]) -> float:
        name, packed_entry, answer = question
        entry = unpack_entry(packed_entry)
        if name in RULES and not RULES[name](answer, entry):
            return 0.0
        return float(data_sets[name].score_answer(answer, entry))

    return score


def pack_entry(entry: dict[str, Any]) -> str:
    """An entry as JSON. It marks tuples, because two of the scorers compare with tuples."""
    return json.dumps(_mark_tuples(entry))


def _mark_tuples(value: Any) -> Any:
    """The value, with {"tuple": [...]} in place of each tuple at any depth."""
    if isinstance(value, dict):
        return {key: _mark_tuples(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [_mark_tuples(item) for item in value]}
    if isinstance(value, list):
        return [_mark_tuples(item) for item in value]
    return value


def _restore_tuple(value: dict[str, Any]) -> Any:
    return tuple(value["tuple"]) if value.keys() == {"tuple"} else value


def unpack_entry(text: str) -> Any:
    """The entry that was packed, except that keys that were numbers are now texts."""
    return json.loads(text, object_hook=_restore_tuple)


def _seed_globals(number: int) -> None:
    """Seeds the global random generators, which some data sets use too."""
    import numpy as np

    random.seed(number)
    np.random.seed(number)


def make_data_set(name: str, seed: int, settings: dict[str, Any]) -> Any:
    """
    A data set of `SIZE` problems.

    If the settings have `level`, the curriculum of reasoning-gym overrides other settings. Raises
    ValueError for wrong settings.
    """
    from reasoning_gym.factory import CURRICULA, DATASETS

    kind, config = DATASETS[name]
    _seed_globals(seed)
    values = settings | {"seed": seed, "size": SIZE}
    try:
        if "level" not in values:
            return kind(config=config(**values))
        level = values.pop("level")
        curriculum = CURRICULA[name]()
        attributes = curriculum.attributes.values()
        num_levels = max(len(attribute.levels) for attribute in attributes)
        if (
            type(level) is not int or not 0 <= level < num_levels
        ):  # reasoning-gym would take the highest level instead
            raise ValueError(f"it has {num_levels} levels, from 0")
        curriculum.set_global_level(level)
        return kind(config=curriculum.generate_configuration(values))
    except (TypeError, AssertionError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"--task-config: {name} does not take {shorten_value(settings)} ({format_error(error)})"
        ) from error
