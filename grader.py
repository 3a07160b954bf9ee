"""
What judges of every kind share: equal answers are judged once, scores are remembered, unreadable ones are told of.

How a score is made is left to `Grader.ask` of its children.

Axes: N completions, J criteria.
"""

import hashlib
import json
import math
import reprlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

import rubrics

LOUD = 0.2  # share of evaluations without a readable score that is worth a warning


class Stats(NamedTuple):
    """What judging cost: seconds, criterion evaluations, the mean mass on valid scores, tokens, and what it did not."""

    seconds: float
    num_evaluations: int
    mass: float  # nan without evaluations; of decoded and remote replies the share that could be read
    num_tokens: int = 0  # positions that went through the model before its first answer token, padding included
    num_cached: int = 0  # evaluations that were known from before


class Judgement(NamedTuple):
    """Rewards (N,) and scores (N, J) in 1..5, float64 numpy; nan where nothing was readable."""

    rewards: np.ndarray
    scores: np.ndarray
    unparsed: int  # evaluations without a readable score
    stats: Stats


class Question(NamedTuple):
    """One evaluation: an answer to be scored by one criterion, which is named by its place in the rubric."""

    prompt: str
    completion: str
    criterion: int


class Evaluation(NamedTuple):
    """What a judge said to one question."""

    score: float  # 1..5, nan where unreadable
    mass: float  # probability on valid scores
    said: str  # the likeliest first token, or the reply


Tell = Callable[[int, Evaluation], None]  # takes what was said to the question at a place, as soon as it is known


class Evaluations(NamedTuple):
    """What a judge said about n pairs of prompt and completion, (n, J)."""

    scores: np.ndarray
    mass: np.ndarray
    said: np.ndarray
    num_tokens: int


class ScoreCache:
    """
    Scores by a digest of judge, rubric, prompt and completion; of more than `limit` the oldest are dropped.

    The order of insertion alone decides what is dropped, so a cache that is filled from its own record goes on as if
    it had never stopped.
    """

    def __init__(self, limit: int = 2**16):
        self.limit = limit
        self.held: dict[str, float] = {}
        self._fresh: list[str] = []

    def put(self, key: str, score: float) -> None:
        if key not in self.held:
            self._fresh.append(key)
        self.held[key] = score
        while len(self.held) > self.limit:
            del self.held[next(iter(self.held))]

    def take_fresh(self) -> list[dict[str, Any]]:
        """Records of what came since the last call, for a file."""
        fresh, self._fresh = self._fresh, []
        return [{"key": key, "score": self.held[key]} for key in fresh if key in self.held]

    def fill(self, records: list[dict[str, Any]]) -> None:
        """
        Begins anew with what such a file holds.

        Raises ValueError when a record is of another kind.
        """
        self.held = {}
        for record in records[-self.limit :]:
            key, score = (record.get("key"), record.get("score")) if isinstance(record, dict) else (None, None)
            if not isinstance(key, str) or type(score) is not float:
                raise ValueError(f"a judge's score is recorded as {reprlib.repr(record)}; remove that line")
            self.put(key, score)
        self._fresh = []

    def load(self, path: str | Path) -> None:
        """Begins anew with a file of such records, one a line, if there is one. ValueError names a file of others."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []
            self.fill([json.loads(line) for line in lines])
        except ValueError as error:
            raise ValueError(f"--judge-cache {path} holds no scores: {error}") from error


class Grader:
    """What judges of both kinds share: equal pairs judged once, the cache, and the warning of unreadable scores."""

    is_paid = False  # whether its scores cost money: these are written when they arrive, and no resumed run drops them

    def __init__(self, rubric: str | Path | dict[str, Any] | rubrics.Rubric):
        self.rubric = rubrics.load_rubric(rubric)
        self.cache = ScoreCache()
        self.on_score: Callable[[], None] = lambda: None  # called whenever the cache has a new score
        self.num_tokens = 0  # of the newest call: positions that went through a model of ours
        self.num_seen = self.num_unread = self.num_warned = 0

    def identity(self) -> str:
        """A digest of everything that a score depends on besides the prompt and the completion."""
        raise NotImplementedError

    def ask(self, questions: list[Question], tell: Tell) -> None:
        """Tells what the judge says to each question, all of them different, in any order."""
        raise NotImplementedError

    def questions(self, pairs: Iterable[tuple[str, str]]) -> list[Question]:
        """Every criterion of every pair, row by row."""
        return [Question(*pair, column) for pair in pairs for column in range(len(self.rubric.criteria))]

    def evaluate(self, pairs: list[tuple[str, str]]) -> Evaluations:
        """What the judge says about n different pairs; no score comes from the cache or goes there."""
        found: dict[int, Evaluation] = {}
        self.ask(self.questions(pairs), found.__setitem__)
        columns = zip(*(found[place] for place in sorted(found)), strict=True)
        scores, mass, said = (np.array(column).reshape(len(pairs), -1) for column in columns)
        return Evaluations(scores, mass, said.astype(object), self.num_tokens)

    def score(self, prompts: Sequence[str], completions: Sequence[str]) -> Judgement:
        """Judges N completions by J criteria."""
        begin = time.perf_counter()
        pairs = list(zip(prompts, completions, strict=True))
        # Equal completions are judged once: padded differently their scores would differ by a rounding, and a group of
        # equal completions must have equal rewards. A quarter to two thirds of a demo run's rows are such.
        questions = self.questions(dict.fromkeys(pairs))
        whose = self.identity()
        keys = [digest(whose, *map(str, question)) for question in questions]
        scores = {question: self.cache.held.get(key) for question, key in zip(questions, keys, strict=True)}
        asked = [place for place, question in enumerate(questions) if scores[question] is None]
        new: dict[Question, Evaluation] = {}

        def tell(number: int, evaluation: Evaluation) -> None:
            place = asked[number]
            new[questions[place]], scores[questions[place]] = evaluation, evaluation.score
            if not math.isnan(evaluation.score):  # what could not be read may be read the next time
                self.cache.put(keys[place], evaluation.score)
                self.on_score()

        self.num_tokens = 0
        if asked:
            self.ask([questions[place] for place in asked], tell)
            self._warn(new)
        found = np.array([scores[question] for question in self.questions(pairs)], float)
        found = found.reshape(len(pairs), len(self.rubric.criteria))
        mass = float(np.mean([evaluation.mass for evaluation in new.values()])) if new else math.nan
        seconds, num_cached = time.perf_counter() - begin, len(questions) - len(new)
        stats = Stats(seconds, len(new), mass, self.num_tokens, num_cached)
        return Judgement(rubrics.rubric_reward(found, self.rubric), found, int(np.isnan(found).sum()), stats)

    def _warn(self, new: dict[Question, Evaluation]) -> None:
        """Says with an example that a fifth of all evaluations was unreadable, and again when twice as many are."""
        unread = [question for question, evaluation in new.items() if math.isnan(evaluation.score)]
        self.num_seen += len(new)
        self.num_unread += len(unread)
        if not unread or self.num_unread <= LOUD * self.num_seen or self.num_unread < 2 * self.num_warned:
            return
        self.num_warned = self.num_unread
        prompt, completion, column = unread[0]
        tqdm.write(
            f"WARNING: {self.num_unread} of {self.num_seen} evaluations of the judge gave no readable score "
            f"({self.num_unread / self.num_seen:.0%}); rewards come from the rest. For example criterion "
            f"{self.rubric.criteria[column].name!r} of the answer {completion[:80]!r} to {prompt[:80]!r}: it said "
            f"{new[unread[0]].said[:80]!r}, with {new[unread[0]].mass:.3f} of its probability on 1 to 5. "
            "Try another --judge-model; or, if answers fit its context, --judge-mode decode with --judge-think 512",
            file=sys.stderr,
        )


def digest(*texts: str) -> str:
    """A digest of texts and of where each ends."""
    made = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()
