"""Episodes of an outside harness: the endpoint, the sampler's turns, and failures."""

import json
import math
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from conftest import ROOT, run_command
from small_run import make_run

import trainer
from kv_cache import SlotCache
from machine.memory import BatchSize
from serving import requests as protocol
from serving.endpoint import Endpoint, RequestCancellation
from serving.harness import Harness, HarnessEnded, close_harnesses
from step.generation import generate_completions
from step.sample import new_samples
from train import train

pytestmark = pytest.mark.slow

SCRIPT = f"{sys.executable} {ROOT / 'tests' / 'harness.py'}"
GAME = ["--model", "demo:tools", "--max-tokens", "128", "--max-context", "320", "--eval-every", "0"]


@pytest.fixture(autouse=True, scope="module")
def close_harnesses_afterwards():
    yield
    close_harnesses()


def make_served_run(run_dir, mode="plain", num_examples=8, *flags):
    run_dir.mkdir(exist_ok=True)
    return make_run(run_dir, *GAME, "--env-server", f"{SCRIPT} '{mode}' {num_examples}", *flags)


def play(run, num_groups, temperature, group_size=1, is_evaluation=False, num_slots=64):
    """Returns samples of the run's first examples, and statistics of the rollout."""
    examples = (run.task.train * num_groups)[:num_groups]
    prompts = (run.prompt_ids * num_groups)[:num_groups]
    return generate_completions(
        run.model,
        run.tokenizer,
        new_samples(examples, prompts, group_size),
        run.sampling._replace(temperature=temperature),
        key=11,
        batch_size=BatchSize(num_slots),
        toolbox=run.toolbox,
        player=run.player,
        environment_seed="seed",
        is_evaluation=is_evaluation,
    )


# ---- the same episodes, inside and outside


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_episodes_of_a_harness_equal_episodes_of_gwen(tmp_path, temperature):
    served_run = make_served_run(tmp_path / "served")
    (tmp_path / "inside").mkdir()
    run = make_run(tmp_path / "inside", *GAME, "--task", "guess", "--max-turns", "6")
    served_samples, stats = play(served_run, 200, temperature)
    samples, _ = play(run, 200, temperature)

    assert len(served_samples) == 200
    assert len(samples) == 200
    assert stats.failures == []
    assert len({tuple(sample.response_ids) for sample in samples}) > 10
    assert max(sample.conversation["turns"] for sample in samples) >= 4

    for served, expected in zip(served_samples, samples, strict=True):
        assert served.prompt == expected.prompt
        assert served.response_ids == expected.response_ids
        assert list(served.loss_positions) == list(expected.loss_positions)
        assert np.abs(served.logprobs - expected.logprobs).max() <= 1e-4
        assert str(served.text) == str(expected.text)
        assert served.columns["earned"][1] == (expected.columns["earned"][1] or 0.0)
        assert served.conversation["turns"] == expected.conversation["turns"]


def test_a_harness_may_limit_the_number_of_concurrent_episodes(tmp_path):
    limited, stats = play(make_served_run(tmp_path / "limited", "at once 3"), 8, 1.0)
    unlimited, _ = play(make_served_run(tmp_path / "unlimited"), 8, 1.0)
    assert stats.failures == []
    assert stats.wait_s > 0
    for sample, expected in zip(limited, unlimited, strict=True):
        assert sample.response_ids == expected.response_ids
        assert np.abs(sample.logprobs - expected.logprobs).max() <= 1e-4


def test_the_model_reads_each_token_of_an_episode_once(tmp_path, monkeypatch):
    """As an exception, the model may read the last token of a turn again."""
    run = make_served_run(tmp_path)
    num_read = []
    hidden = type(run.model).hidden

    def count(self, tokens, cache=None, *args, **options):
        num_read.append(tokens.size)
        return hidden(self, tokens, cache, *args, **options)

    monkeypatch.setattr(type(run.model), "hidden", count)
    [sample], _ = play(run, 1, 0.0)
    num_prefilled = sum(num for num in num_read if num > 1)
    num_sampled = len(set(sample.loss_positions))
    num_given = len(sample.prompt) + len(sample.response_ids) - num_sampled
    num_turns = sample.conversation["turns"]
    assert num_turns >= 3
    assert num_given <= num_prefilled <= num_given + num_turns


def test_a_request_may_limit_the_length_of_a_turn(tmp_path):
    run = make_served_run(tmp_path, "short turns")
    assert ROOT / "tests" / "harness.py" in run.source_files  # a resume notices a changed harness
    samples, stats = play(run, 8, 0.0)
    spans = [end - begin for sample in samples for begin, end in sample.turn_begins_and_ends]
    assert not stats.failures
    assert max(spans) == 5


@pytest.mark.parametrize("mode", ["plain", "short turns", "plain numbered", "short turns numbered"])
def test_rows_that_restart_for_lack_of_memory_repeat_the_turns_that_the_harness_received(
    tmp_path, monkeypatch, mode
):
    run = make_served_run(tmp_path, mode)
    expected, _ = play(run, 24, 1.0, num_slots=8)
    plan_writes = SlotCache.plan_writes
    num_prefills = 0

    def fail_once(cache, num_new=None):
        nonlocal num_prefills
        num_prefills += bool(num_new)
        if num_new and num_prefills == 9:
            num_prefills += 1
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        plan_writes(cache, num_new)

    monkeypatch.setattr(SlotCache, "plan_writes", fail_once)
    samples, stats = play(run, 24, 1.0, num_slots=8)
    assert num_prefills > 10
    assert not stats.failures
    response_ids = [sample.response_ids for sample in samples]
    assert response_ids == [sample.response_ids for sample in expected]


# ---- failing episodes and harnesses


@pytest.mark.parametrize(
    "mode, flags, text",
    [
        ("wrong ids", [], "differs at token 4"),
        ("wrong result", [], "positions"),
        ("bad reward", [], "'much'"),
        ("sleeps", ["--env-timeout", "20"], "--env-timeout"),
    ],
)
def test_a_failed_episode_is_reported_and_left_out(tmp_path, mode, flags, text):
    run = make_served_run(tmp_path, mode, 8, *flags)
    samples, stats = play(run, 8, 0.0)
    assert len(samples) == 4
    assert len(stats.failures) == 4
    assert text in stats.failures[0]
    assert sorted({sample.group for sample in samples}) == [sample.group for sample in samples]


def test_an_evaluation_keeps_failed_episodes_without_a_reward(tmp_path):
    run = make_served_run(tmp_path, "bad reward")
    samples, stats = play(run, 8, 0.0, is_evaluation=True)
    assert len(samples) == 8
    earned = [sample.columns["earned"][1] for sample in samples]
    assert earned.count(None) == 4
    assert len(stats.failures) == 4


def test_the_run_ends_if_all_episodes_fail(tmp_path):
    run = make_served_run(tmp_path, "hot")
    with pytest.raises(ValueError, match=r"all 4 episodes failed.*temperature is 7 in the request"):
        play(run, 4, 1.0)


@pytest.mark.parametrize(
    "mode, text",
    [
        ("broken", "this harness is broken"),
        ("nonsense", "hello"),
        ("silent", "--env-timeout 1|within 1 s"),
        ("no such command", None),
    ],
)
def test_a_harness_that_does_not_start_causes_a_one_line_error(tmp_path, mode, text):
    command = f"{SCRIPT} '{mode}'" if text else "/no/such/command"
    timeout = "1" if mode == "silent" else "60"
    flags = ["--env-server", command, "--env-timeout", timeout, "--run-dir", tmp_path / "run"]
    output = run_command("train.py", *GAME, *flags)
    assert output.returncode == 2
    assert "Traceback" not in output.stderr
    assert "--env-server" in output.stderr
    assert not (tmp_path / "run").exists()


def test_a_flood_of_messages_causes_a_one_line_error(tmp_path):
    flags = ["--env-server", f"{SCRIPT} flood", "--run-dir", tmp_path / "run"]
    output = run_command("train.py", *GAME, *"--batch 2 --groups 2 --steps 1".split(), *flags)
    assert output.returncode == 2
    assert "Traceback" not in output.stderr
    assert "has sent the result of this episode before" in output.stderr


def test_a_run_resumes_after_the_harness_died_in_a_step(tmp_path):
    run_dir = tmp_path / "run"
    settings = "--batch 2 --groups 4 --steps 3 --save-every 1 --learning-rate 0.001"
    flags = [*GAME, *settings.split()]
    harness = f"{SCRIPT} 'dies 20'"
    output = run_command("train.py", *flags, "--env-server", harness, "--run-dir", run_dir)
    assert output.returncode == 2
    assert "Traceback" not in output.stderr
    assert "ended with the status 3" in output.stderr
    metrics = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]

    output = run_command(
        "train.py", "--resume", run_dir, "--env-server", f"{SCRIPT} plain", "--allow-changes"
    )
    assert output.returncode == 0, output.stderr

    uninterrupted = tmp_path / "uninterrupted"
    run_command("train.py", *flags, "--env-server", f"{SCRIPT} plain", "--run-dir", uninterrupted)
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        lines = (run_dir / file).read_text().splitlines()
        assert len(lines) == len((uninterrupted / file).read_text().splitlines())
    assert mean_rewards(run_dir) == mean_rewards(uninterrupted)


def mean_rewards(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward/mean"] for line in lines]


def test_a_run_evaluates_its_held_out_examples_with_the_harness(tmp_path):
    run_dir = tmp_path / "run"
    flags = [*GAME[:-2], *"--batch 2 --groups 4 --steps 1 --eval-every 1".split()]
    harness = f"{SCRIPT} plain"
    output = run_command("train.py", *flags, "--env-server", harness, "--run-dir", run_dir)
    assert output.returncode == 0, output.stderr
    evaluations = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    assert [record["step"] for record in evaluations] == [0, 1]
    assert evaluations[0]["eval/num"] == 4
    assert evaluations[0]["eval/metric/turns"] >= 1
    step = json.loads((run_dir / "metrics.jsonl").read_text())
    assert step["episodes/failed"] == 0
    output = run_command("evaluate.py", "--run", run_dir, "--json")
    assert output.returncode == 0, output.stderr
    assert json.loads(output.stdout)["eval/greedy"] == evaluations[1]["eval/greedy"]


@pytest.mark.parametrize(
    "mode, flags, texts",
    [
        ('example{"prompt": [{"role": "system", "content": "x"}]}', [], ["example 1", "'user'"]),
        ('example{"prompt": [{"role": "robot", "content": "x"}]}', [], ["example 1", "'robot'"]),
        ('example{"prompt": " "}', [], ["example 1", "empty"]),
        ('example{"prompt": "a", "answer": NaN}', [], ["example 1", "NaN"]),
        ("at once 0", [], ["at_once", "a positive integer"]),
        ("at once true", [], ["at_once", "a positive integer"]),
        ("no held-out", ["--eval-every", "1"], ["no held-out examples", "--eval-every 0"]),
    ],
)
def test_an_unusable_example_causes_an_error(tmp_path, mode, flags, texts):
    with pytest.raises(ValueError, match=re.escape(texts[0])) as error:
        make_served_run(tmp_path, mode, 8, *flags)
    assert texts[1] in str(error.value)


def test_rewards_of_the_user_are_added_to_the_reward_of_the_harness(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **columns): return [0.5] * len(completions)\n")
    run = make_served_run(tmp_path / "run", "plain", 8, "--reward", f"{file}:short")
    assert run.task.rewards_with_nonzero_weight.keys() == {"short", "environment"}
    file.write_text("def environment(completions, **columns): return [0.5] * len(completions)\n")
    with pytest.raises(ValueError, match="rename the function"):
        make_served_run(tmp_path / "other", "plain", 8, "--reward", f"{file}:environment")


def test_a_program_cannot_sample_single_completions_in_an_environment(tmp_path):
    with pytest.raises(ValueError, match="--env-server"):
        trainer.sample_completions(make_served_run(tmp_path), ["hello"], 1, None)


def test_unusual_texts_of_a_harness_do_not_end_the_run(tmp_path):
    settings = "--eval-every 1 --batch 2 --groups 2 --steps 1".split()
    flags = ["--env-server", f"{SCRIPT} odd", "--run-dir", tmp_path / "run"]
    output = run_command("train.py", *GAME[:-2], *settings, *flags)
    assert output.returncode == 0, output.stderr


@pytest.mark.parametrize("flags", [[], ["--train-completions", "2", "--truncated", "mask"]])
@pytest.mark.parametrize("mode", ["only 1", "only 1 2 3 4", "only 1 5", "only 2 3 6 7"])
def test_a_step_trains_on_the_episodes_that_did_not_fail(tmp_path, mode, flags):
    """These are one episode, one group, one episode of each group, or two of each group."""
    flags = [*"--batch 2 --groups 4 --steps 1 --learning-rate 0.001".split(), *flags]
    run = make_served_run(tmp_path, mode, 8, *flags)
    [metrics] = trainer.run_steps(run, train, stop_if_hopeless=False)
    assert metrics["episodes/failed"] == 8 - len(mode.split()[1:])
    assert math.isfinite(metrics["loss"])


@pytest.mark.parametrize(
    "flags, text",
    [
        (["--data", "tests/sums.jsonl"], "--data"),
        (["--tools", "mine.py:f"], "--tools"),
        (["--task", "demo"], "--task is demo"),
        (["--task-config", "x=1"], "--task-config x=1"),
        (["--stop", "x"], "--stop"),
    ],
)
def test_settings_that_contradict_a_harness_are_refused(tmp_path, flags, text):
    output = run_command("train.py", *GAME, "--env-server", f"{SCRIPT} plain", *flags)
    assert output.returncode == 2
    assert text in output.stderr
    assert "Traceback" not in output.stderr


# ---- the endpoint


@pytest.fixture
def endpoint():
    events = queue.SimpleQueue()
    endpoint = Endpoint("secret", events)
    endpoint.most_open = 16
    endpoint.context = 100
    yield endpoint
    endpoint.close()


def post(endpoint, body, token="secret", session="a", timeout=10):
    """Sends a request; returns the status and the JSON body of the reply."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{endpoint.port}/inference/v1/generate",
        body if isinstance(body, bytes) else json.dumps(body).encode(),
        {"Authorization": f"Bearer {token}", "X-Session-ID": session},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def wait_until(condition, timeout=60):
    """Waits until the condition holds; returns whether it held before the timeout (seconds)."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_the_endpoint_replies_with_ids_and_log_probabilities(endpoint):
    replies = []
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 7, "logprobs": 1}}
    thread = threading.Thread(target=lambda: replies.append(post(endpoint, body)))
    thread.start()
    pending = endpoint.events.get(timeout=10)
    assert pending.request == protocol.GenerateRequest("a", [1, 2], 7, [], {})
    pending.answer([5, 6], [-0.5, -1.25], "stop")
    thread.join(10)

    [(status, reply)] = replies
    [choice] = reply["choices"]
    assert status == 200
    assert choice["token_ids"] == [5, 6]
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == [
        {"token": "token_id:5", "logprob": -0.5},
        {"token": "token_id:6", "logprob": -1.25},
    ]


def test_the_endpoint_reports_the_maximum_length_of_a_prompt(endpoint):
    request = urllib.request.Request(
        f"{endpoint.url}/models", headers={"Authorization": "Bearer secret"}
    )
    [card] = json.load(urllib.request.urlopen(request))["data"]
    assert card["max_model_len"] == 99


@pytest.mark.parametrize(
    "body, status, text",
    [
        (b"{", 400, "JSON"),
        (b"\xff", 400, "JSON"),
        (b"[" * 100_000, 400, "JSON"),
        ([], 400, "object"),
        ({}, 400, "token_ids"),
        ({"token_ids": [1, "2"]}, 400, "integers"),
        ({"token_ids": [True]}, 400, "integers"),
        ({"token_ids": [1], "sampling_params": 3}, 400, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"temperature": "hot"}}, 400, "temperature"),
        ({"token_ids": [1], "sampling_params": {"temperature": 10**400}}, 400, "temperature"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, 400, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, 400, "n 2"),
        ({"token_ids": [1], "sampling_params": {"stop": ["x"]}}, 400, "stop"),
        ({"token_ids": [1], "features": {"a": 1}}, 400, "features"),
        ({"token_ids": [1], "sampling_params": {"ignore_eos": True}}, 400, "ignore_eos"),
        (b'{"token_ids": [1], "sampling_params": {"max_tokens": NaN}}', 400, "max_tokens"),
        (b'{"token_ids": [1], "sampling_params": {"top_p": Infinity}}', 400, "top_p"),
        (b'{"token_ids": [1e3]}', 400, "integers"),
    ],
)
def test_the_endpoint_refuses_a_wrong_request_and_gives_the_reason(endpoint, body, status, text):
    code, reply = post(endpoint, body)
    assert code == status
    assert text in reply["error"]["message"]
    assert endpoint.events.empty()


def test_a_request_without_the_secret_is_refused(endpoint):
    code, _ = post(endpoint, {"token_ids": [1]}, token="other")
    assert code == 401
    assert post(endpoint, {"token_ids": [1]}, session="")[0] == 400


@pytest.mark.parametrize(
    "headers, status",
    [
        (b"Authorization: Bearer \xff", 401),
        (b"Authorization: Bearer secret\r\nContent-Type: application/json; charset=no-such", 400),
        (b"Authorization: Bearer secret\r\nX-Session-ID: \xff", 400),
    ],
)
def test_headers_that_are_not_text_are_refused_without_a_traceback(
    endpoint, headers, status, caplog
):
    body = b"{}"
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as client:
        client.sendall(
            b"POST /inference/v1/generate HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
            + headers
            + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        reply = client.makefile("rb").read()
    assert reply.startswith(b"HTTP/1.1 %d" % status)
    assert not caplog.records


def test_an_endpoint_closes_while_a_request_is_open():
    endpoint = Endpoint("secret", queue.SimpleQueue())
    endpoint.most_open = 1
    body = b'{"token_ids": [1]}'
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as client:
        client.sendall(
            b"POST /inference/v1/generate HTTP/1.1\r\nHost: a\r\nX-Session-ID: a\r\n"
            b"Authorization: Bearer secret\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        endpoint.events.get(timeout=10)
        begin = time.monotonic()
        endpoint.close()
        assert time.monotonic() - begin < 5
        assert not endpoint._thread.is_alive()


def test_the_endpoint_limits_the_number_of_open_requests(endpoint):
    codes = []
    lock = threading.Lock()

    def post_and_record_code():
        code, _ = post(endpoint, {"token_ids": [1]}, timeout=60)
        with lock:
            codes.append(code)

    threads = [threading.Thread(target=post_and_record_code) for _ in range(1000)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: len(codes) >= 1000 - endpoint.most_open)
    assert codes.count(503) == 1000 - endpoint.most_open

    for _ in range(endpoint.most_open):
        endpoint.events.get(timeout=10).answer([1], [0.0], "stop")
    for thread in threads:
        thread.join(60)
    assert codes.count(200) == endpoint.most_open


def test_a_request_counts_as_open_while_its_body_is_read(endpoint):
    endpoint.most_open = 1
    headers = (
        "POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\n"
        "Authorization: Bearer secret\r\nContent-Length: 100\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
        connection.sendall(headers.encode())  # without the body
        assert wait_until(lambda: endpoint.num_open == 1)
        code, _ = post(endpoint, {"token_ids": [1]})
        assert code == 503
    assert wait_until(lambda: endpoint.num_open == 0)


def test_a_closed_connection_cancels_the_request(endpoint):
    with pytest.raises(TimeoutError):
        post(endpoint, {"token_ids": [1]}, timeout=0.5)
    pending = endpoint.events.get(timeout=10)
    cancelled = endpoint.events.get(timeout=10)
    assert isinstance(cancelled, RequestCancellation)
    assert cancelled.pending is pending
    assert wait_until(lambda: endpoint.num_open == 0)


def test_closing_a_harness_ends_its_child_processes():
    harness = Harness("sh -c 'sleep 1000 & echo $! >&2; wait'")
    with open(harness.log) as log:
        child = ""
        while not child:
            child = log.readline().strip()
    harness.close()
    time.sleep(0.1)
    state = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True)
    assert state.stdout.strip()[:1] in ("", "Z")
    with pytest.raises(HarnessEnded):
        harness.send({"type": "play"})


def wait_for_end(harness):
    with pytest.raises(HarnessEnded) as error:
        for _ in range(200):
            harness.take_event(0.1)
    harness.close()
    return str(error.value)


@pytest.mark.parametrize(
    "script, text",
    [
        ("exec 1>&-; sleep 1000", "closed its standard output"),
        ("sleep 1000 & exit 4", "ended with the status 4"),
        ("exec head -c 20000000 /dev/zero", "more than 16 MB"),
        (r"printf '\377\n'; sleep 1000", "not a message"),
    ],
)
def test_the_run_notices_a_harness_that_can_send_no_more_messages(script, text, monkeypatch):
    monkeypatch.setattr("serving.harness.END_SECONDS", 0.5)
    assert text in wait_for_end(Harness(shlex.join(["sh", "-c", script])))


def test_a_harness_that_ignores_the_end_of_standard_input_is_killed(monkeypatch):
    monkeypatch.setattr("serving.harness.END_SECONDS", 0.5)
    harness = Harness("sleep 1000")
    harness.close()
    assert harness.process.returncode == -signal.SIGKILL


def test_a_second_ctrl_c_does_not_leave_the_harness_running(monkeypatch):
    harness = Harness("sleep 1000")
    wait = harness.process.wait

    def interrupt(timeout=None):
        if timeout and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait()

    monkeypatch.setattr(harness.process, "wait", interrupt)
    harness.close()
    assert harness.process.returncode == -signal.SIGKILL


def test_a_harness_ends_after_the_run_was_killed():
    code = (
        "import serving.harness, os\n"
        "serving.harness.END_SECONDS = 0.1\n"
        "harness = serving.harness.Harness('sleep 1000')\n"
        "print(harness.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    pid = output.stdout.strip()
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
        if state.stdout.strip()[:1] in ("", "Z"):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"the harness {pid} still runs")


def test_a_harness_that_cannot_be_started_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="cannot be started"):
        Harness("/no/such/command")
    assert not list(tmp_path.iterdir())


def test_each_run_that_shares_a_harness_sends_a_description_of_the_policy(tmp_path):
    first = make_served_run(tmp_path / "first")
    second = make_served_run(tmp_path / "second")
    assert first.player.harness is second.player.harness
    directories = []
    send = first.player.harness.send

    def record(message):
        if message["type"] == "policy":
            directories.append(message["tokenizer"])
        send(message)

    first.player.harness.send = record
    try:
        for run in (first, second, second, first):
            play(run, 1, 0.0)
    finally:
        del first.player.harness.send
    expected = [run.player.policy["tokenizer"] for run in (first, second, first)]
    assert directories == expected


# ---- imports


def test_training_without_a_harness_imports_no_server():
    code = (
        "import train, evaluate, sys\n"
        "print([name for name in sys.modules if name.startswith(('aiohttp', 'serving'))])"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert output.stdout.strip() == "[]"


def test_gwen_does_not_import_verifiers_and_the_adapter_does_not_import_gwen():
    modules = {path.stem for path in ROOT.glob("*.py")}
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    environments = ROOT / "examples" / "environments"  # users' files for verifiers
    for path in ROOT.rglob("*.py"):
        names = path.relative_to(ROOT).parts
        if environments in path.parents or any(name.startswith(".") for name in names):
            continue
        lines = path.read_text().splitlines()
        imports = [line for line in lines if line.startswith(("import ", "from "))]
        imported = {line.split()[1].split(".")[0] for line in imports}
        if path.name == "verifiers_harness.py":
            assert not imported & (modules | packages)
        elif not {"tests", "examples", ".venv"} & set(path.parts):
            assert not imported & {"verifiers", "renderers"}, path
