"""
The client of an OpenAI-compatible server: chat completions, many requests at once, each reply as it arrives.

A request has its own clock, a reply a most size, and no redirect is followed. What is busy, unreachable or cut off is
asked again. Left out: what is asked, and what a reply means (judging/remote_judge.py, step/served.py).
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Generator, Sequence
from typing import Any, NamedTuple

import httpx2

from flags import read_json, redacted

BUSY = {408, 409, 425, 429, *range(500, 600)}  # status codes worth a retry; proxies have invented many
TOO_LONG = re.compile(r"context[ _](length|size|window)", re.IGNORECASE)  # in messages of vLLM, llama.cpp and OpenAI
LONGEST_WAIT = 60.0  # seconds between two tries, even if the server asks for more
SLOWEST = 1  # tokens a second of a server that is not dead
LARGEST = 10**7  # bytes of a reply; an honest one has thousands
TEMPLATE = "chat_template_kwargs"  # the settings of its chat template
OPTIONAL = (TEMPLATE, "top_k", "min_p")  # not of the protocol; a server that refuses one is not sent it again


class Flags(NamedTuple):
    """What a user sets of a server, for messages."""

    url: str
    model: str
    key: str  # an environment variable
    length: str  # what makes a request shorter


class Reply(NamedTuple):
    text: str
    first: dict[str, float]  # log-probabilities of the likeliest first tokens, by text; empty if not returned
    problem: str = ""  # why there is none: a prompt too long for the server's model, or a reply of another protocol
    thought: str = ""  # what it wrote before, where the server tells it apart
    finish_reason: str = "stop"  # or "length"
    prompt_tokens: int | None = None  # None: it does not say


class Endpoint:
    """
    The server at a URL, with its name of a model.

    key: a bearer token, sent to no other host. tokens: most of a long reply, which has the time to write them. Raises
    ValueError for what is no URL or key.
    """

    concurrency, retries = 8, 5  # requests at once; how often a failed one is repeated
    first_pause = 0.5  # seconds between the first two tries; later pauses double, or are longer if the server says so

    def __init__(self, flags: Flags, url: str, model: str, key: str | None = None, tokens: int = 0):
        try:
            parts = httpx2.URL(url)
        except httpx2.InvalidURL:
            parts = httpx2.URL("")
        if parts.userinfo:
            raise ValueError(f"{flags.url} holds a password; put the key into {flags.key}")
        if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
            raise ValueError(f"{flags.url} {url!r:.100}: it must be like http://127.0.0.1:8080/v1")
        if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ValueError(f"{flags.key} has characters that no key has; set it again")
        self.flags, self.model, self.key = flags, model, key or ""
        self.timeout = 60 + tokens / SLOWEST  # seconds for one request
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.certificates = httpx2.create_ssl_context()  # once: each client would take 0.2 s for its own
        self.refused: set[str] = set()  # of `OPTIONAL`
        self.is_there = False  # whether it has answered

    def chat(self, bodies: Sequence[dict[str, Any]]) -> Generator[tuple[int, Reply], None, None]:
        """
        Each request's place and reply, as they arrive. A body has `messages` and settings of the protocol.

        Raises ValueError, and sends no more requests, if one is refused or still fails after all retries.
        """
        replies = self._replies([{"model": self.model, "stream": False} | body for body in bodies])

        async def arrived() -> tuple[int, Reply] | None:
            return await anext(replies, None)

        with asyncio.Runner() as runner:
            while reply := runner.run(arrived()):
                yield reply

    async def _replies(self, bodies: list[dict[str, Any]]) -> AsyncIterator[tuple[int, Reply]]:
        gate = asyncio.Semaphore(self.concurrency)
        settings: dict[str, Any] = {"headers": self.headers, "verify": self.certificates, "timeout": self.timeout}
        async with httpx2.AsyncClient(**settings) as client:  # it follows no redirect, which could send the key away

            async def ask(place: int, body: dict[str, Any]) -> tuple[int, Reply]:
                async with gate:
                    return place, await self._ask(client, body)

            tasks = [asyncio.create_task(ask(*request)) for request in enumerate(bodies)]
            try:
                for arrived in asyncio.as_completed(tasks):
                    yield await arrived
            finally:  # after a refusal or Ctrl-C, do not wait for the others
                for pending in tasks:
                    pending.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _post(self, client: httpx2.AsyncClient, body: Any) -> tuple[httpx2.Response, bytes]:
        """A response and its content, the beginning of one that does not end."""
        content = b""
        async with asyncio.timeout(self.timeout):  # the client's own restarts with every byte
            async with client.stream("POST", f"{self.url}/chat/completions", json=body) as response:
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > LARGEST:
                        break
        return response, content

    async def _ask(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> Reply:
        """The reply to one request, after retries."""
        pause = self.first_pause
        for left in reversed(range(1 + self.retries)):
            body = {name: value for name, value in body.items() if name not in self.refused}
            retry_after = ""
            try:
                response, content = await self._post(client, body)
            except TimeoutError:
                problem = f"no whole reply within {self.timeout:g} s"
            except httpx2.RequestError as error:  # refused, reset, cut off
                problem = self._shown(str(error)) or type(error).__name__
            else:
                if response.is_success:
                    self.is_there = True
                    return self._reply(content)
                status, message = response.status_code, self._shown(content.decode(errors="replace"))
                problem = f"status {status}: {message or self._shown(response.reason_phrase)}"
                refused = {name for name in OPTIONAL if name in body and name in message}
                if status in (400, 422) and refused:
                    self.refused |= refused
                    return await self._ask(client, body)
                if status in (400, 413) and TOO_LONG.search(message):
                    return Reply("", {}, f"{problem}; lower {self.flags.length}, or give its model more context")
                if status not in BUSY:
                    name = f"end the address in /v1, and name a model of its with {self.flags.model}"
                    fix = {404: f"; {name}", 401: f"; its key is read from {self.flags.key}"}.get(status, "")
                    raise ValueError(f"{self.flags.url} {self.url} refused a request ({problem}){fix}")
                retry_after = response.headers.get("Retry-After", "")
            if left:
                seconds = float(retry_after) if re.fullmatch(r"\d{1,6}(\.\d+)?", retry_after) else 0.0  # or a date
                # random, so that requests that failed together do not retry together
                await asyncio.sleep(min(max(seconds, pause * random.uniform(0.5, 1.0)), LONGEST_WAIT))
                pause *= 2
        said = f"did not answer after {1 + self.retries} tries ({problem})"
        fix = "others it answered, so it is slow or busy: wait" if self.is_there else "start it"
        raise ValueError(f"{self.flags.url} {self.url} {said}; {fix}, or name another {self.flags.url}")

    def _reply(self, content: bytes) -> Reply:
        """The reply in a server's JSON."""
        try:
            found = read_json(content)
            choice, usage = found["choices"][0], found.get("usage") or {}
            message = choice["message"]
            text = message.get("content") or ""
            thought = message.get("reasoning_content") or message.get("reasoning") or ""
            tokens = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs") or []
            first = {entry["token"]: float(entry["logprob"]) for entry in tokens}
            if not all(isinstance(one, str) for one in (text, thought, *first)):
                raise TypeError
            reason = "length" if choice.get("finish_reason") == "length" else "stop"
            num = usage.get("prompt_tokens")
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            return Reply("", {}, f"it sent no chat completion: {self._shown(content.decode(errors='replace'))!r:.80}")
        text, thought = redacted(text, self.key), redacted(thought, self.key)
        return Reply(text, first, "", thought, reason, num if type(num) is int else None)

    def _shown(self, text: str) -> str:
        """A server's or client's text in one short line without the key, which some echo."""
        return " ".join(redacted(text, self.key).split())[:300]
