"""
Remote judge: scores answers by a rubric with a model on a server, of which it knows only the name.

judging/server.py sends the requests. judging/rubrics.py builds the messages and reads the scores.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from config import JudgeSettings
from judging import rubrics
from judging.rubrics import Evaluation, Grader, Question, Rubric
from judging.server import TEMPLATE_SETTINGS, Endpoint, FlagNames, Reply
from machine import alive

FLAGS = FlagNames("--judge-url", "--judge-model", "JUDGE_API_KEY", "--judge-think")
# The most tokens of a reply without thoughts. They suffice for a judge that explains first; a judge
# that does not explain stops early.
REPLY_TOKENS = 256
# How many of the likeliest first tokens are requested: the most that all servers of this protocol
# allow, and enough for five digits in two spellings.
TOP_LOGPROBS = 10


class RemoteJudge(Grader):
    """A judge on the server at `--judge-url`. key: the server's bearer token, or None."""

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

    def identity(self) -> str:
        server = self.server
        return rubrics.digest_of(server.url, server.model, self.mode, self.think, self.rubric)

    def score_questions(
        self, questions: list[Question]
    ) -> Generator[tuple[int, Evaluation], None, None]:
        bodies = [self._request_body(question) for question in questions]
        replies = contextlib.closing(self.server.chat(bodies))
        bar = alive.Bar(total=len(bodies), desc="judging", unit="evaluation")
        with replies as arriving, bar as progress:
            for place, reply in arriving:
                progress.update()
                yield place, self._read_evaluation(reply)

    def _request_body(self, question: Question) -> dict[str, Any]:
        criterion = self.rubric.criteria[question.criterion]
        messages = rubrics.judge_messages(
            self.rubric, question.prompt, question.completion, criterion
        )
        body: dict[str, Any] = {"messages": messages, "max_tokens": self.max_tokens}
        if self.mode == "logits":
            body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        body["temperature"] = 0
        body[TEMPLATE_SETTINGS] = {"enable_thinking": self.think > 0}
        return body

    def _read_evaluation(self, reply: Reply) -> Evaluation:
        """
        The evaluation in a server's reply. If the reply has no text, its `reply` says why.

        Raises ValueError if the mode is `logits` and the server returns no log-probabilities.
        """
        if self.mode == "logits":
            # a reply without text ended at once, or was filtered
            if not reply.first_logprobs and reply.text:
                raise ValueError(
                    f"--judge-url {self.server.url} gives no log-probabilities; "
                    "set --judge-mode decode"
                )
            evaluation = rubrics.evaluation_from_first_tokens(reply.first_logprobs)
        else:
            was_cut = reply.finish_reason == "length"
            evaluation = rubrics.evaluation_from_reply(reply.text, was_cut)

        shown = reply.text or reply.problem
        if not shown and reply.thought:
            shown = f"(thoughts, for which --judge-think makes room: {reply.thought})"
        return evaluation._replace(reply=shown)
