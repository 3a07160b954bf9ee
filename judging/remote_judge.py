"""
Scores answers by a rubric with a model on a server.

judging/server.py sends the requests, judging/judge_prompts.py builds the messages, and
judging/evaluations.py reads the scores.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from config import JudgeSettings
from judging import judge_prompts
from judging.evaluations import (
    CriterionEvaluation,
    CriterionQuestion,
    evaluation_from_first_logprobs,
    evaluation_from_reply,
)
from judging.grader import Grader, digest_of
from judging.rubrics import Rubric
from judging.server import TEMPLATE_SETTINGS, ChatReplyOrProblem, Endpoint, ServerSettingNames
from machine import alive

FLAGS = ServerSettingNames("--judge-url", "--judge-model", "JUDGE_API_KEY", "--judge-think")
# The maximum number of tokens in a reply, not counting thoughts. This is enough for a judge that
# explains its score first. A judge that does not explain its score stops early.
REPLY_TOKENS = 256
# How many of the likeliest first tokens are requested. All servers of this protocol allow 10,
# which is enough for five digits in two spellings each.
TOP_LOGPROBS = 10


class RemoteJudge(Grader):
    """
    A judge whose model runs on the server at `--judge-url`.

    key: the bearer token for the server, or None.
    """

    is_paid = True

    def __init__(
        self,
        settings: JudgeSettings,
        rubric: Rubric,
        key: str | None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        super().__init__(rubric)
        self.mode = settings.mode
        self.think = settings.think
        self.max_tokens = REPLY_TOKENS + settings.think if settings.mode == "decode" else 1
        self.server = Endpoint(
            FLAGS,
            settings.url,
            settings.model,
            key,
            self.max_tokens if settings.mode == "decode" else 0,
            may_adapt=True,
            sleep=sleep,
        )

    def scoring_digest(self) -> str:
        server = self.server
        return digest_of(server.url, server.model, self.mode, self.think, self.rubric)

    def score_questions(
        self, questions: list[CriterionQuestion]
    ) -> Generator[tuple[int, CriterionEvaluation], None, None]:
        bodies = [self._make_request_body(question) for question in questions]
        replies = contextlib.closing(self.server.send_chat_requests(bodies))
        bar = alive.Bar(total=len(bodies), desc="judging", unit="evaluation")
        with replies as arriving, bar as progress:
            for index, reply in arriving:
                progress.update()
                yield index, self._read_evaluation(reply)

    def _make_request_body(self, question: CriterionQuestion) -> dict[str, Any]:
        criterion = self.rubric.criteria[question.criterion]
        messages = judge_prompts.make_judge_messages(
            self.rubric, question.prompt, question.completion, criterion
        )
        body: dict[str, Any] = {"messages": messages, "max_tokens": self.max_tokens}
        if self.mode == "logits":
            body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        body["temperature"] = 0
        body[TEMPLATE_SETTINGS] = {"enable_thinking": self.think > 0}
        return body

    def _read_evaluation(self, reply: ChatReplyOrProblem) -> CriterionEvaluation:
        """
        The evaluation in a server's reply.

        If the server sent no text, the evaluation's `reply` says why there is no text.

        Raises ValueError if the mode is `logits` and the server returns no log-probabilities.
        """
        if self.mode == "logits":
            # a reply without text ended at once, or was filtered by the server
            if not reply.first_logprobs and reply.text:
                raise ValueError(
                    f"--judge-url {self.server.url} returns no log-probabilities; "
                    "set --judge-mode decode"
                )
            evaluation = evaluation_from_first_logprobs(reply.first_logprobs)
        else:
            was_cut = reply.finish_reason == "length"
            evaluation = evaluation_from_reply(reply.text, was_cut)

        shown = reply.text or reply.problem
        if not shown and reply.thought:
            shown = f"(only a thought; a larger --judge-think allows more tokens: {reply.thought})"
        return evaluation._replace(reply=shown)
