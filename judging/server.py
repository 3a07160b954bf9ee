"""
Client of an OpenAI-compatible server: requests chat completions, several at once.

Each request has a time limit, and each reply a size limit. Redirects are not followed. A
request is repeated if the server is unreachable or the reply is cut off. If the server is busy
(judging/busy.py), all requests pause, and then half as many run at once. A setting that the server
refuses is dropped or renamed, and a refused system message is moved into the user's message; a
console line says so.

The content of requests and the meaning of replies are in judging/remote_judge.py and
evaluation/served_policy.py.
"""

import asyncio
import collections
import contextlib
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx2
from tqdm.auto import tqdm

from judging import busy
from text.documents import read_json
from text.printable import escape_invisible, redact_secrets

# status codes after which a retry may help; proxies have invented many of them
TRANSIENT = {408, 409, 425, *range(500, 600)}
# as in the messages of vLLM, llama.cpp and OpenAI
TOO_LONG = re.compile(r"context[ _](length|size|window)", re.IGNORECASE)
PATIENCE = 600.0  # seconds of pauses without a reply, after which a busy server is given up
LONGEST_WAIT = 3600.0  # seconds; the run ends if a server asks for a longer wait
LONGEST_PAUSE = 60.0  # seconds between two tries of a failed request
SHORTEST_PRINTED_PAUSE = 5.0  # seconds; a shorter pause is not worth a line
GROW_AFTER = 32  # replies after which one more request may run at once again
MIN_TOKENS_PER_SECOND = 1  # a slower server counts as dead
MAX_REPLY_BYTES = 10**7  # a normal reply has thousands
TEMPLATE_SETTINGS = "chat_template_kwargs"  # the settings of the server's chat template
# settings outside the protocol; one that the server refuses is not sent again
OPTIONAL_SETTINGS = (TEMPLATE_SETTINGS, "top_k", "min_p")
# two names of one setting
MAX_TOKENS = "max_tokens"
MAX_COMPLETION_TOKENS = "max_completion_tokens"
SETTING_REFUSALS = {400, 422}  # status codes of a server that refuses a setting
# status codes of refusals that no system message causes
OTHER_REFUSALS = {401, 402, 403, 408, 409, 413, 425, 429}
NO_SUCH_SETTING = re.compile(
    r"not? support|unsupported|unrecognized|unknown|unexpected|not (?:permitted|allowed)|extra"
    r"|deprecated|only the default",
    re.IGNORECASE,
)
ABOUT_ROLES = re.compile(r"system|role|template|jinja", re.IGNORECASE)


class FlagNames(NamedTuple):
    """The names of the user's settings for a server, as messages show them."""

    url: str
    model: str
    key: str  # an environment variable
    length: str  # a lower value of this setting makes a request shorter


class Reply(NamedTuple):
    """A model's reply to one request."""

    text: str
    # log-probabilities of the likeliest first tokens, by text; empty if not returned
    first_logprobs: dict[str, float]
    # why there is no reply: the prompt is too long for the model, or the protocol is another one
    problem: str = ""
    thought: str = ""  # text before the reply, if the server separates it
    finish_reason: str = "stop"  # or "length"
    prompt_tokens: int | None = None  # None: the server does not say


class Response(NamedTuple):
    """The outcome of one try: an HTTP response, or the problem that prevented it."""

    status: int = 0  # 0: no response
    headers: Mapping[str, str] = {}  # by name in lower case
    content: bytes = b""
    problem: str = ""


def merge_system_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the text of a leading system message moved into the user's message."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, user, *rest = messages
    return [user | {"content": f"{system['content']}\n\n{user['content']}"}, *rest]


def has_system_message(body: dict[str, Any]) -> bool:
    """Whether a request begins with a system message, followed by the text of a user."""
    messages = body.get("messages") or []
    if len(messages) < 2:
        return False
    system, user = messages[:2]
    if system.get("role") != "system" or user.get("role") != "user":
        return False
    return isinstance(system.get("content"), str) and isinstance(user.get("content"), str)


def read_content(content: Any) -> tuple[str, str]:
    """
    The text and the thought in a message's content: a text, null, or a list of parts.

    Raises TypeError for anything else.
    """
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        raise TypeError(f"content of type {type(content).__name__}")
    texts = []
    thoughts = []
    for part in content:
        if "thinking" in part:
            text, _ = read_content(part["thinking"])
            thoughts.append(text)
        elif isinstance(part["text"], str):
            texts.append(part["text"])
        else:
            raise TypeError("a part whose text is none")
    return "".join(texts), "".join(thoughts)


class Pace:
    """
    Limits how many requests run at once.

    A busy server halves the limit and pauses all requests. Replies let the limit grow again.
    """

    def __init__(self, max_requests: int):
        self.max_requests = max_requests
        self.limit = max_requests
        self.num_replies = 0
        self.num_pauses = 0
        self.begin()

    def begin(self) -> None:
        """Prepares for the requests of another event loop. The limit stays the same."""
        self.num_running = 0
        self.is_paused = False
        self.num_pauses_without_reply = 0
        self.seconds_without_reply = 0.0  # the seconds of these pauses
        self.changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[int]:
        """Waits for a place among the running requests. Yields the number of pauses so far."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: not self.is_paused and self.num_running < self.limit
            )
            self.num_running += 1
        try:
            yield self.num_pauses
        finally:
            self.num_running -= 1
            async with self.changed:
                self.changed.notify_all()

    async def pause(self, seconds: float, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Holds all requests back. The first pause after a reply halves the limit."""
        self.limit = self.next_limit
        self.num_pauses += 1
        self.num_pauses_without_reply += 1
        self.seconds_without_reply += seconds
        self.is_paused = True
        await sleep(seconds)
        self.is_paused = False
        async with self.changed:
            self.changed.notify_all()

    @property
    def next_limit(self) -> int:
        """The limit after a pause that begins now."""
        return self.limit if self.num_pauses_without_reply else max(1, self.limit // 2)

    def note_reply(self) -> None:
        self.num_pauses_without_reply = 0
        self.seconds_without_reply = 0.0
        self.num_replies += 1
        if self.num_replies % GROW_AFTER == 0:
            self.limit = min(self.limit + 1, self.max_requests)


class Endpoint:
    """
    The server at a URL, and the name of one of its models.

    key: a bearer token, sent to no other host.
    tokens: the most tokens of a long reply; they lengthen the time limit.
    may_adapt: whether a refused system message may be moved into the user's message, and whether a
    refused temperature may be dropped.
    sleep and now: the clock.

    Raises ValueError if the URL or the key is malformed.
    """

    concurrency = 8  # requests at once
    retries = 5  # how often a failed request is repeated
    first_pause = 0.5  # seconds between the first two tries; later pauses double

    def __init__(
        self,
        flags: FlagNames,
        url: str,
        model: str,
        key: str | None = None,
        tokens: int = 0,
        *,
        may_adapt: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ):
        check_url(flags, url)
        if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ValueError(f"{flags.key} has characters that no key has; set it again")
        self.flags = flags
        self.model = model
        self.key = key or ""
        self.timeout = 60 + tokens / MIN_TOKENS_PER_SECOND  # seconds for one request
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        # created once, because each client would take 0.2 s to create its own
        self.certificates = httpx2.create_ssl_context()
        self.may_adapt = may_adapt
        self.sleep = sleep
        self.now = now
        self.refused_settings: set[str] = set()  # not sent again
        self.limit_name = MAX_TOKENS  # how this server calls the limit of tokens
        self.takes_system: bool | None = None  # whether it takes a system message; None: unknown
        self.has_replied = False
        self.pace: Pace | None = None

    @property
    def flag_and_url(self) -> str:
        """How messages name this server."""
        return f"{self.flags.url} {self.url}"

    def chat(self, bodies: Sequence[dict[str, Any]]) -> Generator[tuple[int, Reply], None, None]:
        """
        Yields each request's place and reply, as they arrive.

        A body has `messages` and settings of the protocol.

        Raises ValueError, and sends no more requests, if a request is refused or still fails after
        all retries.
        """
        replies = self._replies([{"model": self.model, "stream": False} | body for body in bodies])

        async def next_reply() -> tuple[int, Reply] | None:
            return await anext(replies, None)

        with asyncio.Runner() as runner:
            while reply := runner.run(next_reply()):
                yield reply

    async def _replies(self, bodies: list[dict[str, Any]]) -> AsyncIterator[tuple[int, Reply]]:
        waiting = collections.deque(enumerate(bodies))
        arrived: asyncio.Queue[tuple[int, Reply] | Exception] = asyncio.Queue()
        if self.pace is None:
            self.pace = Pace(self.concurrency)
        pace = self.pace
        pace.begin()
        # the client follows no redirect, because that could send the key to another host
        client_context = httpx2.AsyncClient(
            headers=self.headers, verify=self.certificates, timeout=self.timeout
        )
        async with client_context as client:

            async def work() -> None:
                while waiting:
                    place, body = waiting.popleft()
                    try:
                        reply = await self._request(client, pace, body)
                        arrived.put_nowait((place, reply))
                    except Exception as error:  # raised again where the reply is awaited
                        arrived.put_nowait(error)

            num_workers = min(self.concurrency, len(bodies))
            workers = [asyncio.create_task(work()) for _ in range(num_workers)]
            try:
                for _ in bodies:
                    outcome = await arrived.get()
                    if isinstance(outcome, Exception):
                        raise outcome
                    yield outcome
            finally:  # after a refusal or Ctrl-C, do not wait for the other requests
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _send(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> Response:
        """The outcome of one try. Only the beginning of an endless response is read."""
        url = f"{self.url}/chat/completions"
        content = b""
        try:
            async with asyncio.timeout(self.timeout):  # the client's own restarts with every byte
                async with client.stream("POST", url, json=body) as response:
                    async for part in response.aiter_bytes():
                        content += part
                        if len(content) > MAX_REPLY_BYTES:
                            break
        except TimeoutError:
            return Response(problem=f"no whole reply within {self.timeout:g} s")
        except httpx2.RequestError as error:  # refused, reset, cut off
            return Response(problem=self._shorten(str(error)) or type(error).__name__)
        headers = {name.lower(): value for name, value in response.headers.items()}
        message = self._shorten(content.decode(errors="replace"))
        if not message:
            message = self._shorten(response.reason_phrase)
        problem = f"status {response.status_code}: {message}"
        return Response(response.status_code, headers, content, problem)

    async def _request(self, client: httpx2.AsyncClient, pace: Pace, body: dict[str, Any]) -> Reply:
        """The reply to one request, after pauses, retries and changes that the server asks for."""
        num_failures = 0
        # the refusal after which the request is tried without a system message
        refusal: Response | None = None
        while True:
            is_merged = refusal is not None
            sent = self._adapt_request(body, is_merged)
            async with pace.slot() as num_pauses:
                response = await self._send(client, sent)

            status = response.status
            error = busy.find_error(response.content) if status else None
            if status in range(200, 300):
                status = busy.find_status(error) or status
            seconds = self._stated_wait(response, error)
            if busy.is_out_of_quota(status, error, seconds):
                raise self._quota_error(response)
            if busy.is_busy(status, error):
                # Another request, sent at the same time, may have paused all requests already.
                if num_pauses == pace.num_pauses:
                    await self._pause(pace, response, seconds)
                continue

            if status in range(200, 300):
                self.has_replied = True
                pace.note_reply()
                self._note_system_message(sent, is_merged)
                return self._parse_reply(response.content)
            if status in (400, 413) and TOO_LONG.search(response.problem):
                problem = (
                    f"{response.problem}; lower {self.flags.length}, or give its model more context"
                )
                return Reply("", {}, problem)
            if status in SETTING_REFUSALS and self._drop_setting(sent, response.problem):
                continue
            if refusal is None and self._may_refuse_system_message(sent, status, response.problem):
                refusal = response
                continue
            if status and status not in TRANSIENT:
                raise self._refusal_error(refusal or response, sent)

            num_failures += 1
            if num_failures > self.retries:
                raise self._failure_error(refusal or response, num_failures)
            pause = self.first_pause * 2 ** (num_failures - 1)
            # random, so that requests that failed together do not retry together
            pause = max(seconds or 0.0, pause * random.uniform(0.5, 1.0))
            await self.sleep(min(pause, LONGEST_PAUSE))

    # ---- a server that is busy

    def _stated_wait(self, response: Response, error: Any) -> float | None:
        """The seconds that a response says to wait, by the server's clock if it states the time."""
        now = busy.read_date(response.headers.get("date", ""))
        if now is None:
            now = self.now()
        return busy.find_wait(response.headers, error, now)

    async def _pause(self, pace: Pace, response: Response, seconds: float | None) -> None:
        """
        Waits as long as a busy server asks. seconds: None if it does not say how long.

        Raises ValueError if that is too long, or if the server was busy for PATIENCE.
        """
        if seconds is not None and seconds > LONGEST_WAIT:
            raise ValueError(
                f"{self.flag_and_url} asks to wait {seconds:.0f} s ({response.problem}); "
                f"start again then, or name another {self.flags.url}"
            )
        if pace.seconds_without_reply >= PATIENCE:
            minutes = pace.seconds_without_reply / 60
            raise ValueError(
                f"{self.flag_and_url} was busy for {minutes:.0f} minutes ({response.problem}); "
                f"start again later, or name another {self.flags.url}"
            )
        # Each pause is at least twice as long as the last: six without a stated time make a minute,
        # and stated times that are too short become longer.
        shortest = busy.SHORTEST_PAUSE if seconds is None else self.first_pause
        least = min(shortest * 2**pace.num_pauses_without_reply, LONGEST_PAUSE)
        seconds = max(seconds or 0.0, least)
        if seconds >= SHORTEST_PRINTED_PAUSE:
            limit = pace.next_limit
            requests = "one request" if limit == 1 else f"{limit} requests"
            self._print(
                f"{self.flag_and_url} is busy ({response.problem}): "
                f"waiting {seconds:.0f} s, then {requests} at once"
            )
        await pace.pause(seconds, self.sleep)

    # ---- a server that refuses a setting or a system message

    def _adapt_request(self, body: dict[str, Any], is_merged: bool) -> dict[str, Any]:
        """
        The request, without the settings that this server refuses.

        is_merged: whether the system message moves into the user's message in any case.
        """
        sent = {name: value for name, value in body.items() if name not in self.refused_settings}
        if MAX_TOKENS in sent:
            sent[self.limit_name] = sent.pop(MAX_TOKENS)
        if (is_merged or self.takes_system is False) and has_system_message(sent):
            sent["messages"] = merge_system_message(sent["messages"])
        return sent

    def _drop_setting(self, sent: dict[str, Any], message: str) -> bool:
        """
        Drops or renames the setting that a refusal names, for all later requests.

        Returns False if the message names no setting that can be dropped or renamed.
        """
        optional = {name for name in OPTIONAL_SETTINGS if name in sent and name in message}
        if optional:
            self.refused_settings |= optional
            return True
        if not NO_SUCH_SETTING.search(message) and MAX_COMPLETION_TOKENS not in message:
            return False
        if MAX_TOKENS in sent and MAX_TOKENS in message:
            if self.limit_name == MAX_TOKENS:
                self._print(
                    f"{self.flag_and_url} takes no {MAX_TOKENS}; "
                    f"it gets {MAX_COMPLETION_TOKENS} instead"
                )
            self.limit_name = MAX_COMPLETION_TOKENS
            return True
        if self.may_adapt and "temperature" in sent and "temperature" in message:
            if "temperature" not in self.refused_settings:
                self._print(
                    f"{self.flag_and_url} takes no temperature; "
                    "it samples at its own, so scores may differ between runs"
                )
            self.refused_settings.add("temperature")
            return True
        return False

    def _may_refuse_system_message(self, sent: dict[str, Any], status: int, message: str) -> bool:
        """Whether a refusal may be due to a system message, so that merging it is worth a try."""
        if not self.may_adapt or self.takes_system or not has_system_message(sent):
            return False
        if self.takes_system is False:  # another request found this out while this one was running
            return True
        if status in range(400, 500):
            return status not in OTHER_REFUSALS
        return status >= 500 and ABOUT_ROLES.search(message) is not None

    def _note_system_message(self, sent: dict[str, Any], is_merged: bool) -> None:
        """Learns from an answered request whether the server takes system messages."""
        if has_system_message(sent):
            self.takes_system = True
        elif is_merged and self.takes_system is None:
            self.takes_system = False
            self._print(
                f"{self.flag_and_url} takes no system message; "
                "its text opens the user's message instead"
            )

    # ---- errors that end a run

    def _refusal_error(self, response: Response, sent: dict[str, Any]) -> ValueError:
        advice = ""
        if response.status == 404:
            advice = (
                f"; end the address in /v1, and set {self.flags.model} to a model of this server"
            )
        elif response.status == 401:
            advice = f"; its key is read from {self.flags.key}"
        elif "logprobs" in sent and "logprobs" in response.problem:
            advice = "; set --judge-mode decode"
        return ValueError(f"{self.flag_and_url} refused a request ({response.problem}){advice}")

    def _quota_error(self, response: Response) -> ValueError:
        return ValueError(
            f"{self.flag_and_url} has no quota left ({response.problem}); "
            f"add to it, or name another {self.flags.url}"
        )

    def _failure_error(self, response: Response, num_tries: int) -> ValueError:
        advice = "start it"
        if self.has_replied:
            advice = "it answered other requests, so it is slow or busy: wait"
        elif response.status:
            advice = "it runs but fails: read its log"
        failure = f"did not answer after {num_tries} tries"
        if response.status:
            failure = f"failed {num_tries} times"
        return ValueError(
            f"{self.flag_and_url} {failure} ({response.problem}); "
            f"{advice}, or name another {self.flags.url}"
        )

    def _print(self, line: str) -> None:
        tqdm.write(escape_invisible(line), file=sys.stderr)

    # ---- replies

    def _parse_reply(self, content: bytes) -> Reply:
        """The reply in a server's JSON. If this is no chat completion, its `problem` says so."""
        try:
            record = read_json(content)
            choice = record["choices"][0]
            message = choice["message"]
            text, thought = read_content(message.get("content"))
            thought = message.get("reasoning_content") or message.get("reasoning") or thought
            first_logprobs = read_first_logprobs(choice)
            if not all(isinstance(part, str) for part in (text, thought, *first_logprobs)):
                raise TypeError
            usage = record.get("usage") or {}
            num_prompt_tokens = usage.get("prompt_tokens")
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            shown = self._shorten(content.decode(errors="replace"))
            return Reply("", {}, f"it sent no chat completion: {shown!r:.80}")
        return Reply(
            text=redact_secrets(text, self.key),
            first_logprobs=first_logprobs,
            thought=redact_secrets(thought, self.key),
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            prompt_tokens=num_prompt_tokens if type(num_prompt_tokens) is int else None,
        )

    def _shorten(self, text: str) -> str:
        """A server's or client's text in one short line, without the key, which it may repeat."""
        return " ".join(redact_secrets(text, self.key).split())[:300]


def check_url(flags: FlagNames, url: str) -> None:
    """Raises ValueError if this is no URL of a server, or if the URL holds a password."""
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL:
        parts = httpx2.URL("")
    if parts.userinfo:
        raise ValueError(f"{flags.url} holds a password; put the key into {flags.key}")
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
        raise ValueError(f"{flags.url} {url!r:.100}: it must be like http://127.0.0.1:8080/v1")


def read_first_logprobs(choice: dict[str, Any]) -> dict[str, float]:
    """The log-probabilities of the likeliest first tokens, by text; empty if not returned."""
    logprobs = choice.get("logprobs") or {}
    tokens = logprobs.get("content") or [{}]
    entries = tokens[0].get("top_logprobs") or []
    return {entry["token"]: float(entry["logprob"]) for entry in entries}
