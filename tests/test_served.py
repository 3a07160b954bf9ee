"""
Evaluation of a policy on a server: `evaluate.py --url` with a scripted server on loopback.

tests/test_judge.py has tests with a real server.
"""

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
from reporting import answers

LIMIT = 12
FLAGS = ["--model", "demo", "--limit", str(LIMIT)]
ANSWERS_BY_PROMPT = {
    example["prompt"]: example["answer"] for example in tasks.load_task("demo").held_out
}


def make_reply(text, message=None, choice=None, **fields):
    """A chat completion. message, choice, fields: additions at the three levels."""
    message = {"role": "assistant", "content": text} | (message or {})
    choice = {"message": message, "finish_reason": "stop"} | (choice or {})
    return json.dumps({"choices": [choice]} | fields)


def right_answer(body):
    """The right answer to a request, with the white space that llama.cpp puts before it."""
    return f"\n\nThe answer is {ANSWERS_BY_PROMPT[body['messages'][-1]['content']]}. "


def reply_rightly(body):
    return make_reply(right_answer(body))


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Starts a server that answers a request with the result of `answer`."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Endpoint, "concurrency", 1)
    with contextlib.ExitStack() as servers:

        def start(answer):
            def answer_any_path(number, body):
                response = answer(body)
                return response if isinstance(response, tuple) else (200, response, {})

            return servers.enter_context(contextlib.closing(Server(answer_any_path)))

        yield start


def request_bodies(server):
    """The bodies of all requests to a server."""
    return [body for _, _, body in server.requests]


def evaluate_served(capsys, server, *flags):
    """Runs the command; returns the record that it prints, and its output on stderr."""
    capsys.readouterr()
    evaluate.main([*FLAGS, "--url", server.url, *map(str, flags)])
    out, err = capsys.readouterr()
    return json.loads(out), err


def catch_error_line(capsys, server):
    """Runs the command, which must fail; returns the last line of its output."""
    with pytest.raises(SystemExit) as exit_info:
        evaluate.main([*FLAGS, "--url", server.url])
    assert exit_info.value.code == 2
    last_line = capsys.readouterr().err.splitlines(keepends=True)[-1]
    return check_error_line(last_line, f"--url {server.url}")


def test_answers_of_a_server_are_graded_like_those_of_a_local_model(serve, capsys, tmp_path):
    server = serve(lambda body: reply_rightly(body) if body["temperature"] else make_reply("None."))
    flags = ["--samples", 3, "--temp", 0.7, "--stop", "!", "--max-tokens", 30]
    record, _ = evaluate_served(capsys, server, *flags, "--out", tmp_path / "out.jsonl")
    evaluate.main([*FLAGS, "--samples", "3"])
    local_record = json.loads(capsys.readouterr().out)

    # The record.
    assert record.keys() == local_record.keys()
    assert record["eval/accuracy"] == 1
    assert record["eval/pass_at_3"] == 1
    assert record["eval/greedy"] == 0
    assert record["eval/num"] == LIMIT
    assert record["eval/entropy"] is None
    assert record["eval/kl"] is None
    answers = read_log(tmp_path / "out.jsonl")
    assert [answer["completions"] for answer in answers] == [
        [f"The answer is {answer['answer']}."] * 3 for answer in answers
    ]
    tokenizer = gwen.load("demo")[1]
    num_tokens = [1 + len(tokenizer.encode(answer["completions"][0])) for answer in answers]
    assert record["eval/tokens"] == pytest.approx(np.mean(num_tokens))

    # The requests: one answer each, and no seed, because a seed ends the batches of mlx_lm.
    settings = {"model": "default_model", "stream": False, "max_tokens": 30, "stop": ["!"]}
    settings |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # servers have defaults
    bodies = request_bodies(server)
    num_sampled = 3 * LIMIT
    for number, body in enumerate(bodies):
        is_sampled = number < num_sampled
        problem = answers[number // 3 if is_sampled else number - num_sampled]
        messages = [{"role": "user", "content": problem["prompt"]}]
        temperature = 0.7 if is_sampled else 0.0
        assert body == settings | {"messages": messages, "temperature": temperature}
    assert len(bodies) == 4 * LIMIT

    assert not list(tmp_path.glob("runs/*")), "a complete evaluation leaves no answers in runs/"


def test_template_variables_and_system_messages_reach_the_server(serve, capsys, tmp_path):
    row = {
        "prompt": "Hi",
        "system": "Be brief.",
        "answer": "1",
        "chat_template_kwargs": {"mood": "gay"},
    }
    data = write_log(tmp_path / "data.jsonl", [row])
    response = make_reply(
        "1", message={"reasoning_content": "Well."}, choice={"finish_reason": "length"}
    )
    server = serve(lambda _: response)
    flags = ["--data", data, "--url-model", "mine", "--no-thinking", "--verifier", "exact"]
    record, err = evaluate_served(capsys, server, *flags, "--out", tmp_path / "out.jsonl")

    body = request_bodies(server)[0]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "mood": "gay"}
    assert body["model"] == "mine"
    assert record["eval/truncated_frac"] == 1
    assert f"mine on the server at {server.url}" in err
    greedy = read_log(tmp_path / "out.jsonl")[0]["greedy"]
    assert greedy == "<think>\nWell.\n</think>\n\n1"


@pytest.mark.parametrize("content", ["<html>hello</html>", '{"choices": ['])
def test_an_invalid_reply_is_requested_again_and_then_ends_in_one_error_line(
    serve, capsys, content
):
    num_requests = collections.Counter()

    def fail_first_request_of_every_second_body(body):
        num_requests[str(body)] += 1
        is_first_request = num_requests[str(body)] == 1
        return content if len(num_requests) % 2 and is_first_request else reply_rightly(body)

    server = serve(fail_first_request_of_every_second_body)
    record, _ = evaluate_served(capsys, server)
    assert record["eval/accuracy"] == 1
    assert record["eval/greedy"] == 1
    assert len(server.requests) == 3 * LIMIT

    server = serve(lambda _: content)
    assert "no chat completion" in catch_error_line(capsys, server)
    assert len(server.requests) == 2 * LIMIT
    assert not list(Path("runs").iterdir())


def fail_after(num, failure):
    """A function that answers rightly `num` times, and then gives the result of `failure`."""
    right_replies_left = iter(range(num))

    def answer(body):
        if next(right_replies_left, None) is None:
            return failure(body)
        return reply_rightly(body)

    return answer


FAILURES = {
    "no such model": lambda _: (404, "no such model", {}),
    "too long": lambda _: (400, "This model's maximum context length is 5 tokens", {}),
    "no reply": lambda _: "{}",
    "cut off": lambda _: (200, "{}", {"Content-Length": "1000", "Connection": "close"}),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_an_evaluation_whose_server_fails_ends_in_one_line_and_can_continue(
    serve, capsys, monkeypatch, failure
):
    monkeypatch.setattr("evaluation.served_policy.RETRIES", 0)
    state = {"answer": fail_after(15, failure)}
    server = serve(lambda body: state["answer"](body))
    line = catch_error_line(capsys, server)
    assert "; 15 of 24 answers are in runs/served-" in line
    assert line.endswith("run the same command again to fetch the rest\n")
    assert ("--url-model" in line) == ("no such model" in line)

    # A power failure can leave an incomplete line.
    (answers_file,) = Path("runs").iterdir()
    with answers_file.open("a") as file:
        file.write('{"step": 0, "pla')
    state["answer"] = fail_after(3, failure)
    assert "; 18 of 24 answers are in runs/served-" in catch_error_line(capsys, server)

    # Other settings need other answers.
    server.requests.clear()
    state["answer"] = reply_rightly
    _, err = evaluate_served(capsys, server, "--temp", 0.5)
    assert "continuing" not in err
    assert len(server.requests) == 24

    # The same command requests only the missing answers.
    server.requests.clear()
    record, err = evaluate_served(capsys, server)
    assert "the 18 answers in runs/served-" in err
    assert record["eval/accuracy"] == 1
    assert len(server.requests) == 6

    # After a complete evaluation all is requested again: the server may run another model by now.
    server.requests.clear()
    evaluate_served(capsys, server)
    assert len(server.requests) == 24


@pytest.mark.parametrize("is_equal", [True, False])
def test_one_warning_appears_if_the_server_counts_other_prompt_tokens_than_training(
    serve, capsys, is_equal
):
    tokenizer = gwen.load("demo")[1]
    num_prompt_tokens = {
        prompt: len(chat_template.encode_chat(tokenizer, prompt)) for prompt in ANSWERS_BY_PROMPT
    }

    def answer(body):
        num_tokens = num_prompt_tokens[body["messages"][-1]["content"]]
        usage = {"prompt_tokens": num_tokens if is_equal else num_tokens - 1}
        return make_reply(right_answer(body), usage=usage)

    _, err = evaluate_served(capsys, serve(answer))
    assert err.count("WARNING") == (not is_equal)
    if not is_equal:
        assert "which end" in err
        assert "</think>" in err


def test_a_url_without_a_model_is_refused_because_the_tokenizer_is_unknown(check_refusal):
    check_refusal(
        evaluate.main,
        ["--url", "http://host/v1"],
        "--url does not say which tokenizer the server uses",
    )


def test_a_served_policy_downloads_no_weights(tmp_path, monkeypatch):
    requested_patterns = []

    def find_or_download_hub_model(name, files=hub.HUB_FILES):
        requested_patterns.extend(files)
        return hub.DEMO

    monkeypatch.setattr(hub, "find_or_download_hub_model", find_or_download_hub_model)
    served = ServedPolicy("http://host/v1", "mine", "owner/name", 8, tmp_path, {})
    assert served.facts.eos_ids
    assert served.tokenizer.encode("one")

    without_weights = ["config.json", "tokenizer.json", "chat_template.jinja"]
    files = [*without_weights, "model-00001-of-00002.safetensors"]
    assert list(filter_repo_objects(files, allow_patterns=requested_patterns)) == without_weights


# ---- side by side


def write_answers(path, greedy_values, sampled_values=((1.0,), (0.0,), (1.0,), (None,))):
    """Writes the answers of an evaluation of eight problems, from the values of four."""
    rows = []
    pairs = zip(sampled_values * 2, greedy_values * 2, strict=True)
    for number, (values, greedy) in enumerate(pairs):
        row = {"problem": number, "prompt": f"{number}?", "values": values}
        rows.append(row | {"greedy": f" {greedy}", "greedy_value": float(greedy)})
    return write_log(path, rows)


def test_a_comparison_of_evaluations_has_intervals_of_paired_differences(tmp_path, capsys):
    files = [
        write_answers(tmp_path / "base.jsonl", [1, 0, 0, 0]),
        write_answers(tmp_path / "fused.jsonl", [1, 1, 1, 0]),
    ]
    report.main(["--compare", *files])
    header, _, first, second = capsys.readouterr().out.splitlines()
    expected_header = "problems sampled difference greedy difference same greedy text".split()
    assert header.split() == expected_header
    assert first.split()[:2] == ["base.jsonl", "8"]
    assert "0.667 ±" in first
    assert "0.250 ±" in first
    assert "+0.500 ± " in second
    assert second.count(", too few ") == 2
    assert second.endswith("4 of 8")

    # The difference is between means of four samples.
    files = []
    for number in (0, 1):
        path = tmp_path / f"{number}.jsonl"
        sampled_values = [[number / 2, number, 0.0, 0.0]] * 4
        files.append(write_answers(path, [1, 0, 0, 0], sampled_values))
    report.main(["--compare", *files])
    assert "+0.375 ± 0.205, better" in capsys.readouterr().out


def test_a_prompt_that_is_text_equals_the_same_prompt_as_a_message_in_a_comparison(tmp_path):
    evaluation = write_answers(tmp_path / "one.jsonl", [1, 0, 1, 1])
    rows = read_log(tmp_path / "one.jsonl")
    as_messages = []
    for row in rows:
        assert isinstance(row["prompt"], str)
        as_messages.append(row | {"prompt": [{"role": "user", "content": row["prompt"]}]})
    other = write_log(tmp_path / "messages.jsonl", as_messages)
    table = answers.make_answer_comparison_table([str(evaluation), str(other)])
    assert table[2][-1] == f"{len(rows)} of {len(rows)}"


def test_a_comparison_refuses_files_without_answers_and_files_without_common_problems(
    tmp_path, check_refusal
):
    evaluation = write_answers(tmp_path / "one.jsonl", [1, 1, 1, 1])
    rows = read_log(tmp_path / "one.jsonl")

    def check_comparison_refusal(other, pattern):
        check_refusal(report.main, ["--compare", evaluation, other], pattern)

    for content in ("{", "[]", "{}"):
        (tmp_path / "no.jsonl").write_text(content)
        check_comparison_refusal(tmp_path / "no.jsonl", "no.jsonl contains no answers.* --out")
    check_comparison_refusal(tmp_path / "nowhere.jsonl", "nowhere.jsonl does not exist")

    other_prompts = [row | {"prompt": "?"} for row in rows]
    other = write_log(tmp_path / "other.jsonl", other_prompts)
    check_comparison_refusal(other, "share no problems")

    scored = write_log(tmp_path / "right.jsonl", [row | {"reward": [1.0]} for row in rows])
    check_comparison_refusal(scored, "right.jsonl .*--verifier and --reward")

    # The directory of a run that has just started.
    check_comparison_refusal(tmp_path, f"{tmp_path} contains no answers")
