"""Tools and environments: schemas, the parsing of calls, the ids between turns, threads and time limits."""

import asyncio
import json
import math
import random
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, catch_message

import sampler
from config import Config
from prompts import chat_template, chats
from prompts.examples import shorten_value
from reporting import journal
from rewards.functions import load_functions
from step.sample import Sample
from tasks import calculator, guess
from tools import calls
from tools.episodes import Episodes
from tools.toolbox import Toolbox, make_toolbox

CONTROL_TOKENS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


@pytest.fixture(scope="module")
def tool_tokenizer(tokenizer, tmp_path_factory):
    """The tests' tokenizer. Its template supports tools, and its control tokens are not `special`."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(str(path))
    tokenizer_copy = AutoTokenizer.from_pretrained(str(path))
    tokenizer_copy.add_tokens(CONTROL_TOKENS)
    template = ROOT / "demo" / "tools" / "chat_template.jinja"
    tokenizer_copy.chat_template = template.read_text()
    return tokenizer_copy


def add(a: int, b: int = 1) -> int:
    """
    Adds.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


async def sleep(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


def fail(text: str | None = None) -> str:
    """
    Fails.

    Args:
        text: What it says.
    """
    raise RuntimeError(f"no {text}")


SCHEMAS = calls.make_tool_schemas("--tools", {"add": add, "sleep": sleep, "fail": fail})
JSON = calls.choose_call_parser("<tool_call>")
CODER = calls.choose_call_parser("<tool_call>\n<function=")

# ---- calls


def write_json_call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_coder_call(name, **arguments):
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def test_the_parser_reads_the_calls_after_the_thought_in_order():
    thought = f"<think>{write_json_call('add', {'a': 1})}</think>"
    first_call = write_json_call("add", {"a": 2})
    second_call = write_json_call("sleep", {"seconds": 1})
    text = f"{thought}Let me see. {first_call}\n{second_call}"

    assert calls.parse_calls(text, JSON, SCHEMAS) == [
        calls.ToolCall("add", {"a": 2}),
        calls.ToolCall("sleep", {"seconds": 1}),
    ]
    assert calls.parse_calls("no call", JSON, SCHEMAS) == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("add", {"a": 3}),
        ("add", {"a": -1, "b": 20}),
        ("sleep", {"seconds": 1}),
        ("fail", {"text": None}),
    ],
)
def test_both_call_formats_keep_integers_and_an_allowed_null(name, arguments):
    expected_calls = [calls.ToolCall(name, arguments)]

    json_text = write_json_call(name, arguments)
    assert calls.parse_calls(json_text, JSON, SCHEMAS) == expected_calls

    coder_text = write_coder_call(name, **arguments).replace("None", "null")
    assert calls.parse_calls(coder_text, CODER, SCHEMAS) == expected_calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>\nadd(1)\n</tool_call>", "cannot be read: JSONDecodeError"),
        (write_json_call("add", {"a": float("nan")}), "cannot be read"),
        (write_json_call("add", {"a": 5}).replace("5", "1e999"), "cannot be read"),
        ("<tool_call>" + "[" * 10_000 + "</tool_call>", "cannot be read: RecursionError"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "is not {"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "no </tool_call>"),
        (write_json_call("ad", {"a": 1}), "there is no tool 'ad', did you mean 'add'?"),
        (write_json_call("add", {}), "add: $ 'a' is a required property"),
        (write_json_call("add", {"a": 1, "c": 2}), "('c' was unexpected)"),
        (write_json_call("add", {"a": "1"}), "add: $.a '1' is not of type 'integer'"),
        (write_json_call("add", {"a": True}), "True is not of type 'integer'"),
        (write_json_call("fail", {"text": 3}), "fail: $.text 3 is not"),
        (write_coder_call("add", a="{[]: 1}"), "cannot be read"),
        (write_coder_call("add", a="[" * 5000), "cannot be read"),
        (write_coder_call("add", a="1e999"), "cannot be read: OverflowError"),
        (write_coder_call("sleep", seconds="NaN"), "cannot be read"),
        (write_json_call("__init__", {}), "there is no tool"),
    ],
)
def test_an_invalid_call_has_a_one_line_error(text, error):
    parser = CODER if "<function=" in text else JSON
    (invalid_call,) = calls.parse_calls(text, parser, SCHEMAS)
    assert error in invalid_call.error
    assert "\n" not in invalid_call.error


RESULT = "<tool_response>\n42\n</tool_response>"
ADD = write_json_call("add", {"a": 1})


@pytest.mark.parametrize(
    "text",
    [
        f"{ADD}\n{RESULT}\nIt is 42.",
        f"{ADD}\nIt is 42.",
        f"{RESULT}\nIt is 42.",
        f"{ADD}\n{RESULT}\n{ADD}",
        f"<think>\nlet me see\n</think>\n{ADD} {RESULT}",
        f"{ADD}<tool_response>",
        f"Surely.\n{RESULT}",
    ],
)
def test_a_tool_result_that_the_model_wrote_counts_as_a_failed_call(tool_tokenizer, text):
    num_calls = text.count("<tool_call>")
    parsed_calls = calls.parse_calls(text, JSON, SCHEMAS)
    assert [call.error == "" for call in parsed_calls] == [True] * num_calls + [False]

    episodes = Episodes(make_box(tool_tokenizer, [add]), EXAMPLES, [0], "0")
    _, messages = play_turn(episodes, tool_tokenizer, text)
    assert messages[0]["content"] == text, "the message has the complete text"
    results = [message["content"] for message in messages[1:]]
    assert results[:-1] == ["2"] * num_calls
    assert "error" in json.loads(results[-1])

    (sample,) = episodes.add_episode_results_to_samples([Sample([], [1], range(1), 0)], {})
    metrics = journal.tool_metrics([sample], sampler.RolloutStats(0.0, 0.0, 0))
    assert metrics["tools/failures"] == 1


@pytest.mark.parametrize(
    "text",
    [
        f"I add.\n{ADD}\n",
        f"{ADD}\n{ADD}",
        f"{ADD} and {ADD}",
        f"<think>\nit may say {RESULT}\n</think>\n{ADD}",
        write_json_call("fail", {"text": RESULT}),
        "It is 42.",
    ],
)
def test_a_turn_without_an_invented_result_has_no_error(text):
    assert not any(call.error for call in calls.parse_calls(text, JSON, SCHEMAS))


def test_a_message_keeps_the_text_between_calls(tool_tokenizer):
    episodes = Episodes(make_box(tool_tokenizer, [add]), EXAMPLES, [0], "0")
    _, messages = play_turn(episodes, tool_tokenizer, f"First.\n{ADD} and {ADD}")
    assert messages[0]["content"] == "First.\nand"
    assert len(messages[0]["tool_calls"]) == 2


def test_tools_without_a_schema_and_templates_without_tools_are_refused_by_name():
    message = catch_message(calls.choose_call_parser, "{{ messages }}")
    assert "<tool_call>" in message

    message = catch_message(calls.make_tool_schemas, "--tools", {"f": lambda x: x})
    assert "--tools: the tool f has no schema" in message

    class_without_reset = type("Empty", (), {})
    message = catch_message(calls.make_environment_schemas, class_without_reset)
    assert "has no method reset" in message

    class_with_undocumented_method = type("Helped", (guess.Guess,), {"close": lambda self: None})
    message = catch_message(calls.make_environment_schemas, class_with_undocumented_method)
    assert "begin the name with _" in message


# ---- the ids between turns


def test_the_codec_encodes_tool_messages_as_the_template_does(tool_tokenizer):
    codec = calls.TurnCodec(tool_tokenizer, [tool_tokenizer.eos_token_id], thinking=False)
    rng = random.Random(0)
    pieces = ["one", " and", "two\n", " is", "three ", "é", "\t", "  ", "<", "|", "{}"]
    pieces.append("\U0001f600")
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}

    for _ in range(300):
        messages = []
        for _ in range(rng.randrange(1, 3)):
            content = "".join(rng.choices(pieces, k=rng.randrange(9)))
            messages.append({"role": "tool", "name": "add", "content": content})

        conversation = tool_tokenizer.apply_chat_template([*calls.EXCHANGE, *messages], **options)
        ids = tool_tokenizer.encode(conversation, add_special_tokens=False)
        end_positions = [
            position for position, id in enumerate(ids) if id == tool_tokenizer.eos_token_id
        ]
        assert codec.encode_between_turns(messages, None) == ids[end_positions[1] + 1 :]


def draw_hostile_text(rng):
    """Random pieces of control tokens, and characters that are hard to encode."""
    control_tokens = [*CONTROL_TOKENS, "<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    pieces = "< |im_end|> <|im_ end|> é assistant\n \x00 \ue000 \ud800".split(" ")
    pieces.append("}" * 9)
    return "".join(rng.choices([*control_tokens, *pieces], k=rng.randrange(1, 12)))


def test_the_text_of_a_tool_never_becomes_a_control_token(tool_tokenizer):
    codec = calls.TurnCodec(tool_tokenizer, [tool_tokenizer.eos_token_id], thinking=False)
    control_ids = set(tool_tokenizer.added_tokens_decoder)
    rng = random.Random(1)

    def encode_control_tokens(text):
        ids = codec.encode_between_turns([{"role": "tool", "content": text}], None)
        return [id for id in ids if id in control_ids]

    expected_ids = encode_control_tokens("plain")
    for _ in range(200):
        text = codec.cut_to_tokens_with_note(draw_hostile_text(rng), 1000)
        assert encode_control_tokens(text) == expected_ids


def test_a_long_result_is_cut_to_a_number_of_tokens_and_ends_with_a_note(tool_tokenizer):
    codec = calls.TurnCodec(tool_tokenizer, [tool_tokenizer.eos_token_id], thinking=False)
    text = codec.cut_to_tokens_with_note("ab" * 500_000, 10)
    beginning, note = text.split("\n")
    assert len(tool_tokenizer.encode(beginning)) == 10
    assert note == f"[cut: {len(beginning)} of 1000000 characters]"

    assert codec.cut_to_tokens_with_note("two and two", 30) == "two and two"


# ---- episodes


def make_box(tokenizer, tools=(), environments=None, **settings):
    config = Config.from_flags(**{"tool_timeout": 5.0} | settings)
    model = SimpleNamespace(max_position_embeddings=1000, end_ids=(tokenizer.eos_token_id,))
    tools_by_name = {tool.__name__: tool for tool in tools}
    return Toolbox(config, tools_by_name, environments or {}, tokenizer, model)


def end_turn(episodes, tokenizer, row, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    episodes.end_turn(row, [*ids, tokenizer.eos_token_id])


def play_turn(episodes, tokenizer, text, row=0):
    """The reply to a turn of a row (ids, or a finish reason), and the messages of its episode."""
    end_turn(episodes, tokenizer, row, text)
    replies = episodes.take_replies(wait=True)
    assert list(replies) == [row]
    return replies[row], episodes.episodes[row].messages


EXAMPLES = [{"prompt": "what is two and two?"}]


def test_the_calls_of_a_turn_run_in_order_and_their_results_reach_the_model(tool_tokenizer):
    box = make_box(tool_tokenizer, [add, sleep, fail])
    episodes = Episodes(box, EXAMPLES, [0], "0")

    text = (
        write_json_call("add", {"a": 2})
        + write_json_call("fail", {"text": "luck"})
        + write_json_call("sleep", {"seconds": 0.01})
    )
    ids, messages = play_turn(episodes, tool_tokenizer, text)
    assert [message["content"] for message in messages[1:]] == [
        "3",
        '{"error": "RuntimeError: no luck"}',
        "done",
    ]
    tool_names = [tool_call["function"]["name"] for tool_call in messages[0]["tool_calls"]]
    assert tool_names == ["add", "fail", "sleep"]
    assert ids == box.codec.encode_between_turns(messages[1:], list(box.schemas[""].values()))
    assert play_turn(episodes, tool_tokenizer, "four")[0] == "stop"

    (sample,) = episodes.add_episode_results_to_samples([Sample([], [1], range(1), 0)], {})
    records = sample.conversation["tool_calls"]
    assert [record["error"] for record in records] == [None, "RuntimeError: no luck", None]
    assert [record["turn"] for record in records] == [0, 0, 0]
    assert sample.conversation["turns"] == 2

    stats = sampler.RolloutStats(0.0, 0.0, 0, wait_s=0.5)
    assert "tools/calls/add" not in journal.tool_metrics([sample], stats, ["add"])
    metrics = journal.tool_metrics([sample], stats, [*box.tool_names, "other"])
    assert box.tool_names == ["add", "fail", "sleep"]
    assert metrics["tools/calls/add"] == 1
    assert metrics["tools/calls/other"] == 0
    assert metrics["tools/calls"] == 3
    assert metrics["tools/failures"] == 1
    assert metrics["tools/turns"] == 2


def test_the_tool_and_the_environment_in_the_documentation_work(tool_tokenizer, tmp_path):
    page = (ROOT / "docs" / "tools.md").read_text("utf-8")
    code_blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text("\n\n".join(code_blocks))
    (search,) = load_functions("--tools", f"{tmp_path}/mine.py:search").values()
    (game,) = load_functions("--env", f"{tmp_path}/mine.py:Game", kind="class").values()

    episodes = Episodes(make_box(tool_tokenizer, [search], {"": game}), EXAMPLES, [0], "0")
    number = episodes.episodes[0].worker.instance.number
    text = write_json_call("search", {"query": "opening hours"})
    text += write_json_call("guess", {"number": number})
    _, messages = play_turn(episodes, tool_tokenizer, text)
    results = [message["content"] for message in messages[1:]]
    assert results == ["9 to 17, closed on Sundays", "right"]

    episodes.collect_episode_rewards()
    assert episodes.episodes[0].reward == 1


def test_a_method_is_called_by_its_attribute_name_and_not_by_its_function_name(tool_tokenizer):
    # A decorator may change a function's __name__.
    game = type("Game", (guess.Guess,), {"try_it": guess.Guess.guess})
    box = make_box(tool_tokenizer, environments={"": game})
    episodes = Episodes(box, [{"prompt": ""}], [0], "0")
    number = episodes.episodes[0].worker.instance.number
    text = write_json_call("try_it", {"number": number})
    _, messages = play_turn(episodes, tool_tokenizer, text)
    assert messages[-1]["content"] == "right"


def test_a_result_that_cannot_become_text_reaches_the_model_as_an_error(tool_tokenizer):
    # The sum has 4,301 digits, one more than Python writes.
    text = write_json_call("add", {"a": 10**4300 - 1})
    episodes = Episodes(make_box(tool_tokenizer, [add]), EXAMPLES, [0], "0")
    _, messages = play_turn(episodes, tool_tokenizer, text)
    assert messages[-1]["content"].startswith('{"error": "ValueError: Exceeds the limit')


def test_the_calls_of_the_last_turn_run_before_the_episode_ends(tool_tokenizer):
    box = make_box(tool_tokenizer, [add], max_turns=1)
    episodes = Episodes(box, EXAMPLES, [0], "0")
    reason, messages = play_turn(episodes, tool_tokenizer, write_json_call("add", {"a": 2}))
    assert reason == "turns"
    assert messages[-1]["content"] == "3"

    episodes = Episodes(box, EXAMPLES, [0], "0")
    _, messages = play_turn(episodes, tool_tokenizer, "<tool_call>")
    assert messages[-1]["name"] == "tool"


def test_rows_wait_for_their_tools_at_the_same_time(tool_tokenizer):
    episodes = Episodes(make_box(tool_tokenizer, [sleep]), EXAMPLES * 20, [0] * 20, "0")
    begin = time.monotonic()
    for row in range(20):
        end_turn(episodes, tool_tokenizer, row, write_json_call("sleep", {"seconds": 0.2}))
    replies = {}
    while len(replies) < 20:
        replies |= episodes.take_replies(wait=True)
    assert time.monotonic() - begin < 2.0  # one after another, the calls would take 4 s


def test_a_call_that_hangs_times_out_and_a_new_environment_replaces_the_old(tool_tokenizer):
    creating_threads = []
    may_return = threading.Event()

    class Slow(guess.Guess):
        def __init__(self):
            creating_threads.append(threading.current_thread())

        def wait(self) -> str:
            """Waits."""
            may_return.wait(30)
            return "late"

    box = make_box(tool_tokenizer, environments={"": Slow}, tool_timeout=0.2)
    episodes = Episodes(box, [{"prompt": ""}], [0], "0")
    old_environment = episodes.episodes[0].worker.instance
    text = write_json_call("wait", {})
    text += write_json_call("guess", {"number": old_environment.number})

    _, messages = play_turn(episodes, tool_tokenizer, text)
    assert [message["content"] for message in messages[1:]] == [
        '{"error": "the call took longer than 0.2 s"}',
        "right",
    ]
    assert episodes.episodes[0].worker.instance is not old_environment
    assert creating_threads[0] is not creating_threads[1]

    # The old thread ends without the other calls of the turn.
    may_return.set()
    creating_threads[0].join(30)
    assert not creating_threads[0].is_alive()
    assert not old_environment.is_found


def test_the_thread_of_a_row_that_begins_again_ends_after_its_current_call(tool_tokenizer):
    may_return = threading.Event()

    def waits() -> str:
        """Waits."""
        may_return.wait(5)
        return "done"

    episodes = Episodes(make_box(tool_tokenizer, [waits]), EXAMPLES, [0], "0")
    end_turn(episodes, tool_tokenizer, 0, write_json_call("waits", {}))
    old_worker = episodes.episodes[0].worker
    episodes.begin_or_restart_decoding([0])
    assert episodes.episodes[0].worker is not old_worker

    may_return.set()
    old_worker.thread.join(5)
    assert not old_worker.thread.is_alive()


class ThreadBound:
    """An environment that checks that all methods run in the thread that created it."""

    def __init__(self):
        self.thread = threading.get_ident()

    def reset(self, **row):
        self.check("reset")
        return f" {row['prompt']} {random.random()} {np.random.random()}"

    def check(self, what: str) -> str:
        """
        Checks.

        Args:
            what: A word.
        """
        assert self.thread == threading.get_ident()
        return what

    async def get_reward(self):
        return 0.5


def test_each_environment_lives_in_one_thread_and_is_reused_in_the_next_rollout(tool_tokenizer):
    box = make_box(tool_tokenizer, environments={"": ThreadBound})
    examples = [{"prompt": "a"}] * 3 + [{"prompt": "b"}] * 3
    episodes = Episodes(box, examples, [0] * 3 + [1] * 3, "0")
    text = write_json_call("check", {"what": "x"})
    _, messages = play_turn(episodes, tool_tokenizer, text, row=4)
    assert messages[-1]["content"] == "x"

    blank_samples = [Sample([], [], (), 0)] * 6
    samples = episodes.add_episode_results_to_samples(blank_samples, {})
    assert [sample.columns["earned"] for sample in samples] == [("ThreadBound", 0.5)] * 6
    environments = [sample.columns["environments"] for sample in samples]
    threads = {environment.thread for environment in environments}
    assert len(threads) == 6
    assert threading.get_ident() not in threads

    next_episodes = Episodes(box, [{"prompt": "a"}] * 6, [0] * 6, "1")
    next_samples = next_episodes.add_episode_results_to_samples(blank_samples, {})
    assert [sample.columns["environments"] for sample in next_samples] == environments


def test_the_rows_of_a_group_have_the_same_task_and_each_step_has_a_new_one(tool_tokenizer):
    box = make_box(tool_tokenizer, environments={"": ThreadBound})
    random_states = random.getstate(), np.random.get_state()[1].tolist()

    def reset_prompts(names, groups, seed):
        episodes = Episodes(box, [{"prompt": name} for name in names], groups, seed)
        return [example["prompt"] for example in episodes.examples]

    prompts_by_step = []
    for seed in ("0", "1", "0"):
        prompts = reset_prompts("aabb", [0, 0, 1, 1], seed)
        assert prompts[0] == prompts[1]
        assert prompts[2] == prompts[3]
        prompts_by_step.append([prompts[0], prompts[2]])

    # The prompts depend on the seed and on the group.
    assert prompts_by_step[0] == prompts_by_step[2]
    all_prompts = prompts_by_step[0] + prompts_by_step[1]
    assert len({prompt[2:] for prompt in all_prompts}) == 4
    assert prompts_by_step[0][0].startswith("a a ")

    # Later groups of the same step have new tasks.
    later_prompts = reset_prompts("aaa", [4, 4, 5], "0")
    assert later_prompts[0] == later_prompts[1]
    assert later_prompts[1] != later_prompts[2]
    assert not set(later_prompts) & set(prompts_by_step[0])

    # The global generators are as before.
    assert (random.getstate(), np.random.get_state()[1].tolist()) == random_states


def test_a_reset_that_differs_within_a_group_is_refused(tool_tokenizer):
    class Counting(ThreadBound):
        count = 0

        def reset(self, **_):
            Counting.count += 1
            return f"number {Counting.count}"

    box = make_box(tool_tokenizer, environments={"": Counting})
    message = catch_message(Episodes, box, [{"prompt": "a"}] * 3, [0, 1, 0], "0")
    assert "reset" in message
    assert "'number 1' and 'number 3'" in message


def test_an_error_in_an_environment_names_the_environment(tool_tokenizer):
    class Broken(ThreadBound):
        def get_reward(self):
            raise KeyError("key")

    box = make_box(tool_tokenizer, environments={"": Broken})
    message = catch_message(Episodes(box, EXAMPLES, [0], "0").collect_episode_rewards)
    assert "environment Broken: get_reward raised KeyError: 'key'" in message

    # Rewards that are not finite numbers are refused. Once only a run refused them: `chat.py`
    # failed to show them.
    for value in ([1.0], "one", math.nan, 10**400):
        Broken.get_reward = lambda self, value=value: value
        message = catch_message(Episodes(box, EXAMPLES, [0], "0").collect_episode_rewards)
        assert (
            message
            == f"environment Broken: get_reward returned {shorten_value(value)} for an episode; return a number"
        )

    for value, reward in ((np.array(2.0), 2.0), (None, None)):
        Broken.get_reward = lambda self, value=value: value
        episodes = Episodes(box, EXAMPLES, [0], "0")
        episodes.collect_episode_rewards()
        assert episodes.episodes[0].reward == reward
        assert "[stop]" in episodes.format_episode(0, "stop")


def test_two_hundred_hostile_turns_raise_no_exception(tool_tokenizer):
    rng = random.Random(2)
    box = make_box(tool_tokenizer, [add, fail], max_turns=10**6)
    episodes = Episodes(box, EXAMPLES, [0], "0")
    for _ in range(200):
        texts = (
            draw_hostile_text(rng).encode("utf-8", "replace").decode(),
            write_json_call("add", {draw_hostile_text(rng): 1}),
            write_json_call("fail", {"text": draw_hostile_text(rng)}),
            "<tool_call>" + "{" * 10_000,
            write_json_call("add", {"a": -math.inf}),
        )
        end_turn(episodes, tool_tokenizer, 0, rng.choice(texts).replace("<|im_end|>", ""))
        (reply,) = episodes.take_replies(wait=True).values()
        assert reply == "stop" or isinstance(reply, list)

    episode = episodes.episodes[0]
    written_episode = json.dumps([episode.call_records, episode.messages], allow_nan=False)
    assert len(written_episode) > 10_000


# ---- the bundled tasks


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1 2",
        "(1",
        "1)",
        "2 ** 3",
        "__import__('os')",
        "1/0",
        "()",
        "9" * 300,
        "(" * 200,
        "1(2)",
    ],
)
def test_the_calculator_refuses_invalid_expressions(expression):
    assert catch_message(calculator.calculator, expression)


def test_the_calculator_ignores_leading_zeros_and_white_space():
    expressions = ["05 + 3", "2 +\t2\n", "1.05 + 00", "100.001 - 007.5", " 10/0.05"]
    results = [calculator.calculator(expression) for expression in expressions]
    assert results == ["8", "4", "1.05", "92.501", "200"]


def test_the_calculator_computes_random_expressions_as_python_does():
    rng = random.Random(0)
    for _ in range(500):
        text = str(rng.randrange(1, 20))
        for _ in range(rng.randrange(5)):
            longer = f"{text} {rng.choice('+-*')} {rng.choice(['', '-'])}{rng.randrange(1, 20)}"
            text = f"({text})" if rng.random() < 0.3 else longer
        assert calculator.calculator(text) == str(eval(text))


def test_the_answer_is_the_only_number_in_the_last_line():
    call_then_answer = f"{write_json_call('calculator', {'expression': '6*7'})}\nIt is 42."
    completions = [call_then_answer, "42", "It is 41 or 42.", "42\nNo.", "It is 42.0"]
    assert calculator.correct(completions, ["42"] * 5) == [1, 1, 0, 0, 0]


def test_a_prompt_lists_the_tools_and_a_prompt_without_tools_is_unchanged(tool_tokenizer):
    box = make_box(tool_tokenizer, [add])
    ids = box.encode_prompt(EXAMPLES[0])
    assert "add: a b" in tool_tokenizer.decode(ids)
    plain_ids = chat_template.encode_chat(tool_tokenizer, EXAMPLES[0]["prompt"])
    assert plain_ids == ids[-len(plain_ids) :]

    assert make_toolbox(Config.from_flags(), (), {}, tool_tokenizer, None) is None


# ---- conversations for fine-tuning


def test_fine_tuning_trains_on_the_turns_as_a_rollout_samples_them(tool_tokenizer):
    """A row has the ids of the prompt, a turn, the tool result and a turn. The loss covers turns only."""
    box = make_box(tool_tokenizer, [add])
    schemas = list(box.schemas[""].values())
    tool_call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "user", "content": "what is two and one?"},
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    example = chats.read_conversation_example({"messages": messages, "tools": json.dumps(schemas)})
    end_ids = [tool_tokenizer.eos_token_id]
    rows = chats.encode_conversation(
        tool_tokenizer, example, thinking=False, end_ids=end_ids, context=1000
    )

    def encode_turn(text):
        return tool_tokenizer.encode(text, add_special_tokens=False) + end_ids

    prompt_ids = box.encode_prompt({"prompt": messages[0]["content"]})
    first_turn_ids = encode_turn(write_json_call("add", {"a": 2}))
    result_ids = box.codec.encode_between_turns([messages[2]], schemas)
    last_turn_ids = encode_turn("three")
    assert [row.ids[row.places[0] :] for row in rows] == [first_turn_ids, last_turn_ids]
    assert rows[0].ids == prompt_ids + first_turn_ids
    assert rows[1].ids[-len(result_ids + last_turn_ids) :] == result_ids + last_turn_ids


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        (
            {"tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
            "tool_calls of message 2",
        ),
        ({"tool_calls": ["add"]}, "tool_calls of message 2"),
        ({"role": "tool"}, "assistant"),
    ],
)
def test_a_conversation_with_unreadable_calls_is_refused(change, expected_text):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""} | change]
    message = catch_message(chats.read_conversation_example, {"messages": messages})
    assert expected_text in message
