"""
Reads from a response whether a server is busy, for how long, and whether waiting helps.

A server may say so in the status, in headers or in the body, each in several forms. The waiting
itself is in judging/server.py.
"""

import email.utils
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from text.documents import read_json

BUSY = {429, 503, 529}  # too many requests, unavailable, overloaded
# Seconds of the first pause if a busy server does not say how long to wait. Each pause is twice as
# long as the last: six of them make a minute, after which most rate limits begin anew, and a server
# that is busy only for a moment soon gets the request again.
SHORTEST_PAUSE = 1.0

SAYS_BUSY = re.compile(
    r"rate.?limit|too.?many.?requests|overloaded|at capacity|server.?(?:is )?busy|slow.?down"
    r"|resource.?exhausted|temporarily unavailable|try again (?:later|in)",
    re.IGNORECASE,
)
# Error codes and types that OpenAI, DeepSeek, OpenRouter, Mistral and Anthropic send
QUOTA_CODES = re.compile(
    r"insufficient.?(?:quota|balance|credits?|funds)|billing.?(?:hard.?limit|not.?active|error)"
    r"|quota.?exhausted|payment.?required|access.?terminated",
    re.IGNORECASE,
)
QUOTA_MESSAGES = re.compile(
    r"exceeded your current quota|(?:credit )?balance is too low|out of credits"
    r"|insufficient (?:balance|credits?|funds)|billing hard limit",
    re.IGNORECASE,
)
PAYMENT_REQUIRED = 402

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
UNIT = r"(?:ms|milli\w*|s|sec\w*|m|min\w*|h|hours?|hrs?|d|days?)(?![a-z])"
DURATION = re.compile(rf"(\d+(?:\.\d+)?)\s*({UNIT})", re.IGNORECASE)
ASKS_TO_WAIT = re.compile(
    r"(?:try|retry|available|reset\w*|wait)\D{0,40}?"
    rf"((?:\d+(?:\.\d+)?\s*{UNIT}[\s,]*(?:and\s+)?)+)",
    re.IGNORECASE,
)
# A number above EPOCH is a date in seconds since 1970. One above 1000 * EPOCH is in milliseconds.
EPOCH = 1e9


def read_duration(text: str) -> float | None:
    """
    The seconds of a duration such as "20", "20s", "6m0s", "1m30.5s", "250ms" or "2 minutes".

    None if the text is no duration.
    """
    text = text.strip()
    if re.fullmatch(r"\d{1,20}(?:\.\d{1,20})?", text):
        return float(text)
    parts = DURATION.findall(text)
    if not parts or re.sub(r"[\s,]|and", "", DURATION.sub("", text)):
        return None
    seconds = 0.0
    for number, unit in parts:
        name = "ms" if unit.lower().startswith(("ms", "milli")) else unit[0].lower()
        seconds += float(number) * UNITS[name]
    return seconds


def read_date(text: str) -> float | None:
    """
    The seconds since 1970 of a date; None if the text is no date.

    text: an HTTP date, such as "Wed, 21 Oct 2015 07:28:00 GMT", or an ISO 8601 date.
    """
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text)
        except ValueError:
            return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return date.timestamp()


def read_wait(text: str, now: float) -> float | None:
    """The seconds to wait, from a duration or a date; None if the text is neither."""
    seconds = read_duration(text)
    if seconds is None:
        date = read_date(text.strip())
        return None if date is None else max(date - now, 0.0)
    if seconds > EPOCH * 1000:
        seconds /= 1000
    return max(seconds - now, 0.0) if seconds > EPOCH else seconds


def read_wait_from_headers(headers: Mapping[str, str], now: float) -> float | None:
    """
    The seconds to wait according to a response's headers; None if they do not say.

    The headers may be Retry-After, retry-after-ms or the reset of a rate limit. If there are
    several rate limits, the longest reset counts, among the used-up limits if there are any.

    headers: by name in lower case.
    """
    milliseconds = headers.get("retry-after-ms", "")
    if re.fullmatch(r"\d{1,12}(?:\.\d+)?", milliseconds):
        return float(milliseconds) / 1000
    stated = read_wait(headers.get("retry-after", ""), now)
    if stated is not None:
        return stated

    used_up: list[float] = []
    unused: list[float] = []
    for name, text in headers.items():
        if "ratelimit" not in name or "reset" not in name:
            continue
        seconds = read_wait(text, now)
        if seconds is None:
            continue
        remaining = headers.get(name.replace("reset", "remaining"), "")
        is_used_up = re.fullmatch(r"0+(?:\.0+)?", remaining) is not None
        (used_up if is_used_up else unused).append(seconds)
    return max(used_up or unused, default=None)


def list_values(content: Any) -> Iterator[tuple[str, Any]]:
    """Yields every number, text, boolean and null in a JSON value, with its key in lower case."""
    waiting = [("", content)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(name).lower(), inner) for name, inner in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(key, inner) for inner in reversed(value)]
        else:
            yield key, value


def read_wait_from_body(content: Any, now: float) -> float | None:
    """
    The seconds to wait according to a response's body; None if it does not say.

    The body may hold `retry_after`, `retryDelay`, headers, or a message like "try again in 20s".
    """
    headers = {}
    for key, value in list_values(content):
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            continue
        headers[key.replace("_", "-")] = str(value)
        if key in ("retry_after", "retryafter", "retrydelay", "retry_delay", "retry_after_seconds"):
            seconds = read_wait(str(value), now)
            if seconds is not None:
                return seconds
    # some servers put the headers of another server into the body
    stated = read_wait_from_headers(headers, now)
    if stated is not None:
        return stated
    for _, value in list_values(content):
        request = ASKS_TO_WAIT.search(value) if isinstance(value, str) else None
        if request:
            return read_duration(request[1])
    return None


def find_wait(headers: Mapping[str, str], error: Any, now: float) -> float | None:
    """The seconds to wait according to a response's headers, or else to the error in its body."""
    seconds = read_wait_from_headers(headers, now)
    return read_wait_from_body(error, now) if seconds is None else seconds


def find_error(body: bytes) -> Any:
    """
    The error in a response's body; None if the body has a reply instead.

    If the body is no JSON, the error is the body's text.
    """
    try:
        content = read_json(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")[:2000]
    if not isinstance(content, dict):
        return content
    if content.get("error"):
        return content["error"]
    choices = content.get("choices")
    if isinstance(choices, list) and choices:
        return choices[0].get("error") if isinstance(choices[0], dict) else None
    return content


def find_status(error: Any) -> int | None:
    """The status in an error, as in `{"code": 429}`; None if it has none."""
    for key, value in list_values(error):
        if key not in ("code", "status", "status_code", "http_status"):
            continue
        is_digits = isinstance(value, str) and re.fullmatch(r"[45]\d\d", value)
        if (type(value) is int or is_digits) and 400 <= int(value) < 600:
            return int(value)
    return None


def is_busy(status: int, error: Any) -> bool:
    """Whether a response's status, or the error in its body, says that the server is busy."""
    if status in BUSY or find_status(error) in BUSY:
        return True
    is_plain_text = isinstance(error, str) and status < 400
    may_say_so = status < 400 or status == 403 or status >= 500
    if not may_say_so or is_plain_text:
        return False
    return any(
        isinstance(value, str) and SAYS_BUSY.search(value) for _, value in list_values(error)
    )


def is_out_of_quota(status: int, error: Any, seconds: float | None) -> bool:
    """
    Whether a response says that a quota is used up, so that waiting does not help.

    seconds: the wait that the response states, or None.
    """
    if status == PAYMENT_REQUIRED or find_status(error) == PAYMENT_REQUIRED:
        return True
    texts = [value for _, value in list_values(error) if isinstance(value, str)]
    if any(QUOTA_CODES.search(text) for text in texts):
        return True
    return seconds is None and any(QUOTA_MESSAGES.search(text) for text in texts)
