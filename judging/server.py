"""
The client of an OpenAI-compatible server: chat completions, many requests at once, each reply as it arrives.

A request has its own clock, a reply a most size, and no redirect is followed. What is unreachable or cut off is asked
again. A busy server (judging/busy.py) gets a pause and half as many requests at once. A setting that it refuses is
left out or renamed, and a system message that it refuses opens the user's message; a line says so. Left out: what is
asked, and what a reply means (judging/remote_judge.py, step/served.py).
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

from flags import escape_invisible, read_json, redact_secrets
from judging import busy

TRANSIENT = {
    408,
    409,
    425,
    *range(500, 600),
}  # status codes worth a retry; proxies have invented many
TOO_LONG = re.compile(
    r"context[ _](length|size|window)", re.IGNORECASE
)  # in messages of vLLM, llama.cpp and OpenAI
PATIENCE = 600.0  # seconds of pauses without a reply after which a busy server is given up
LONGEST_WAIT = 3600.0  # seconds; a server that asks for more ends the run
LONGEST_PAUSE = 60.0  # seconds between two tries of what failed
TOLD_FROM = 5.0  # seconds; a shorter pause is not worth a line
GROW_AFTER = 32  # replies, after which one more request may run at once again
SLOWEST = 1  # tokens a second of a server that is not dead
LARGEST = 10**7  # bytes of a reply; an honest one has thousands
TEMPLATE = "chat_template_kwargs"  # the settings of its chat template
OPTIONAL = (
    TEMPLATE,
    "top_k",
    "min_p",
)  # not of the protocol; a server that refuses one is not sent it again
LIMIT, OTHER_LIMIT = "max_tokens", "max_completion_tokens"  # two names of one setting
REFUSES_A_SETTING = {400, 422}
KEEPS_ITS_REASON = {
    401,
    402,
    403,
    408,
    409,
    413,
    425,
    429,
}  # refusals that no system message causes
NO_SUCH_SETTING = re.compile(
    r"not? support|unsupported|unrecognized|unknown|unexpected|not (?:permitted|allowed)|extra|deprecated"
    r"|only the default",
    re.IGNORECASE,
)
ABOUT_ROLES = re.compile(r"system|role|template|jinja", re.IGNORECASE)


class Flags(NamedTuple):
    """What a user sets of a server, for messages."""

    url: str
    model: str
    key: str  # an environment variable
    length: str  # what makes a request shorter


class Reply(NamedTuple):
    text: str
    first: dict[
        str, float
    ]  # log-probabilities of the likeliest first tokens, by text; empty if not returned
    problem: str = ""  # why there is none: a prompt too long for the server's model, or a reply of another protocol
    thought: str = ""  # what it wrote before, where the server tells it apart
    finish_reason: str = "stop"  # or "length"
    prompt_tokens: int | None = None  # None: it does not say


class Answer(NamedTuple):
    """What came of one try: a response, or the problem that there is none."""

    status: int = 0  # 0: no response
    headers: Mapping[str, str] = {}  # names in small letters
    content: bytes = b""
    problem: str = ""


def merge_system_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without a leading system message, whose text opens the user's first message instead."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, user, *others = messages
    return [user | {"content": f"{system['content']}\n\n{user['content']}"}, *others]


def has_system_message(body: dict[str, Any]) -> bool:
    """Whether a request begins with a system message, followed by the text of a user."""
    messages = body.get("messages") or []
    if (
        len(messages) < 2
        or messages[0].get("role") != "system"
        or messages[1].get("role") != "user"
    ):
        return False
    return isinstance(messages[0].get("content"), str) and isinstance(
        messages[1].get("content"), str
    )


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
    How many requests run at once.

    A busy server halves the number at once and holds all requests back for a while; replies let it grow again.
    """

    def __init__(self, most: int):
        self.most = self.limit = most
        self.num_replies = 0
        self.num_pauses = 0
        self.begin()

    def begin(self) -> None:
        """Prepares for the requests of another event loop. Their number at once stays."""
        self.num_running = 0
        self.is_paused = False
        self.num_pauses_without_reply = 0
        self.seconds_without_reply = 0.0  # of pauses
        self.changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[int]:
        """A place among the running requests; it gives the number of pauses before it."""
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
        """Holds all requests back for some seconds. The first pause after a reply halves their number."""
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
        """The number of requests at once after a pause that begins now."""
        return self.limit if self.num_pauses_without_reply else max(1, self.limit // 2)

    def note_reply(self) -> None:
        self.num_pauses_without_reply = 0
        self.seconds_without_reply = 0.0
        self.num_replies += 1
        if self.num_replies % GROW_AFTER == 0:
            self.limit = min(self.limit + 1, self.most)


class Endpoint:
    """
    The server at a URL, with its name of a model.

    key: a bearer token, sent to no other host. tokens: most of a long reply, which has the time to write them.
    may_adapt: whether a refused system message may move into the user's, and a refused temperature be left out. sleep
    and now: the clock. Raises ValueError for what is no URL or key.
    """

    concurrency, retries = 8, 5  # requests at once; how often a failed one is repeated
    first_pause = 0.5  # seconds between the first two tries; later pauses double

    def __init__(
        self,
        flags: Flags,
        url: str,
        model: str,
        key: str | None = None,
        tokens: int = 0,
        *,
        may_adapt: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ):
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
        self.certificates = (
            httpx2.create_ssl_context()
        )  # once: each client would take 0.2 s for its own
        self.may_adapt, self.sleep, self.now = may_adapt, sleep, now
        self.refused: set[str] = set()  # settings that are not sent again
        self.calls_limit = LIMIT  # the name of the setting
        self.takes_system: bool | None = None  # whether it takes a system message; None: not known
        self.has_replied = False
        self.pace: Pace | None = None

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
        waiting = collections.deque(enumerate(bodies))
        arrived: asyncio.Queue[tuple[int, Reply] | Exception] = asyncio.Queue()
        if self.pace is None:
            self.pace = Pace(self.concurrency)
        pace = self.pace
        pace.begin()
        settings: dict[str, Any] = {
            "headers": self.headers,
            "verify": self.certificates,
            "timeout": self.timeout,
        }
        async with httpx2.AsyncClient(
            **settings
        ) as client:  # it follows no redirect, which could send the key away

            async def work() -> None:
                while waiting:
                    place, body = waiting.popleft()
                    try:
                        arrived.put_nowait((place, await self._request(client, pace, body)))
                    except Exception as error:  # raised where the reply is awaited
                        arrived.put_nowait(error)

            workers = [
                asyncio.create_task(work()) for _ in range(min(self.concurrency, len(bodies)))
            ]
            try:
                for _ in bodies:
                    reply = await arrived.get()
                    if isinstance(reply, Exception):
                        raise reply
                    yield reply
            finally:  # after a refusal or Ctrl-C, do not wait for the others
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _send(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> Answer:
        """What comes of one request; of a response that does not end, the beginning."""
        content = b""
        try:
            async with asyncio.timeout(self.timeout):  # the client's own restarts with every byte
                async with client.stream(
                    "POST", f"{self.url}/chat/completions", json=body
                ) as response:
                    async for part in response.aiter_bytes():
                        content += part
                        if len(content) > LARGEST:
                            break
        except TimeoutError:
            return Answer(problem=f"no whole reply within {self.timeout:g} s")
        except httpx2.RequestError as error:  # refused, reset, cut off
            return Answer(problem=self._shorten(str(error)) or type(error).__name__)
        headers = {name.lower(): value for name, value in response.headers.items()}
        message = self._shorten(content.decode(errors="replace")) or self._shorten(
            response.reason_phrase
        )
        return Answer(
            response.status_code, headers, content, f"status {response.status_code}: {message}"
        )

    async def _request(self, client: httpx2.AsyncClient, pace: Pace, body: dict[str, Any]) -> Reply:
        """The reply to one request, after pauses, retries and changes that the server asks for."""
        num_failures = 0
        refusal: Answer | None = (
            None  # of the system message, while the request is tried without one
        )
        while True:
            sent = self._adapt_request(body, is_merged=refusal is not None)
            async with pace.slot() as num_pauses:
                answer = await self._send(client, sent)

            error = busy.find_error(answer.content) if answer.status else None
            status = answer.status
            if status in range(200, 300):
                status = busy.find_status(error) or status
            now = busy.read_date(
                answer.headers.get("date", "")
            )  # by the server's clock, where it says
            seconds = busy.find_wait(answer.headers, error, self.now() if now is None else now)
            if busy.is_out_of_quota(status, error, seconds):
                raise self._explain_quota(answer)
            if busy.is_busy(status, error):
                # A request that was sent with this one may have paused for all of them already.
                if num_pauses == pace.num_pauses:
                    await self._pause(pace, answer, seconds)
                continue

            if status in range(200, 300):
                self.has_replied = True
                pace.note_reply()
                self._note_system_message(sent, is_merged=refusal is not None)
                return self._parse_reply(answer.content)
            if status in (400, 413) and TOO_LONG.search(answer.problem):
                return Reply(
                    "",
                    {},
                    f"{answer.problem}; lower {self.flags.length}, or give its model more context",
                )
            if status in REFUSES_A_SETTING and self._drop_refused_setting(sent, answer.problem):
                continue
            if refusal is None and self._may_refuse_system_message(sent, status, answer.problem):
                refusal = answer
                continue
            if status and status not in TRANSIENT:
                raise self._explain_refusal(refusal or answer, sent)

            num_failures += 1
            if num_failures > self.retries:
                raise self._explain_failure(refusal or answer, num_failures)
            pause = self.first_pause * 2 ** (num_failures - 1)
            # random, so that requests that failed together do not retry together
            await self.sleep(
                min(max(seconds or 0.0, pause * random.uniform(0.5, 1.0)), LONGEST_PAUSE)
            )

    # ---- a server that is busy

    async def _pause(self, pace: Pace, answer: Answer, seconds: float | None) -> None:
        """
        Waits as long as a busy server says; None: it does not say.

        Raises ValueError if that is too long, or if it was busy for PATIENCE.
        """
        where = f"{self.flags.url} {self.url}"
        if seconds is not None and seconds > LONGEST_WAIT:
            fix = f"start again then, or name another {self.flags.url}"
            raise ValueError(f"{where} asks to wait {seconds:.0f} s ({answer.problem}); {fix}")
        if pace.seconds_without_reply >= PATIENCE:
            minutes = pace.seconds_without_reply / 60
            fix = f"start again later, or name another {self.flags.url}"
            raise ValueError(
                f"{where} was busy for {minutes:.0f} minutes ({answer.problem}); {fix}"
            )
        # The pauses double: six without a stated time make a minute, and stated times that are too short grow.
        shortest = busy.SHORTEST_PAUSE if seconds is None else self.first_pause
        least = min(shortest * 2**pace.num_pauses_without_reply, LONGEST_PAUSE)
        seconds = max(seconds or 0.0, least)
        if seconds >= TOLD_FROM:
            limit = pace.next_limit
            requests = "one request" if limit == 1 else f"{limit} requests"
            self._print_once(
                f"{where} is busy ({answer.problem}): waiting {seconds:.0f} s, then {requests} at once"
            )
        await pace.pause(seconds, self.sleep)

    # ---- what a server does not take

    def _adapt_request(self, body: dict[str, Any], is_merged: bool) -> dict[str, Any]:
        """A request as this server takes it. is_merged: without a system message, whatever it takes."""
        sent = {name: value for name, value in body.items() if name not in self.refused}
        if LIMIT in sent:
            sent[self.calls_limit] = sent.pop(LIMIT)
        if (is_merged or self.takes_system is False) and has_system_message(sent):
            sent["messages"] = merge_system_message(sent["messages"])
        return sent

    def _drop_refused_setting(self, sent: dict[str, Any], message: str) -> bool:
        """Leaves out or renames the setting that a message refuses; false if it refuses none of these."""
        optional = {name for name in OPTIONAL if name in sent and name in message}
        if optional:
            self.refused |= optional
            return True
        if not NO_SUCH_SETTING.search(message) and OTHER_LIMIT not in message:
            return False
        where = f"{self.flags.url} {self.url}"
        if LIMIT in sent and LIMIT in message:
            if self.calls_limit == LIMIT:
                self._print_once(f"{where} takes no {LIMIT}; it gets {OTHER_LIMIT} instead")
            self.calls_limit = OTHER_LIMIT
            return True
        if self.may_adapt and "temperature" in sent and "temperature" in message:
            if "temperature" not in self.refused:
                self._print_once(
                    f"{where} takes no temperature; it draws at its own, so scores may differ between runs"
                )
            self.refused.add("temperature")
            return True
        return False

    def _may_refuse_system_message(self, sent: dict[str, Any], status: int, message: str) -> bool:
        """Whether a refusal may be due to a system message, so that the request is worth a try without one."""
        if not self.may_adapt or self.takes_system or not has_system_message(sent):
            return False
        if self.takes_system is False:  # found while this request was on its way
            return True
        if status in range(400, 500):
            return status not in KEEPS_ITS_REASON
        return status >= 500 and ABOUT_ROLES.search(message) is not None

    def _note_system_message(self, sent: dict[str, Any], is_merged: bool) -> None:
        """Remembers of a request that was answered whether the server takes system messages."""
        if has_system_message(sent):
            self.takes_system = True
        elif is_merged and self.takes_system is None:
            self.takes_system = False
            fix = "its text opens the user's message instead"
            self._print_once(f"{self.flags.url} {self.url} takes no system message; {fix}")

    # ---- what ends a run

    def _explain_refusal(self, answer: Answer, sent: dict[str, Any]) -> ValueError:
        fix = ""
        if answer.status == 404:
            fix = f"; end the address in /v1, and name a model of its with {self.flags.model}"
        elif answer.status == 401:
            fix = f"; its key is read from {self.flags.key}"
        elif "logprobs" in sent and "logprobs" in answer.problem:
            fix = "; set --judge-mode decode"
        return ValueError(f"{self.flags.url} {self.url} refused a request ({answer.problem}){fix}")

    def _explain_quota(self, answer: Answer) -> ValueError:
        fix = f"add to it, or name another {self.flags.url}"
        return ValueError(
            f"{self.flags.url} {self.url} has no quota left ({answer.problem}); {fix}"
        )

    def _explain_failure(self, answer: Answer, num_tries: int) -> ValueError:
        fix = "start it"
        if self.has_replied:
            fix = "others it answered, so it is slow or busy: wait"
        elif answer.status:
            fix = "it runs but fails: read its log"
        failed = (
            f"failed {num_tries} times"
            if answer.status
            else f"did not answer after {num_tries} tries"
        )
        return ValueError(
            f"{self.flags.url} {self.url} {failed} ({answer.problem}); {fix}, or name another {self.flags.url}"
        )

    def _print_once(self, line: str) -> None:
        tqdm.write(escape_invisible(line), file=sys.stderr)

    # ---- replies

    def _parse_reply(self, content: bytes) -> Reply:
        """The reply in a server's JSON."""
        try:
            record = read_json(content)
            choice, usage = record["choices"][0], record.get("usage") or {}
            message = choice["message"]
            text, thought = read_content(message.get("content"))
            thought = message.get("reasoning_content") or message.get("reasoning") or thought
            tokens = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get(
                "top_logprobs"
            ) or []
            first = {entry["token"]: float(entry["logprob"]) for entry in tokens}
            if not all(isinstance(part, str) for part in (text, thought, *first)):
                raise TypeError
            reason = "length" if choice.get("finish_reason") == "length" else "stop"
            num = usage.get("prompt_tokens")
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            return Reply(
                "",
                {},
                f"it sent no chat completion: {self._shorten(content.decode(errors='replace'))!r:.80}",
            )
        text, thought = redact_secrets(text, self.key), redact_secrets(thought, self.key)
        return Reply(text, first, "", thought, reason, num if type(num) is int else None)

    def _shorten(self, text: str) -> str:
        """A server's or client's text in one short line without the key, which some echo."""
        return " ".join(redact_secrets(text, self.key).split())[:300]
