"""Chat completions of a scripted server on loopback that is busy, slow or wrong, or redirects."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import catch_message, mark_readable

import flags
from config import JudgeSettings
from judging import busy, judge_prompts, remote_judge, rubrics
from judging import server as client
from judging.server import Endpoint
from settings.checks import check_settings

HELLO = [{"role": "user", "content": "hello"}]


def chat_completion(text, top=()):
    """A chat completion; `top` lists the likeliest tokens with their log-probabilities."""
    logprobs = None
    if top:
        entries = [{"token": token, "logprob": logprob} for token, logprob in top]
        logprobs = {"content": [{"token": text, "logprob": 0.0, "top_logprobs": entries}]}
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"message": message, "logprobs": logprobs}]})


class Server:
    """
    A server that answers with the status, body and headers that `answer(number, body)` returns.

    It records all requests.
    """

    def __init__(self, answer):
        self.requests = []
        self.running = 0
        self.most_running = 0
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.requests)
                    outer.requests.append((self.path, dict(self.headers), body))
                    outer.running += 1
                    outer.most_running = max(outer.most_running, outer.running)
                status, content, headers = answer(number, body)
                payload = content.encode(errors="surrogateescape")
                with lock:
                    outer.running -= 1
                try:
                    start = self.send_response_only if "Date" in headers else self.send_response
                    start(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    if "Content-Length" not in headers:
                        self.send_header("Content-Length", str(len(payload)))
                    self.end_headers()
                    self.wfile.write(payload)
                except OSError:  # the client gave up
                    pass

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture(name="serve")
def serve_fixture(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with contextlib.ExitStack() as servers:
        yield lambda answer: servers.enter_context(contextlib.closing(Server(answer)))


def make_endpoint(server, key=None, **attributes):
    """A client of the server, with these attributes."""
    endpoint = Endpoint(remote_judge.FLAGS, server.url, "tiny", key)
    vars(endpoint).update({"timeout": 5.0, "first_pause": 0.01} | attributes)
    return endpoint


def send_requests(endpoint, conversations=(HELLO,), **parameters):
    """Sends one request per conversation; returns the replies in the order of the conversations."""
    requests = [{"messages": messages} | parameters for messages in conversations]
    replies = dict(endpoint.send_chat_requests(requests))
    return [replies[place] for place in sorted(replies)]


def test_a_request_follows_the_protocol_and_the_client_reads_the_reply(serve):
    server = serve(lambda *_: (200, chat_completion("4", [("4", -0.1), ("5", -2.5)]), {}))
    scores = make_judge(server).score(["a"], ["b"]).scores
    assert scores == pytest.approx(4.083, abs=1e-3)

    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert [message["role"] for message in body.pop("messages")] == ["system", "user"]
    assert body == {
        "model": "tiny",
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "logprobs": True,
        "top_logprobs": 10,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_replies_carry_their_places_and_concurrency_limits_simultaneous_requests(serve):
    def answer(number, body):
        time.sleep(0.05 if number % 2 else 0.1)
        return 200, chat_completion(body["messages"][0]["content"].upper()), {}

    server = serve(answer)
    conversations = [[{"role": "user", "content": f"n{i}"}] for i in range(12)]
    replies = send_requests(make_endpoint(server, concurrency=3), conversations)
    assert [reply.text for reply in replies] == [f"N{i}" for i in range(12)]
    assert server.most_running == 3
    assert len(server.requests) == 12


class Clock:
    """A clock that jumps instead of sleeping, and records the pauses."""

    def __init__(self):
        self.pauses = []

    async def sleep(self, seconds):
        self.pauses.append(seconds)

    @property
    def seconds(self):
        return sum(self.pauses)


@pytest.mark.parametrize("status", [408, 500, 502])
def test_the_pauses_after_failures_double_unless_the_server_names_a_pause(serve, status):
    def answer(number, _):
        if number >= 4:
            return 200, chat_completion("5"), {}
        headers = {"Retry-After": "0.5"} if number == 3 else {}
        return status, "later", headers

    clock = Clock()
    endpoint = make_endpoint(serve(answer), retries=4, first_pause=0.02, sleep=clock.sleep)
    (reply,) = send_requests(endpoint)
    assert reply.text == "5"
    for pause, longest in zip(clock.pauses[:3], (0.02, 0.04, 0.08), strict=True):
        assert longest / 2 <= pause <= longest
    assert clock.pauses[3:] == [0.5]


# ---- a busy server

LATER = {"error": {"message": "Rate limit reached. Please try again in 20s.", "code": 429}}
IN_40_S = {"Date": "Wed, 21 Oct 2026 07:28:00 GMT", "Retry-After": "Wed, 21 Oct 2026 07:28:40 GMT"}
BUSY = {  # status, body and headers of a busy server, and the seconds that the client waits
    "nothing": (429, "slow down", {}, 1),
    "503": (503, "", {}, 1),
    "529": (529, '{"type": "error", "error": {"type": "overloaded_error"}}', {}, 1),
    "seconds": (429, "", {"Retry-After": "41"}, 41),
    "a date": (429, "", {"Retry-After": "Sun, 06 Nov 1994 08:49:37 GMT"}, 0.5),
    "a date with the server's clock": (429, "", IN_40_S, 40),
    "milliseconds": (429, "", {"retry-after-ms": "2500"}, 2.5),
    "a reset": (429, "", {"x-ratelimit-reset-requests": "6m0s"}, 360),
    "the reset of what is used up": (
        429,
        "",
        {
            "x-ratelimit-reset-requests": "1h",
            "x-ratelimit-reset-tokens": "12s",
            "x-ratelimit-remaining-tokens": "0",
        },
        12,
    ),
    "words": (429, json.dumps(LATER), {}, 20),
    "words with status 200": (200, json.dumps(LATER), {}, 20),
    "words with status 403": (403, '{"error": {"message": "Rate limit exceeded"}}', {}, 1),
    "a code with status 200": (
        200,
        '{"error": {"code": 429, "message": "Provider returned error"}}',
        {},
        1,
    ),
    "a choice's error": (
        200,
        '{"choices": [{"error": {"code": 429}, "message": {"content": ""}}]}',
        {},
        1,
    ),
    "retryDelay": (
        429,
        '{"error": {"details": [{"retryDelay": "7s"}], "message": "current quota"}}',
        {},
        7,
    ),
}


@pytest.mark.parametrize(("status", "content", "headers", "seconds"), BUSY.values(), ids=BUSY)
def test_a_client_waits_as_long_as_a_busy_server_says_and_then_asks_again(
    serve, status, content, headers, seconds
):
    def answer(number, _):
        if number > 0:
            return 200, chat_completion("5"), {}
        return status, content, headers

    server = serve(answer)
    clock = Clock()
    (reply,) = send_requests(make_endpoint(server, first_pause=0.5, sleep=clock.sleep))
    assert reply.text == "5"
    assert clock.pauses == [seconds]
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [200, 429])
def test_every_request_gets_a_reply_although_the_server_is_busy_for_40_s(serve, status):
    """One pause serves all requests refused together; afterwards, half as many run at once."""
    clock = Clock()
    all_eight_sent = threading.Barrier(8)

    def answer(number, _):
        if number < 8:
            all_eight_sent.wait(60)
        if clock.seconds < 40:
            return status, json.dumps(LATER), {}
        return 200, chat_completion("5"), {}

    server = serve(answer)
    endpoint = make_endpoint(server, timeout=60.0, sleep=clock.sleep)
    replies = send_requests(endpoint, [HELLO] * 40)
    assert [reply.text for reply in replies] == ["5"] * 40
    assert clock.pauses == [20, 20]
    assert len(server.requests) <= 40 + 8 + 4
    assert endpoint.pace.limit == 4 + 1


def test_every_request_gets_a_reply_from_a_server_with_a_limit_of_requests_per_time(serve):
    clock = Clock()
    times = []

    def answer(*_):
        recent = [then for then in times if then > clock.seconds - 30]
        if len(recent) >= 20:
            return 429, "too many requests", {}
        times.append(clock.seconds)
        return 200, chat_completion("5"), {}

    endpoint = make_endpoint(serve(answer), concurrency=1, sleep=clock.sleep)
    replies = send_requests(endpoint, [HELLO] * 40)
    assert [reply.text for reply in replies] == ["5"] * 40
    assert clock.pauses == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("status", [200, 429])
def test_the_pauses_double_up_to_a_minute_in_all_if_a_busy_server_names_no_time(serve, status):
    clock = Clock()

    def answer(number, _):
        if 4 <= number < 10:
            return status, '{"error": {"code": 429}}', {}
        return 200, chat_completion("5"), {}

    server = serve(answer)
    endpoint = make_endpoint(server, concurrency=1, sleep=clock.sleep)
    replies = send_requests(endpoint, [HELLO] * 12)
    assert [reply.text for reply in replies] == ["5"] * 12
    assert clock.pauses == [1, 2, 4, 8, 16, 32]
    assert len(server.requests) == 12 + 6


def test_the_client_gives_up_a_server_that_stays_busy_and_does_not_advise_to_start_it(serve):
    for headers in ({}, {"Retry-After": "0"}):
        clock = Clock()
        server = serve(lambda *_, headers=headers: (429, "slow down", headers))
        endpoint = make_endpoint(server, first_pause=0.5, sleep=clock.sleep)
        message = catch_message(send_requests, endpoint, [HELLO] * 3)
        assert "status 429: slow down" in message
        assert "start the server" not in message
        assert 600 <= clock.seconds < 700
        assert endpoint.pace.limit == 4


def test_a_wait_of_hours_ends_a_run_at_once_with_the_time_that_the_server_names(serve):
    clock = Clock()
    server = serve(lambda *_: (429, "", {"x-ratelimit-reset-requests": "7h12m"}))
    endpoint = make_endpoint(server, sleep=clock.sleep)
    assert "25920 s" in catch_message(send_requests, endpoint)
    assert clock.pauses == []
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (429, {"code": "insufficient_quota", "message": "You exceeded your current quota"}),
        (429, {"type": "insufficient_quota", "message": "Please try again in 20s"}),
        (402, {"message": "Insufficient credits"}),
        (403, {"message": "Your credit balance is too low"}),
        (200, {"code": 402, "message": "add more credits"}),
    ],
)
def test_an_exhausted_quota_ends_a_run_at_once_with_the_message_of_the_server(serve, status, error):
    clock = Clock()
    server = serve(lambda *_: (status, json.dumps({"error": error}), {}))
    message = catch_message(send_requests, make_endpoint(server, sleep=clock.sleep))
    assert "quota" in message
    assert error["message"] in message
    assert "start the server" not in message
    assert clock.pauses == []
    assert len(server.requests) == 1


def test_the_limit_of_simultaneous_requests_grows_again_after_many_replies():
    pace = client.RequestLimiter(8)
    pace.limit = 2
    for _ in range(10 * client.GROW_AFTER):
        pace.note_reply_and_raise_limit()
    assert pace.limit == 8


WAITS = {
    "20": 20,
    "0.5": 0.5,
    "20s": 20,
    "6m0s": 360,
    "1m30.5s": 90.5,
    "250ms": 0.25,
    "2 minutes": 120,
    "1h2m": 3720,
    "1 minute and 20 seconds": 80,
    "Thu, 01 Jan 1970 00:20:00 GMT": 200,
    "1970-01-01T00:20:00Z": 200,
    "1970-01-01T00:00:01+00:00": 0,
    "2000000000": 2e9 - 1000,
} | dict.fromkeys(("", "soon", "-5", "1e5", "20 apples", "9" * 50))


@pytest.mark.parametrize(("text", "seconds"), WAITS.items())
def test_the_client_reads_every_form_of_a_wait_that_servers_write(text, seconds):
    assert busy.parse_wait_seconds(text, now=1000.0) == seconds


# ---- a server that refuses a system message or a setting


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "System role not supported"),
        (500, "Jinja Exception: System role not supported"),
        (404, "System role not supported"),
        (422, "Conversation roles must alternate user/assistant/user/assistant/..."),
    ],
)
def test_the_preamble_moves_to_the_user_message_if_a_server_takes_no_system_message(
    serve, capsys, status, message
):
    def answer(_, body):
        if body["messages"][0]["role"] == "system":
            return status, json.dumps({"error": {"message": message}}), {}
        return 200, chat_completion("4"), {}

    server = serve(answer)
    judge = make_judge(server, "decode", concurrency=4)
    texts = list("abcdefgh")
    assert (judge.score(texts, texts).scores == 4).all()
    assert len(server.requests) <= 8 + 4
    assert capsys.readouterr().err.count("system message;") == 1
    (user_message,) = server.requests[-1][2]["messages"]
    assert user_message["content"].startswith("Grade.\n\n<question>\n")

    # The judge remembers the refusal.
    num_requests = len(server.requests)
    judge.score(["x"], ["y"])
    assert len(server.requests) == num_requests + 1


def test_a_refusal_for_another_reason_than_the_system_message_is_quoted(serve):
    def refuse(_, body):
        has_system_message = body["messages"][0]["role"] == "system"
        return 404, "no such model" if has_system_message else "other words", {}

    server = serve(refuse)
    message = catch_message(make_judge(server, "decode").score, ["a"], ["b"])
    assert "no such model" in message
    assert "--judge-model" in message
    assert len(server.requests) == 2

    # A server that took a system message before does not refuse the system message.
    def refuse_second(number, _):
        return (400, "bad request", {}) if number else (200, chat_completion("4"), {})

    server = serve(refuse_second)
    message = catch_message(make_judge(server, "decode").score, ["a", "b"], ["b", "c"])
    assert "bad request" in message
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "max_tokens",
            "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead.",
        ),
        ("temperature", "Unsupported value: 'temperature' does not support 0 with this model."),
    ],
)
def test_a_parameter_that_the_judge_refuses_is_renamed_or_dropped_with_a_warning(
    serve, capsys, name, message
):
    def answer(_, body):
        if name not in body:
            return 200, chat_completion("4"), {}
        error = {"message": message, "type": "invalid_request_error", "param": name}
        return 400, json.dumps({"error": error}), {}

    server = serve(answer)
    judge = make_judge(server, "decode", concurrency=2)
    assert (judge.score(list("abcd"), list("abcd")).scores == 4).all()
    assert len(server.requests) <= 6
    warnings = re.findall(f"does not accept (a )?{name}", capsys.readouterr().err)
    assert len(warnings) == 1

    body = server.requests[-1][2]
    assert name not in body
    if name == "max_tokens":
        assert body["max_completion_tokens"] == remote_judge.REPLY_TOKENS


def test_a_request_to_the_server_of_a_policy_is_never_changed(serve):
    for message in ("System role not supported", "'temperature' does not support 0.7"):
        server = serve(lambda *_, message=message: (400, message, {}))
        conversation = [{"role": "system", "content": "Be brief."}, *HELLO]
        assert message in catch_message(send_requests, make_endpoint(server), [conversation])
        assert len(server.requests) == 1


# ---- a server that fails


@pytest.mark.parametrize(
    ("status", "content", "headers", "reason"),
    [
        (502, "bad\ngateway", {}, "status 502: bad gateway"),
        (
            200,
            chat_completion("5"),
            {"Content-Length": "1000", "Connection": "close"},
            "peer closed .* expected 1000.*",
        ),
        (None, "", {}, ".+"),  # no server listens
    ],
)
def test_a_failed_request_is_repeated_and_then_reported_in_one_line(
    serve, status, content, headers, reason
):
    def answer(number, _):
        if number == 3:
            return 200, chat_completion("5"), {}
        return status, content, headers

    server = serve(answer)
    url = server.url if status else "http://127.0.0.1:1/v1"
    endpoint = make_endpoint(types.SimpleNamespace(url=url), retries=2)
    line = rf"^--judge-url {url} [^\n]* 3 [^\n]*\({reason}\)[^\n]*$"
    with pytest.raises(ValueError, match=line) as error:
        send_requests(endpoint)
    assert len(server.requests) == (3 if status else 0)
    # A server that answers with a status need not be started.
    assert ("start the server" in str(error.value)) == (status != 502)

    if status:
        assert send_requests(endpoint)[0].text == "5"
        assert "so it is slow or busy" in catch_message(send_requests, endpoint)


def test_the_time_limit_also_ends_a_reply_that_arrives_byte_by_byte(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send_slowly():
            with listener.accept()[0] as connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(1000):
                    connection.sendall(b" ")
                    time.sleep(0.02)

        threading.Thread(target=send_slowly, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        endpoint = make_endpoint(types.SimpleNamespace(url=url), timeout=0.3, retries=1)
        with pytest.raises(ValueError, match=r"after 2 tries \(no complete reply within 0.3 s\)"):
            send_requests(endpoint)


def test_a_refusal_ends_all_requests_without_waiting_for_slow_ones(serve):
    test_has_ended = threading.Event()

    def answer(number, _):
        if number:
            return 401, '{"error": "no such key"}', {}
        test_has_ended.wait(60)
        return 200, chat_completion("5"), {}

    server = serve(answer)
    endpoint = make_endpoint(server, concurrency=2, timeout=60.0)
    refusal = r"refused a request \(status 401: .*no such key.*\); set JUDGE"
    with pytest.raises(ValueError, match=refusal):
        send_requests(endpoint, [HELLO] * 50)
    assert server.running == 1
    assert len(server.requests) < 10
    test_has_ended.set()


def test_ctrl_c_immediately_ends_a_program_that_waits_for_slow_requests(serve):
    test_has_ended = threading.Event()
    server = serve(lambda *_: test_has_ended.wait(120) and (200, chat_completion("5"), {}))
    program = f"""
from judging.server import Endpoint, ServerSettingNames
endpoint = Endpoint(ServerSettingNames("--url", "", "", ""), {server.url!r}, "tiny")
list(endpoint.send_chat_requests([{{"messages": []}}] * 9))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    while server.running < 8:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        test_has_ended.set()
    assert errors.endswith("KeyboardInterrupt\n")
    assert len(server.requests) == 8


def test_a_redirect_is_refused_so_that_no_other_server_gets_the_key(serve):
    other = serve(lambda *_: (200, chat_completion("5"), {}))
    headers = {"Location": other.url + "/chat/completions"}
    for status in (301, 302, 303, 307, 308):
        server = serve(lambda *_, status=status: (status, "", headers))
        with pytest.raises(ValueError, match=f"status {status}"):
            send_requests(make_endpoint(server, key="secret"))
    assert other.requests == []


@pytest.mark.parametrize("name", ["chat_template_kwargs", "top_k"])
def test_the_client_drops_an_optional_parameter_that_a_server_does_not_know(serve, name):
    def answer(_, body):
        if name in body:
            return 400, f"Unrecognized request argument supplied: {name}", {}
        return 200, chat_completion("5"), {}

    server = serve(answer)
    endpoint = make_endpoint(server, concurrency=3)
    replies = send_requests(endpoint, [HELLO] * 3, **{name: {}})
    assert [reply.text for reply in replies] == ["5"] * 3
    assert len(server.requests) <= 6
    send_requests(endpoint, **{name: {}})
    assert name not in server.requests[-1][2]


# ---- replies


def completion_in_parts(content, finish_reason="stop"):
    """A chat completion with this content, which is a text or a list of parts."""
    choice = {"message": {"content": content}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]})


@pytest.mark.parametrize(
    ("content", "finish_reason", "score"),
    [
        ([{"type": "text", "text": "4"}], "stop", 4),
        ([{"type": "text", "text": "Score: "}, {"type": "text", "text": "3"}], "stop", 3),
        (
            [
                {"type": "thinking", "thinking": [{"type": "text", "text": "2"}]},
                {"type": "text", "text": "5"},
            ],
            "stop",
            5,
        ),
        ([{"type": "thinking", "thinking": "2"}], "stop", None),
        ([], "stop", None),
        ("The answer is clear.\n\n4", "stop", 4),
        ("The answer is clear.\n\n4", "length", None),
        ("Score: 4\n\nThe answer gives 2 of", "length", 4),
        ("<think>The 2 sums are", "length", None),
    ],
)
def test_a_judge_reads_replies_in_parts_and_only_first_or_labelled_scores_of_cut_replies(
    serve, content, finish_reason, score
):
    server = serve(lambda *_: (200, completion_in_parts(content, finish_reason), {}))
    judge = mark_readable(make_judge(server, "decode"))
    expected = np.nan if score is None else score
    np.testing.assert_array_equal(judge.score(["a"], ["b"]).scores, [[expected]])


def test_a_judge_has_enough_tokens_to_explain_the_score_first(serve):
    server = serve(lambda *_: (200, chat_completion("It names both causes.\n\nScore: 4"), {}))
    assert make_judge(server, "decode").score(["a"], ["b"]).scores == 4
    assert server.requests[0][2]["max_tokens"] == remote_judge.REPLY_TOKENS
    assert remote_judge.REPLY_TOKENS >= 200


# ---- hostile servers

KEY = "sk-do-not-show-0123456789"
RUBRIC = rubrics.Rubric("Grade.", [rubrics.Criterion("kind", 1.0, "Is it kind?")])


def make_judge(server, mode="logits", **attributes):
    """A judge on the server, whose client has these attributes."""
    settings = JudgeSettings(url=server.url, model="tiny", mode=mode)
    judge = remote_judge.RemoteJudge(settings, RUBRIC, KEY)
    vars(judge.server).update({"concurrency": 1} | attributes)
    return judge


def completion_with_logprob(logprob):
    """A reply whose likeliest token is "4"; the text `logprob` is its log-probability."""
    return chat_completion("4", [("4", 0.125)]).replace("0.125", logprob)


OTHER_PROTOCOLS = {
    "html": "<html>hello</html>",
    "list": "[]",
    "no choices": "{}",
    "empty choices": '{"choices": []}',
    "null message": '{"choices": [{"message": null}]}',
    "number": '{"choices": [{"message": {"content": 5}}]}',
    "nested text": '{"choices": [{"message": {"content": ' + "[" * 500 + "]" * 500 + "}}]}",
    "nested": "[" * 200_000,
    "key twice": '{"choices": [{"message": {"content": "1", "content": "5"}}]}',
    "401 digits": completion_with_logprob(f"1{'0' * 400}"),
    "5,000 digits": completion_with_logprob("9" * 5000),
    "token of lists": chat_completion("4", [([[["4"]]], -0.1)]),
    "log-probability of text": completion_with_logprob('"low"'),
    "no log-probability": completion_with_logprob("null"),
    "latin": chat_completion("5").replace("assistant", "\udce9"),
}


@pytest.mark.parametrize("content", OTHER_PROTOCOLS.values(), ids=OTHER_PROTOCOLS)
def test_a_reply_of_another_protocol_is_unreadable_and_ends_the_run_if_it_comes_first(
    serve, content
):
    def answer(number, _):
        return 200, content if number % 2 else chat_completion("4", [("4", -0.01)]), {}

    scores = make_judge(serve(answer)).score(["a"] * 3, ["b", "c", "d"]).scores
    np.testing.assert_array_equal(scores, [[4], [np.nan], [4]])

    server = serve(lambda *_: (200, content, {}))
    line = r"^[^\n]*first 1 evaluations.*sent no chat completion[^\n]*$"
    with pytest.raises(ValueError, match=line):
        make_judge(server).score(["a"], ["b"])


@pytest.mark.parametrize(
    "logprob", ["1e6", "0.5", "NaN", "Infinity", "1e999", "true", '"nan"', "five certain tokens"]
)
def test_impossible_log_probabilities_are_unreadable(serve, logprob):
    if logprob == "five certain tokens":
        content = chat_completion("4", [(digit, 0.0) for digit in "12345"])
    else:
        content = completion_with_logprob(logprob)
    server = serve(lambda *_: (200, content, {}))
    judgement = mark_readable(make_judge(server)).score(["a"], ["b"])
    assert np.isnan(judgement.scores).all()
    assert judgement.mass == 0


def test_the_error_for_a_reply_of_thoughts_alone_shows_them_and_names_judge_think(serve):
    content = '{"choices": [{"message": {"content": null, "reasoning_content": "Well, perhaps"}}]}'
    server = serve(lambda *_: (200, content, {}))
    message = catch_message(make_judge(server, "decode").score, ["a"], ["b"])
    assert "--judge-think allows more tokens: Well, perhaps" in message


def test_the_client_stops_reading_an_endless_reply_and_counts_it_as_unreadable(serve, monkeypatch):
    monkeypatch.setattr(client, "MAX_REPLY_BYTES", 1000)
    server = serve(lambda *_: (200, chat_completion("4" * 10**6), {}))
    (reply,) = send_requests(make_endpoint(server))
    assert "no chat completion" in reply.problem


def test_the_judge_reads_long_runs_of_spaces_quickly(serve):
    begin = time.process_time()
    server = serve(lambda *_: (200, chat_completion(" " * 200_000 + "4"), {}))
    judge = make_judge(server, "decode")
    assert judge.score(["a"], ["b"]).scores == 4
    prompt = "<" + " " * 200_000
    assert judge_prompts.make_judge_messages(RUBRIC, prompt, "", judge.rubric.criteria[0])
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("status", [200, 302, 400, 401, 503])
def test_no_output_shows_a_key_that_a_server_echoes(serve, capsys, status):
    """The key is in a refusal, in replies, and cut in half where the quotation ends."""
    echoes = [
        f"{begin}Bearer {KEY} may not do this: context length"
        for begin in ("", "x" * 70, "x" * 290)
    ]
    contents = [*echoes, json.dumps({"error": KEY}), *map(chat_completion, echoes)]
    server = serve(lambda number, _: (status, contents[number], {"X-Key": KEY}))
    judge = make_judge(server, "decode", retries=0, sleep=Clock().sleep)
    messages = []
    judge.warn = messages.append
    for _ in contents:
        judge.unreadable.has_warned = False
        try:
            judge.score(["a"], ["b"])
        except ValueError as error:
            messages.append(str(error))

    assert len(messages) == len(contents)
    output = "".join(messages) + "".join(capsys.readouterr())
    assert KEY[:12] not in output


def test_error_lines_hide_secrets_of_the_environment_and_passwords_in_urls(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("MY_API_KEY", "x")  # a letter of many words
    with pytest.raises(SystemExit):
        flags.exit_with_error("asked https://me:pass@host/x with hf_secret, exactly")
    assert capsys.readouterr().err == "error: asked https://***@host/x with ***, exactly\n"


@pytest.mark.parametrize(
    ("url", "key", "expected_text"),
    [
        ("127.0.0.1:8080", None, "server's URL"),
        ("ftp://host/v1", None, "server's URL"),
        ("http://", None, "server's URL"),
        ("http://host?key=secret", None, "server's URL"),
        ("http://me:secret@host/v1", None, "contains a password"),
        ("HTTPS://me:secret@host", None, "contains a password"),
        ("http://host/v1", "secret\nX-Other: 1", "JUDGE_API_KEY"),  # would break the header
    ],
)
def test_an_invalid_url_or_key_is_refused_without_showing_secrets(url, key, expected_text):
    with pytest.raises(ValueError, match=expected_text) as error:
        check_settings({"judge_url": url, "judge_model": "tiny"})
        Endpoint(remote_judge.FLAGS, url, "tiny", key)
    assert "me:secret" not in str(error.value)
    if key is not None:
        assert "secret" not in str(error.value)
