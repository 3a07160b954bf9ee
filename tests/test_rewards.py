"""Reward functions: loading, calls and checks of user rewards; formulas of built-in rewards."""

import math
import os
import sys
from fractions import Fraction

import numpy as np
import pytest
from conftest import catch_message
from extras import needs

from rewards import built_in, functions, rewards

# ---- rewards that a user brings


@pytest.fixture
def reward_file(tmp_path):
    def write(body: str) -> str:
        path = tmp_path / "my.py"
        path.write_text(body)
        return str(path)

    return write


def test_a_reward_file_may_import_neighbours_and_leaves_the_path_unchanged(tmp_path, reward_file):
    (tmp_path / "reward_neighbour.py").write_text("FACTOR = 2\n")
    file = reward_file(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from reward_neighbour import FACTOR\n"
        "@dataclass\n"
        "class Weights:\n"
        "    by: float = FACTOR\n"
        "def brevity(completions, **_):\n"
        "    return [-Weights().by * len(text) for text in completions]\n"
    )
    old_path = list(sys.path)
    name, fn = rewards.load_reward(f"{file}:brevity")
    assert name == "brevity"
    assert sys.path == old_path
    assert rewards.call_reward_on_rank0(name, fn, ["p"], ["abc"], {}) == [-6.0]


BAD_REWARD_FILES = [  # a line of the file, a part of the message; more are in mistakes.yaml
    ("1 / 0", "ZeroDivisionError"),
    ("import sys; sys.exit(0)", "SystemExit"),
    ("raise ValueError('two\\nlines')", "two lines"),
    ("def rubric(): pass", "the name of the judge"),
]


@pytest.mark.parametrize(("body", "expected_text"), BAD_REWARD_FILES)
def test_the_error_of_a_bad_reward_file_names_the_file_in_one_line(
    reward_file, body, expected_text
):
    message = catch_message(rewards.load_reward, f"{reward_file(body)}:rubric")
    assert "my.py" in message
    assert expected_text in message


def test_the_error_of_a_bad_reward_spec_names_the_form_in_one_line():
    for spec in ("my.py", "my.py:", ":fn", "", "my.py:not a name", "soft_overlongs"):
        assert "FILE.py:function" in catch_message(rewards.load_reward, spec)

    for spec in ("./mine:fn", "../my/mine:fn"):
        message = catch_message(rewards.load_reward, spec)
        assert "nor an installed module; if it is a module, add its folder" in message

    for (
        spec
    ) in "soft_overlong soft_overlong:256 soft_overlong:256:-1 length:x boxed_once:1".split():
        assert "positive whole numbers" in catch_message(rewards.load_reward, spec)


def test_a_reward_gets_the_columns_of_the_signature_or_all_with_kwargs():
    arguments = []

    def with_names(completions, answer, unknown=7):
        arguments.append((completions, answer, unknown))
        return [0] * len(completions)

    def with_kwargs(**columns):
        arguments.append(sorted(columns))
        return [0] * 2

    columns = {"answer": ["x", "y"], "level": [1, 2]}
    for reward in (with_names, with_kwargs):
        rewards.call_reward_on_rank0("mine", reward, ["p", "q"], ["a", "b"], columns)
    assert arguments == [
        (["a", "b"], ["x", "y"], 7),
        ["answer", "completions", "level", "prompts"],
    ]


def test_a_reward_cannot_change_the_lists_or_the_working_directory_of_the_trainer():
    def clear_completions(completions):
        completions.clear()
        return [1.0, 1.0]

    def change_directory(completions):
        os.chdir("/")
        return [1.0]

    completions = ["a", "b"]
    working_directory = os.getcwd()
    rewards.call_reward_on_rank0("clear", clear_completions, ["p", "q"], completions, {})
    rewards.call_reward_on_rank0("change", change_directory, ["p"], ["a"], {})
    assert completions == ["a", "b"]
    assert os.getcwd() == working_directory


@pytest.mark.parametrize(
    "value",
    [[1, 0.5], (1, 0.5), np.array([1, 0.5]), [True, Fraction(1, 2)]],
    ids=["list", "tuple", "array", "bool"],
)
def test_rewards_of_any_real_type_become_floats(value):
    values = rewards.call_reward_on_rank0(
        "fn", lambda completions: value, ["p", "q"], ["a", "b"], {}
    )
    assert values == [1.0, 0.5]
    assert all(type(reward) is float for reward in values)

    values = rewards.call_reward_on_rank0(
        "fn", lambda completions: [np.array(2.5)], ["p"], ["a"], {}
    )
    assert values == [2.5]


BAD_REWARDS = [  # more are in mistakes.yaml
    ("ab", "'ab'; return a list"),
    (iter([1, 2]), "return a list"),
    ([1.0, 2.0, 3.0], "returned 3 values; return a list of 2 numbers"),
    ([1.0, 10**400], "for row 1"),
    ([1.0, 1j], "1j for row 1"),
    ([[1.0], [2.0]], "[1.0] for row 0"),
]


@pytest.mark.parametrize(
    ("value", "expected_text"), BAD_REWARDS, ids=lambda value: repr(value)[:20]
)
def test_the_error_of_a_bad_result_names_the_reward_the_row_and_the_value(value, expected_text):
    message = catch_message(
        rewards.call_reward_on_rank0, "mine", lambda completions: value, ["p", "q"], ["a", "b"], {}
    )
    assert "reward mine" in message
    assert expected_text in message


def test_a_positional_only_argument_causes_an_error_that_names_the_argument():
    message = catch_message(
        rewards.call_reward_on_rank0, "mine", lambda completions, /: [0.0], ["p"], ["a"], {}
    )
    assert "needs the argument 'completions'" in message


# ---- rewards written for TRL


TRL_STYLE = """
import asyncio
def with_step(
    prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs
):
    log_metric("num_prompts", len(prompts))
    log_extra("answer", answer)
    texts = [completion[0]["content"] for completion in completions]
    assert all(message["role"] == "user" for prompt in prompts for message in prompt)
    progress = trainer_state.global_step / trainer_state.max_steps
    return [20 * progress + len(ids) + (text == right) if right else None
            for text, ids, right in zip(texts, completion_ids, answer)]
async def asynchronous(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(completion[0]["content"])) for completion in completions]
"""
ROWS = {"answer": ["x", "b", None], "completion_ids": [[1], [2, 3], [4]], "num_tokens": [1, 2, 1]}


def test_a_reward_written_for_trl_gets_messages_ids_and_the_step(reward_file):
    file = reward_file(TRL_STYLE)
    prompts = ["p", [{"role": "user", "content": "q"}], "r"]

    name, fn = rewards.load_reward(f"{file}:with_step")
    all_rewards = {name: fn, "length": built_in.make_built_in_reward("length:3")}
    rewards.set_step_of_user_rewards(all_rewards, 5, 10)
    first, second, third = rewards.call_reward_on_rank0(name, fn, prompts, ["a", "b", "c"], ROWS)
    assert (first, second) == (11, 13)
    assert math.isnan(third)

    name, fn = rewards.load_reward(f"{file}:asynchronous")
    assert rewards.call_reward_on_rank0(name, fn, prompts, ["a", "bb", ""], ROWS) == [1, 2, 0]


READS_MESSAGES_OR_TEXTS = """
def message_length(completions, **_):
    return [len(completion[0]['content']) for completion in completions]

def first_letter(completions, **_):
    return [text[0] == 'A' for text in completions]

def inverse_length(completions, **_):
    return [1 / len(text) for text in completions]

def catches_errors(completions, **_):
    first_two = [completions.pop(0), completions.pop(0)]
    try:
        return message_length(first_two)
    except Exception:
        return [9.0, 9.0]

def contains_x(completions, log_metric, **_):
    log_metric('n', len(completions[0]))
    return ['x' in text.lower() for text in completions]
"""


def test_a_reward_gets_messages_instead_of_texts_only_if_it_reads_keys_of_messages(reward_file):
    file = reward_file(READS_MESSAGES_OR_TEXTS)
    messages = [{"role": "user", "content": "q"}]

    def load_and_call(name, texts, prompt="p"):
        _, fn = rewards.load_reward(f"{file}:{name}")
        return rewards.call_reward_on_rank0(name, fn, [prompt] * 2, texts, {})

    # A reward for messages.
    assert load_and_call("message_length", ["", "abc"]) == [0, 3]

    # A reward for messages that catches the error on texts.
    for prompt, last_values in (("p", [9, 9]), (messages, [0, 3])):
        _, fn = rewards.load_reward(f"{file}:catches_errors")
        values = [
            rewards.call_reward_on_rank0("catches_errors", fn, [prompt] * 2, texts, {})
            for texts in (["ab", "cd"], ["", "abc"])
        ]
        assert values == [[9, 9], last_values]

    # A reward for texts: the metrics of the trial call with messages are dropped.
    _, fn = rewards.load_reward(f"{file}:contains_x")
    values = rewards.call_reward_on_rank0("contains_x", fn, [messages] * 2, ["ab", "cd"], {})
    assert values == [0, 0]
    assert fn.logged.metrics == {"n": [2]}

    # Errors of rewards for texts.
    for name, error in (("first_letter", "IndexError"), ("inverse_length", "ZeroDivisionError")):
        message = catch_message(load_and_call, name, ["", "abc"])
        assert f"reward {name} raised {error}" in message


@needs("trl")
def test_two_rewards_of_trl_run_unchanged(reward_file):
    file = reward_file("from trl.rewards import accuracy_reward, think_format_reward\n")
    completions = [
        "<think>\nHalf.\n</think>\nIt is $\\boxed{\\frac{1}{2}}$",
        "It is $\\boxed{0.25}$",
        "No idea",
    ]
    columns = {"solution": ["$0.5$", "$0.5$", "no formula"]}
    for name, expected in (("accuracy_reward", [1, 0, None]), ("think_format_reward", [1, 0, 0])):
        _, fn = rewards.load_reward(f"{file}:{name}")
        values = rewards.call_reward_on_rank0(name, fn, "ppp", completions, columns)
        assert [None if math.isnan(value) else value for value in values] == expected


# ---- built-in rewards


MARKED_ANSWERS = ["\\boxed{42}", "#### 42", "#### Plan\n\\boxed{42}", "Answer: 42"]


@pytest.mark.parametrize(
    ("spec", "texts", "num_tokens", "expected"),
    [
        (  # as in DAPO
            "soft_overlong:100:20",
            [""] * 6,
            [0, 80, 85, 90, 100, 130],
            [0, 0, -0.25, -0.5, -1, -1],
        ),
        ("length:40", [""] * 5, [0, 20, 40, 60, 400], [-1, -0.5, 0, -0.5, -1]),
        ("boxed_once", MARKED_ANSWERS, [3] * 4, [1] * 4),
        (
            "boxed_once",
            ["42", "\\boxed{1} \\boxed{2}", "\\boxed{42}\n#### 42", "\\boxed{}", ""],
            [3] * 5,
            [0] * 5,
        ),
    ],
)
def test_built_in_rewards_follow_the_formulas(spec, texts, num_tokens, expected):
    name, fn = rewards.load_reward(spec)
    prompts = ["p"] * len(texts)
    columns = {"num_tokens": num_tokens}
    assert rewards.call_reward_on_rank0(name, fn, prompts, texts, columns) == expected


def test_a_file_is_one_module_until_it_changes(reward_file):
    path = reward_file("class A: pass\ndef is_a(x): return isinstance(x, A)\n")
    loaded_class = functions.load_functions("--env", f"{path}:A", kind="class")["A"]
    _, is_a = functions.load_function("--reward", f"{path}:is_a")
    assert is_a(loaded_class())

    reward_file("def is_a(x): return 7\n")
    _, is_a = functions.load_function("--reward", f"{path}:is_a")
    assert is_a(0) == 7


def test_users_can_still_import_math_correct_from_the_old_module():
    from problems.rewards import math_correct as math_correct_of_old_module
    from rewards.verifiers import math_correct

    assert math_correct_of_old_module is math_correct
