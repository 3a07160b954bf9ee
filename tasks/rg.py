"""
The tasks `rg:NAME`, with endless problems from data sets of the optional package reasoning-gym.

A problem is determined by its data set, its level and its number. Held-out problems have numbers
below `FIRST`, and training problems have numbers from `FIRST` on. The seed of a run chooses a range
of these numbers, which differs from the ranges of other seeds. A run never trains on held-out
prompts, and repeats prompts only when none are new.

Worker processes make the problems. Four of the generators depend on the hashes of strings, which
differ from one Python process to the next, but are the same in all workers. Other workers score the
answers by the rules of the data sets. The scoring workers are sealed (sandbox/seal.py), because an
answer may be hostile text. Their time is limited, because some scorers never finish on such text.
The scoring workers make no problems, so that no answer can influence a problem. Where a scorer
would run an answer as Python code, `eval` is replaced by a function in `rewards/formulas.py`. This
file does not cover which problems are drawn in a step (tasks/draws.py).
"""

# ruff: noqa: RUF001  (the sign for a logical "or" looks like a v)

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

from prompts.examples import (
    Example,
    did_you_mean,
    format_error,
    hash_prompt_without_system,
    shorten_value,
)
from rewards.formulas import (
    formula_to_sympy,
    parse_json_with_single_quotes,
    patch_and_preload_sympy,
)
from rewards.rewards import Reward
from sandbox.workers import WorkerAnswer, WorkerPool
from tasks.task import Task
from text.commands import advice_to_install_extra
from text.documents import load_yaml

SYSTEM = (
    "Think step by step about the problem, then give the answer in this form:\n"
    "<answer>answer here</answer>\n"
    "Write nothing but the final answer inside the tags. Where the problem shows an example, "
    "follow its format."
)
FIRST = 2**20  # this many numbers are reserved for held-out problems, and for each seed
SEEDS = 2**12 - 1  # the number of seeds with different problems, since numbers must be below 2^32

# the largest numbers of worker processes, which use 100 MB each
MAKERS = 2
SCORERS = 4
# The number of problems per data set object, which is the default of reasoning-gym. The problems of
# four data sets depend on it.
SIZE = 500
LIMIT = 5.0  # the limit on processor time for scoring an answer, in seconds
MAKING = 60.0  # the limit on processor time for making a problem, in seconds
GOLDEN = 0.6180339887498949  # multiples of this number modulo 1 are spread evenly

LONGEST = (
    100_000  # the largest number of characters in an answer; right answers have a few thousand
)

# The data sets whose scorers run text as Python code, each with the function that replaces `eval`.
# `tests/test_seal.py` searches the source code for these scorers. The scorers of bitwise_arithmetic
# and number_sorting run only text from the problem, never text from the answer.
READERS: dict[str, Callable[..., Any]] = {
    "binary_matrix": parse_json_with_single_quotes,
    "n_queens": parse_json_with_single_quotes,
    "number_sorting": parse_json_with_single_quotes,
    "spiral_matrix": parse_json_with_single_quotes,
    "string_insertion": parse_json_with_single_quotes,
    "bitwise_arithmetic": formula_to_sympy,
    "countdown": formula_to_sympy,
    "intermediate_integration": formula_to_sympy,
    "polynomial_multiplication": formula_to_sympy,
    "puzzle24": formula_to_sympy,
    "simple_integration": formula_to_sympy,
}


# Additional checks, because some scorers in reasoning-gym 0.1.25 return 1 for wrong answers.


def _is_without_nan(answer: str, entry: dict[str, Any]) -> bool:
    """Whether an answer is free of nan, which the scorers compare as equal to every number."""
    return "nan" not in answer.lower()


def _is_close_probability(answer: str, entry: dict[str, Any]) -> bool:
    """
    Whether an answer is close to the right probability.

    The scorer of reasoning-gym compares only as many digits as the answer has, and therefore
    accepts "0" for 0.3125.
    """
    return abs(float(answer) - float(entry["answer"])) <= 1e-4


def _is_same_word(answer: str, entry: dict[str, Any]) -> bool:
    """
    Whether an answer is the right word, apart from upper and lower case.

    The scorer of reasoning-gym accepts every answer that is not empty, because it converts both
    texts to bool before it compares them.
    """
    return answer.lower() == str(entry["answer"]).lower()


def _has_known_variables(answer: str, entry: dict[str, Any]) -> bool:
    """
    Whether an answer contains only variables of the problem.

    The scorer also accepts invented variables, such as `p`. If the premises of a problem contradict
    each other, they imply every statement, so even a statement about an invented variable would
    count as right.
    """
    words = set(re.split(r"[()¬∧∨→↔\s]+", answer))
    return words <= {"", *entry["metadata"]["variables"]}


def _uses_given_numbers(answer: str, entry: dict[str, Any]) -> bool:
    """
    Whether an answer uses exactly the numbers in the problem.

    A problem asks for a formula that combines four given numbers to 24. The scorer of reasoning-gym
    also accepts other numbers.
    """
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


class DataSetMix(NamedTuple):
    """A mix of data sets for a task, with their weights and settings."""

    weights: dict[str, float]
    # the settings of each data set, named as in reasoning-gym; one of them may be `level`
    settings: dict[str, dict[str, Any]]
    num_held_out: int
    system: str
    unused: tuple[str, ...] = ()  # configured data sets that the task does not use


def parse_mix(task_name: str, config_path: str | None) -> DataSetMix:
    """
    Parses a task such as `rg:countdown=2,leg_counting` and the file that --task-config names.

    If the file has settings for data sets that the task does not name, the names of these data sets
    become `unused`. A worker checks later that these data sets exist, because only workers import
    reasoning-gym.

    Raises ValueError for mistakes; the message names the wrong part of the task or the wrong key.
    """
    weights = _parse_weights(task_name)
    flag = f"--task-config {config_path}"
    content = load_yaml(config_path, flag) if config_path else {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{flag} contains {shorten_value(content)} instead of settings; "
            "write lines like `countdown:`"
        )
    num_held_out = content.pop("held_out", 256)
    system = content.pop("system", SYSTEM)
    if type(num_held_out) is not int or not 0 < num_held_out <= SIZE * 100:
        raise ValueError(
            f"{flag}: held_out is {shorten_value(num_held_out)}; "
            f"it must be a number of problems from 1 to {SIZE * 100}"
        )
    if not isinstance(system, str):
        raise ValueError(f"{flag}: system is {shorten_value(system)}; it must be text")
    settings = {name: content.pop(name, None) or {} for name in weights}
    for name, values in settings.items():
        if not isinstance(values, dict) or {"seed", "size"} & values.keys():
            raise ValueError(
                f"{flag}: {name} is {shorten_value(values)}; "
                "write settings other than seed and size under this name"
            )
    return DataSetMix(weights, settings, num_held_out, system, unused=tuple(map(str, content)))


def _parse_weights(task_name: str) -> dict[str, float]:
    """The weight of each data set that a task such as `rg:countdown=2,leg_counting` names."""
    weights: dict[str, float] = {}
    for part in task_name.removeprefix("rg:").split(","):
        name, equals, text = part.partition("=")
        name = name.strip()
        try:
            weight = float(text) if equals else 1.0
        except ValueError:
            weight = 0.0
        if not name or name in weights or not 0 < weight < 1e6:
            raise ValueError(
                f"--task {task_name}: {part!r} is not NAME or NAME=WEIGHT with a positive weight, "
                "or repeats a name; write the task as in rg:countdown=2,lcm"
            )
        weights[name] = weight
    return weights


# ---- functions of the main process


def make_task(name: str, config_path: str | None) -> Task:
    """
    The task for a name such as `rg:countdown=2,leg_counting`.

    config_path: the file that --task-config names, if any.
    """
    problems = GymProblems(parse_mix(name, config_path))
    rewards: dict[str, Reward] = {"correct": problems.score, "format": score_format}
    # the format alone earns much less than the right answer
    weights = {"correct": 1.0, "format": 0.1}
    return Task(
        name, rewards, weights, problems.verify, held_out=problems.held_out, problems=problems
    )


class GymProblems:
    """
    Endless problems from a mix of data sets, and the rewards for completions.

    Raises ValueError if reasoning-gym or a data set is missing, or if a setting is wrong.
    """

    def __init__(self, mix: DataSetMix):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ValueError(
                f"--task rg:{','.join(mix.weights)} needs the package reasoning-gym, which is not "
                f"installed; {advice_to_install_extra('tasks')}"
            )
        self.mix = mix
        self.makers = WorkerPool(
            f"{__name__}:make_problem_maker", (mix.settings, mix.unused), num=MAKERS, limit=MAKING
        )
        num = min(SCORERS, os.cpu_count() or 1)
        self.scorers = WorkerPool(
            f"{__name__}:make_answer_scorer", (mix.settings,), num=num, limit=LIMIT, sealed=True
        )
        # Every run of the mix has the same held-out problems. If problems repeat, there are fewer
        # held-out problems than `num_held_out`, because no other numbers are tried.
        examples = self._make_numbered_examples(range(mix.num_held_out), 0)
        self.held_out = list(
            {hash_prompt_without_system(example): example for example in examples}.values()
        )

    def make_examples(self, indices: Sequence[int], seed: int) -> list[Example]:
        """The training examples at the given indices in the order of the seed."""
        return self._make_numbered_examples(indices, FIRST * (1 + seed % SEEDS))

    def _make_numbered_examples(self, indices: Sequence[int], first_number: int) -> list[Example]:
        """An example for each index. The number of its problem is `first_number` plus the index."""
        questions = [(self._choose_data_set(index), first_number + index) for index in indices]
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

    def _choose_data_set(self, index: int) -> str:
        """The data set for an index. Data sets occur in proportion to their weights."""
        names = list(self.mix.weights)
        ends = list(itertools.accumulate(self.mix.weights.values()))
        return names[bisect.bisect(ends, index * GOLDEN % 1.0 * ends[-1])]

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
        anything other than a number from 0 to 1. The score is also 0 if a wrong answer contains
        the right answer as a part. For such answers, reasoning-gym itself compares the lengths of
        the texts: if "12" is right, it scores "-12" at two thirds.
        """
        texts = [extract_answer(completion) for completion in completions]
        rows = [row for row, text in enumerate(texts) if 0 < len(text) <= LONGEST]
        questions = [(category[row], entry[row], texts[row]) for row in rows]
        scores = [0.0] * len(completions)
        for row, result in zip(rows, self.scorers.answer_all(questions), strict=True):
            score = score_or_zero(result)
            contains_answer = bool(answer[row]) and str(answer[row]) in texts[row]
            scores[row] = 0.0 if score < 1 and contains_answer else score
        return scores

    def verify(self, **columns: Any) -> list[float]:
        """1 for each completion with the full score, else 0."""
        return [float(score >= 1) for score in self.score(**columns)]


def score_or_zero(answer: WorkerAnswer) -> float:
    """The score in the answer of a worker; 0 unless the answer is a number from 0 to 1."""
    value = answer.value
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else 0.0


def extract_answer(text: str) -> str:
    """The content of the last <answer>...</answer> in a text; "" if there is none."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else ""


def score_format(completions: Sequence[str], **_: Any) -> list[float]:
    """
    1 for each completion that ends with its only <answer>...</answer>, if it is not empty; else 0.
    """
    return [float(_ends_with_only_answer(text)) for text in completions]


def _ends_with_only_answer(text: str) -> bool:
    parts = re.split("(</?answer>)", text.rstrip())
    if parts[1::2] != ["<answer>", "</answer>"]:
        return False
    return parts[2].strip() != "" and parts[4] == ""


# ---- functions of a worker


def make_problem_maker(
    settings_by_data_set: dict[str, dict[str, Any]], unused_data_sets: Sequence[str] = ()
) -> Callable[[tuple[str, int]], tuple[str, Any, str]]:
    """
    Makes a worker's function, which returns the prompt, the answer and the entry of a problem.

    The question to the worker is the name of a data set and the number of a problem. The entry is
    the dictionary with which reasoning-gym describes a problem; see `pack_entry` for its format.

    Raises ValueError for a wrong name or setting.
    """
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})
    for name in settings_by_data_set:
        if name not in names:
            raise ValueError(
                f"--task rg:{name}: reasoning-gym has no data set of this name"
                f"{did_you_mean(name, names)}"
            )
    for name in unused_data_sets:
        if name not in names:
            hint = did_you_mean(name, [*names, "held_out", "system"])
            raise ValueError(
                f"--task-config: {shorten_value(name)} is neither a data set nor a setting{hint}"
            )

    @functools.lru_cache(maxsize=16)
    def get_data_set(name: str, seed: int) -> Any:
        return make_data_set(name, seed, settings_by_data_set[name])

    for name in settings_by_data_set:
        get_data_set(name, 0)

    def make_problem(name_and_number: tuple[str, int]) -> tuple[str, Any, str]:
        name, number = name_and_number
        _seed_global_generators(number)
        offset = number % SIZE
        entry = get_data_set(name, number - offset)[offset]
        return entry["question"], entry["answer"], pack_entry(entry)

    return make_problem


def make_answer_scorer(
    settings_by_data_set: dict[str, dict[str, Any]],
) -> Callable[[tuple[str, str, str]], float]:
    """
    Makes a sealed worker's function, which returns the score of an answer.

    The question to the worker is the name of a data set, a packed entry and the answer.
    """
    if any(READERS.get(name) is formula_to_sympy for name in settings_by_data_set):
        patch_and_preload_sympy()
    from reasoning_gym.factory import DATASETS

    data_sets = {
        name: make_data_set(name, 0, settings) for name, settings in settings_by_data_set.items()
    }
    for name in READERS.keys() & data_sets.keys():
        module = sys.modules[DATASETS[name][0].__module__]
        vars(module).update(eval=READERS[name], parse_expr=READERS[name])

    def score(name_entry_and_answer: tuple[str, str, str]) -> float:
        name, packed_entry, answer = name_entry_and_answer
        entry = unpack_entry(packed_entry)
        if name in RULES and not RULES[name](answer, entry):
            return 0.0
        return float(data_sets[name].score_answer(answer, entry))

    return score


def pack_entry(entry: dict[str, Any]) -> str:
    """
    An entry of a data set as JSON.

    Tuples are marked, so that `unpack_entry` can restore them. Two scorers compare tuples.
    """
    return json.dumps(_mark_tuples(entry))


def _mark_tuples(value: Any) -> Any:
    """The value with each tuple, at any depth, replaced by a dictionary that marks it."""
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
    """The entry that `pack_entry` packed. Keys that were numbers have become strings."""
    return json.loads(text, object_hook=_restore_tuple)


def _seed_global_generators(number: int) -> None:
    """Seeds the global random generators of Python and NumPy, which some data sets use."""
    import numpy as np

    random.seed(number)
    np.random.seed(number)


def make_data_set(name: str, seed: int, settings: dict[str, Any]) -> Any:
    """
    A data set object of reasoning-gym with `SIZE` problems.

    If the settings include `level`, the curriculum that reasoning-gym has for this data set chooses
    the settings that define the level, and overrides the same settings given here.

    Raises ValueError for wrong settings.
    """
    from reasoning_gym.factory import CURRICULA, DATASETS

    kind, config = DATASETS[name]
    _seed_global_generators(seed)
    values = settings | {"seed": seed, "size": SIZE}
    try:
        if "level" not in values:
            return kind(config=config(**values))
        level = values.pop("level")
        curriculum = CURRICULA[name]()
        attributes = curriculum.attributes.values()
        num_levels = max(len(attribute.levels) for attribute in attributes)
        # if the level is too high, reasoning-gym would silently use the highest level
        if type(level) is not int or not 0 <= level < num_levels:
            raise ValueError(f"level must be from 0 to {num_levels - 1}")
        curriculum.set_global_level(level)
        return kind(config=curriculum.generate_configuration(values))
    except (TypeError, AssertionError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"--task-config: {name} does not accept {shorten_value(settings)} "
            f"({format_error(error)})"
        ) from error
