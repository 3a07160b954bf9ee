"""Remote judge: scores the same rubric with a model known only by its name on a server (judging/server.py)."""

import contextlib
from collections.abc import Generator
from typing import Any

from config import JudgeSettings
from judging import rubrics
from judging.rubrics import Evaluation, Grader, Question, Rubric
from judging.server import TEMPLATE, Endpoint, Flags
from machine import alive

FLAGS = Flags("--judge-url", "--judge-model", "JUDGE_API_KEY", "--judge-think")
TOP_LOGPROBS = 10  # requested; the most that servers of this protocol all allow; five digits in two spellings


class RemoteJudge(Grader):
    """A judge on the server at `--judge-url`; see the judge's settings. key: see `Endpoint`."""

    is_paid = True

    def __init__(self, settings: JudgeSettings, rubric: Rubric, key: str | None):
        super().__init__(rubric)
        self.mode, self.think = settings.mode, settings.think
        self.server = Endpoint(FLAGS, settings.url, settings.model, key, settings.think)

    def identity(self) -> str:
        return rubrics.digest(self.server.url, self.server.model, self.mode, self.think, self.rubric)

    def evaluations(self, questions: list[Question]) -> Generator[tuple[int, Evaluation], None, None]:
        criteria = self.rubric.criteria
        asked = [rubrics.messages(self.rubric, q.prompt, q.completion, criteria[q.criterion]) for q in questions]
        settings: dict[str, Any] = {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
        if self.mode == "decode":
            settings = {"max_tokens": rubrics.REPLY_TOKENS + self.think}
        settings |= {"temperature": 0, TEMPLATE: {"enable_thinking": self.think > 0}}
        arriving = contextlib.closing(self.server.chat([{"messages": messages} | settings for messages in asked]))
        with arriving as replies, alive.Bar(total=len(asked), desc="judging", unit="evaluation") as progress:
            for place, reply in replies:
                progress.update()
                evaluation = rubrics.from_reply(reply.text)
                if self.mode == "logits":
                    if not reply.first and reply.text:  # without text it ended at once, or was filtered
                        fix = "set --judge-mode decode"
                        raise ValueError(f"--judge-url {self.server.url} gives no log-probabilities; {fix}")
                    evaluation = rubrics.from_first_tokens(reply.first)
                thoughts = f"(thoughts, for which --judge-think makes room: {reply.thought})" * bool(reply.thought)
                yield place, evaluation._replace(reply=reply.text or reply.problem or thoughts)
