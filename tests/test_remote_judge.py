"""Chat completions of a server: a scripted one on loopback that is busy, slow, wrong or redirects."""

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


def completion(text, top=()):
    entries = [{"token": token, "logprob": logprob} for token, logprob in top]
    logprobs = (
        {"content": [{"token": text, "logprob": 0.0, "top_logprobs": entries}]} if top else None
    )
    return json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": text}, "logprobs": logprobs}]}
    )


class Server:
    """A server that answers with what `answer(number, body)` gives: status, body and headers; it keeps all requests."""

    def __init__(self, answer):
        self.requests, self.running, self.most_running, lock = [], 0, 0, threading.Lock()
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
                with lock:
                    outer.running -= 1
                try:
                    start = self.send_response_only if "Date" in headers else self.send_response
                    start(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    if "Content-Length" not in headers:
                        self.send_header(
                            "Content-Length", str(len(content.encode(errors="surrogateescape")))
                        )
                    self.end_headers()
                    self.wfile.write(content.encode(errors="surrogateescape"))
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
def serving(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with contextlib.ExitStack() as servers:
        yield lambda answer: servers.enter_context(contextlib.closing(Server(answer)))


def make(server, key=None, **settings):
    """A client of a server; settings are its own."""
    made = Endpoint(remote_judge.FLAGS, server.url, "tiny", key)
    vars(made).update({"timeout": 5.0, "first_pause": 0.01} | settings)
    return made


def ask(asker, conversations=(HELLO,), **settings):
    replies = dict(
        asker.send_chat_requests([{"messages": messages} | settings for messages in conversations])
    )
    return [replies[place] for place in sorted(replies)]


def test_a_request_is_that_of_the_protocol_and_its_reply_is_read(serve):
    server = serve(lambda *_: (200, completion("4", [("4", -0.1), ("5", -2.5)]), {}))
    assert grader_of(server).score(["a"], ["b"]).scores == pytest.approx(4.083, abs=1e-3)
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert [message["role"] for message in body.pop("messages")] == ["system", "user"]
    plain = {"model": "tiny", "max_tokens": 1, "temperature": 0, "stream": False}
    plain |= {
        "logprobs": True,
        "top_logprobs": 10,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert body == plain


def test_replies_come_with_their_places_and_no_more_requests_run_at_once_than_allowed(serve):
    def answer(number, body):
        time.sleep(0.05 if number % 2 else 0.1)
        return 200, completion(body["messages"][0]["content"].upper()), {}

    server = serve(answer)
    asked = [[{"role": "user", "content": f"n{i}"}] for i in range(12)]
    assert [reply.text for reply in ask(make(server, concurrency=3), asked)] == [
        f"N{i}" for i in range(12)
    ]
    assert server.most_running == 3
    assert len(server.requests) == 12


class Clock:
    """A clock that jumps where a client would sleep, and remembers by how much."""

    def __init__(self):
        self.pauses = []

    async def sleep(self, seconds):
        self.pauses.append(seconds)

    @property
    def seconds(self):
        return sum(self.pauses)


@pytest.mark.parametrize("status", [408, 500, 502])
def test_a_failing_server_is_asked_again_after_pauses_that_double_or_as_long_as_it_says(
    serve, status
):
    def answer(number, _):
        later = {"Retry-After": "0.5"} if number == 3 else {}
        return (status, "later", later) if number < 4 else (200, completion("5"), {})

    clock = Clock()
    assert ask(make(serve(answer), retries=4, first_pause=0.02, sleep=clock.sleep))[0].text == "5"
    for pause, most in zip(clock.pauses[:3], (0.02, 0.04, 0.08), strict=True):
        assert most / 2 <= pause <= most
    assert clock.pauses[3:] == [0.5]


# ---- a busy server

LATER = {"error": {"message": "Rate limit reached. Please try again in 20s.", "code": 429}}
IN_40_S = {"Date": "Wed, 21 Oct 2026 07:28:00 GMT", "Retry-After": "Wed, 21 Oct 2026 07:28:40 GMT"}
BUSY = {  # by what a server says: status, body, headers, and the seconds that a client waits
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
def test_a_busy_server_is_waited_for_as_long_as_it_says_and_asked_again(
    serve, status, content, headers, seconds
):
    server = serve(
        lambda number, _: (200, completion("5"), {}) if number else (status, content, headers)
    )
    clock = Clock()
    assert ask(make(server, first_pause=0.5, sleep=clock.sleep))[0].text == "5"
    assert clock.pauses == [seconds] and len(server.requests) == 2


@pytest.mark.parametrize("status", [200, 429])
def test_a_server_that_is_busy_for_40_s_answers_every_request_in_the_end(serve, status):
    """Half as many requests run at once afterwards; one pause is for all that were refused together."""
    clock = Clock()
    together = threading.Barrier(8)

    def answer(number, _):
        if number < 8:
            together.wait(60)  # all eight are on their way
        return (status, json.dumps(LATER), {}) if clock.seconds < 40 else (200, completion("5"), {})

    server = serve(answer)
    asker = make(server, timeout=60.0, sleep=clock.sleep)
    assert [reply.text for reply in ask(asker, [HELLO] * 40)] == ["5"] * 40
    assert clock.pauses == [20, 20]
    assert len(server.requests) <= 40 + 8 + 4 and asker.pace.limit == 4 + 1


def test_a_server_that_takes_so_many_requests_a_minute_is_slowed_down_to_and_answers_all(serve):
    clock, times = Clock(), []

    def answer(*_):
        recent = [then for then in times if then > clock.seconds - 30]
        if len(recent) >= 20:
            return 429, "too many requests", {}
        times.append(clock.seconds)
        return 200, completion("5"), {}

    assert [
        reply.text
        for reply in ask(make(serve(answer), concurrency=1, sleep=clock.sleep), [HELLO] * 40)
    ] == ["5"] * 40
    assert clock.pauses == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("status", [200, 429])
def test_a_server_that_says_no_time_is_waited_for_a_minute_in_all_by_pauses_that_double(
    serve, status
):
    clock = Clock()

    def answer(number, _):
        return (
            (status, '{"error": {"code": 429}}', {})
            if 4 <= number < 10
            else (200, completion("5"), {})
        )

    server = serve(answer)
    asker = make(server, concurrency=1, sleep=clock.sleep)
    assert [reply.text for reply in ask(asker, [HELLO] * 12)] == ["5"] * 12
    assert clock.pauses == [1, 2, 4, 8, 16, 32]
    assert len(server.requests) == 12 + 6


def test_a_server_that_stays_busy_is_given_up_after_minutes_and_not_told_to_be_started(serve):
    for headers in ({}, {"Retry-After": "0"}):
        clock = Clock()
        asker = make(
            serve(lambda *_, headers=headers: (429, "slow down", headers)),
            first_pause=0.5,
            sleep=clock.sleep,
        )
        said = catch_message(ask, asker, [HELLO] * 3)
        assert "status 429: slow down" in said and "start the server" not in said
        assert 600 <= clock.seconds < 700 and asker.pace.limit == 4


def test_a_wait_of_hours_ends_a_run_at_once_with_what_the_server_says(serve):
    clock = Clock()
    server = serve(lambda *_: (429, "", {"x-ratelimit-reset-requests": "7h12m"}))
    assert "25920 s" in catch_message(ask, make(server, sleep=clock.sleep))
    assert clock.pauses == [] and len(server.requests) == 1


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
def test_a_quota_that_is_used_up_ends_a_run_at_once_in_the_server_s_words(serve, status, error):
    clock = Clock()
    server = serve(lambda *_: (status, json.dumps({"error": error}), {}))
    said = catch_message(ask, make(server, sleep=clock.sleep))
    assert "quota" in said and error["message"] in said and "start the server" not in said
    assert clock.pauses == [] and len(server.requests) == 1


def test_more_requests_run_at_once_again_after_many_replies():
    pace = client.RequestLimiter(8)
    pace.limit = 2
    for _ in range(10 * client.GROW_AFTER):
        pace.note_reply_and_raise_limit()
    assert pace.limit == 8


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(
            ("20", 20),
            ("0.5", 0.5),
            ("20s", 20),
            ("6m0s", 360),
            ("1m30.5s", 90.5),
            ("250ms", 0.25),
            ("2 minutes", 120),
        ),
        *(("1h2m", 3720), ("1 minute and 20 seconds", 80), ("Thu, 01 Jan 1970 00:20:00 GMT", 200)),
        *(
            ("1970-01-01T00:20:00Z", 200),
            ("1970-01-01T00:00:01+00:00", 0),
            ("2000000000", 2e9 - 1000),
        ),
        *((text, None) for text in ("", "soon", "-5", "1e5", "20 apples", "9" * 50)),
    ],
)
def test_a_wait_is_read_in_every_form_that_servers_write(text, seconds):
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
def test_a_server_that_takes_no_system_message_gets_the_preamble_in_the_user_s(
    serve, capsys, status, message
):
    def answer(_, body):
        if body["messages"][0]["role"] == "system":
            return status, json.dumps({"error": {"message": message}}), {}
        return 200, completion("4"), {}

    server = serve(answer)
    grader = grader_of(server, "decode", concurrency=4)
    texts = list("abcdefgh")
    assert (grader.score(texts, texts).scores == 4).all()
    assert len(server.requests) <= 8 + 4 and capsys.readouterr().err.count("system message;") == 1
    (user,) = server.requests[-1][2]["messages"]
    assert user["content"].startswith("Grade.\n\n<question>\n")
    num = len(server.requests)
    grader.score(["x"], ["y"])
    assert len(server.requests) == num + 1, "it is remembered"


def test_a_refusal_that_is_not_due_to_the_system_message_is_told_in_its_own_words(serve):
    def answer(_, body):
        return (
            404,
            "no such model" if body["messages"][0]["role"] == "system" else "other words",
            {},
        )

    server = serve(answer)
    said = catch_message(grader_of(server, "decode").score, ["a"], ["b"])
    assert "no such model" in said and "--judge-model" in said and len(server.requests) == 2
    server = serve(
        lambda number, _: (400, "bad request", {}) if number else (200, completion("4"), {})
    )
    assert "bad request" in catch_message(grader_of(server, "decode").score, ["a", "b"], ["b", "c"])
    assert len(server.requests) == 2, "it took a system message before"


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
def test_a_setting_that_a_judge_s_server_refuses_is_renamed_or_left_out_and_told(
    serve, capsys, name, message
):
    def answer(_, body):
        refusal = json.dumps(
            {"error": {"message": message, "type": "invalid_request_error", "param": name}}
        )
        return (400, refusal, {}) if name in body else (200, completion("4"), {})

    server = serve(answer)
    grader = grader_of(server, "decode", concurrency=2)
    assert (grader.score(list("abcd"), list("abcd")).scores == 4).all()
    assert (
        len(server.requests) <= 6
        and len(re.findall(f"does not accept (a )?{name}", capsys.readouterr().err)) == 1
    )
    body = server.requests[-1][2]
    assert name not in body and (
        name != "max_tokens" or body["max_completion_tokens"] == remote_judge.REPLY_TOKENS
    )


def test_a_policy_s_server_is_asked_as_told_or_not_at_all(serve):
    for message in ("System role not supported", "'temperature' does not support 0.7"):
        server = serve(lambda *_, message=message: (400, message, {}))
        messages = [{"role": "system", "content": "Be brief."}, *HELLO]
        assert message in catch_message(ask, make(server), [messages])
        assert len(server.requests) == 1


# ---- a server that fails


@pytest.mark.parametrize(
    ("status", "content", "headers", "said"),
    [
        (502, "bad\ngateway", {}, "status 502: bad gateway"),
        (
            200,
            completion("5"),
            {"Content-Length": "1000", "Connection": "close"},
            "peer closed .* expected 1000.*",
        ),
        (None, "", {}, ".+"),  # nobody there
    ],
)
def test_a_failure_is_asked_for_again_and_then_said_in_one_line(
    serve, status, content, headers, said
):
    server = serve(
        lambda number, _: (200, completion("5"), {}) if number == 3 else (status, content, headers)
    )
    url = server.url if status else "http://127.0.0.1:1/v1"
    asker = make(types.SimpleNamespace(url=url), retries=2)
    with pytest.raises(
        ValueError, match=rf"^--judge-url {url} [^\n]* 3 [^\n]*\({said}\)[^\n]*$"
    ) as error:
        ask(asker)
    assert len(server.requests) == (3 if status else 0)
    assert ("start the server" in str(error.value)) == (status != 502), (
        "a server that answers is there"
    )
    if status:
        assert ask(asker)[0].text == "5"
        assert "so it is slow or busy" in catch_message(ask, asker)


def test_a_slow_reply_is_given_up_and_asked_for_again_though_it_comes_byte_by_byte(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            with listener.accept()[0] as connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(1000):
                    connection.sendall(b" ")
                    time.sleep(0.02)

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with pytest.raises(ValueError, match=r"after 2 tries \(no complete reply within 0.3 s\)"):
            ask(make(types.SimpleNamespace(url=url), timeout=0.3, retries=1))


def test_what_a_server_refuses_ends_all_requests_and_does_not_wait_for_the_slow_ones(serve):
    ended = threading.Event()

    def answer(number, _):
        if number:
            return 401, '{"error": "no such key"}', {}
        ended.wait(60)
        return 200, completion("5"), {}

    server = serve(answer)
    with pytest.raises(
        ValueError,
        match=r"refused a request \(status 401: .*no such key.*\); set JUDGE",
    ):
        ask(make(server, concurrency=2, timeout=60.0), [HELLO] * 50)
    assert server.running == 1 and len(server.requests) < 10
    ended.set()


def test_ctrl_c_ends_a_program_that_waits_for_slow_requests_at_once(serve):
    ended = threading.Event()
    server = serve(lambda *_: ended.wait(120) and (200, completion("5"), {}))
    program = f"""
from judging.server import Endpoint, ServerSettingNames
list(Endpoint(ServerSettingNames("--url", "", "", ""), {server.url!r}, "tiny").send_chat_requests([{{"messages": []}}] * 9))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    while server.running < 8:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        ended.set()
    assert said.endswith("KeyboardInterrupt\n") and len(server.requests) == 8


def test_a_redirect_is_refused_so_that_the_key_goes_nowhere_else(serve):
    other = serve(lambda *_: (200, completion("5"), {}))
    for status in (301, 302, 303, 307, 308):
        server = serve(
            lambda *_, status=status: (status, "", {"Location": other.url + "/chat/completions"})
        )
        with pytest.raises(ValueError, match=f"status {status}"):
            ask(make(server, key="secret"))
    assert other.requests == []


@pytest.mark.parametrize("name", ["chat_template_kwargs", "top_k"])
def test_a_server_that_does_not_know_a_setting_of_some_is_not_sent_it_again(serve, name):
    def answer(_, body):
        if name in body:
            return 400, f"Unrecognized request argument supplied: {name}", {}
        return 200, completion("5"), {}

    server = serve(answer)
    asker = make(server, concurrency=3)
    assert [reply.text for reply in ask(asker, [HELLO] * 3, **{name: {}})] == ["5"] * 3
    assert len(server.requests) <= 6
    ask(asker, **{name: {}})
    assert name not in server.requests[-1][2]


# ---- replies


def written(content, finish_reason="stop"):
    """A chat completion with this content, in one part or several."""
    return json.dumps(
        {"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]}
    )


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
def test_a_reply_in_parts_is_read_and_of_one_that_was_cut_only_a_first_or_labelled_score(
    serve, content, finish_reason, score
):
    server = serve(lambda *_: (200, written(content, finish_reason), {}))
    judged = mark_readable(grader_of(server, "decode")).score(["a"], ["b"])
    np.testing.assert_array_equal(judged.scores, [[np.nan if score is None else score]])


def test_a_judge_that_explains_first_has_room_for_it(serve):
    server = serve(lambda *_: (200, completion("It names both causes.\n\nScore: 4"), {}))
    assert grader_of(server, "decode").score(["a"], ["b"]).scores == 4
    assert server.requests[0][2]["max_tokens"] == remote_judge.REPLY_TOKENS >= 200


# ---- hostile servers

KEY = "sk-do-not-show-0123456789"
RUBRIC = rubrics.Rubric("Grade.", [rubrics.Criterion("kind", 1.0, "Is it kind?")])


def grader_of(server, mode="logits", **settings):
    grader = remote_judge.RemoteJudge(
        JudgeSettings(url=server.url, model="tiny", mode=mode), RUBRIC, KEY
    )
    vars(grader.server).update({"concurrency": 1} | settings)
    return grader


def with_logprob(logprob):
    """A reply whose likeliest token is "4", its log-probability written as given."""
    return completion("4", [("4", 0.125)]).replace("0.125", logprob)


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
    "401 digits": with_logprob(f"1{'0' * 400}"),
    "5,000 digits": with_logprob("9" * 5000),
    "token of lists": completion("4", [([[["4"]]], -0.1)]),
    "log-probability of text": with_logprob('"low"'),
    "no log-probability": with_logprob("null"),
    "latin": completion("5").replace("assistant", "\udce9"),
}


@pytest.mark.parametrize("content", OTHER_PROTOCOLS.values(), ids=OTHER_PROTOCOLS)
def test_a_reply_of_another_protocol_is_unreadable_and_the_first_one_ends_the_run_in_a_line(
    serve, content
):
    server = serve(
        lambda number, _: (200, content if number % 2 else completion("4", [("4", -0.01)]), {})
    )
    np.testing.assert_array_equal(
        grader_of(server).score(["a"] * 3, ["b", "c", "d"]).scores, [[4], [np.nan], [4]]
    )
    with pytest.raises(
        ValueError,
        match=r"^[^\n]*first 1 evaluations.*sent no chat completion[^\n]*$",
    ):
        grader_of(serve(lambda *_: (200, content, {}))).score(["a"], ["b"])


@pytest.mark.parametrize(
    "written", ["1e6", "0.5", "NaN", "Infinity", "1e999", "true", '"nan"', "five certain tokens"]
)
def test_log_probabilities_that_are_none_are_unreadable(serve, written):
    certain = completion("4", [(digit, 0.0) for digit in "12345"])
    content = certain if written.startswith("five") else with_logprob(written)
    judged = mark_readable(grader_of(serve(lambda *_: (200, content, {})))).score(["a"], ["b"])
    assert np.isnan(judged.scores).all() and judged.mass == 0


def test_the_thoughts_of_a_judge_that_came_to_no_reply_are_shown_and_what_makes_room_for_them(
    serve,
):
    content = '{"choices": [{"message": {"content": null, "reasoning_content": "Well, perhaps"}}]}'
    said = catch_message(
        grader_of(serve(lambda *_: (200, content, {})), "decode").score, ["a"], ["b"]
    )
    assert "--judge-think allows more tokens: Well, perhaps" in said


def test_a_reply_without_end_is_read_no_further_and_unreadable(serve, monkeypatch):
    monkeypatch.setattr(client, "MAX_REPLY_BYTES", 1000)
    (reply,) = ask(make(serve(lambda *_: (200, completion("4" * 10**6), {}))))
    assert "no chat completion" in reply.problem


def test_a_long_reply_of_spaces_is_read_at_once(serve):
    begin = time.process_time()
    server = serve(lambda *_: (200, completion(" " * 200_000 + "4"), {}))
    assert grader_of(server, "decode").score(["a"], ["b"]).scores == 4
    assert judge_prompts.make_judge_messages(
        RUBRIC, "<" + " " * 200_000, "", grader_of(server).rubric.criteria[0]
    )
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("status", [200, 302, 400, 401, 503])
def test_a_key_that_a_server_echoes_is_shown_nowhere(serve, capsys, status):
    """In a refusal, in a reply of another protocol, in a reply, and cut in half by the end of what is shown."""
    echoes = [
        f"{begin}Bearer {KEY} may not do this: context length"
        for begin in ("", "x" * 70, "x" * 290)
    ]
    contents = [*echoes, json.dumps({"error": KEY}), *map(completion, echoes)]
    server = serve(lambda number, _: (status, contents[number], {"X-Key": KEY}))
    grader, said = grader_of(server, "decode", retries=0, sleep=Clock().sleep), []
    grader.warn = said.append
    for _ in contents:
        grader.unreadable.has_warned = False
        try:
            grader.score(["a"], ["b"])
        except ValueError as error:
            said.append(str(error))
    assert len(said) == len(contents) and KEY[:12] not in "".join(said) + "".join(
        capsys.readouterr()
    )


def test_secrets_of_the_environment_and_passwords_in_urls_are_in_no_error_line(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("MY_API_KEY", "x")  # which stands in many words
    with pytest.raises(SystemExit):
        flags.exit_with_error("asked https://me:pass@host/x with hf_secret, exactly")
    assert capsys.readouterr().err == "error: asked https://***@host/x with ***, exactly\n"


@pytest.mark.parametrize(
    ("url", "key", "said"),
    [
        ("127.0.0.1:8080", None, "server's URL"),
        *(
            (url, None, "server's URL")
            for url in ("ftp://host/v1", "http://", "http://host?key=secret")
        ),
        *(
            (url, None, "contains a password")
            for url in ("http://me:secret@host/v1", "HTTPS://me:secret@host")
        ),
        ("http://host/v1", "secret\nX-Other: 1", "JUDGE_API_KEY"),  # would break the header
    ],
)
def test_a_url_or_key_that_is_none_is_refused_without_showing_what_is_secret(url, key, said):
    with pytest.raises(ValueError, match=said) as error:
        check_settings({"judge_url": url, "judge_model": "tiny"})
        Endpoint(remote_judge.FLAGS, url, "tiny", key)
    assert "me:secret" not in str(error.value) and (key is None or "secret" not in str(error.value))
