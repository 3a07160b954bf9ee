"""The episodes of an outside harness: messages and requests arrive in any order."""

import collections
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from sampler import SamplingParams
from serving.endpoint import RequestCancellation
from serving.episodes import ServedEpisodes, read_outcome
from serving.harness import parse_message
from serving.requests import PendingRequest, parse_generate_request

END = 9
CONTEXT = 50


class RecordingRequest(PendingRequest):
    """A request that records its reply."""

    def __init__(self, body, session):
        self.request = parse_generate_request(body, session)
        self.id = "1"
        self.status = None
        self.body = None

    def _set_reply(self, status, body):
        assert self.status is None, "a request has two replies"
        self.status = status
        self.body = body

    @property
    def error(self):
        return self.body["error"]["message"]


class FakeHarness:
    """A harness whose events a test chooses."""

    has_ended = False

    def __init__(self):
        self.endpoint = SimpleNamespace(most_open=0, context=0)
        self.sent = []
        self.queue = collections.deque()
        self.num_episodes = 0

    def next_episode_number(self):
        self.num_episodes += 1
        return self.num_episodes

    def knows_episode_number(self, number):
        return 1 <= number <= self.num_episodes

    def refuse_repeated_message(self, message):
        pass

    def send(self, message):
        self.sent.append(message)

    def take_event(self, timeout):
        return self.queue.popleft() if self.queue else None

    # ---- events

    def announce(self, number, session=None):
        self.queue.append(
            {"type": "session", "episode": number, "session": session or f"s{number}"}
        )

    def ask(self, session, ids, **params):
        pending = RecordingRequest({"token_ids": ids, "sampling_params": params}, session)
        self.queue.append(pending)
        return pending

    def cancel(self, pending):
        self.queue.append(RequestCancellation(pending))

    def report(self, number, ids, positions, **fields):
        message = {"token_ids": ids, "own": positions, "reward": 1.0} | fields
        self.queue.append({"type": "result", "episode": number} | message)


def make_episodes(num=1, timeout=60.0, harness=None):
    harness = harness or FakeHarness()
    params = SamplingParams(max_tokens=20, eos_ids=(END,))
    episodes = ServedEpisodes(
        harness, num, params, context=CONTEXT, vocabulary_size=10, timeout=timeout
    )
    return harness, episodes


def begin_wave(num=1):
    """Begins episodes, each of which has requested its first turn. Returns the open requests too."""
    harness, episodes = make_episodes(num)
    requests = []
    for number in range(1, num + 1):
        harness.announce(number)
        requests.append(harness.ask(f"s{number}", [1, 2]))
    assert len(episodes.gather_wave()) == num
    episodes.begin_or_restart_decoding(list(range(num)))
    return harness, episodes, requests


def end_turn(episodes, row, ids):
    episodes.end_turn(row, ids, np.full(len(ids), -1, np.float32))


# ---- races


def test_a_request_may_arrive_before_the_message_with_the_session():
    harness, episodes = make_episodes()
    harness.ask("s1", [1, 2])
    harness.announce(1)
    assert [episode.prompt for episode in episodes.gather_wave()] == [[1, 2]]


def test_a_repeated_request_gets_the_same_turn():
    harness, episodes, [first_request] = begin_wave()
    end_turn(episodes, 0, [5, END])
    repeated_request = harness.ask("s1", [1, 2])
    assert episodes.take_replies(wait=False) == {}
    assert repeated_request.status == 200
    assert repeated_request.body == first_request.body


def test_a_result_without_the_tokens_of_the_last_reply_fails_the_episode():
    harness, episodes, _ = begin_wave()
    end_turn(episodes, 0, [5, END])
    harness.report(1, [1, 2], [])
    assert episodes.take_replies(wait=False) == {0: "stop"}
    assert "token ids" in episodes.episodes[0].error


def test_a_result_during_an_open_request_ends_the_request():
    harness, episodes, _ = begin_wave()
    end_turn(episodes, 0, [5, END])
    second_request = harness.ask("s1", [1, 2, 5, END, 3])
    assert episodes.take_replies(wait=False) == {0: [3]}
    harness.report(1, [1, 2, 5, END], [2, 3])
    assert episodes.take_replies(wait=False) == {0: "stop"}
    assert second_request.status == 409
    assert episodes.episodes[0].outcome.reward == 1.0


def test_two_sessions_fail_an_episode():
    harness, episodes, _ = begin_wave()
    harness.announce(1, "other")
    assert episodes.take_replies(wait=False) == {0: "stop"}
    assert "two sessions" in episodes.episodes[0].error
    assert harness.sent == [{"type": "cancel", "episode": 1}]


def test_a_session_belongs_to_one_episode():
    harness, episodes = make_episodes(2)
    harness.announce(1, "same")
    harness.announce(2, "same")
    harness.ask("same", [1, 2])
    [episode] = episodes.gather_wave()
    assert episode.number == 1
    assert "episode 1 has the same session" in episodes.episodes[1].error


def test_a_request_of_a_failed_episode_gets_an_error_at_once():
    harness, episodes, _ = begin_wave()
    episodes._fail_and_cancel_episode(episodes.episodes[0], "a test")
    late_request = harness.ask("s1", [1, 2])
    episodes.take_replies(wait=False)
    assert late_request.status == 400
    assert "a test" in late_request.error


def test_a_request_gets_an_error_if_the_episode_failed_before_its_session_was_announced():
    harness, episodes = make_episodes()
    pending = harness.ask("s1", [1, 2])
    harness.report(1, [], [], error="a test")
    harness.announce(1)
    for _ in range(3):
        episodes._handle_event(0)
    assert pending.status == 400


def test_a_result_of_an_earlier_rollout_is_ignored():
    harness, episodes = make_episodes()
    episodes.cancel_episodes_and_refuse_requests()
    _, later = make_episodes(harness=harness)
    harness.report(1, [1, 2], [])
    harness.announce(2)
    harness.ask("s2", [1, 2])
    [episode] = later.gather_wave()
    assert episode.number == 2
    assert not episode.error


def test_a_client_that_cancels_an_open_request_fails_the_episode():
    harness, episodes, [first_request] = begin_wave()
    harness.cancel(first_request)
    repeated_request = harness.ask("s1", [1, 2])
    assert episodes.take_replies(wait=False) == {0: "stop"}
    assert repeated_request.status == 400
    assert "closed the connection" in repeated_request.error


def test_a_client_that_closes_after_the_reply_may_repeat_the_request():
    harness, episodes, [first_request] = begin_wave()
    end_turn(episodes, 0, [5, END])
    harness.cancel(first_request)
    repeated_request = harness.ask("s1", [1, 2])
    episodes.take_replies(wait=False)
    assert repeated_request.status == 200
    assert not episodes.episodes[0].error


def test_the_number_of_waiting_requests_without_a_session_is_bounded():
    harness, episodes = make_episodes(1)
    requests = [harness.ask(f"unknown {number}", [1]) for number in range(5)]
    for _ in requests:
        episodes._handle_event(0)
    assert [pending.status for pending in requests] == [None, 503, 503, 503, 503]
    episodes.cancel_episodes_and_refuse_requests()
    assert requests[0].status == 409


@pytest.mark.parametrize(
    "ids, expected_text",
    [
        ([1, 2, 5, END], "adds no token"),
        ([1, 2, 5, END, 10], "not below 10"),
        ([1, 2, 5, END, -1], "not below 10"),
        ([1, 2, 4, END, 3], "token 3"),
        ([1], "token 2"),
        ([1, 2, 5, END] + [3] * CONTEXT, "maximum context length"),
    ],
)
def test_a_request_that_does_not_continue_the_conversation_is_refused(ids, expected_text):
    harness, episodes, _ = begin_wave()
    end_turn(episodes, 0, [5, END])
    second_request = harness.ask("s1", ids)
    assert episodes.take_replies(wait=False) == {}
    assert second_request.status == 400
    assert expected_text in second_request.error
    assert not episodes.episodes[0].is_over


@pytest.mark.parametrize(
    "fields, expected_text",
    [
        ({"reward": float("nan")}, "nan"),
        ({"reward": float("inf")}, "inf"),
        ({"reward": 10**400}, "not a number"),
        ({"reward": True}, "True"),
        ({"metrics": {"x": float("nan")}}, "nan"),
        ({"metrics": [1]}, "metrics"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": "text"}, "messages"),
        ({"logprobs": [float("nan")] * 2}, "log-probabilities"),
        ({"logprobs": "ab"}, "log-probabilities"),
        ({"logprobs": [-1.0]}, "log-probabilities"),
        ({"own": [3, 2]}, "positions"),
        ({"own": None}, "positions"),
        ({"token_ids": None}, "token ids"),
        ({"error": ["a", {"b": "c"}]}, "a"),
    ],
)
def test_an_invalid_result_fails_the_episode(fields, expected_text):
    harness, episodes, _ = begin_wave()
    end_turn(episodes, 0, [5, END])
    harness.report(1, [1, 2, 5, END], [2, 3], **fields)
    assert episodes.take_replies(wait=False) == {0: "stop"}
    assert expected_text in episodes.episodes[0].error


def test_texts_of_a_harness_can_be_written_to_a_file():
    """JSON may hold half of a surrogate pair, which no file in UTF-8 can hold."""
    line = b'{"type": "result", "error": "a\\ud800b", "\\uDC00": ["\\ud83d\\ude00", "\\\\ud800"]}'
    message = parse_message(line)
    assert message == {"type": "result", "error": "a?b", "?": ["\U0001f600", "\\ud800"]}
    json.dumps(message, ensure_ascii=False).encode()


def test_an_error_of_a_harness_is_one_line():
    with pytest.raises(ValueError, match=r"^a b$"):
        read_outcome({"error": "a\n\n  b\n"})


@pytest.mark.parametrize(
    "line", [b"\xff{}", b"[1]", b"3", b"{}", b'{"type": 1}', b"[" * 100_000, b"9" * 5000, b"\n"]
)
def test_a_line_that_is_not_a_message_gives_none(line):
    assert parse_message(line) is None


def test_an_unread_result_prevents_a_timeout():
    harness, episodes, _ = begin_wave(2)
    for row in range(2):
        end_turn(episodes, row, [5, END])
    episodes.timeout = 0.05
    time.sleep(0.1)
    for number in (2, 1):
        harness.report(number, [1, 2, 5, END], [2, 3])
    episodes.wait_for_results()
    assert not any(episode.error for episode in episodes.episodes)


# ---- rows that begin again after memory ran out


def test_a_row_that_begins_again_has_the_token_limit_of_the_first_request():
    harness, episodes = make_episodes()
    harness.announce(1)
    harness.ask("s1", [1, 2], max_tokens=4)
    episodes.gather_wave()
    episodes.begin_or_restart_decoding([0])
    end_turn(episodes, 0, [5, 5, 5, 5])
    harness.ask("s1", [1, 2, 5, 5, 5, 5, 3], max_tokens=7)
    episodes.take_replies(wait=False)
    assert episodes.max_tokens_of_next_turn(0) == 7
    episodes.begin_or_restart_decoding([0])
    assert episodes.max_tokens_of_next_turn(0) == 4


def test_a_result_ends_a_row_only_after_the_row_has_repeated_all_turns():
    harness, episodes, _ = begin_wave()
    end_turn(episodes, 0, [5, END])
    harness.ask("s1", [1, 2, 5, END, 3])
    assert episodes.take_replies(wait=False) == {0: [3]}
    end_turn(episodes, 0, [6, END])
    episodes.begin_or_restart_decoding([0])
    harness.report(1, [1, 2, 5, END, 3, 6, END], [2, 3, 5, 6])
    assert episodes.take_replies(wait=False) == {}
    end_turn(episodes, 0, [5, END])
    assert episodes.take_replies(wait=False) == {0: [3]}
    end_turn(episodes, 0, [6, END])
    assert episodes.take_replies(wait=False) == {0: "stop"}
    assert episodes.episodes[0].outcome


def test_a_row_that_waits_for_a_later_batch_gets_no_reply():
    harness, episodes, _ = begin_wave(2)
    for row in range(2):
        end_turn(episodes, row, [5, END])
    episodes.begin_or_restart_decoding([0])  # memory ran out, and the batch is smaller now
    harness.ask("s1", [1, 2, 5, END, 3])
    harness.ask("s2", [1, 2, 5, END, 4])
    assert episodes.take_replies(wait=False) == {}
    end_turn(episodes, 0, [5, END])
    assert episodes.take_replies(wait=False) == {0: [3]}
    episodes.begin_or_restart_decoding([1])
    end_turn(episodes, 1, [5, END])
    assert episodes.take_replies(wait=False) == {1: [4]}


def test_a_row_that_repeats_a_turn_with_other_ids_fails():
    _, episodes, _ = begin_wave()
    end_turn(episodes, 0, [5, END])
    episodes.begin_or_restart_decoding([0])
    episodes.receive_unfinished_turn(0, [5, 5], np.full(2, -1, np.float32), "length")
    assert "repeated exactly" in episodes.episodes[0].error
    assert len(episodes.episodes[0].turns) == 1
