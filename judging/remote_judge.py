"""Remote judge: scores the same rubric with a model known only by its name on a server (judging/server.py)."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from config import JudgeSettings
from judging import rubrics
from judging.rubrics import Evaluation, Grader, Question, Rubric
from judging.server import TEMPLATE, Endpoint, Flags
from machine import alive

FLAGS = Flags("--judge-url", "--judge-model", "JUDGE_API_KEY", "--judge-think")
REPLY_TOKENS = 256  # most of a reply without thoughts: room for a judge that explains first; one that does not stops
TOP_LOGPROBS = (
    10  # requested; the most that servers of this protocol all allow; five digits in two spellings
)


class RemoteJudge(Grader):
    """A judge on the server at `--judge-url`; see the judge's settings. key: see `Endpoint`."""

    is_paid = True

    def __init__(
        self,
        settings: JudgeSettings,
        rubric: Rubric,
        key: str | None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        super().__init__(rubric)
        self.mode, self.think = settings.mode, settings.think
        self.most_tokens = REPLY_TOKENS + settings.think if settings.mode == "decode" else 1
        num_tokens = self.most_tokens if settings.mode == "decode" else 0
        self.server = Endpoint(
            FLAGS, settings.url, settings.model, key, num_tokens, may_adapt=True, sleep=sleep
        )

    def identity(self) -> str:
        return rubrics.digest_of(
            self.server.url, self.server.model, self.mode, self.think, self.rubric
        )

    def evaluate(self, questions: list[Question]) -> Generator[tuple[int, Evaluation], None, None]:
        criteria = self.rubric.criteria
        asked = [
            rubrics.judge_messages(self.rubric, q.prompt, q.completion, criteria[q.criterion])
            for q in questions
        ]
        settings: dict[str, Any] = {"max_tokens": self.most_tokens}
        if self.mode == "logits":
            settings |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        settings |= {"temperature": 0, TEMPLATE: {"enable_thinking": self.think > 0}}
        arriving = contextlib.closing(
            self.server.chat([{"messages": messages} | settings for messages in asked])
        )
        with (
            arriving as replies,
            alive.Bar(total=len(asked), desc="judging", unit="evaluation") as progress,
        ):
            for place, reply in replies:
                progress.update()
                evaluation = rubrics.evaluation_from_reply(
                    reply.text, was_cut=reply.finish_reason == "length"
                )
                if self.mode == "logits":
                    if (
                        not reply.first and reply.text
                    ):  # without text it ended at once, or was filtered
                        fix = "set --judge-mode decode"
                        raise ValueError(
                            f"--judge-url {self.server.url} gives no log-probabilities; {fix}"
                        )
                    evaluation = rubrics.evaluation_from_first_tokens(reply.first)
                thoughts = (
                    f"(thoughts, for which --judge-think makes room: {reply.thought})"
                    * bool(reply.thought)
                )
                yield place, evaluation._replace(reply=reply.text or reply.problem or thoughts)
