"""Chat completions of a server: a scripted one on loopback that is busy, slow, wrong or redirects."""

import contextlib
import json
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
from conftest import message_of, readable

import flags
from config import JudgeSettings
from judging import remote_judge, rubrics
from judging import server as client
from judging.server import Endpoint
from settings.checks import checked

HELLO = [{"role": "user", "content": "hello"}]


def completion(text, top=()):
    entries = [{"token": token, "logprob": logprob} for token, logprob in top]
    logprobs = {"content": [{"token": text, "logprob": 0.0, "top_logprobs": entries}]} if top else None
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, "logprobs": logprobs}]})


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
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    if "Content-Length" not in headers:
                        self.send_header("Content-Length", str(len(content.encode(errors="surrogateescape"))))
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
    replies = dict(asker.chat([{"messages": messages} | settings for messages in conversations]))
    return [replies[place] for place in sorted(replies)]


def test_a_request_is_that_of_the_protocol_and_its_reply_is_read(serve):
    server = serve(lambda *_: (200, completion("4", [("4", -0.1), ("5", -2.5)]), {}))
    assert grader_of(server).score(["a"], ["b"]).scores == pytest.approx(4.083, abs=1e-3)
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert [message["role"] for message in body.pop("messages")] == ["system", "user"]
    plain = {"model": "tiny", "max_tokens": 1, "temperature": 0, "stream": False}
    plain |= {"logprobs": True, "top_logprobs": 10, "chat_template_kwargs": {"enable_thinking": False}}
    assert body == plain


def test_replies_come_with_their_places_and_no_more_requests_run_at_once_than_allowed(serve):
    def answer(number, body):
        time.sleep(0.05 if number % 2 else 0.1)
        return 200, completion(body["messages"][0]["content"].upper()), {}

    server = serve(answer)
    asked = [[{"role": "user", "content": f"n{i}"}] for i in range(12)]
    assert [reply.text for reply in ask(make(server, concurrency=3), asked)] == [f"N{i}" for i in range(12)]
    assert server.most_running == 3
    assert len(server.requests) == 12


@pytest.fixture
def pauses(monkeypatch):
    """The seconds that an endpoint would wait before it asks again; it does not wait them."""
    waited = []

    async def note(seconds):
        waited.append(seconds)

    monkeypatch.setattr(client.asyncio, "sleep", note)
    return waited


@pytest.mark.parametrize("status", [408, 429, 500, 529])
def test_a_busy_server_is_asked_again_after_pauses_that_double_or_as_long_as_it_says(serve, pauses, status):
    def answer(number, _):
        later = {"Retry-After": "0.5"} if number == 3 else {}
        return (status, "later", later) if number < 4 else (200, completion("5"), {})

    assert ask(make(serve(answer), retries=4, first_pause=0.02))[0].text == "5"
    for pause, most in zip(pauses[:3], (0.02, 0.04, 0.08), strict=True):
        assert most / 2 <= pause <= most
    assert pauses[3:] == [0.5]


@pytest.mark.parametrize(
    ("status", "content", "headers", "said"),
    [
        (503, "over\nloaded", {}, "status 503: over loaded"),
        (200, completion("5"), {"Content-Length": "1000", "Connection": "close"}, "peer closed .* expected 1000.*"),
        (None, "", {}, ".+"),  # nobody there
    ],
)
def test_a_failure_is_asked_for_again_and_then_said_in_one_line(serve, status, content, headers, said):
    server = serve(lambda number, _: (200, completion("5"), {}) if number == 3 else (status, content, headers))
    url = server.url if status else "http://127.0.0.1:1/v1"
    asker = make(types.SimpleNamespace(url=url), retries=2)
    line = rf"^--judge-url {url} did not answer after 3 tries \({said}\); start it, or name another [^\n]*$"
    with pytest.raises(ValueError, match=line):
        ask(asker)
    assert len(server.requests) == (3 if status else 0)
    if status:
        assert ask(asker)[0].text == "5"
        assert "others it answered, so it is slow or busy" in message_of(ask, asker)


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
        with pytest.raises(ValueError, match=r"after 2 tries \(no whole reply within 0.3 s\)"):
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
        ValueError, match=r"refused a request \(status 401: .*no such key.*\); its key is read from JUDGE"
    ):
        ask(make(server, concurrency=2, timeout=60.0), [HELLO] * 50)
    assert server.running == 1 and len(server.requests) < 10
    ended.set()


def test_ctrl_c_ends_a_program_that_waits_for_slow_requests_at_once(serve):
    ended = threading.Event()
    server = serve(lambda *_: ended.wait(120) and (200, completion("5"), {}))
    program = f"""
from judging.server import Endpoint, Flags
list(Endpoint(Flags("--url", "", "", ""), {server.url!r}, "tiny").chat([{{"messages": []}}] * 9))
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
        server = serve(lambda *_, status=status: (status, "", {"Location": other.url + "/chat/completions"}))
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


# ---- hostile servers

KEY = "sk-do-not-show-0123456789"
RUBRIC = rubrics.Rubric("Grade.", [rubrics.Criterion("kind", 1.0, "Is it kind?")])


def grader_of(server, mode="logits", **settings):
    grader = remote_judge.RemoteJudge(JudgeSettings(url=server.url, model="tiny", mode=mode), RUBRIC, KEY)
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
def test_a_reply_of_another_protocol_is_unreadable_and_the_first_one_ends_the_run_in_a_line(serve, content):
    server = serve(lambda number, _: (200, content if number % 2 else completion("4", [("4", -0.01)]), {}))
    np.testing.assert_array_equal(grader_of(server).score(["a"] * 3, ["b", "c", "d"]).scores, [[4], [np.nan], [4]])
    with pytest.raises(ValueError, match=r"^[^\n]*none of its first 1 evaluations .*it sent no chat completion[^\n]*$"):
        grader_of(serve(lambda *_: (200, content, {}))).score(["a"], ["b"])


@pytest.mark.parametrize("written", ["1e6", "0.5", "NaN", "Infinity", "1e999", "true", '"nan"', "five certain tokens"])
def test_log_probabilities_that_are_none_are_unreadable(serve, written):
    certain = completion("4", [(digit, 0.0) for digit in "12345"])
    content = certain if written.startswith("five") else with_logprob(written)
    judged = readable(grader_of(serve(lambda *_: (200, content, {})))).score(["a"], ["b"])
    assert np.isnan(judged.scores).all() and judged.mass == 0


def test_the_thoughts_of_a_judge_that_came_to_no_reply_are_shown_and_what_makes_room_for_them(serve):
    content = '{"choices": [{"message": {"content": null, "reasoning_content": "Well, perhaps"}}]}'
    said = message_of(grader_of(serve(lambda *_: (200, content, {})), "decode").score, ["a"], ["b"])
    assert "it said '(thoughts, for which --judge-think makes room: Well, perhaps)'. Try another" in said


def test_a_reply_without_end_is_read_no_further_and_unreadable(serve, monkeypatch):
    monkeypatch.setattr(client, "LARGEST", 1000)
    (reply,) = ask(make(serve(lambda *_: (200, completion("4" * 10**6), {}))))
    assert reply.problem.startswith("it sent no chat completion")


def test_a_long_reply_of_spaces_is_read_at_once(serve):
    begin = time.process_time()
    server = serve(lambda *_: (200, completion(" " * 200_000 + "4"), {}))
    assert grader_of(server, "decode").score(["a"], ["b"]).scores == 4
    assert rubrics.messages(RUBRIC, "<" + " " * 200_000, "", grader_of(server).rubric.criteria[0])
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("status", [200, 302, 400, 401, 503])
def test_a_key_that_a_server_echoes_is_shown_nowhere(serve, capsys, status):
    """In a refusal, in a reply of another protocol, in a reply, and cut in half by the end of what is shown."""
    echoes = [f"{begin}Bearer {KEY} may not do this: context length" for begin in ("", "x" * 70, "x" * 290)]
    contents = [*echoes, json.dumps({"error": KEY}), *map(completion, echoes)]
    server = serve(lambda number, _: (status, contents[number], {"X-Key": KEY}))
    grader, said = grader_of(server, "decode", retries=0), []
    grader.warn = said.append
    for _ in contents:
        grader.has_warned = False
        try:
            grader.score(["a"], ["b"])
        except ValueError as error:
            said.append(str(error))
    assert len(said) == len(contents) and KEY[:12] not in "".join(said) + "".join(capsys.readouterr())


def test_secrets_of_the_environment_and_passwords_in_urls_are_in_no_error_line(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("MY_API_KEY", "x")  # which stands in many words
    with pytest.raises(SystemExit):
        flags.fail("asked https://me:pass@host/x with hf_secret, exactly")
    assert capsys.readouterr().err == "error: asked https://***@host/x with ***, exactly\n"


@pytest.mark.parametrize(
    ("url", "key", "said"),
    [
        ("127.0.0.1:8080", None, "must be like"),
        *((url, None, "must be like") for url in ("ftp://host/v1", "http://", "http://host?key=secret")),
        *((url, None, "holds a password") for url in ("http://me:secret@host/v1", "HTTPS://me:secret@host")),
        ("http://host/v1", "secret\nX-Other: 1", "JUDGE_API_KEY"),  # would break the header
    ],
)
def test_a_url_or_key_that_is_none_is_refused_without_showing_what_is_secret(url, key, said):
    with pytest.raises(ValueError, match=said) as error:
        checked({"judge_url": url, "judge_model": "tiny"})
        Endpoint(remote_judge.FLAGS, url, "tiny", key)
    assert "me:secret" not in str(error.value) and (key is None or "secret" not in str(error.value))
