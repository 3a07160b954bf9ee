"""A policy on a server: `evaluate.py --url` asks a scripted one on loopback; a real one: tests/test_judge.py."""

import collections
import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import check_error_line, read_log, write_log
from huggingface_hub.utils import filter_repo_objects
from test_remote_judge import Server

import evaluate
import gwen
import report
import tasks
from disk import hub
from evaluation.served_policy import ServedPolicy
from judging.server import Endpoint
from prompts import chat_template

LIMIT = 12
FLAGS = ["--model", "demo", "--limit", str(LIMIT)]
HELD_OUT = {one["prompt"]: one["answer"] for one in tasks.load_task("demo").held_out}


def reply(text, **more):
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    choice["message"] |= more.pop("message", {})
    return json.dumps({"choices": [choice | more.pop("choice", {})]} | more)


def right(body):
    """The right answer to what is asked, with the white space that llama.cpp leaves in front."""
    return f"\n\nThe answer is {HELD_OUT[body['messages'][-1]['content']]}. "


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Starts a server that answers a request with what `answer` gives for it."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Endpoint, "concurrency", 1)
    with contextlib.ExitStack() as servers:

        def start(answer):
            def any_path(number, body):
                given = answer(body)
                return given if isinstance(given, tuple) else (200, given, {})

            return servers.enter_context(contextlib.closing(Server(any_path)))

        yield start


def asked(server):
    """The chat completions that a server was asked for."""
    return [body for _, _, body in server.requests]


def told(capsys, server, *flags):
    """The record that the command prints, and what it says beside it."""
    capsys.readouterr()
    evaluate.main([*FLAGS, "--url", server.url, *map(str, flags)])
    out, err = capsys.readouterr()
    return json.loads(out), err


def failed(capsys, server):
    """The line with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        evaluate.main([*FLAGS, "--url", server.url])
    assert ended.value.code == 2
    return check_error_line(
        capsys.readouterr().err.splitlines(keepends=True)[-1], f"--url {server.url}"
    )


def test_a_server_s_answers_are_graded_as_those_of_a_model_here(serve, capsys, tmp_path):
    server = serve(lambda body: reply(right(body) if body["temperature"] else "None."))
    how = ["--samples", 3, "--temp", 0.7, "--stop", "!", "--max-tokens", 30]
    record, _ = told(capsys, server, *how, "--out", tmp_path / "out.jsonl")
    evaluate.main([*FLAGS, "--samples", "3"])
    assert record.keys() == json.loads(capsys.readouterr().out).keys()
    assert (record["eval/accuracy"], record["eval/pass_at_3"], record["eval/greedy"]) == (1, 1, 0)
    assert record["eval/num"] == LIMIT and record["eval/entropy"] is record["eval/kl"] is None
    details = read_log(tmp_path / "out.jsonl")
    assert [one["completions"] for one in details] == [
        [f"The answer is {one['answer']}."] * 3 for one in details
    ]
    tokenizer = gwen.load("demo")[1]
    num_tokens = [1 + len(tokenizer.encode(one["completions"][0])) for one in details]
    assert record["eval/tokens"] == pytest.approx(np.mean(num_tokens))
    settings = {"model": "default_model", "stream": False, "max_tokens": 30, "stop": ["!"]}
    settings |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # servers have defaults
    for number, body in enumerate(
        asked(server)
    ):  # one answer each, and no seed, which ends mlx_lm's batches
        problem = details[number // 3 if number < 3 * LIMIT else number - 3 * LIMIT]
        assert body == settings | {
            "messages": [{"role": "user", "content": problem["prompt"]}],
            "temperature": 0.7 if number < 3 * LIMIT else 0.0,
        }
    assert len(asked(server)) == 4 * LIMIT
    assert not list(tmp_path.glob("runs/*")), "answers that were told are not kept"


def test_what_a_row_or_a_flag_gives_the_template_and_what_stands_before_reach_the_server(
    serve, capsys, tmp_path
):
    row = {
        "prompt": "Hi",
        "system": "Be brief.",
        "answer": "1",
        "chat_template_kwargs": {"mood": "gay"},
    }
    data = write_log(tmp_path / "data.jsonl", [row])
    server = serve(
        lambda _: reply(
            "1", message={"reasoning_content": "Well."}, choice={"finish_reason": "length"}
        )
    )
    how = ["--data", data, "--url-model", "mine", "--no-thinking", "--verifier", "exact"]
    record, err = told(capsys, server, *how, "--out", tmp_path / "out.jsonl")
    body = asked(server)[0]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert (
        body["chat_template_kwargs"] == {"enable_thinking": False, "mood": "gay"}
        and body["model"] == "mine"
    )
    assert record["eval/truncated_frac"] == 1 and f"mine on the server at {server.url}" in err
    assert read_log(tmp_path / "out.jsonl")[0]["greedy"] == "<think>\nWell.\n</think>\n\n1"


@pytest.mark.parametrize("content", ["<html>hello</html>", '{"choices": ['])
def test_what_is_no_reply_is_asked_for_again_and_else_ends_in_a_line(serve, capsys, content):
    seen = collections.Counter()

    def once(body):
        seen[str(body)] += 1
        return content if len(seen) % 2 and seen[str(body)] == 1 else reply(right(body))

    server = serve(once)
    record, _ = told(capsys, server)
    assert record["eval/accuracy"] == record["eval/greedy"] == 1 and len(asked(server)) == 3 * LIMIT
    server = serve(lambda _: content)
    assert "no chat completion" in failed(capsys, server)
    assert len(asked(server)) == 2 * LIMIT and not list(Path("runs").iterdir())


def end_after(num, then):
    """An answer that is right `num` times, and then what another gives."""
    left = iter(range(num))
    return lambda body: then(body) if next(left, None) is None else reply(right(body))


WRONG = {
    "no such model": lambda _: (404, "no such model", {}),
    "too long": lambda _: (400, "This model's maximum context length is 5 tokens", {}),
    "no reply": lambda _: "{}",
    "cut off": lambda _: (200, "{}", {"Content-Length": "1000", "Connection": "close"}),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_server_that_fails_ends_in_a_line_and_nothing_is_asked_twice(
    serve, capsys, monkeypatch, wrong
):
    monkeypatch.setattr("evaluation.served_policy.RETRIES", 0)
    state = {"answer": end_after(15, wrong)}
    server = serve(lambda body: state["answer"](body))
    line = failed(capsys, server)
    assert "; 15 of 24 answers are in runs/served-" in line and line.endswith(
        "run the same command again to fetch the rest\n"
    )
    assert ("--url-model" in line) == ("no such model" in line)
    (kept,) = Path("runs").iterdir()
    with kept.open("a") as file:
        file.write('{"step": 0, "pla')  # a line that was being written when the machine went down
    state["answer"] = end_after(3, wrong)
    assert "; 18 of 24 answers are in runs/served-" in failed(capsys, server)
    server.requests.clear()
    state["answer"] = lambda body: reply(right(body))
    _, err = told(capsys, server, "--temp", 0.5)
    assert "continuing" not in err and len(asked(server)) == 24, (
        "other questions have other answers"
    )
    server.requests.clear()
    record, err = told(capsys, server)
    assert "the 18 answers in runs/served-" in err
    assert record["eval/accuracy"] == 1 and len(asked(server)) == 6
    server.requests.clear()
    told(capsys, server)
    assert len(asked(server)) == 24, (
        "what was told is asked anew: the server may run another model now"
    )


@pytest.mark.parametrize("is_like", [True, False])
def test_a_template_that_makes_other_tokens_than_training_is_told_of_once(serve, capsys, is_like):
    tokenizer = gwen.load("demo")[1]
    prompts = {prompt: chat_template.encode_chat(tokenizer, prompt) for prompt in HELD_OUT}

    def answer(body):
        ids = prompts[body["messages"][-1]["content"]]
        return reply(right(body), usage={"prompt_tokens": len(ids) - (not is_like)})

    _, err = told(capsys, serve(answer))
    assert err.count("WARNING") == (not is_like)
    assert is_like or ("which end" in err and "</think>" in err)


def test_a_server_alone_does_not_tell_the_tokenizer(check_refusal):
    check_refusal(
        evaluate.main,
        ["--url", "http://host/v1"],
        "--url does not say which tokenizer the server uses",
    )


def test_the_weights_of_what_a_server_runs_are_not_fetched(tmp_path, monkeypatch):
    patterns = []
    monkeypatch.setattr(
        hub,
        "find_or_download_hub_model",
        lambda name, files=hub.HUB_FILES: patterns.extend(files) or hub.DEMO,
    )
    served = ServedPolicy("http://host/v1", "mine", "owner/name", 8, tmp_path, {})
    assert served.facts.eos_ids and served.tokenizer.encode("one")
    files = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
    ]
    assert list(filter_repo_objects(files, allow_patterns=patterns)) == files[:3]


# ---- side by side


def written(path, greedy, samples=((1.0,), (0.0,), (1.0,), (None,))):
    rows = zip(range(8), samples * 2, greedy * 2, strict=True)
    shown = [
        dict(problem=n, prompt=f"{n}?", values=v, greedy=f" {g}", greedy_value=float(g))
        for n, v, g in rows
    ]
    return write_log(path, shown)


def test_evaluations_stand_side_by_side_with_the_intervals_of_pairs(tmp_path, capsys):
    files = [
        written(tmp_path / "base.jsonl", [1, 0, 0, 0]),
        written(tmp_path / "fused.jsonl", [1, 1, 1, 0]),
    ]
    report.main(["--compare", *files])
    head, _, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == "problems sampled difference greedy difference same greedy text".split()
    assert first.split()[:2] == ["base.jsonl", "8"] and "0.667 ±" in first and "0.250 ±" in first
    assert "+0.500 ± " in second and second.count(", too few ") == 2 and second.endswith("4 of 8")
    files = [
        written(tmp_path / f"{n}.jsonl", [1, 0, 0, 0], [[n / 2, n, 0.0, 0.0]] * 4) for n in (0, 1)
    ]
    report.main(["--compare", *files])
    assert "+0.375 ± 0.205, better" in capsys.readouterr().out  # of means of four samples


def test_what_is_no_evaluation_and_what_shares_no_problem_is_refused(tmp_path, check_refusal):
    one = written(tmp_path / "one.jsonl", [1, 1, 1, 1])
    other = write_log(
        tmp_path / "other.jsonl",
        [row | {"prompt": "?"} for row in read_log(tmp_path / "one.jsonl")],
    )
    for content in ("{", "[]", "{}"):
        (tmp_path / "no.jsonl").write_text(content)
        said = "no.jsonl contains no answers.* --out"
        check_refusal(report.main, ["--compare", one, tmp_path / "no.jsonl"], said)
    check_refusal(
        report.main, ["--compare", one, tmp_path / "nowhere.jsonl"], "nowhere.jsonl does not exist"
    )
    check_refusal(report.main, ["--compare", one, other], "no problem in common")
    right = write_log(
        tmp_path / "right.jsonl",
        [row | {"reward": [1.0]} for row in read_log(tmp_path / "one.jsonl")],
    )
    check_refusal(
        report.main,
        ["--compare", one, right],
        "right.jsonl .*--verifier and --reward",
    )
    check_refusal(
        report.main, ["--compare", one, tmp_path], f"{tmp_path} contains no answers"
    )  # of a run that began
