"""
Finds out from a response whether a server is busy, how long to wait, and whether waiting helps.

A server may give this information in the response's status, headers or body, in several formats.
judging/server.py does the waiting.
"""

import email.utils
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from text.documents import read_json

BUSY = {429, 503, 529}  # status codes: too many requests, unavailable, overloaded

# The first pause, in seconds, if a busy server does not say how long to wait. Each pause is twice
# as long as the previous one. So a server that is busy only for a moment soon gets the request
# again, and six pauses last about a minute, after which most rate limits reset.
SHORTEST_PAUSE = 1.0

SAYS_BUSY = re.compile(
    r"rate.?limit|too.?many.?requests|overloaded|at capacity|server.?(?:is )?busy|slow.?down"
    r"|resource.?exhausted|temporarily unavailable|try again (?:later|in)",
    re.IGNORECASE,
)
# error codes and error types that OpenAI, DeepSeek, OpenRouter, Mistral and Anthropic send
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
# A number above EPOCH is a date in seconds since 1970; a number above 1000 * EPOCH is a date in
# milliseconds since 1970.
EPOCH = 1e9


def parse_duration_seconds(text: str) -> float | None:
    """
    The number of seconds in a duration; None if the text is not a duration.

    text: for example "20", "20s", "6m0s", "1m30.5s", "250ms" or "2 minutes".
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


def parse_date_timestamp(text: str) -> float | None:
    """
    A date as seconds since 1970; None if the text is not a date.

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


def parse_wait_seconds(duration_or_date: str, now: float) -> float | None:
    """The seconds in a duration, or from `now` until a date; None if the text is neither."""
    seconds = parse_duration_seconds(duration_or_date)
    if seconds is None:
        date = parse_date_timestamp(duration_or_date.strip())
        return None if date is None else max(date - now, 0.0)
    if seconds > EPOCH * 1000:
        seconds /= 1000
    return max(seconds - now, 0.0) if seconds > EPOCH else seconds


def wait_seconds_from_headers(headers: Mapping[str, str], now: float) -> float | None:
    """
    The seconds to wait according to a response's headers; None if the headers do not say.

    The headers may be Retry-After, retry-after-ms, or the reset times of rate limits. If some rate
    limits are used up, the wait is the longest of their reset times; otherwise, it is the longest
    reset time of all limits.

    headers: the header values by lower-case name. now: the time in seconds since 1970.
    """
    milliseconds = headers.get("retry-after-ms", "")
    if re.fullmatch(r"\d{1,12}(?:\.\d+)?", milliseconds):
        return float(milliseconds) / 1000
    stated = parse_wait_seconds(headers.get("retry-after", ""), now)
    if stated is not None:
        return stated

    used_up: list[float] = []
    unused: list[float] = []
    for name, text in headers.items():
        if "ratelimit" not in name or "reset" not in name:
            continue
        seconds = parse_wait_seconds(text, now)
        if seconds is None:
            continue
        remaining = headers.get(name.replace("reset", "remaining"), "")
        is_used_up = re.fullmatch(r"0+(?:\.0+)?", remaining) is not None
        (used_up if is_used_up else unused).append(seconds)
    return max(used_up or unused, default=None)


def iterate_json_leaves_with_lower_keys(json_value: Any) -> Iterator[tuple[str, Any]]:
    """
    Yields every number, string, boolean and null in a JSON value, with its key in lower case.

    An item of a list has the key of the list. Without any key, the key is "".
    """
    waiting = [("", json_value)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(name).lower(), inner) for name, inner in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(key, inner) for inner in reversed(value)]
        else:
            yield key, value


def wait_seconds_from_error(error: Any, now: float) -> float | None:
    """
    The seconds to wait according to a response's body; None if the body does not say.

    The body may contain `retry_after`, `retryDelay`, headers, or a message like "try again in 20s".
    """
    headers = {}
    for key, value in iterate_json_leaves_with_lower_keys(error):
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            continue
        headers[key.replace("_", "-")] = str(value)
        if key in ("retry_after", "retryafter", "retrydelay", "retry_delay", "retry_after_seconds"):
            seconds = parse_wait_seconds(str(value), now)
            if seconds is not None:
                return seconds
    # some servers copy another server's headers into the body
    stated = wait_seconds_from_headers(headers, now)
    if stated is not None:
        return stated
    for _, value in iterate_json_leaves_with_lower_keys(error):
        request = ASKS_TO_WAIT.search(value) if isinstance(value, str) else None
        if request:
            return parse_duration_seconds(request[1])
    return None


def wait_seconds_from_response(headers: Mapping[str, str], error: Any, now: float) -> float | None:
    """The seconds to wait according to a response's headers, or else to the error in its body."""
    seconds = wait_seconds_from_headers(headers, now)
    return wait_seconds_from_error(error, now) if seconds is None else seconds


def extract_error(response_body: bytes) -> Any:
    """
    The error in a response's body; None if the body is a reply without an error.

    If the body is not JSON, the error is the body's text.
    """
    try:
        content = read_json(response_body)
    except (ValueError, RecursionError):
        return response_body.decode(errors="replace")[:2000]
    if not isinstance(content, dict):
        return content
    if content.get("error"):
        return content["error"]
    choices = content.get("choices")
    if isinstance(choices, list) and choices:
        return choices[0].get("error") if isinstance(choices[0], dict) else None
    return content


def extract_error_status(error: Any) -> int | None:
    """The HTTP status code in an error, such as 429; None if the error contains none."""
    for key, value in iterate_json_leaves_with_lower_keys(error):
        if key not in ("code", "status", "status_code", "http_status"):
            continue
        is_digits = isinstance(value, str) and re.fullmatch(r"[45]\d\d", value)
        if (type(value) is int or is_digits) and 400 <= int(value) < 600:
            return int(value)
    return None


def says_server_is_busy(status: int, error: Any) -> bool:
    """Whether a response's status or its error says that the server is busy."""
    if status in BUSY or extract_error_status(error) in BUSY:
        return True
    is_plain_text = isinstance(error, str) and status < 400
    may_say_so = status < 400 or status == 403 or status >= 500
    if not may_say_so or is_plain_text:
        return False
    return any(
        isinstance(value, str) and SAYS_BUSY.search(value)
        for _, value in iterate_json_leaves_with_lower_keys(error)
    )


def says_quota_is_used_up(status: int, error: Any, stated_wait_seconds: float | None) -> bool:
    """
    Whether a response says that a quota is used up, in which case waiting does not help.

    stated_wait_seconds: how long the response says to wait, or None if it does not say.
    """
    if status == PAYMENT_REQUIRED or extract_error_status(error) == PAYMENT_REQUIRED:
        return True
    texts = [
        value for _, value in iterate_json_leaves_with_lower_keys(error) if isinstance(value, str)
    ]
    if any(QUOTA_CODES.search(text) for text in texts):
        return True
    return stated_wait_seconds is None and any(QUOTA_MESSAGES.search(text) for text in texts)
