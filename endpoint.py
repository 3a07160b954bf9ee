"""
Chat completions of an OpenAI-compatible server: requests in parallel, retried while the server is busy or away.

What is left out: streaming, tools, and what the messages say. Standard library only.
"""

import http.client
import json
import queue
import random
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Messages = list[dict[str, str]]
BUSY = {408, 409, 425, 429, *range(500, 600)}  # status codes that a later try may not meet; proxies have made up many
TOO_LONG = re.compile(r"context[ _](length|size|window)", re.IGNORECASE)  # in what vLLM, llama.cpp and OpenAI say
LONGEST_WAIT = 60.0  # seconds between two tries, whatever the server asks for
LONGEST_REPLY = 2**24  # bytes; a server that sends more is no judge


class Reply(NamedTuple):
    """What the server answered."""

    text: str
    first: dict[str, float]  # log-probabilities of the likeliest first tokens, by their text; empty if none were given
    problem: str = ""  # why there is no reply to a prompt that is too long for the server's model


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host, so it is an error."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Endpoint:
    """
    The server at `url` ("http://host:port/v1"), asked for its model `model`.

    concurrency: requests at once. timeout: seconds for one try. retries: tries after the first, each after a pause
    twice as long as the last, or longer where the server says so. key: sent as a bearer token, and to no other host.
    Raises ValueError when the URL is none.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        concurrency: int = 8,
        timeout: float = 60.0,
        retries: int = 5,
        first_pause: float = 0.5,
    ):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"--judge-url {url!r:.100}: it must be like http://127.0.0.1:8080/v1")
        if parts.username or parts.password:
            raise ValueError("--judge-url holds a password, which logs would show; put the key into JUDGE_API_KEY")
        if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ValueError("JUDGE_API_KEY has characters that no key has; set it again")
        self.url, self.model = url.rstrip("/").removesuffix("/chat/completions"), model
        self.key, self.concurrency, self.timeout = key, concurrency, timeout
        self.retries, self.first_pause = retries, first_pause
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._knows_template = True  # until the server refuses `chat_template_kwargs`, which OpenAI's own does

    def chat(
        self, conversations: Sequence[Messages], *, max_tokens: int, top_logprobs: int = 0, thinking: bool = False
    ) -> Iterator[tuple[int, Reply]]:
        """
        The greedy reply to each conversation with its place, as they arrive; an empty one where it is longer than the
        model's context.

        top_logprobs: how many of the likeliest first tokens to ask for. Raises ValueError when a request is refused or
        still fails after all retries; then no further request is sent.
        """
        stop = threading.Event()
        todo = iter(list(enumerate(conversations)))  # a list's iterator gives each item to one thread
        done: queue.SimpleQueue[tuple[int, Reply | Exception]] = queue.SimpleQueue()

        def work() -> None:
            while not stop.is_set() and (item := next(todo, None)):
                try:
                    done.put((item[0], self._ask(item[1], max_tokens, top_logprobs, thinking, stop)))
                except Exception as error:
                    done.put((item[0], error))
                    stop.set()

        try:
            for _ in range(min(self.concurrency, len(conversations))):
                # no executor: it waits for its threads, which may wait for the server, even when the program ends
                threading.Thread(target=work, name="judge", daemon=True).start()
            for _ in conversations:
                place, reply = done.get()
                if isinstance(reply, Exception):
                    raise reply
                yield place, reply
        finally:  # a refused request, or Ctrl-C: nobody waits for the others
            stop.set()

    def _ask(
        self, messages: Messages, max_tokens: int, top_logprobs: int, thinking: bool, stop: threading.Event
    ) -> Reply:
        """One request with its retries."""
        pause = self.first_pause
        for left in reversed(range(self.retries + 1)):
            body: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": max_tokens}
            body |= {"temperature": 0, "stream": False}
            if top_logprobs:
                body |= {"logprobs": True, "top_logprobs": top_logprobs}
            if self._knows_template:
                body["chat_template_kwargs"] = {"enable_thinking": thinking}
            try:
                return self._post(body)
            except urllib.error.HTTPError as error:
                said = _said(error)
                if error.code in (400, 422) and "chat_template_kwargs" in said and "chat_template_kwargs" in body:
                    self._knows_template = False
                    return self._ask(messages, max_tokens, top_logprobs, thinking, stop)
                problem = f"status {error.code}: {said}"
                if error.code in (400, 413) and TOO_LONG.search(said):
                    return Reply("", {}, problem)
                if error.code not in BUSY:
                    raise ValueError(f"--judge-url {self.url} refused a request ({problem})") from error
                asked_for = _seconds(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out
                problem, asked_for = str(error) or type(error).__name__, 0.0
            if not left or stop.is_set():
                break
            # a random share, so that requests that failed together do not come back together
            stop.wait(min(max(asked_for, pause * random.uniform(0.5, 1.0)), LONGEST_WAIT))
            pause *= 2
        raise ValueError(
            f"--judge-url {self.url} did not answer after {self.retries + 1} tries ({problem:.300}); "
            "start it, or name another --judge-url"
        )

    def _post(self, body: dict[str, Any]) -> Reply:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/chat/completions", data=data, headers=headers)
        begin = time.monotonic()
        with self._opener.open(request, timeout=self.timeout) as response:
            content = b""
            while part := response.read1(2**16):  # the socket's time-out starts anew with every byte; ours does not
                content += part
                if len(content) > LONGEST_REPLY or time.monotonic() - begin > self.timeout:
                    raise TimeoutError(f"no whole reply within {self.timeout:g} s and {LONGEST_REPLY} bytes")
            if response.length:  # what is still to come of the Content-Length
                raise ConnectionError(f"the reply was cut off, {response.length} bytes before its end")
        return _reply(content, self.url)


def _reply(content: bytes, url: str) -> Reply:
    """The reply in a server's JSON. ValueError when it is of another protocol."""
    try:
        choice = json.loads(content)["choices"][0]
        text = choice["message"].get("content") or ""
        tokens = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs") or []
        first = {str(entry["token"]): float(entry["logprob"]) for entry in tokens}
        if not isinstance(text, str):
            raise TypeError(f"its content is a {type(text).__name__}")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"--judge-url {url} sent no chat completion: {content[:80]!r}") from error
    return Reply(text, first)


def _said(error: urllib.error.HTTPError) -> str:
    """The beginning of what a server said about a failure, on one line."""
    try:
        text = error.read(2**16).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        text = ""
    return " ".join(text.split())[:300] or error.reason


def _seconds(retry_after: str | None) -> float:
    """Seconds of a Retry-After header; 0 where it is missing or a date."""
    return float(retry_after) if retry_after and re.fullmatch(r"\d{1,6}(\.\d+)?", retry_after) else 0.0
