"""
Questions to a judge, and the evaluations that are read from its replies or their first tokens.

The rules that find a score in a reply's text are in judging/replies.py.
"""

import math
from typing import Any, NamedTuple

import numpy as np

MIN_MASS = 0.5  # a score is unreadable if the digits 1 to 5 have less probability mass than this
REPLY_TOKENS = 16  # the maximum number of tokens in a decoded reply, not counting thoughts
_SPACE_MARKS = "\u0120\u2581"  # the characters that vocabularies use for a leading space


class CriterionQuestion(NamedTuple):
    """A question to a judge: how good is this completion by this one criterion?"""

    prompt: str
    completion: str
    criterion: int  # the criterion's index in the rubric


class CriterionEvaluation(NamedTuple):
    """A judge's evaluation of one completion by one criterion."""

    score: float  # 1 to 5; nan if the reply is unreadable
    mass: float  # the probability mass on the scores 1 to 5; for a decoded reply, 1 or 0
    reply: str  # the reply's text, or the likeliest first token


def score_of_token_or_zero(token: str) -> int:
    """
    The score from 1 to 5 that a token spells, or 0 if it spells no score.

    A space, or a vocabulary's mark for a space, may precede the digit.
    """
    text = token.strip().lstrip(_SPACE_MARKS)
    return int(text) if text in {*"12345"} else 0


def token_ids_by_score(tokenizer: Any) -> list[list[int]]:
    """
    For each score from 1 to 5, the ids of the tokens that spell this score, in ascending order.

    Raises ValueError if one of the digits 1 to 5 has no token of its own.
    """
    ids_by_score: list[list[int]] = [[] for _ in range(6)]
    for token, token_id in tokenizer.get_vocab().items():
        ids_by_score[score_of_token_or_zero(token)].append(token_id)
    missing = [str(score) for score in range(1, 6) if not ids_by_score[score]]
    if missing:
        raise ValueError(
            f"the judge's tokenizer has no single token for {', '.join(missing)}, "
            "so the first token of a reply cannot be a score; set --judge-mode decode"
        )
    return [sorted(ids) for ids in ids_by_score[1:]]


def evaluation_from_first_logprobs(first_logprobs: dict[str, float]) -> CriterionEvaluation:
    """
    The evaluation with the expected score and the probability mass on the scores 1 to 5.

    The score is nan if the mass is below MIN_MASS, or if a server sent invalid log-probabilities.

    first_logprobs: the log-probabilities of the likeliest first tokens, by the token's text.
    """
    by_score = np.zeros(6)
    for token, logprob in first_logprobs.items():
        by_score[score_of_token_or_zero(token)] += math.exp(min(logprob, 1.0))
    # `not ... <` also refuses nan; servers round, so the sum may slightly exceed 1
    if not by_score.sum() < 1.05:
        return CriterionEvaluation(math.nan, 0.0, "")
    mass = float(by_score[1:].sum())
    if mass < MIN_MASS:
        return CriterionEvaluation(math.nan, mass, "")
    expected_score = by_score[1:] @ np.arange(1, 6) / mass
    return CriterionEvaluation(float(expected_score), mass, "")


def evaluation_from_reply(reply_text: str, was_cut: bool = False) -> CriterionEvaluation:
    """
    The evaluation in a decoded reply, with a mass of 1.

    If the reply is unreadable, the score is nan and the mass is 0.

    was_cut: whether the reply ended at its token limit.
    """
    from judging import replies  # imported here because only mode `decode` needs it

    score = replies.read_score(reply_text, was_cut)
    if score is None:
        return CriterionEvaluation(math.nan, 0.0, reply_text)
    return CriterionEvaluation(float(score), 1.0, reply_text)
