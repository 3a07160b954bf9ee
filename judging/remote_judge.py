"""
Remote judge: scores the same rubric with an OpenAI-compatible server, many requests at once.

Retries requests while the server is busy or unreachable, and passes on each reply as it arrives.

Axes: N completions, J criteria.
"""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from config import JudgeSettings
from flags import read_json, redacted
from judging import rubrics
from judging.rubrics import Evaluation, Grader, Question
from machine import alive

BUSY = {408, 409, 425, 429, *range(500, 600)}  # status codes worth a retry; proxies have invented many
TOO_LONG = re.compile(r"context[ _](length|size|window)", re.IGNORECASE)  # in messages of vLLM, llama.cpp and OpenAI
LONGEST_WAIT = 60.0  # seconds between two tries, even if the server asks for more
LARGEST = 10**7  # bytes of a reply; an honest one has thousands
TEMPLATE = "chat_template_kwargs"  # the settings of its chat template, which not every server knows
TOP_LOGPROBS = 10  # requested; the most that servers of this protocol all allow; five digits in two spellings


class Reply(NamedTuple):
    """The server's answer."""

    text: str
    first: dict[str, float]  # log-probabilities of the likeliest first tokens, by text; empty if not returned
    problem: str = ""  # why there is none: a prompt too long for the server's model, or a reply of another protocol


class Endpoint:
    """
    The server at `--judge-url`, with its model `--judge-model`; see the judge's settings.

    first_pause: seconds between the first two tries; later pauses double, or are longer if the server says so. key: a
    bearer token, sent to no other host. Raises ValueError for an invalid URL.
    """

    concurrency, timeout, retries = 8, 60.0, 5  # requests at once; seconds for one; how often a failed one is repeated

    def __init__(self, settings: JudgeSettings, key: str | None = None, first_pause: float = 0.5):
        url = settings.url
        try:
            parts = httpx2.URL(url)
        except httpx2.InvalidURL:
            parts = httpx2.URL("")
        if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
            raise ValueError(f"--judge-url {url!r:.100}: it must be like http://127.0.0.1:8080/v1")
        if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ValueError("JUDGE_API_KEY has characters that no key has; set it again")
        self.settings, self.key, self.first_pause = settings, key or "", first_pause
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.certificates = httpx2.create_ssl_context()  # once: each client would take 0.2 s for its own
        self._knows_template = True  # until the server rejects `TEMPLATE`, as OpenAI's does

    def chat(
        self, conversations: Sequence[list[dict[str, str]]], settings: dict[str, Any]
    ) -> Generator[tuple[int, Reply], None, None]:
        """
        Each conversation's place and greedy reply, as they arrive; settings: of the protocol, such as `max_tokens`.

        Raises ValueError, and sends no more requests, if one is refused or still fails after all retries.
        """
        body = {"model": self.settings.model, "temperature": 0, "stream": False} | settings
        replies = self._replies([body | {"messages": messages} for messages in conversations])

        async def arrived() -> tuple[int, Reply] | None:
            return await anext(replies, None)

        with asyncio.Runner() as runner:
            while reply := runner.run(arrived()):
                yield reply

    async def _replies(self, bodies: list[dict[str, Any]]) -> AsyncIterator[tuple[int, Reply]]:
        gate, limits = asyncio.Semaphore(self.concurrency), httpx2.Limits(max_connections=self.concurrency)
        # the client follows no redirects, which could send the key to another host
        settings: dict[str, Any] = {"headers": self.headers, "verify": self.certificates, "limits": limits}
        async with httpx2.AsyncClient(timeout=self.timeout, **settings) as client:

            async def ask(place: int, body: dict[str, Any]) -> tuple[int, Reply]:
                async with gate:
                    return place, await self._ask(client, body)

            tasks = [asyncio.create_task(ask(*request)) for request in enumerate(bodies)]
            try:
                for task in asyncio.as_completed(tasks):
                    yield await task
            finally:  # after a refusal or Ctrl-C, do not wait for the others
                for pending in tasks:
                    pending.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> Reply:
        """The reply to one request, after retries."""
        pause = self.first_pause
        for left in reversed(range(1 + self.retries)):
            if not self._knows_template:
                body = {name: value for name, value in body.items() if name != TEMPLATE}
            retry_after = ""
            try:
                async with asyncio.timeout(self.timeout):  # the client's own restarts with every byte
                    async with client.stream("POST", f"{self.url}/chat/completions", json=body) as response:
                        content = await _read(response)
            except TimeoutError:
                problem = f"no whole reply within {self.timeout:g} s"
            except httpx2.RequestError as error:  # refused, reset, cut off
                problem = self._shown(str(error)) or type(error).__name__
            else:
                if response.is_success:
                    return self._reply(content)
                status, message = response.status_code, self._shown(content.decode(errors="replace"))
                problem = f"status {status}: {message or self._shown(response.reason_phrase)}"
                if status in (400, 422) and TEMPLATE in message and TEMPLATE in body:
                    self._knows_template = False
                    return await self._ask(client, body)
                if status in (400, 413) and TOO_LONG.search(message):
                    return Reply("", {}, f"{problem}; lower --judge-think, or give its model more context")
                if status not in BUSY:
                    raise ValueError(f"--judge-url {self.url} refused a request ({problem})")
                retry_after = response.headers.get("Retry-After", "")
            if left:
                seconds = float(retry_after) if re.fullmatch(r"\d{1,6}(\.\d+)?", retry_after) else 0.0  # or a date
                # random, so that requests that failed together do not retry together
                await asyncio.sleep(min(max(seconds, pause * random.uniform(0.5, 1.0)), LONGEST_WAIT))
                pause *= 2
        fix = "start it, or name another --judge-url"
        raise ValueError(f"--judge-url {self.url} did not answer after {1 + self.retries} tries ({problem}); {fix}")

    def _reply(self, content: bytes) -> Reply:
        """The reply in a server's JSON."""
        try:
            choice = read_json(content)["choices"][0]
            text = choice["message"].get("content") or ""
            tokens = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs") or []
            first = {entry["token"]: float(entry["logprob"]) for entry in tokens}
            if not all(isinstance(one, str) for one in (text, *first)):
                raise TypeError
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            return Reply("", {}, f"it sent no chat completion: {self._shown(content.decode(errors='replace'))!r:.80}")
        return Reply(redacted(text, self.key), first)

    def _shown(self, text: str) -> str:
        """A server's or client's text in one short line without the key, which some echo."""
        return " ".join(redacted(text, self.key).split())[:300]


async def _read(response: httpx2.Response) -> bytes:
    """A reply's bytes, the first of one that does not end."""
    content = b""
    async for part in response.aiter_bytes():
        content += part
        if len(content) > LARGEST:
            break
    return content


class RemoteJudge(Grader):
    """A judge known only by its name on a server. key: see `Endpoint`."""

    is_paid = True

    def __init__(self, settings: JudgeSettings, rubric: str | Path | dict[str, Any] | rubrics.Rubric, key: str | None):
        super().__init__(rubric)
        self.mode, self.think = settings.mode, settings.think
        self.server = Endpoint(settings, key)

    def identity(self) -> str:
        model = self.server.settings.model
        return rubrics.digest(self.server.url, model, self.mode, self.think, self.rubric)

    def evaluations(self, questions: list[Question]) -> Generator[tuple[int, Evaluation], None, None]:
        criteria = self.rubric.criteria
        asked = [rubrics.messages(self.rubric, q.prompt, q.completion, criteria[q.criterion]) for q in questions]
        settings: dict[str, Any] = {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
        if self.mode == "decode":
            settings = {"max_tokens": rubrics.REPLY_TOKENS + self.think}
        settings[TEMPLATE] = {"enable_thinking": self.think > 0}
        arriving = contextlib.closing(self.server.chat(asked, settings))
        with arriving as replies, alive.Bar(total=len(asked), desc="judging", unit="evaluation") as progress:
            for place, reply in replies:
                progress.update()
                yield place, self._read(reply)

    def _read(self, reply: Reply) -> Evaluation:
        if self.mode == "decode":
            return rubrics.from_reply(reply.text)._replace(reply=reply.text or reply.problem)
        if not reply.first and reply.text:  # without text it ended at once, or was filtered
            raise ValueError(f"--judge-url {self.server.url} gives no log-probabilities; set --judge-mode decode")
        value, mass = rubrics.from_first_tokens(reply.first)
        return Evaluation(value, mass, reply.text or reply.problem)
