"""
The HTTP endpoint at which an outside harness asks the policy for tokens.

`POST /inference/v1/generate` samples one turn, and `GET /v1/models` names the model and the length
of its context. The endpoint runs in a thread of its own, and accepts connections only from this
machine. It puts every request into a queue. The thread with the model takes the requests from this
queue and answers them.
"""

import asyncio
import hmac
import json
import queue
import threading
from typing import Any

from aiohttp import web

from serving.requests import (
    PendingRequest,
    RefusedRequest,
    make_error,
    parse_generate_request,
)

HOST = "127.0.0.1"
MODEL_NAME = "policy"
MOST_BODY_BYTES = 16 << 20  # the largest size of a request's body
START_SECONDS = 30.0
SHUTDOWN_SECONDS = 1.0  # how long `close` waits for requests that are still open


class RequestCancellation:
    """Tells the thread with the model that a client has given up its request."""

    def __init__(self, pending: PendingRequest):
        self.pending = pending


class Endpoint:
    """
    The endpoint, which runs until `close`.

    most_open: the maximum number of requests that may wait for replies at the same time. The
    endpoint answers further requests at once with the status 503, after which OpenAI's clients try
    again later.
    """

    most_open = 0
    context = 0  # the most tokens of a conversation

    def __init__(self, token: str, events: "queue.SimpleQueue[Any]"):
        """
        token: the secret that each request must contain.
        events: the queue for requests and for their cancellations.
        """
        self.token = token
        self.events = events
        self.num_requests = 0
        self.num_open = 0
        self.port = 0
        self.loop = asyncio.new_event_loop()
        self._has_started = threading.Event()
        self._start_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="gwen-endpoint", daemon=True)
        self._thread.start()
        if not self._has_started.wait(START_SECONDS) or self._start_error:
            raise ValueError(f"--env-server: the endpoint cannot start: {self._start_error}")

    @property
    def url(self) -> str:
        """The address for OpenAI's clients."""
        return f"http://{HOST}:{self.port}/v1"

    def close(self) -> None:
        """Stops the endpoint. Requests that still wait for replies are dropped."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(START_SECONDS)

    # ---- the thread of the endpoint

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        application = web.Application(client_max_size=MOST_BODY_BYTES)
        application.router.add_post("/inference/v1/generate", self._generate)
        application.router.add_get("/v1/models", self._list_models)
        # a handler is cancelled when its client closes the connection
        runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        try:
            self.loop.run_until_complete(runner.setup())
            site = web.TCPSite(runner, HOST, 0, backlog=1024)
            self.loop.run_until_complete(site.start())
            self.port = runner.addresses[0][1]
        except Exception as error:
            self._start_error = error
            self._has_started.set()
            return
        self._has_started.set()
        self.loop.run_forever()
        self.loop.run_until_complete(runner.cleanup())
        self.loop.close()

    def _check_token(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "")
        expected = f"Bearer {self.token}"
        # aiohttp reads bytes that are not UTF-8 as halves of surrogate pairs
        if not hmac.compare_digest(
            given.encode(errors="surrogateescape"), expected.encode(errors="surrogateescape")
        ):
            raise RefusedRequest("the API key is wrong", status=401)

    async def _list_models(self, request: web.Request) -> web.Response:
        try:
            self._check_token(request)
        except RefusedRequest as refusal:
            return _error_response(refusal)
        # a prompt must leave room for at least one token
        card = {"id": MODEL_NAME, "object": "model", "max_model_len": self.context - 1}
        return web.json_response({"object": "list", "data": [card]})

    async def _generate(self, request: web.Request) -> web.Response:
        try:
            self._check_token(request)
            if self.num_open >= self.most_open:
                raise RefusedRequest(
                    f"{self.num_open} requests are open already; try again later", status=503
                )
            # The request counts as open from here on. While its body is read, other requests are
            # handled, and they must see the new count.
            self.num_open += 1
            try:
                return await self._read_request_and_wait_for_reply(request)
            finally:
                self.num_open -= 1
        except RefusedRequest as refusal:
            return _error_response(refusal)

    async def _read_request_and_wait_for_reply(self, request: web.Request) -> web.Response:
        """Reads a request, passes it on, and returns the reply. Raises RefusedRequest."""
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(f"the body is not JSON: {error}") from error
        parsed = parse_generate_request(body, request.headers.get("X-Session-ID", ""))

        self.num_requests += 1
        pending = PendingRequest(parsed, self.num_requests)
        self.events.put(pending)
        try:
            status, reply = await pending.reply
        except asyncio.CancelledError:
            self.events.put(RequestCancellation(pending))
            raise
        return web.json_response(reply, status=status)


def _error_response(refusal: RefusedRequest) -> web.Response:
    return web.json_response(make_error(str(refusal), refusal.status), status=refusal.status)
