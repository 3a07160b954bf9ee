"""
The requests that the endpoint receives, and their replies.

Their format is that of vLLM's `/inference/v1/generate`. A request holds the token ids of a whole
conversation up to the model's next turn. The reply holds the ids of this turn and the
log-probability of each id. This file checks requests and writes replies. serving/endpoint.py
receives the requests, and serving/episodes.py answers them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# the sampling settings that a request may contain only with the run's values, by their vLLM names
FIXED_SETTINGS = ("temperature", "top_p", "top_k", "min_p")
# the values with which vLLM switches a setting off
OFF = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}
# settings that would change the distribution of the tokens, each with the only allowed value
NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "min_tokens": 0,
}
LARGEST_NUMBER = 1e9  # the largest allowed value of a setting
UNSUPPORTED = (
    "stop",
    "ignore_eos",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
)


class RefusedRequest(ValueError):
    """
    A request cannot be carried out, and is answered with an HTTP error.

    status: the HTTP status of the reply.
    """

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class GenerateRequest(NamedTuple):
    """One request for a turn."""

    session: str  # the conversation's name, the same in all of its requests
    token_ids: list[int]  # the whole conversation up to the turn
    max_tokens: int | None  # the most tokens of the turn
    stop_token_ids: list[int]
    settings: dict[str, float]  # those of FIXED_SETTINGS that the request contains


def parse_generate_request(body: Any, session: str) -> GenerateRequest:
    """
    Reads the JSON body of a request.

    session: the header `X-Session-ID`.

    Raises RefusedRequest if a field is missing or has a wrong type, or if the request asks for
    something that the endpoint cannot do.
    """
    if not session:
        raise RefusedRequest("the header X-Session-ID is missing; send the name of the episode")
    if not isinstance(body, dict):
        raise RefusedRequest("the body is not a JSON object")
    for name in ("features", "content_parts"):
        if body.get(name):
            raise RefusedRequest(f"the request has {name}; only text is supported")
    token_ids = _read_ids(body, "token_ids")
    if not token_ids:
        raise RefusedRequest("token_ids is empty; send the ids of the conversation")

    params = body.get("sampling_params")
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        raise RefusedRequest("sampling_params is not a JSON object")
    for name in UNSUPPORTED:
        if params.get(name):
            raise RefusedRequest(
                f"sampling_params has {name}, which is not supported; leave it out"
            )
    for name, neutral in NEUTRAL.items():
        if params.get(name) not in (None, neutral):
            raise RefusedRequest(
                f"sampling_params has {name} {params[name]!r:.40}; only {neutral} is supported"
            )
    settings = {}
    for name in FIXED_SETTINGS:
        if params.get(name) is not None:
            settings[name] = _read_number(params, name)
    max_tokens = None
    if params.get("max_tokens") is not None:
        max_tokens = int(_read_number(params, "max_tokens"))
        if max_tokens < 1:
            raise RefusedRequest(f"max_tokens is {max_tokens}; it must be at least 1")
    return GenerateRequest(
        session, token_ids, max_tokens, _read_ids(params, "stop_token_ids"), settings
    )


def _read_ids(fields: Mapping[str, Any], name: str) -> list[int]:
    """A list of token ids; [] if the field is missing."""
    ids = fields.get(name)
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(type(id_) is int for id_ in ids):
        raise RefusedRequest(f"{name} is not a list of integers")
    return ids


def _read_number(fields: Mapping[str, Any], name: str) -> float:
    number = fields[name]
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not abs(number) <= LARGEST_NUMBER:  # false for nan, too
        raise RefusedRequest(f"{name} is {number!r:.40}; send a number")
    return float(number)


def make_generate_reply(
    request_id: str, ids: Sequence[int], logprobs: Sequence[float], finish_reason: str
) -> dict[str, Any]:
    """
    The JSON body of a reply.

    ids: the ids of the turn, including its end token.
    finish_reason: "stop" if the turn has an end token, and "length" if it was cut off.
    """
    content = [
        {"token": f"token_id:{id_}", "logprob": float(logprob)}
        for id_, logprob in zip(ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": list(ids),
        "logprobs": {"content": content},
        "finish_reason": finish_reason,
    }
    return {"request_id": request_id, "choices": [choice]}


class PendingRequest:
    """A request that waits for its reply. A thread other than the endpoint's sends the reply."""

    def __init__(self, request: GenerateRequest, number: int):
        """
        number: the number in the request's id.

        This method must be called in the endpoint's thread.
        """
        self.request = request
        self.id = f"gwen-{number}"
        self.loop = asyncio.get_running_loop()
        # the status and the JSON body of the reply
        self.reply: asyncio.Future[tuple[int, dict[str, Any]]] = self.loop.create_future()

    def answer(self, ids: Sequence[int], logprobs: Sequence[float], finish_reason: str) -> None:
        """Sends the reply with the ids of the turn."""
        self._set_reply(200, make_generate_reply(self.id, ids, logprobs, finish_reason))

    def refuse(self, message: str, status: int = 400) -> None:
        """Answers the request with an HTTP error."""
        self._set_reply(status, make_error(message, status))

    def _set_reply(self, status: int, body: dict[str, Any]) -> None:
        def set_result() -> None:
            if not self.reply.done():
                self.reply.set_result((status, body))

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(set_result)


def make_error(message: str, status: int) -> dict[str, Any]:
    """The JSON body of an HTTP error, in the format that OpenAI's clients expect."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}
