"""Episodes of an outside harness: the endpoint, the sampler's turns, and what goes wrong."""

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
from serving.endpoint import CancelledRequest, Endpoint
from serving.harness import Harness, HarnessEnded, close_harnesses
from step.generation import generate_completions
from step.sample import new_samples
from train import train

pytestmark = pytest.mark.slow

SCRIPT = f"{sys.executable} {ROOT / 'tests' / 'harness.py'}"
GAME = ["--model", "demo:tools", "--max-tokens", "128", "--max-context", "320", "--eval-every", "0"]


@pytest.fixture(autouse=True, scope="module")
def no_harness_is_left():
    yield
    close_harnesses()


def served_run(run_dir, mode="plain", num_examples=8, *flags):
    run_dir.mkdir(exist_ok=True)
    return make_run(run_dir, *GAME, "--env-server", f"{SCRIPT} '{mode}' {num_examples}", *flags)


def play(run, num_groups, temperature, group_size=1, is_evaluation=False, num_slots=64):
    """Samples of the run's first examples."""
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
def test_episodes_of_a_harness_equal_episodes_played_inside(tmp_path, temperature):
    served = served_run(tmp_path / "served")
    (tmp_path / "inside").mkdir()
    inside = make_run(tmp_path / "inside", *GAME, "--task", "guess", "--max-turns", "6")
    outer, stats = play(served, 200, temperature)
    inner, _ = play(inside, 200, temperature)
    assert len(outer) == len(inner) == 200
    assert stats.failures == []
    assert len({tuple(sample.response_ids) for sample in inner}) > 10
    assert max(sample.conversation["turns"] for sample in inner) >= 4
    for a, b in zip(outer, inner, strict=True):
        assert a.prompt == b.prompt
        assert a.response_ids == b.response_ids
        assert list(a.loss_positions) == list(b.loss_positions)
        assert np.abs(a.logprobs - b.logprobs).max() <= 1e-4
        assert str(a.text) == str(b.text)
        assert a.columns["earned"][1] == (b.columns["earned"][1] or 0.0)
        assert a.conversation["turns"] == b.conversation["turns"]


def test_a_harness_may_limit_how_many_episodes_it_plays_at_once(tmp_path):
    few, stats = play(served_run(tmp_path / "few", "at once 3"), 8, 1.0)
    all_at_once, _ = play(served_run(tmp_path / "all"), 8, 1.0)
    assert stats.failures == []
    assert stats.wait_s > 0
    for a, b in zip(few, all_at_once, strict=True):
        assert a.response_ids == b.response_ids
        assert np.abs(a.logprobs - b.logprobs).max() <= 1e-4


def test_no_position_is_computed_twice(tmp_path, monkeypatch):
    """The model reads each token once; only a turn's last token may be read again."""
    run = served_run(tmp_path)
    num_read = []
    hidden = type(run.model).hidden

    def count(self, tokens, cache=None, *args, **options):
        num_read.append(tokens.size)
        return hidden(self, tokens, cache, *args, **options)

    monkeypatch.setattr(type(run.model), "hidden", count)
    [sample], _ = play(run, 1, 0.0)
    num_prefilled = sum(num for num in num_read if num > 1)
    own = set(sample.loss_positions)
    num_foreign = len(sample.prompt) + len(sample.response_ids) - len(own)
    num_turns = sample.conversation["turns"]
    assert num_turns >= 3
    assert num_foreign <= num_prefilled <= num_foreign + num_turns


def test_a_request_may_limit_a_turn(tmp_path):
    run = served_run(tmp_path, "short turns")
    assert ROOT / "tests" / "harness.py" in run.source_files  # a resume notices its changes
    samples, stats = play(run, 8, 0.0)
    spans = [end - begin for sample in samples for begin, end in sample.turn_begins_and_ends]
    assert not stats.failures
    assert max(spans) == 5


@pytest.mark.parametrize("mode", ["plain", "short turns", "plain numbered", "short turns numbered"])
def test_rows_that_begin_again_after_memory_ran_out_repeat_the_turns_that_the_harness_knows(
    tmp_path, monkeypatch, mode
):
    run = served_run(tmp_path, mode)
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
    assert [sample.response_ids for sample in samples] == [
        sample.response_ids for sample in expected
    ]


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
def test_an_episode_that_fails_is_named_and_left_out(tmp_path, mode, flags, text):
    run = served_run(tmp_path, mode, 8, *flags)
    samples, stats = play(run, 8, 0.0)
    assert len(samples) == 4
    assert len(stats.failures) == 4
    assert text in stats.failures[0]
    assert sorted({sample.group for sample in samples}) == [sample.group for sample in samples]


def test_an_evaluation_keeps_failed_episodes_without_a_reward(tmp_path):
    run = served_run(tmp_path, "bad reward")
    samples, stats = play(run, 8, 0.0, is_evaluation=True)
    assert len(samples) == 8
    earned = [sample.columns["earned"][1] for sample in samples]
    assert earned.count(None) == 4 == len(stats.failures)


def test_the_run_ends_if_all_episodes_fail(tmp_path):
    run = served_run(tmp_path, "hot")
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
def test_a_harness_that_does_not_start_is_one_line(tmp_path, mode, text):
    command = f"{SCRIPT} '{mode}'" if text else "/no/such/command"
    output = run_command(
        "train.py", *GAME, "--env-server", command, "--env-timeout", "1" if mode == "silent" else "60",
        "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert output.returncode == 2
    assert "Traceback" not in output.stderr
    assert "--env-server" in output.stderr
    assert not (tmp_path / "run").exists()


def test_a_flood_of_messages_ends_in_one_line(tmp_path):
    output = run_command(
        "train.py", *GAME, "--env-server", f"{SCRIPT} flood", "--batch", "2", "--groups", "2",
        "--steps", "1", "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert output.returncode == 2
    assert "Traceback" not in output.stderr
    assert "has sent the result of this episode before" in output.stderr


def test_a_harness_killed_in_a_step_leaves_a_run_that_resumes(tmp_path):
    run_dir = tmp_path / "run"
    flags = [
        *GAME, "--batch", "2", "--groups", "4", "--steps", "3", "--save-every", "1",
        "--learning-rate", "0.001",
    ]  # fmt: skip
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
    whole = tmp_path / "whole"
    run_command("train.py", *flags, "--env-server", f"{SCRIPT} plain", "--run-dir", whole)
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        first, second = (path / file for path in (run_dir, whole))
        assert len(first.read_text().splitlines()) == len(second.read_text().splitlines())
    rewards = [
        [
            json.loads(line)["reward/mean"]
            for line in (path / "metrics.jsonl").read_text().splitlines()
        ]
        for path in (run_dir, whole)
    ]
    assert rewards[0] == rewards[1]


def test_a_run_evaluates_its_held_out_examples_with_the_harness(tmp_path):
    run_dir = tmp_path / "run"
    flags = [*GAME[:-2], "--batch", "2", "--groups", "4", "--steps", "1", "--eval-every", "1"]
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
def test_examples_that_cannot_be_used_are_one_line(tmp_path, mode, flags, texts):
    with pytest.raises(ValueError, match=re.escape(texts[0])) as error:
        served_run(tmp_path, mode, 8, *flags)
    assert texts[1] in str(error.value)


def test_rewards_of_the_user_are_added_to_that_of_the_harness(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **columns): return [0.5] * len(completions)\n")
    run = served_run(tmp_path / "run", "plain", 8, "--reward", f"{file}:short")
    assert run.task.rewards_with_nonzero_weight.keys() == {"short", "environment"}
    file.write_text("def environment(completions, **columns): return [0.5] * len(completions)\n")
    with pytest.raises(ValueError, match="rename the function"):
        served_run(tmp_path / "other", "plain", 8, "--reward", f"{file}:environment")


def test_a_program_cannot_sample_single_answers_of_an_environment(tmp_path):
    with pytest.raises(ValueError, match="--env-server"):
        trainer.sample_completions(served_run(tmp_path), ["hello"], 1, None)


def test_odd_texts_of_a_harness_do_not_end_the_run(tmp_path):
    output = run_command(
        "train.py", *GAME[:-1], "1", "--env-server", f"{SCRIPT} odd", "--batch", "2",
        "--groups", "2", "--steps", "1", "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert output.returncode == 0, output.stderr


@pytest.mark.parametrize("flags", [[], ["--train-completions", "2", "--truncated", "mask"]])
@pytest.mark.parametrize("mode", ["only 1", "only 1 2 3 4", "only 1 5", "only 2 3 6 7"])
def test_a_step_trains_on_the_episodes_that_are_left(tmp_path, mode, flags):
    """One episode, one group, one episode of each group, or two of each."""
    flags = ["--batch", "2", "--groups", "4", "--steps", "1", "--learning-rate", "0.001", *flags]
    run = served_run(tmp_path, mode, 8, *flags)
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
def test_settings_that_do_not_fit_a_harness_are_refused(tmp_path, flags, text):
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
    """The status and the JSON body of a reply."""
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


def test_the_endpoint_answers_with_ids_and_log_probabilities(endpoint):
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


def test_the_endpoint_names_the_longest_prompt(endpoint):
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
def test_a_wrong_request_is_refused_with_its_reason(endpoint, body, status, text):
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
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    assert not caplog.records


def test_an_endpoint_closes_although_a_request_is_open():
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


def test_a_thousand_requests_at_once_are_bounded(endpoint):
    codes = []
    lock = threading.Lock()

    def ask():
        code, _ = post(endpoint, {"token_ids": [1]}, timeout=60)
        with lock:
            codes.append(code)

    threads = [threading.Thread(target=ask) for _ in range(1000)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while len(codes) < 1000 - endpoint.most_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert codes.count(503) == 1000 - endpoint.most_open
    for _ in range(endpoint.most_open):
        endpoint.events.get(timeout=10).answer([1], [0.0], "stop")
    for thread in threads:
        thread.join(60)
    assert codes.count(200) == endpoint.most_open


def test_a_client_that_closes_its_connection_is_noticed(endpoint):
    with pytest.raises(TimeoutError):
        post(endpoint, {"token_ids": [1]}, timeout=0.5)
    pending = endpoint.events.get(timeout=10)
    cancelled = endpoint.events.get(timeout=10)
    assert isinstance(cancelled, CancelledRequest)
    assert cancelled.pending is pending
    assert endpoint.num_open == 0


def test_a_harness_ends_with_its_children():
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
def test_a_harness_that_can_send_nothing_more_is_noticed(script, text, monkeypatch):
    monkeypatch.setattr("serving.harness.END_SECONDS", 0.5)
    assert text in wait_for_end(Harness(shlex.join(["sh", "-c", script])))


def test_a_harness_that_ignores_the_end_of_its_input_is_killed(monkeypatch):
    monkeypatch.setattr("serving.harness.END_SECONDS", 0.5)
    harness = Harness("sleep 1000")
    harness.close()
    assert harness.process.returncode == -signal.SIGKILL


def test_a_second_ctrl_c_does_not_leave_the_harness_behind(monkeypatch):
    harness = Harness("sleep 1000")
    wait = harness.process.wait

    def interrupt(timeout=None):
        if timeout and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait()

    monkeypatch.setattr(harness.process, "wait", interrupt)
    harness.close()
    assert harness.process.returncode == -signal.SIGKILL


def test_a_harness_ends_although_its_run_was_killed():
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


def test_a_command_that_cannot_be_started_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="cannot be started"):
        Harness("/no/such/command")
    assert not list(tmp_path.iterdir())


def test_runs_that_share_a_harness_each_tell_it_their_policy(tmp_path):
    first, second = (served_run(tmp_path / name) for name in ("first", "second"))
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


# ---- what is imported


def test_training_without_a_harness_loads_no_server():
    code = "import train, evaluate, sys; print([n for n in sys.modules if n.startswith(('aiohttp', 'serving'))])"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert output.stdout.strip() == "[]"


def test_gwen_imports_nothing_of_verifiers_and_the_adapter_nothing_of_gwen():
    rooms = {path.stem for path in ROOT.glob("*.py")} | {
        path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()
    }
    environments = ROOT / "examples" / "environments"  # users' files for verifiers
    for path in ROOT.rglob("*.py"):
        names = path.relative_to(ROOT).parts
        if environments in path.parents or any(name.startswith(".") for name in names):
            continue
        lines = path.read_text().splitlines()
        imported = {
            line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))
        }
        if path.name == "verifiers_harness.py":
            assert not imported & rooms
        elif not {"tests", "examples", ".venv"} & set(path.parts):
            assert not imported & {"verifiers", "renderers"}, path
