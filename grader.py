"""
What judges of every kind share: equal answers are judged once, scores are remembered, unreadable ones are told of.

How a score is made is left to `Grader.evaluate` of its children.

Axes: N completions, J criteria.
"""

import hashlib
import json
import math
import reprlib
import sys
import time
from collections.abc import Sequence
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


class Evaluations(NamedTuple):
    """What a judge said about n pairs of prompt and completion."""

    scores: np.ndarray  # (n, J) float64, nan where unreadable
    mass: np.ndarray  # (n, J) probability on valid scores
    said: np.ndarray  # (n, J) of str: the likeliest first token, or the reply
    num_tokens: int


def no_evaluations(num_pairs: int, num_criteria: int) -> Evaluations:
    """Room for what a judge will say."""
    shape = (num_pairs, num_criteria)
    return Evaluations(np.full(shape, math.nan), np.zeros(shape), np.full(shape, "", object), 0)


class ScoreCache:
    """
    Scores by a digest of judge, rubric, prompt and completion; of more than `limit` the oldest are dropped.

    The order of insertion alone decides what is dropped, so a cache that is filled from its own record goes on as if
    it had never stopped.
    """

    def __init__(self, limit: int = 2**16):
        self.limit = limit
        self.held: dict[str, list[float]] = {}
        self._fresh: list[str] = []

    def put(self, key: str, scores: list[float]) -> None:
        if key not in self.held:
            self._fresh.append(key)
        self.held[key] = scores
        while len(self.held) > self.limit:
            del self.held[next(iter(self.held))]

    def take_fresh(self) -> list[dict[str, Any]]:
        """Records of what came since the last call, for a file."""
        fresh, self._fresh = self._fresh, []
        return [{"key": key, "scores": self.held[key]} for key in fresh if key in self.held]

    def fill(self, records: list[dict[str, Any]]) -> None:
        """
        Begins anew with what such a file holds.

        Raises ValueError when a record is of another kind.
        """
        self.held = {}
        for record in records[-self.limit :]:
            key, scores = (record.get("key"), record.get("scores")) if isinstance(record, dict) else (None, None)
            if not isinstance(key, str) or not isinstance(scores, list) or not all(type(s) is float for s in scores):
                raise ValueError(f"a judge's score is recorded as {reprlib.repr(record)}; remove that line")
            self.put(key, scores)
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

    def __init__(self, rubric: str | Path | dict[str, Any] | rubrics.Rubric):
        self.rubric = rubrics.load_rubric(rubric)
        self.cache = ScoreCache()
        self.num_seen = self.num_unread = self.num_warned = 0

    def identity(self) -> str:
        """A digest of everything that a score depends on besides the prompt and the completion."""
        raise NotImplementedError

    def evaluate(self, pairs: list[tuple[str, str]]) -> Evaluations:
        """What the judge says about n pairs, all of them different; no score comes from the cache or goes there."""
        raise NotImplementedError

    def score(self, prompts: Sequence[str], completions: Sequence[str]) -> Judgement:
        """Judges N completions by J criteria."""
        begin = time.perf_counter()
        pairs = list(zip(prompts, completions, strict=True))
        # Equal completions are judged once: padded differently their scores would differ by a rounding, and a group of
        # equal completions must have equal rewards. A quarter to two thirds of a demo run's rows are such.
        distinct = list(dict.fromkeys(pairs))
        whose = self.identity()
        keys = [digest(whose, prompt, completion) for prompt, completion in distinct]
        known = [self.cache.held.get(key) for key in keys]
        unknown = [index for index, scores in enumerate(known) if scores is None]
        num_criteria = len(self.rubric.criteria)
        found = np.array([[math.nan] * num_criteria if scores is None else scores for scores in known])
        found = found.reshape(len(distinct), num_criteria)
        new = self.evaluate([distinct[index] for index in unknown]) if unknown else None
        if new is not None:
            found[unknown] = new.scores
            for index in unknown:
                if not np.isnan(found[index]).any():  # what could not be read may be read the next time
                    self.cache.put(keys[index], found[index].tolist())
            self._warn([distinct[index] for index in unknown], new)
        place = {pair: index for index, pair in enumerate(distinct)}
        scores = found[[place[pair] for pair in pairs]].reshape(len(pairs), num_criteria)
        stats = Stats(
            time.perf_counter() - begin,
            len(unknown) * num_criteria,
            math.nan if new is None else float(new.mass.mean()),
            0 if new is None else new.num_tokens,
            (len(distinct) - len(unknown)) * num_criteria,
        )
        return Judgement(rubrics.rubric_reward(scores, self.rubric), scores, int(np.isnan(scores).sum()), stats)

    def _warn(self, pairs: list[tuple[str, str]], new: Evaluations) -> None:
        """Says with an example that a fifth of all evaluations was unreadable, and again when twice as many are."""
        unread = np.argwhere(np.isnan(new.scores)).tolist()
        self.num_seen += new.scores.size
        self.num_unread += len(unread)
        if not unread or self.num_unread <= LOUD * self.num_seen or self.num_unread < 2 * self.num_warned:
            return
        self.num_warned = self.num_unread
        row, column = unread[0]
        prompt, completion = pairs[row]
        tqdm.write(
            f"WARNING: {self.num_unread} of {self.num_seen} evaluations of the judge gave no readable score "
            f"({self.num_unread / self.num_seen:.0%}); rewards come from the rest. For example criterion "
            f"{self.rubric.criteria[column].name!r} of the answer {completion[:80]!r} to {prompt[:80]!r}: it said "
            f"{new.said[row, column][:80]!r}, with {new.mass[row, column]:.3f} of its probability on 1 to 5. "
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
