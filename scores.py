"""
Scores: how they are read from what a judge says, remembered, and handed to a trainer.

`Grader.score` is what a trainer sees: each different question is asked once, in which way is left to its children, and
unreadable answers are told of. What is left out: what a judge is asked, and how its scores become a reward.

Axes: N completions, J criteria, M rows of a batch, V vocabulary.
"""

import hashlib
import json
import math
import re
import reprlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from tqdm import tqdm

import rubrics

REPLY_TOKENS = 16  # of a decoded reply, thoughts not counted
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


# ---- reading


def score_token_ids(tokenizer: Any) -> list[list[int]]:
    """
    For each score 1 to 5 the ids of the single tokens that say it, with and without a leading space.

    Raises ValueError when a digit is no token of its own, since then no first token tells the scores apart.
    """
    found = []
    for score in "12345":
        spelled = [tokenizer.encode(form, add_special_tokens=False) for form in (score, f" {score}")]
        ids = {ids[0] for ids in spelled if len(ids) == 1}
        # tokenizers that put a space before every text never show the bare digit, and models may say it all the same
        looked_up = (tokenizer.convert_tokens_to_ids(mark + score) for mark in ("", "\u0120", "\u2581"))
        ids |= {i for i in looked_up if i is not None and i != tokenizer.unk_token_id}
        found.append(sorted(i for i in ids if tokenizer.decode([i]).strip() == score))
    if missing := [str(score) for score, ids in enumerate(found, 1) if not ids]:
        raise ValueError(
            f"the judge's tokenizer has no token of its own for {', '.join(missing)}, so its first token is no score; "
            "set --judge-mode decode"
        )
    return found


def from_logprobs(logprobs: mx.array, ids: list[list[int]], min_mass: float) -> tuple[list[float], list[float]]:
    """
    Expectations over the score tokens `ids`, and their mass, of rows of log-probabilities (M, V).

    A row whose mass is below `min_mass` has the score nan.
    """
    by_score = mx.stack([mx.exp(logprobs[:, mx.array(one)]).sum(-1) for one in ids], axis=-1)  # (M, 5)
    mass = by_score.sum(-1)
    expected = (by_score * mx.arange(1, 6)).sum(-1) / mx.maximum(mass, 1e-30)
    shares = np.array(mass)
    return np.where(shares.astype(float) >= min_mass, np.array(expected), math.nan).tolist(), shares.tolist()


def from_first_tokens(first: dict[str, float], min_mass: float) -> tuple[float, float]:
    """The same of the likeliest first tokens alone, from their texts to their log-probabilities."""
    by_score = np.zeros(6)
    for token, logprob in first.items():
        by_score[digit_of(token) or 0] += math.exp(logprob)
    mass = float(by_score[1:].sum())
    return float(by_score[1:] @ np.arange(1, 6) / mass) if mass >= min_mass else math.nan, mass


def digit_of(token: str) -> int | None:
    """The score that a token says, "5", " 5", or with a vocabulary's mark for the space before it; else None."""
    text = token.strip().lstrip("\u0120\u2581")
    return int(text) if text in {"1", "2", "3", "4", "5"} else None


_SCORE = re.compile(r"(?<![\w.,/-])[1-5](?![\w/]|[.,]\d)")
_NOT_A_SCORE = re.compile(  # of "4 of 5" and "**4** (of 5)" what follows the 4; the 5 in "a score of 5" is one
    r"(?:\s*/\s*|[\s*(]+out\s+of\s+|(?<=\d)[\s*(]+of\s+)5(?!\w|\.\d)|\b1\s*(?:-|\u2013|to)\s*5\b", re.IGNORECASE
)


def read_score(reply: str) -> float:
    """
    The last standalone digit 1 to 5 of what a judge said after its thoughts; nan where there is none.

    "4/5", "4 out of 5", "4 of 5" and "4 on a scale from 1 to 5" say 4; "10", "3.5" and "-1" say nothing.
    """
    _, closed, after = reply.rpartition("</think>")
    if not closed and "<think>" in reply:
        return float("nan")
    found = _SCORE.findall(_NOT_A_SCORE.sub("", after))
    return float(found[-1]) if found else float("nan")


def from_reply(text: str) -> Evaluation:
    """What a decoded reply says; its mass is whether it can be read."""
    score = read_score(text)
    return Evaluation(score, float(not math.isnan(score)), text)


# ---- what judges of every kind share


class ScoreCache:
    """
    Scores by a digest of judge, rubric, prompt and completion; of more than `limit` the oldest are dropped.

    The order of insertion alone decides what is dropped, so a cache that is filled from its own record goes on as if
    it had never stopped.
    """

    def __init__(self, limit: int = 2**18):
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

    def state(self) -> dict[str, int]:
        """What memory has forced upon this judge; small JSON values."""
        return {}

    def restore(self, state: dict[str, int]) -> None:
        """Takes up such a state, which may be that of a judge of another kind."""

    def identity(self) -> str:
        """A digest of everything that a score depends on besides the prompt and the completion."""
        raise NotImplementedError

    def ask(self, questions: list[Question], tell: Tell) -> None:
        """Tells what the judge says to each question, all of them different, in any order."""
        raise NotImplementedError

    def questions(self, pairs: Iterable[tuple[str, str]]) -> list[Question]:
        """Every criterion of every pair, row by row."""
        return [Question(*pair, column) for pair in pairs for column in range(len(self.rubric.criteria))]

    def score(self, prompts: Sequence[str], completions: Sequence[str]) -> Judgement:
        """Judges N completions by J criteria."""
        begin = time.perf_counter()
        pairs = list(zip(prompts, completions, strict=True))
        # Equal completions are judged once: padded differently their scores would differ by a rounding, and a group of
        # equal completions must have equal rewards. A quarter to two thirds of a demo run's rows are such.
        questions = self.questions(dict.fromkeys(pairs))
        whose = self.identity()
        keys = [digest(whose, *question) for question in questions]
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


def digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
