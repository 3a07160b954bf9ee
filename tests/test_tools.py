"""Tools and environments: their schemas, what is read as a call, the ids between turns, threads and time limits."""

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

CONTROL = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


@pytest.fixture(scope="module")
def talker(tokenizer, tmp_path_factory):
    """The tests' tokenizer with a template that knows tools, and control tokens that are not `special`."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("talker")
    tokenizer.save_pretrained(str(path))
    own = AutoTokenizer.from_pretrained(str(path))
    own.add_tokens(CONTROL)
    own.chat_template = (ROOT / "demo" / "tools" / "chat_template.jinja").read_text()
    return own


def add(a: int, b: int = 1) -> int:
    """
    Adds.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


async def later(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


def fails(text: str | None = None) -> str:
    """
    Fails.

    Args:
        text: What it says.
    """
    raise RuntimeError(f"no {text}")


SCHEMAS = calls.make_tool_schemas("--tools", {"add": add, "later": later, "fails": fails})
JSON, CODER = map(calls.choose_call_parser, ("<tool_call>", "<tool_call>\n<function="))

# ---- calls


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def coder(name, **arguments):
    parts = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def test_calls_are_read_after_the_thought_in_order():
    text = f"<think>{call('add', {'a': 1})}</think>Let me see. {call('add', {'a': 2})}\n{call('later', {'seconds': 1})}"
    assert calls.parse_calls(text, JSON, SCHEMAS) == [
        calls.ToolCall("add", {"a": 2}),
        calls.ToolCall("later", {"seconds": 1}),
    ]
    assert calls.parse_calls("no call", JSON, SCHEMAS) == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("add", {"a": 3}),
        ("add", {"a": -1, "b": 20}),
        ("later", {"seconds": 1}),
        ("fails", {"text": None}),
    ],
)
def test_both_formats_are_read_whole_numbers_and_null_where_it_may_be(name, arguments):
    for text, read in (
        (call(name, arguments), JSON),
        (coder(name, **arguments).replace("None", "null"), CODER),
    ):
        assert calls.parse_calls(text, read, SCHEMAS) == [calls.ToolCall(name, arguments)]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>\nadd(1)\n</tool_call>", "cannot be read: JSONDecodeError"),
        (call("add", {"a": float("nan")}), "cannot be read"),
        (call("add", {"a": 5}).replace("5", "1e999"), "cannot be read"),
        ("<tool_call>" + "[" * 10_000 + "</tool_call>", "cannot be read: RecursionError"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "is not {"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "no </tool_call>"),
        (call("ad", {"a": 1}), "there is no tool 'ad', did you mean 'add'?"),
        (call("add", {}), "add: $ 'a' is a required property"),
        (call("add", {"a": 1, "c": 2}), "('c' was unexpected)"),
        (call("add", {"a": "1"}), "add: $.a '1' is not of type 'integer'"),
        (call("add", {"a": True}), "True is not of type 'integer'"),
        (call("fails", {"text": 3}), "fails: $.text 3 is not"),
        (coder("add", a="{[]: 1}"), "cannot be read"),
        (coder("add", a="[" * 5000), "cannot be read"),
        (coder("add", a="1e999"), "cannot be read: OverflowError"),
        (coder("later", seconds="NaN"), "cannot be read"),
        (call("__init__", {}), "there is no tool"),
    ],
)
def test_what_cannot_be_called_says_why(text, error):
    (found,) = calls.parse_calls(text, CODER if "<function=" in text else JSON, SCHEMAS)
    assert error in found.error and "\n" not in found.error


RESULT = "<tool_response>\n42\n</tool_response>"
ADD = call("add", {"a": 1})


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
def test_a_result_that_the_model_writes_itself_is_a_failure_shown_and_told(talker, text):
    made = calls.parse_calls(text, JSON, SCHEMAS)
    assert [one.error == "" for one in made] == [True] * text.count("<tool_call>") + [False]
    talk = Episodes(box_of(talker, [add]), EXAMPLES, [0], "0")
    _, messages = answer(talk, talker, text)
    assert messages[0]["content"] == text, "all of it is shown"
    told = [message["content"] for message in messages[1:]]
    assert told[:-1] == ["2"] * text.count("<tool_call>") and "error" in json.loads(told[-1])
    (sample,) = talk.add_conversations_to_samples([Sample([], [1], range(1), 0)], {})
    assert journal.tool_metrics([sample], sampler.RolloutStats(0.0, 0.0, 0))["tools/failures"] == 1


@pytest.mark.parametrize(
    "text",
    [
        f"I add.\n{ADD}\n",
        f"{ADD}\n{ADD}",
        f"{ADD} and {ADD}",
        f"<think>\nit may say {RESULT}\n</think>\n{ADD}",
        call("fails", {"text": RESULT}),
        "It is 42.",
    ],
)
def test_a_turn_that_ends_with_its_calls_forges_nothing(text):
    assert not any(one.error for one in calls.parse_calls(text, JSON, SCHEMAS))


def test_text_between_calls_stands_in_the_messages(talker):
    _, messages = answer(
        Episodes(box_of(talker, [add]), EXAMPLES, [0], "0"), talker, f"First.\n{ADD} and {ADD}"
    )
    assert messages[0]["content"] == "First.\nand" and len(messages[0]["tool_calls"]) == 2


def test_tools_without_types_or_words_and_templates_without_tools_are_refused_by_name():
    assert "<tool_call>" in catch_message(calls.choose_call_parser, "{{ messages }}")
    assert "--tools: the tool f has no schema" in catch_message(
        calls.make_tool_schemas, "--tools", {"f": lambda x: x}
    )
    assert "has no method reset" in catch_message(
        calls.make_environment_schemas, type("Empty", (), {})
    )
    helped = type("Helped", (guess.Guess,), {"close": lambda self: None})
    assert "begin the name with _" in catch_message(calls.make_environment_schemas, helped)


# ---- the ids between turns


def test_a_frame_has_the_ids_of_the_template(talker):
    frame = calls.TurnCodec(talker, [talker.eos_token_id], thinking=False)
    rng = random.Random(0)
    words = ["one", " and", "two\n", " is", "three ", "é", "\t", "  ", "<", "|", "{}", "\U0001f600"]
    for _ in range(300):
        messages = [
            {
                "role": "tool",
                "name": "add",
                "content": "".join(rng.choices(words, k=rng.randrange(9))),
            }
            for _ in range(rng.randrange(1, 3))
        ]
        how = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        whole = talker.apply_chat_template([*calls.EXCHANGE, *messages], **how)
        ids = talker.encode(whole, add_special_tokens=False)
        ends = [place for place, one in enumerate(ids) if one == talker.eos_token_id]
        assert frame.encode_between_turns(messages, None) == ids[ends[1] + 1 :]


def hostile(rng):
    whole = [*CONTROL, "<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    parts = [
        "<",
        "|im_end|>",
        "<|im_",
        "end|>",
        "é",
        "assistant\n",
        "\x00",
        "\ue000",
        "\ud800",
        "}" * 9,
    ]
    return "".join(rng.choices([*whole, *parts], k=rng.randrange(1, 12)))


def test_what_a_tool_says_is_never_a_control_token(talker):
    frame = calls.TurnCodec(talker, [talker.eos_token_id], thinking=False)
    control, rng = set(talker.added_tokens_decoder), random.Random(1)

    def frame_of(text):
        return [
            one
            for one in frame.encode_between_turns([{"role": "tool", "content": text}], None)
            if one in control
        ]

    expected = frame_of("plain")
    for _ in range(200):
        text = frame.cut_to_tokens_with_note(hostile(rng), 1000)
        assert frame_of(text) == expected


def test_a_long_result_is_cut_to_its_tokens_and_says_so(talker):
    frame = calls.TurnCodec(talker, [talker.eos_token_id], thinking=False)
    text = frame.cut_to_tokens_with_note("ab" * 500_000, 10)
    shown, said = text.split("\n")
    assert len(talker.encode(shown)) == 10 and said == f"[cut: {len(shown)} of 1000000 characters]"
    assert frame.cut_to_tokens_with_note("two and two", 30) == "two and two"


# ---- episodes


def box_of(talker, tools=(), environments=None, **settings):
    config = Config.from_flags(**{"tool_timeout": 5.0} | settings)
    model = SimpleNamespace(max_position_embeddings=1000, end_ids=(talker.eos_token_id,))
    return Toolbox(
        config, {tool.__name__: tool for tool in tools}, environments or {}, talker, model
    )


def say(talk, talker, row, text):
    talk.end_turn(row, [*talker.encode(text, add_special_tokens=False), talker.eos_token_id])


def answer(talk, talker, text, row=0):
    """What a row is told, as its messages say."""
    say(talk, talker, row, text)
    found = talk.take_replies(wait=True)
    assert list(found) == [row]
    return found[row], talk.episodes[row].messages


EXAMPLES = [{"prompt": "what is two and two?"}]


def test_a_turns_calls_are_made_in_order_and_told_back(talker):
    box = box_of(talker, [add, later, fails])
    talk = Episodes(box, EXAMPLES, [0], "0")
    asked = call("add", {"a": 2}), call("fails", {"text": "luck"}), call("later", {"seconds": 0.01})
    ids, messages = answer(talk, talker, "".join(asked))
    assert [one["content"] for one in messages[1:]] == [
        "3",
        '{"error": "RuntimeError: no luck"}',
        "done",
    ]
    assert [one["function"]["name"] for one in messages[0]["tool_calls"]] == [
        "add",
        "fails",
        "later",
    ]
    assert ids == box.codec.encode_between_turns(messages[1:], list(box.schemas[""].values()))
    assert answer(talk, talker, "four")[0] == "stop"
    (sample,) = talk.add_conversations_to_samples([Sample([], [1], range(1), 0)], {})
    calls = sample.conversation["tool_calls"]
    assert [one["error"] for one in calls] == [None, "RuntimeError: no luck", None]
    assert [one["turn"] for one in calls] == [0, 0, 0] and sample.conversation["turns"] == 2
    figures = journal.tool_metrics([sample], sampler.RolloutStats(0.0, 0.0, 0, wait_s=0.5))
    assert (figures["tools/calls"], figures["tools/failures"], figures["tools/turns"]) == (3, 1, 2)


def test_the_tool_and_the_environment_of_the_page_answer_a_turn(talker, tmp_path):
    shown = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "tools.md").read_text("utf-8"), re.DOTALL
    )
    (tmp_path / "mine.py").write_text("\n\n".join(shown))
    (search,) = load_functions("--tools", f"{tmp_path}/mine.py:search").values()
    (game,) = load_functions("--env", f"{tmp_path}/mine.py:Game", kind="class").values()
    talk = Episodes(box_of(talker, [search], {"": game}), EXAMPLES, [0], "0")
    number = talk.episodes[0].worker.instance.number
    asked = call("search", {"query": "opening hours"}), call("guess", {"number": number})
    _, messages = answer(talk, talker, "".join(asked))
    assert [one["content"] for one in messages[1:]] == ["9 to 17, closed on Sundays", "right"]
    talk.collect_episode_rewards()
    assert talk.episodes[0].reward == 1


def test_a_method_is_called_by_the_name_it_is_found_under_though_a_decorator_loses_its_own(talker):
    game = type("Game", (guess.Guess,), {"try_it": guess.Guess.guess})
    talk = Episodes(box_of(talker, environments={"": game}), [{"prompt": ""}], [0], "0")
    asked = call("try_it", {"number": talk.episodes[0].worker.instance.number})
    assert answer(talk, talker, asked)[1][-1]["content"] == "right"


def test_a_result_that_has_no_text_is_told_as_an_error(talker):
    asked = call("add", {"a": 10**4300 - 1})  # and 1: of 4,301 digits, one more than Python writes
    _, messages = answer(Episodes(box_of(talker, [add]), EXAMPLES, [0], "0"), talker, asked)
    assert messages[-1]["content"].startswith('{"error": "ValueError: Exceeds the limit')


def test_the_last_turn_makes_its_calls_and_ends(talker):
    talk = Episodes(box_of(talker, [add], max_turns=1), EXAMPLES, [0], "0")
    reason, messages = answer(talk, talker, call("add", {"a": 2}))
    assert reason == "turns" and messages[-1]["content"] == "3"
    assert (
        answer(Episodes(talk.box, EXAMPLES, [0], "0"), talker, "<tool_call>")[1][-1]["name"]
        == "tool"
    )


def test_rows_wait_side_by_side(talker):
    talk = Episodes(box_of(talker, [later]), EXAMPLES * 20, [0] * 20, "0")
    begin = time.monotonic()
    for row in range(20):
        say(talk, talker, row, call("later", {"seconds": 0.2}))
    found = {}
    while len(found) < 20:
        found |= talk.take_replies(wait=True)
    assert time.monotonic() - begin < 2.0  # one after another they would take 4


def test_a_call_that_hangs_is_given_up_and_its_environment_made_anew(talker):
    made, going = [], threading.Event()

    class Slow(guess.Guess):
        def __init__(self):
            made.append(threading.current_thread())

        def wait(self) -> str:
            """Waits."""
            going.wait(30)
            return "late"

    talk = Episodes(
        box_of(talker, environments={"": Slow}, tool_timeout=0.2), [{"prompt": ""}], [0], "0"
    )
    before = talk.episodes[0].worker.instance
    number = before.number
    _, messages = answer(talk, talker, call("wait", {}) + call("guess", {"number": number}))
    assert [one["content"] for one in messages[1:]] == [
        '{"error": "the call took longer than 0.2 s"}',
        "right",
    ]
    assert talk.episodes[0].worker.instance is not before and made[0] is not made[1]
    going.set()
    made[0].join(30)
    assert not made[0].is_alive() and not before.is_found  # the rest of the turn is made once


def test_the_thread_of_a_row_that_is_drawn_again_ends_with_the_call_it_is_in(talker):
    going = threading.Event()

    def waits() -> str:
        """Waits."""
        going.wait(5)
        return "done"

    talk = Episodes(box_of(talker, [waits]), EXAMPLES, [0], "0")
    say(talk, talker, 0, call("waits", {}))
    before = talk.episodes[0].worker
    talk.begin([0])
    assert talk.episodes[0].worker is not before
    going.set()
    before.thread.join(5)
    assert not before.thread.is_alive()


class Threads:
    """Everything of it runs in the thread that made it."""

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


def test_an_instance_lives_in_a_thread_of_its_own_and_its_rewards_come_once(talker):
    box = box_of(talker, environments={"": Threads})
    talk = Episodes(box, [{"prompt": "a"}] * 3 + [{"prompt": "b"}] * 3, [0] * 3 + [1] * 3, "0")
    assert answer(talk, talker, call("check", {"what": "x"}), row=4)[1][-1]["content"] == "x"
    blank = [Sample([], [], (), 0)] * 6
    columns = [one.columns for one in talk.add_conversations_to_samples(blank, {})]
    assert [one["earned"] for one in columns] == [("Threads", 0.5)] * 6
    instances = [one["environments"] for one in columns]
    threads = {one.thread for one in instances}
    assert len(threads) == 6 and threading.get_ident() not in threads
    again = Episodes(box, [{"prompt": "a"}] * 6, [0] * 6, "1").add_conversations_to_samples(
        blank, {}
    )
    assert [one.columns["environments"] for one in again] == instances  # reused


def test_the_rows_of_a_group_face_one_task_and_every_step_another(talker):
    box = box_of(talker, environments={"": Threads})
    before = random.getstate(), np.random.get_state()[1].tolist()
    rows, groups = [{"prompt": name} for name in "aabb"], [0, 0, 1, 1]
    texts = [
        [one["prompt"] for one in Episodes(box, rows, groups, seed).examples]
        for seed in ("0", "1", "0")
    ]
    assert all(text[0] == text[1] and text[2] == text[3] for text in texts)
    texts = [text[::2] for text in texts]
    assert texts[0] == texts[2] and len({text[2:] for each in texts[:2] for text in each}) == 4
    assert texts[0][0].startswith("a a ")
    later = [
        one["prompt"] for one in Episodes(box, [{"prompt": "a"}] * 3, [4, 4, 5], "0").examples
    ]  # a second draw
    assert later[0] == later[1] != later[2] and not {*later} & {*texts[0]}
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_reset_that_differs_within_a_group_is_refused(talker):
    class Own(Threads):
        count = 0

        def reset(self, **_):
            Own.count += 1
            return f"number {Own.count}"

    box = box_of(talker, environments={"": Own})
    said = catch_message(Episodes, box, [{"prompt": "a"}] * 3, [0, 1, 0], "0")
    assert "reset" in said and "'number 1' and 'number 3'" in said


def test_what_an_environment_raises_names_it(talker):
    class Broken(Threads):
        def get_reward(self):
            raise KeyError("key")

    box = box_of(talker, environments={"": Broken})
    said = catch_message(Episodes(box, EXAMPLES, [0], "0").collect_episode_rewards)
    assert "environment Broken: get_reward raised KeyError: 'key'" in said
    for value in (
        [1.0],
        "one",
        math.nan,
        10**400,
    ):  # which only a run refused, and `chat.py` could not show
        Broken.get_reward = lambda self, value=value: value
        said = catch_message(Episodes(box, EXAMPLES, [0], "0").collect_episode_rewards)
        assert (
            said
            == f"environment Broken: get_reward returned {shorten_value(value)} for an episode; return a number"
        )
    for value, given in ((np.array(2.0), 2.0), (None, None)):
        Broken.get_reward = lambda self, value=value: value
        (talk := Episodes(box, EXAMPLES, [0], "0")).collect_episode_rewards()
        assert talk.episodes[0].reward == given and "[stop]" in talk.format_episode(0, "stop")


def test_two_hundred_hostile_turns_end_no_episode_with_an_exception(talker):
    rng = random.Random(2)
    talk = Episodes(box_of(talker, [add, fails], max_turns=10**6), EXAMPLES, [0], "0")
    for _ in range(200):
        text, key = hostile(rng).encode("utf-8", "replace").decode(), {hostile(rng): 1}
        kinds = (
            text,
            call("add", key),
            call("fails", {"text": hostile(rng)}),
            "<tool_call>" + "{" * 10_000,
        )
        kinds += (call("add", {"a": -math.inf}),)
        say(talk, talker, 0, rng.choice(kinds).replace("<|im_end|>", ""))
        (reply,) = talk.take_replies(wait=True).values()
        assert reply == "stop" or isinstance(reply, list)
    assert (
        len(json.dumps([talk.episodes[0].call_records, talk.episodes[0].messages], allow_nan=False))
        > 10_000
    )


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
def test_the_calculator_evaluates_nothing_else(expression):
    assert catch_message(calculator.calculator, expression)


def test_zeros_in_front_and_white_space_change_nothing():
    asked = ["05 + 3", "2 +\t2\n", "1.05 + 00", "100.001 - 007.5", " 10/0.05"]
    assert [*map(calculator.calculator, asked)] == ["8", "4", "1.05", "92.501", "200"]


def test_random_expressions_are_computed_as_python_does():
    rng = random.Random(0)
    for _ in range(500):
        text = str(rng.randrange(1, 20))
        for _ in range(rng.randrange(5)):
            longer = f"{text} {rng.choice('+-*')} {rng.choice(['', '-'])}{rng.randrange(1, 20)}"
            text = f"({text})" if rng.random() < 0.3 else longer
        assert calculator.calculator(text) == str(eval(text))


def test_only_the_last_line_and_only_one_number_in_it_is_the_answer():
    said = f"{call('calculator', {'expression': '6*7'})}\nIt is 42."
    assert calculator.correct(
        [said, "42", "It is 41 or 42.", "42\nNo.", "It is 42.0"], ["42"] * 5
    ) == [1, 1, 0, 0, 0]


def test_a_prompt_shows_the_tools_and_a_tool_less_template_call_stays_as_it_was(talker):
    box = box_of(talker, [add])
    ids = box.encode_prompt(EXAMPLES[0])
    assert "add: a b" in talker.decode(ids)
    plain = chat_template.encode_chat(talker, EXAMPLES[0]["prompt"])
    assert plain == ids[-len(plain) :]
    assert make_toolbox(Config.from_flags(), (), {}, talker, None) is None


# ---- conversations to learn from


def test_fine_tuning_learns_turns_as_a_rollout_samples_them(talker):
    """Its rows have the ids of prompt, turn, frame and turn; what tools said is in them and is not trained."""
    box = box_of(talker, [add])
    made = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "user", "content": "what is two and one?"},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    example = chats.read_conversation_example(
        {"messages": messages, "tools": json.dumps(list(box.schemas[""].values()))}
    )
    how = {"thinking": False, "end_ids": [talker.eos_token_id], "context": 1000}
    rows, end = chats.encode_conversation(talker, example, **how), [talker.eos_token_id]
    prompt = box.encode_prompt({"prompt": messages[0]["content"]})
    first = talker.encode(call("add", {"a": 2}), add_special_tokens=False) + end
    told = box.codec.encode_between_turns([messages[2]], list(box.schemas[""].values()))
    last = talker.encode("three", add_special_tokens=False) + end
    assert [row.ids[row.places[0] :] for row in rows] == [first, last]
    assert rows[0].ids == prompt + first
    assert rows[1].ids[-len(told + last) :] == told + last


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
            "tool_calls of message 2",
        ),
        ({"tool_calls": ["add"]}, "tool_calls of message 2"),
        ({"role": "tool"}, "assistant"),
    ],
)
def test_a_conversation_with_calls_that_cannot_be_read_is_refused(change, said):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""} | change]
    assert said in catch_message(chats.read_conversation_example, {"messages": messages})
