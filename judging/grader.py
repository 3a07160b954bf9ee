"""
`Grader`, the base class of all judges, and its cache of scores.

This file uses no model. The local judge (judge.py) and the judge on a server
(judging/remote_judge.py) are subclasses of `Grader`. The trainer calls `Grader.score`, which asks
each distinct question once and caches the scores.

Axes: N completions, J criteria.
"""

import contextlib
import hashlib
import itertools
import math
import reprlib
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from judging.evaluations import CriterionEvaluation, CriterionQuestion
from judging.rubrics import Source, load_rubric, weighted_sum_of_centered_scores

# a larger fraction of unreadable evaluations than this triggers a warning
UNREADABLE_WARNING_FRACTION = 0.2
# if none of a judge's first 24 evaluations is readable, the run ends with an error
NUM_TRIAL_EVALUATIONS = 24


class Judgement(NamedTuple):
    """
    The rewards and scores of N completions, and the cost of judging them.

    Unreadable scores are nan.
    """

    rewards: np.ndarray  # (N,)
    scores: np.ndarray  # (N, J), from 1 to 5
    seconds: float
    num_evaluations: int  # how many times the judge scored one completion by one criterion

    # the mean probability mass on the scores 1 to 5, or the readable fraction of decoded replies;
    # nan if there were no evaluations
    mass: float
    num_cached: int  # how many distinct scores came from the cache

    @property
    def num_unreadable(self) -> int:
        return int(np.isnan(self.scores).sum())


class ScoreCache:
    """
    Readable scores in order of arrival. A digest of judge, rubric and question is the key of each.

    The cache also counts the scores that `take_unsaved_records` has already returned.
    """

    def __init__(self) -> None:
        self.scores = dict[str, float]()
        self.num_taken = 0

    def take_unsaved_records(self) -> list[dict[str, Any]]:
        """Returns records of the scores that arrived since the last call, to be saved to a file."""
        new_items = itertools.islice(self.scores.items(), self.num_taken, None)
        self.num_taken = len(self.scores)
        return [{"key": key, "score": score} for key, score in new_items]

    def replace_scores(self, records: list[dict[str, Any]]) -> None:
        """
        Replaces all scores with the scores in records that `take_unsaved_records` returned.

        Raises ValueError if a record is malformed.
        """
        self.scores.clear()
        for record in records:
            key = record.get("key") if isinstance(record, dict) else None
            score = record.get("score") if isinstance(record, dict) else None
            if not isinstance(key, str) or type(score) is not float or not 1 <= score <= 5:
                raise ValueError(
                    f"a saved judge score is malformed: {reprlib.repr(record)}; remove that line "
                    "from judge_scores.jsonl"
                )
            self.scores[key] = score
        self.num_taken = len(self.scores)


class UnreadableCounter:
    """Counts the evaluations of a run, and says whether too many of them are unreadable."""

    def __init__(self) -> None:
        self.num_evaluations = 0
        self.num_unreadable = 0
        self.has_warned = False

    def count_evaluations(self, evaluations: Iterable[CriterionEvaluation]) -> None:
        for evaluation in evaluations:
            self.num_evaluations += 1
            self.num_unreadable += math.isnan(evaluation.score)

    @property
    def has_too_many_unreadable(self) -> bool:
        return self.num_unreadable > UNREADABLE_WARNING_FRACTION * self.num_evaluations


class Grader:
    """
    The base class of the local judge and of the judge on a server.

    A grader asks each distinct question once, caches scores, and warns of unreadable scores. A
    subclass implements `scoring_digest` and `score_questions`.
    """

    # Whether scores cost money. If they do, each score is saved on arrival, so that a resumed run
    # does not ask for it again.
    is_paid = False
    mode: str  # "logits" or "decode"

    def __init__(self, rubric: Source):
        self.rubric = load_rubric(rubric)
        self.cache = ScoreCache()
        self.unreadable = UnreadableCounter()
        self.on_score: Callable[[], None] = lambda: None  # called after each new score
        self.warn: Callable[[str], None] = print_warning

    def scoring_digest(self) -> str:
        """A digest of everything on which a score depends except the question."""
        raise NotImplementedError

    def score_questions(
        self, questions: list[CriterionQuestion]
    ) -> Generator[tuple[int, CriterionEvaluation], None, None]:
        """
        Yields each question's index and evaluation as soon as it arrives, in any order.

        The questions must all be distinct.
        """
        raise NotImplementedError

    def take_unsaved_scores(self) -> list[dict[str, Any]]:
        """Returns records of the scores that arrived since the last call, to be saved to a file."""
        return self.cache.take_unsaved_records()

    def replace_cached_scores(self, records: list[dict[str, Any]]) -> None:
        """
        Replaces the cached scores with the scores in records that `take_unsaved_scores` returned.

        Raises ValueError if a record is malformed.
        """
        self.cache.replace_scores(records)

    def make_questions(
        self, prompt_completion_pairs: Iterable[tuple[str, str]]
    ) -> list[CriterionQuestion]:
        """One question per criterion for each prompt and its completion, in the pairs' order."""
        columns = range(len(self.rubric.criteria))
        return [
            CriterionQuestion(prompt, completion, column)
            for prompt, completion in prompt_completion_pairs
            for column in columns
        ]

    def score(self, prompts: Sequence[str], completions: Sequence[str]) -> Judgement:
        """
        Judges N completions by J criteria.

        All ranks must call this method, because the questions are divided among the ranks.
        """
        begin = time.perf_counter()
        pairs = list(zip(prompts, completions, strict=True))
        # Equal completions are judged once, because equal completions of a group must get equal
        # rewards. If each were judged, different padding would change their scores by rounding
        # errors. In a demo run, a quarter to two thirds of the rows repeat another row.
        distinct_questions = self.make_questions(dict.fromkeys(pairs))
        scoring_digest = self.scoring_digest()
        keys = {question: digest_of(scoring_digest, *question) for question in distinct_questions}
        scores = self._look_up_cached_scores(keys)
        missing = [question for question, score in scores.items() if score is None]

        evaluations = self._evaluate_and_cache_across_ranks(missing, keys)
        for question, evaluation in evaluations.items():
            scores[question] = evaluation.score
        if evaluations:
            self._raise_if_none_readable(evaluations)
            self._count_and_warn_of_unreadable(evaluations)

        table = np.array([scores[question] for question in self.make_questions(pairs)], float)
        table = table.reshape(len(pairs), len(self.rubric.criteria))
        mass = math.nan
        if evaluations:
            mass = float(np.mean([evaluation.mass for evaluation in evaluations.values()]))
        return Judgement(
            rewards=weighted_sum_of_centered_scores(table, self.rubric),
            scores=table,
            seconds=time.perf_counter() - begin,
            num_evaluations=len(evaluations),
            mass=mass,
            num_cached=len(keys) - len(evaluations),
        )

    def _look_up_cached_scores(
        self, keys: dict[CriterionQuestion, str]
    ) -> dict[CriterionQuestion, float | None]:
        """The score of each question in rank 0's cache; None if a question has no cached score."""
        # imported here because machine.world imports MLX, which the rest of this file does not need
        from machine import world

        cached = world.compute_on_rank0(
            lambda: [self.cache.scores.get(key) for key in keys.values()]
        )
        return dict(zip(keys, cached, strict=True))

    def _evaluate_and_cache_across_ranks(
        self, questions: list[CriterionQuestion], keys: dict[CriterionQuestion, str]
    ) -> dict[CriterionQuestion, CriterionEvaluation]:
        """
        Evaluates questions on all ranks, and caches each readable score as soon as it arrives.

        All questions about a prompt are evaluated on the same rank. In the returned dictionary, the
        evaluations from this rank come first, in order of arrival.
        """
        from machine import world

        if not questions:
            return {}
        evaluations: dict[CriterionQuestion, CriterionEvaluation] = {}
        local_indices = world.own_item_indices_by_key(question.prompt for question in questions)
        if local_indices:
            local_questions = [questions[index] for index in local_indices]
            with contextlib.closing(self.score_questions(local_questions)) as arriving:
                for number, evaluation in arriving:
                    question = local_questions[number]
                    evaluations[question] = evaluation
                    self._cache_readable_score(keys[question], evaluation.score)
                    if len(evaluations) == NUM_TRIAL_EVALUATIONS:
                        self._raise_if_none_readable(evaluations)

        local: dict[int, Any] = {index: evaluations[questions[index]] for index in local_indices}
        purpose = f"judge's {len(questions)} questions"
        gathered = world.gather_sorted_by_number(local, purpose)
        for question, fields in zip(questions, gathered, strict=True):
            if question not in evaluations:
                evaluations[question] = CriterionEvaluation(*fields)
                self._cache_readable_score(keys[question], evaluations[question].score)
        return evaluations

    def _cache_readable_score(self, key: str, score: float) -> None:
        """
        Caches a score if it is readable.

        An unreadable score is not cached, so that the judge is asked again.
        """
        if not math.isnan(score):
            self.cache.scores[key] = score
            self.on_score()

    def _raise_if_none_readable(
        self, evaluations: dict[CriterionQuestion, CriterionEvaluation]
    ) -> None:
        """
        Raises ValueError if no evaluation so far has been readable, so that the cache has no score.

        evaluations: the judge's evaluations so far.
        """
        if not self.cache.scores:
            raise ValueError(
                f"the judge gave no readable score in its first {len(evaluations)} evaluations. "
                f"{self._describe_first_unreadable(evaluations)}"
            )

    def _count_and_warn_of_unreadable(
        self, evaluations: dict[CriterionQuestion, CriterionEvaluation]
    ) -> None:
        """
        Counts evaluations, and warns once, with an example, if too many of them are unreadable.
        """
        count = self.unreadable
        count.count_evaluations(evaluations.values())
        has_example = any(math.isnan(evaluation.score) for evaluation in evaluations.values())
        if has_example and count.has_too_many_unreadable and not count.has_warned:
            count.has_warned = True
            self.warn(
                f"{count.num_unreadable} of {count.num_evaluations} of the judge's replies gave "
                "no readable score; rewards are computed from the other replies. "
                f"{self._describe_first_unreadable(evaluations)}"
            )

    def _describe_first_unreadable(
        self, evaluations: dict[CriterionQuestion, CriterionEvaluation]
    ) -> str:
        """Describes the first unreadable evaluation, and advises the user on what to change."""
        question = next(
            question for question, evaluation in evaluations.items() if math.isnan(evaluation.score)
        )
        evaluation = evaluations[question]
        criterion = self.rubric.criteria[question.criterion]
        mass = ""
        mode_advice = "a larger --judge-think, if the judge explains its score first"
        if self.mode == "logits":
            mass = f", with a probability of {evaluation.mass:.3f} on the digits 1 to 5"
            mode_advice = "--judge-mode decode, if the answers fit into the judge's context"
        return (
            f"For example, when asked to score the answer {question.completion[:80]!r} to "
            f"{question.prompt[:80]!r} by the criterion {criterion.name!r}, "
            f"the judge replied {evaluation.reply[:160]!r}{mass}. "
            f"Try another --judge-model (docs/judge.md says which models can judge), "
            f"or {mode_advice}"
        )


def print_warning(text: str) -> None:
    tqdm.write(f"WARNING: {text}.", file=sys.stderr)


def digest_of(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
