"""
A client for OpenAI-compatible servers: sends several requests for chat completions at once.

Each request has a time limit, and each reply has a size limit. Redirects are not followed. A
request is repeated if the server is unreachable or the reply is cut off. If the server is busy
(judging/busy.py), all requests pause, and afterwards half as many run at once. If the server
refuses a setting, the setting is dropped or renamed. If the server refuses a system message, the
message's text is moved into the user's message. Lines on stderr report most of these changes.

judging/remote_judge.py and evaluation/served_policy.py decide what to request, and read the
replies.
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

# status codes after which a retry may help; proxies use many codes from 500 to 599
TRANSIENT = {408, 409, 425, *range(500, 600)}
# matches the messages that vLLM, llama.cpp and OpenAI send if a prompt is too long
TOO_LONG = re.compile(r"context[ _](length|size|window)", re.IGNORECASE)
PATIENCE = 600.0  # after this many seconds of pauses without a reply, the run ends
LONGEST_WAIT = 3600.0  # seconds; if a server asks for a longer wait, the run ends
LONGEST_PAUSE = 60.0  # the maximum number of seconds between two tries
SHORTEST_PRINTED_PAUSE = 5.0  # seconds; no line is printed about a shorter pause
GROW_AFTER = 32  # after this many replies, one more request may run at once
MIN_TOKENS_PER_SECOND = 1  # a request to a slower server times out
MAX_REPLY_BYTES = 10**7  # a normal reply has thousands of bytes
TEMPLATE_SETTINGS = "chat_template_kwargs"  # the request's settings for the server's chat template

# settings outside the protocol; if the server refuses one, it is not sent again
OPTIONAL_SETTINGS = (TEMPLATE_SETTINGS, "top_k", "min_p")
# two names for the same setting, the maximum number of tokens in a reply
MAX_TOKENS = "max_tokens"
MAX_COMPLETION_TOKENS = "max_completion_tokens"
SETTING_REFUSALS = {400, 422}  # status codes that a server sends when it refuses a setting

# status codes of refusals that are never due to a system message
OTHER_REFUSALS = {401, 402, 403, 408, 409, 413, 425, 429}
NO_SUCH_SETTING = re.compile(
    r"not? support|unsupported|unrecognized|unknown|unexpected|not (?:permitted|allowed)|extra"
    r"|deprecated|only the default",
    re.IGNORECASE,
)
ABOUT_ROLES = re.compile(r"system|role|template|jinja", re.IGNORECASE)


class ServerSettingNames(NamedTuple):
    """How messages call a server's settings: by their flags or their environment variable."""

    url: str
    model: str
    key: str  # the name of an environment variable
    length: str  # the setting that the user should lower if a request is too long


class ChatReplyOrProblem(NamedTuple):
    """A model's reply to one request, or the reason why there is no reply."""

    text: str
    # log-probabilities of the likeliest first tokens, by the token's text; empty if the server sent
    # none
    first_logprobs: dict[str, float]
    # why there is no reply: the prompt is too long, or the server sent no chat completion
    problem: str = ""
    thought: str = ""  # the model's thought, if the server returns it separately
    finish_reason: str = "stop"  # "stop", or "length" if the reply reached its token limit
    prompt_tokens: int | None = None  # None if the server does not say


class RequestOutcome(NamedTuple):
    """The outcome of one try: an HTTP response, or the problem that prevented a response."""

    status: int = 0  # 0 if there was no response
    headers: Mapping[str, str] = {}  # by lower-case name
    content: bytes = b""
    problem: str = ""


def merge_system_into_user_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages, with a leading system message's text moved into the next message."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, user, *rest = messages
    return [user | {"content": f"{system['content']}\n\n{user['content']}"}, *rest]


def begins_with_system_and_user(request_body: dict[str, Any]) -> bool:
    """Whether a request begins with a system message followed by a user's message."""
    messages = request_body.get("messages") or []
    if len(messages) < 2:
        return False
    system, user = messages[:2]
    if system.get("role") != "system" or user.get("role") != "user":
        return False
    return isinstance(system.get("content"), str) and isinstance(user.get("content"), str)


def split_text_and_thought(content: Any) -> tuple[str, str]:
    """
    The text and the thought in a reply's content, which is a string, null, or a list of parts.

    Raises TypeError if the content is anything else.
    """
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        raise TypeError(f"content of type {type(content).__name__}")
    texts = []
    thoughts = []
    for part in content:
        if "thinking" in part:
            text, _ = split_text_and_thought(part["thinking"])
            thoughts.append(text)
        elif isinstance(part["text"], str):
            texts.append(part["text"])
        else:
            raise TypeError("a content part whose text is not a string")
    return "".join(texts), "".join(thoughts)


class RequestLimiter:
    """
    Limits how many requests to a server run at once.

    If the server is busy, all requests pause and the limit is halved. After enough replies, the
    limit grows again.
    """

    def __init__(self, max_requests: int):
        self.max_requests = max_requests
        self.limit = max_requests
        self.num_replies = 0
        self.num_pauses = 0
        self.reset_pauses_for_new_event_loop()

    def reset_pauses_for_new_event_loop(self) -> None:
        """
        Resets the running requests and the current pause for a new event loop.

        The limit, and the numbers of replies and pauses so far, do not change.
        """
        self.num_running = 0
        self.is_paused = False
        self.num_pauses_without_reply = 0
        self.seconds_without_reply = 0.0  # the total length of the pauses since the last reply
        self.state_changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def hold_slot_and_yield_num_pauses(self) -> AsyncIterator[int]:
        """
        Waits until another request may run, and counts it as running inside the context.

        Yields the number of pauses so far.
        """
        async with self.state_changed:
            await self.state_changed.wait_for(
                lambda: not self.is_paused and self.num_running < self.limit
            )
            self.num_running += 1
        try:
            yield self.num_pauses
        finally:
            self.num_running -= 1
            async with self.state_changed:
                self.state_changed.notify_all()

    async def pause_and_lower_limit(
        self, seconds: float, sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        """
        Pauses all requests not yet running, and halves the limit.

        The limit is not halved again if no reply has arrived since the previous pause.
        """
        self.limit = self.limit_after_pause
        self.num_pauses += 1
        self.num_pauses_without_reply += 1
        self.seconds_without_reply += seconds
        self.is_paused = True
        await sleep(seconds)
        self.is_paused = False
        async with self.state_changed:
            self.state_changed.notify_all()

    @property
    def limit_after_pause(self) -> int:
        """The limit that will apply after a pause that begins now."""
        return self.limit if self.num_pauses_without_reply else max(1, self.limit // 2)

    def note_reply_and_raise_limit(self) -> None:
        self.num_pauses_without_reply = 0
        self.seconds_without_reply = 0.0
        self.num_replies += 1
        if self.num_replies % GROW_AFTER == 0:
            self.limit = min(self.limit + 1, self.max_requests)


class Endpoint:
    """
    Sends requests to one model on the server at a URL.

    key: a bearer token, which is sent only to this server.
    tokens: the maximum number of tokens in a reply; more tokens mean a longer time limit.
    may_adapt: whether requests may be changed if the server refuses a system message or a
    temperature.
    sleep: a function that waits for a number of seconds.
    now: a function that returns the time in seconds since 1970.

    Raises ValueError if the URL or the key is malformed.
    """

    concurrency = 8  # the maximum number of requests at once
    retries = 5  # how many times a failed request is repeated
    first_pause = 0.5  # seconds between the first two tries; each later pause is twice as long

    def __init__(
        self,
        flags: ServerSettingNames,
        url: str,
        model: str,
        key: str | None = None,
        tokens: int = 0,
        *,
        may_adapt: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ):
        check_server_url(flags, url)
        if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ValueError(f"{flags.key} has characters that a key cannot have; set it again")
        self.flags = flags
        self.model = model
        self.key = key or ""
        self.timeout = 60 + tokens / MIN_TOKENS_PER_SECOND  # seconds for one request
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        # created only once, because creating it for each client would take 0.2 s
        self.certificates = httpx2.create_ssl_context()
        self.may_adapt = may_adapt
        self.sleep = sleep
        self.now = now
        self.refused_settings: set[str] = set()  # not sent again
        self.limit_name = MAX_TOKENS  # the name that this server uses for the token limit

        # whether the server accepts system messages; None if unknown
        self.takes_system: bool | None = None
        self.has_replied = False
        self.pace: RequestLimiter | None = None

    @property
    def flag_and_url(self) -> str:
        """The flag and the URL that identify this server in error messages."""
        return f"{self.flags.url} {self.url}"

    def send_chat_requests(
        self, request_bodies: Sequence[dict[str, Any]]
    ) -> Generator[tuple[int, ChatReplyOrProblem], None, None]:
        """
        Sends requests and yields each request's index and reply as soon as the reply arrives.

        request_bodies: for each request, a dictionary with `messages` and the protocol's settings.

        Raises ValueError, and sends no further requests, if a request is refused or still fails
        after all retries.
        """
        replies = self._yield_replies(
            [{"model": self.model, "stream": False} | body for body in request_bodies]
        )

        async def next_reply() -> tuple[int, ChatReplyOrProblem] | None:
            return await anext(replies, None)

        with asyncio.Runner() as runner:
            while reply := runner.run(next_reply()):
                yield reply

    async def _yield_replies(
        self, bodies: list[dict[str, Any]]
    ) -> AsyncIterator[tuple[int, ChatReplyOrProblem]]:
        waiting = collections.deque(enumerate(bodies))
        arrived: asyncio.Queue[tuple[int, ChatReplyOrProblem] | Exception] = asyncio.Queue()
        if self.pace is None:
            self.pace = RequestLimiter(self.concurrency)
        pace = self.pace
        pace.reset_pauses_for_new_event_loop()
        # The client follows no redirects, because a redirect could send the key to another host.
        client_context = httpx2.AsyncClient(
            headers=self.headers, verify=self.certificates, timeout=self.timeout
        )
        async with client_context as client:

            async def send_waiting_requests() -> None:
                while waiting:
                    index, body = waiting.popleft()
                    try:
                        reply = await self._send_with_retries(client, pace, body)
                        arrived.put_nowait((index, reply))
                    # the loop that awaits the replies raises this error again
                    except Exception as error:
                        arrived.put_nowait(error)

            num_workers = min(self.concurrency, len(bodies))
            workers = [asyncio.create_task(send_waiting_requests()) for _ in range(num_workers)]
            try:
                for _ in bodies:
                    outcome = await arrived.get()
                    if isinstance(outcome, Exception):
                        raise outcome
                    yield outcome
            finally:  # after an error or Ctrl-C, do not wait for the other requests
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _send_once(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> RequestOutcome:
        """
        Sends a request once and returns the outcome.

        Only the beginning of an oversized response is read.
        """
        url = f"{self.url}/chat/completions"
        content = b""
        try:
            # the client's own timeout restarts with every byte
            async with asyncio.timeout(self.timeout):
                async with client.stream("POST", url, json=body) as response:
                    async for part in response.aiter_bytes():
                        content += part
                        if len(content) > MAX_REPLY_BYTES:
                            break
        except TimeoutError:
            return RequestOutcome(problem=f"no complete reply within {self.timeout:g} s")
        except httpx2.RequestError as error:  # the connection was refused, reset or cut off
            return RequestOutcome(
                problem=self._redact_and_shorten(str(error)) or type(error).__name__
            )
        headers = {name.lower(): value for name, value in response.headers.items()}
        message = self._redact_and_shorten(content.decode(errors="replace"))
        if not message:
            message = self._redact_and_shorten(response.reason_phrase)
        problem = f"status {response.status_code}: {message}"
        return RequestOutcome(response.status_code, headers, content, problem)

    async def _send_with_retries(
        self, client: httpx2.AsyncClient, pace: RequestLimiter, body: dict[str, Any]
    ) -> ChatReplyOrProblem:
        """
        Sends a request, repeatedly if necessary, until a reply arrives, and returns the reply.

        Between tries, this method waits, and it may pause all requests or change the request.

        Raises ValueError if the server refuses the request, or if too many tries fail.
        """
        num_failures = 0
        # the first refusal that may be due to the system message
        refusal: RequestOutcome | None = None
        while True:
            is_merged = refusal is not None
            sent = self._adapt_request_to_server(body, is_merged)
            async with pace.hold_slot_and_yield_num_pauses() as num_pauses:
                response = await self._send_once(client, sent)

            status = response.status
            error = busy.extract_error(response.content) if status else None
            if status in range(200, 300):
                status = busy.extract_error_status(error) or status
            seconds = self._stated_wait_seconds(response, error)
            if busy.says_quota_is_used_up(status, error, seconds):
                raise self._make_quota_error(response)
            if busy.says_server_is_busy(status, error):
                # another request that ran at the same time may already have paused all requests
                if num_pauses == pace.num_pauses:
                    await self._pause_or_give_up(pace, response, seconds)
                continue

            if status in range(200, 300):
                self.has_replied = True
                pace.note_reply_and_raise_limit()
                self._note_system_message_support(sent, is_merged)
                return self._parse_reply(response.content)
            if status in (400, 413) and TOO_LONG.search(response.problem):
                problem = (
                    f"{response.problem}; lower {self.flags.length}, or give the server's model "
                    f"more context"
                )
                return ChatReplyOrProblem("", {}, problem)
            if status in SETTING_REFUSALS and self._drop_or_rename_setting(sent, response.problem):
                continue
            if refusal is None and self._may_be_due_to_system_message(
                sent, status, response.problem
            ):
                refusal = response
                continue
            if status and status not in TRANSIENT:
                raise self._make_refusal_error(refusal or response, sent)

            num_failures += 1
            if num_failures > self.retries:
                raise self._make_failure_error(refusal or response, num_failures)
            pause = self.first_pause * 2 ** (num_failures - 1)
            # a random pause, so that requests that failed together are not repeated together
            pause = max(seconds or 0.0, pause * random.uniform(0.5, 1.0))
            await self.sleep(min(pause, LONGEST_PAUSE))

    # ---- a server that is busy

    def _stated_wait_seconds(self, response: RequestOutcome, error: Any) -> float | None:
        """
        How many seconds a response says to wait; None if it does not say.

        If the response says to wait until a date, that date is compared with the date of the
        response, or with this machine's clock if the response has no date.
        """
        now = busy.parse_date_timestamp(response.headers.get("date", ""))
        if now is None:
            now = self.now()
        return busy.wait_seconds_from_response(response.headers, error, now)

    async def _pause_or_give_up(
        self, pace: RequestLimiter, response: RequestOutcome, seconds: float | None
    ) -> None:
        """
        Pauses all requests because the server is busy.

        seconds: how long the server asks to wait; None if the server does not say.

        Raises ValueError if the server asks to wait longer than LONGEST_WAIT, or if pauses without
        a reply have lasted PATIENCE seconds.
        """
        if seconds is not None and seconds > LONGEST_WAIT:
            raise ValueError(
                f"{self.flag_and_url} asks for a wait of {seconds:.0f} s ({response.problem}); "
                f"start again after that time, or use another {self.flags.url}"
            )
        if pace.seconds_without_reply >= PATIENCE:
            minutes = pace.seconds_without_reply / 60
            raise ValueError(
                f"{self.flag_and_url} has been busy for {minutes:.0f} minutes "
                f"({response.problem}); start again later, or use another {self.flags.url}"
            )
        # Until a reply arrives, the minimum pause doubles each time. So if the server does not say
        # how long to wait, six pauses last about a minute. If the server asks for waits that are
        # too short, the pauses still become longer.
        shortest = busy.SHORTEST_PAUSE if seconds is None else self.first_pause
        least = min(shortest * 2**pace.num_pauses_without_reply, LONGEST_PAUSE)
        seconds = max(seconds or 0.0, least)
        if seconds >= SHORTEST_PRINTED_PAUSE:
            limit = pace.limit_after_pause
            requests = "one request" if limit == 1 else f"{limit} requests"
            self._print_escaped_to_stderr(
                f"{self.flag_and_url} is busy ({response.problem}): "
                f"waiting {seconds:.0f} s, then {requests} at once"
            )
        await pace.pause_and_lower_limit(seconds, self.sleep)

    # ---- a server that refuses a setting or a system message

    def _adapt_request_to_server(
        self, request_body: dict[str, Any], is_merged: bool
    ) -> dict[str, Any]:
        """
        Returns the request without the settings that this server refuses.

        is_merged: whether to move the system message into the user's message even if the server
        might accept system messages.
        """
        sent = {
            name: value for name, value in request_body.items() if name not in self.refused_settings
        }
        if MAX_TOKENS in sent:
            sent[self.limit_name] = sent.pop(MAX_TOKENS)
        if (is_merged or self.takes_system is False) and begins_with_system_and_user(sent):
            sent["messages"] = merge_system_into_user_message(sent["messages"])
        return sent

    def _drop_or_rename_setting(self, sent: dict[str, Any], refusal_message: str) -> bool:
        """
        Drops or renames the setting that a refusal mentions, for this and all later requests.

        Returns False if the message mentions no setting that can be dropped or renamed.
        """
        optional = {name for name in OPTIONAL_SETTINGS if name in sent and name in refusal_message}
        if optional:
            self.refused_settings |= optional
            return True
        if (
            not NO_SUCH_SETTING.search(refusal_message)
            and MAX_COMPLETION_TOKENS not in refusal_message
        ):
            return False
        if MAX_TOKENS in sent and MAX_TOKENS in refusal_message:
            if self.limit_name == MAX_TOKENS:
                self._print_escaped_to_stderr(
                    f"{self.flag_and_url} does not accept {MAX_TOKENS}; "
                    f"sending {MAX_COMPLETION_TOKENS} instead"
                )
            self.limit_name = MAX_COMPLETION_TOKENS
            return True
        if self.may_adapt and "temperature" in sent and "temperature" in refusal_message:
            if "temperature" not in self.refused_settings:
                self._print_escaped_to_stderr(
                    f"{self.flag_and_url} does not accept a temperature; "
                    "the server uses its own, so scores may differ between runs"
                )
            self.refused_settings.add("temperature")
            return True
        return False

    def _may_be_due_to_system_message(
        self, sent: dict[str, Any], status: int, refusal_message: str
    ) -> bool:
        """Whether a refusal may be due to the request's system message."""
        if not self.may_adapt or self.takes_system or not begins_with_system_and_user(sent):
            return False
        # meanwhile, another request showed that the server refuses system messages
        if self.takes_system is False:
            return True
        if status in range(400, 500):
            return status not in OTHER_REFUSALS
        return status >= 500 and ABOUT_ROLES.search(refusal_message) is not None

    def _note_system_message_support(self, sent: dict[str, Any], is_merged: bool) -> None:
        """After a request succeeds, remembers whether the server accepts system messages."""
        if begins_with_system_and_user(sent):
            self.takes_system = True
        elif is_merged and self.takes_system is None:
            self.takes_system = False
            self._print_escaped_to_stderr(
                f"{self.flag_and_url} does not accept a system message; "
                "the user's message now begins with the system message's text"
            )

    # ---- errors that end a run

    def _make_refusal_error(self, response: RequestOutcome, sent: dict[str, Any]) -> ValueError:
        advice = ""
        if response.status == 404:
            advice = (
                f"; check that the URL ends in /v1, and that {self.flags.model} names a model on "
                "this server"
            )
        elif response.status == 401:
            advice = f"; set {self.flags.key} to a valid key"
        elif "logprobs" in sent and "logprobs" in response.problem:
            advice = "; set --judge-mode decode"
        return ValueError(f"{self.flag_and_url} refused a request ({response.problem}){advice}")

    def _make_quota_error(self, response: RequestOutcome) -> ValueError:
        return ValueError(
            f"{self.flag_and_url} says that your quota is used up ({response.problem}); "
            f"raise the quota, or use another {self.flags.url}"
        )

    def _make_failure_error(self, response: RequestOutcome, num_tries: int) -> ValueError:
        advice = "start the server"
        if self.has_replied:
            advice = "the server answered other requests, so it is slow or busy; wait"
        elif response.status:
            advice = "the server is running but returns errors, so read its log"
        failure = f"did not answer after {num_tries} tries"
        if response.status:
            failure = f"failed {num_tries} times"
        return ValueError(
            f"{self.flag_and_url} {failure} ({response.problem}); "
            f"{advice}, or use another {self.flags.url}"
        )

    def _print_escaped_to_stderr(self, line: str) -> None:
        tqdm.write(escape_invisible(line), file=sys.stderr)

    # ---- replies

    def _parse_reply(self, content: bytes) -> ChatReplyOrProblem:
        """
        Reads a reply from a server's JSON.

        If the content is not a chat completion, the reply's `problem` says so.
        """
        try:
            record = read_json(content)
            choice = record["choices"][0]
            message = choice["message"]
            text, thought = split_text_and_thought(message.get("content"))
            thought = message.get("reasoning_content") or message.get("reasoning") or thought
            first_logprobs = read_first_logprobs(choice)
            if not all(isinstance(part, str) for part in (text, thought, *first_logprobs)):
                raise TypeError
            usage = record.get("usage") or {}
            num_prompt_tokens = usage.get("prompt_tokens")
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            shown = self._redact_and_shorten(content.decode(errors="replace"))
            return ChatReplyOrProblem("", {}, f"the server sent no chat completion: {shown!r:.80}")
        return ChatReplyOrProblem(
            text=redact_secrets(text, self.key),
            first_logprobs=first_logprobs,
            thought=redact_secrets(thought, self.key),
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            prompt_tokens=num_prompt_tokens if type(num_prompt_tokens) is int else None,
        )

    def _redact_and_shorten(self, text: str) -> str:
        """A text from the server or the client as one short line, with the key removed."""
        return " ".join(redact_secrets(text, self.key).split())[:300]


def check_server_url(flags: ServerSettingNames, url: str) -> None:
    """Raises ValueError if the URL is not a server's URL, or if the URL contains a password."""
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL:
        parts = httpx2.URL("")
    if parts.userinfo:
        raise ValueError(
            f"{flags.url} contains a password; remove it, and put the key into {flags.key}"
        )
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
        raise ValueError(
            f"{flags.url} {url!r:.100} is not a server's URL; write it like http://127.0.0.1:8080/v1"
        )


def read_first_logprobs(choice: dict[str, Any]) -> dict[str, float]:
    """
    The log-probabilities of the likeliest first tokens, by the token's text.

    The result is empty if the server sent no log-probabilities.
    """
    logprobs = choice.get("logprobs") or {}
    tokens = logprobs.get("content") or [{}]
    entries = tokens[0].get("top_logprobs") or []
    return {entry["token"]: float(entry["logprob"]) for entry in entries}
