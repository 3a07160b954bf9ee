"""Reward functions: loaded from hostile files, called, checked; those that suit any task against their formulas."""

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


def test_a_reward_is_loaded_by_path_with_its_neighbours_and_leaves_no_trace_on_the_path(
    tmp_path, reward_file
):
    (tmp_path / "reward_neighbour.py").write_text("FACTOR = 2\n")
    file = reward_file(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom reward_neighbour import FACTOR\n"
        "@dataclass\nclass Weights:\n    by: float = FACTOR\n"
        "def brevity(completions, **_):\n    return [-Weights().by * len(text) for text in completions]\n"
    )
    before = list(sys.path)
    name, fn = rewards.load_reward(f"{file}:brevity")
    assert name == "brevity" and sys.path == before
    assert rewards.call_reward_on_rank0(name, fn, ["p"], ["abc"], {}) == [-6.0]


BAD_REWARD_FILES = [  # what its message must hold; more are in mistakes.yaml
    ("1 / 0", "ZeroDivisionError"),
    ("import sys; sys.exit(0)", "SystemExit"),
    ("raise ValueError('two\\nlines')", "two lines"),
    ("def rubric(): pass", "the name of the judge"),
]


@pytest.mark.parametrize(("body", "expected"), BAD_REWARD_FILES)
def test_a_bad_reward_file_is_one_line_that_names_it(reward_file, body, expected):
    text = catch_message(rewards.load_reward, f"{reward_file(body)}:rubric")
    assert "my.py" in text and expected in text


def test_a_bad_reward_spec_is_one_line_that_names_the_form():
    for spec in ("my.py", "my.py:", ":fn", "", "my.py:not a name", "soft_overlongs"):
        assert "FILE.py:function" in catch_message(rewards.load_reward, spec)
    for spec in ("./mine:fn", "../my/mine:fn"):
        assert "nor an installed module; if it is a module, add its folder" in catch_message(
            rewards.load_reward, spec
        )
    for spec in (
        "soft_overlong",
        "soft_overlong:256",
        "soft_overlong:256:-1",
        "length:x",
        "boxed_once:1",
    ):
        assert "positive whole numbers" in catch_message(rewards.load_reward, spec)


def test_a_reward_gets_the_columns_that_it_names_or_all_with_kwargs():
    seen = {}

    def named(completions, answer, unknown=7):
        seen["named"] = (completions, answer, unknown)
        return [0] * len(completions)

    def every(**columns):
        seen["every"] = sorted(columns)
        return [0] * 2

    columns = {"answer": ["x", "y"], "level": [1, 2]}
    rewards.call_reward_on_rank0("named", named, ["p", "q"], ["a", "b"], columns)
    rewards.call_reward_on_rank0("every", every, ["p", "q"], ["a", "b"], columns)
    assert seen == {
        "named": (["a", "b"], ["x", "y"], 7),
        "every": ["answer", "completions", "level", "prompts"],
    }


def test_a_reward_cannot_change_the_trainers_lists_or_directory():
    completions, here = ["a", "b"], os.getcwd()
    rewards.call_reward_on_rank0(
        "greedy", lambda completions: [completions.clear() or 1.0] * 2, ["p", "q"], completions, {}
    )
    rewards.call_reward_on_rank0(
        "gone", lambda completions: [os.chdir("/") or 1.0], ["p"], ["a"], {}
    )
    assert (completions, os.getcwd()) == (["a", "b"], here)


@pytest.mark.parametrize(
    "value",
    [[1, 0.5], (1, 0.5), np.array([1, 0.5]), [True, Fraction(1, 2)]],
    ids=["list", "tuple", "array", "bool"],
)
def test_rewards_of_any_real_type_become_floats(value):
    given = rewards.call_reward_on_rank0(
        "fn", lambda completions: value, ["p", "q"], ["a", "b"], {}
    )
    assert given == [1.0, 0.5] and all(type(reward) is float for reward in given)
    assert rewards.call_reward_on_rank0(
        "fn", lambda completions: [np.array(2.5)], ["p"], ["a"], {}
    ) == [2.5]


BAD_REWARDS = [  # more are in mistakes.yaml
    ("ab", "'ab'; return a list"),
    (iter([1, 2]), "return a list"),
    ([1.0, 2.0, 3.0], "returned 3 values; return a list of 2 numbers"),
    ([1.0, 10**400], "for row 1"),
    ([1.0, 1j], "1j for row 1"),
    ([[1.0], [2.0]], "[1.0] for row 0"),
]


@pytest.mark.parametrize(("value", "expected"), BAD_REWARDS, ids=lambda value: repr(value)[:20])
def test_a_bad_result_names_the_reward_the_row_and_the_value(value, expected):
    text = catch_message(
        rewards.call_reward_on_rank0, "mine", lambda completions: value, ["p", "q"], ["a", "b"], {}
    )
    assert "reward mine" in text and expected in text


def test_an_argument_that_cannot_be_given_by_its_name_is_named():
    said = catch_message(
        rewards.call_reward_on_rank0, "by_place", lambda completions, /: [0.0], ["p"], ["a"], {}
    )
    assert "needs the argument 'completions'" in said


# ---- as TRL calls them


TRL_STYLE = """
import asyncio
def scheduled(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):
    log_metric("seen", len(prompts)), log_extra("answer", answer)
    texts = [completion[0]["content"] for completion in completions]
    assert all(message["role"] == "user" for prompt in prompts for message in prompt)
    share = trainer_state.global_step / trainer_state.max_steps
    return [20 * share + len(ids) + (text == right) if right else None
            for text, ids, right in zip(texts, completion_ids, answer)]
async def awaited(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(completion[0]["content"])) for completion in completions]
"""
ROWS = {"answer": ["x", "b", None], "completion_ids": [[1], [2, 3], [4]], "num_tokens": [1, 2, 1]}


def test_a_function_written_for_trl_gets_messages_ids_and_the_step(reward_file):
    file, prompts = reward_file(TRL_STYLE), ["p", [{"role": "user", "content": "q"}], "r"]
    name, fn = rewards.load_reward(f"{file}:scheduled")
    rewards.set_step_of_user_rewards(
        {name: fn, "length": built_in.make_built_in_reward("length:3")}, 5, 10
    )
    first, second, third = rewards.call_reward_on_rank0(name, fn, prompts, ["a", "b", "c"], ROWS)
    assert (first, second) == (11, 13) and math.isnan(third)
    name, fn = rewards.load_reward(f"{file}:awaited")
    assert rewards.call_reward_on_rank0(name, fn, prompts, ["a", "bb", ""], ROWS) == [1, 2, 0]


def test_only_what_reads_a_message_s_keys_is_tried_on_messages(reward_file):
    file = reward_file(
        "def theirs(completions, **_):\n    return [len(one[0]['content']) for one in completions]\n"
        "def initial(completions, **_):\n    return [one[0] == 'A' for one in completions]\n"
        "def share(completions, **_):\n    return [1 / len(one) for one in completions]\n"
        "def hidden(completions, **_):\n    mine = [completions.pop(0), completions.pop(0)]\n"
        "    try: return theirs(mine)\n    except Exception: return [9.0, 9.0]\n"
        "def plain(completions, log_metric, **_):\n    log_metric('n', len(completions[0]))\n"
        "    return ['x' in one.lower() for one in completions]\n"
    )
    name, fn = rewards.load_reward(f"{file}:theirs")
    assert rewards.call_reward_on_rank0(name, fn, ["p"] * 2, ["", "abc"], {}) == [0, 3]
    asked = [{"role": "user", "content": "q"}]
    for prompt, values in (("p", [9, 9]), (asked, [0, 3])):
        _, fn = rewards.load_reward(f"{file}:hidden")
        given = [
            rewards.call_reward_on_rank0("hidden", fn, [prompt] * 2, texts, {})
            for texts in (["ab", "cd"], ["", "abc"])
        ]
        assert given == [[9, 9], values]
    _, fn = rewards.load_reward(f"{file}:plain")
    assert rewards.call_reward_on_rank0("plain", fn, [asked] * 2, ["ab", "cd"], {}) == [0, 0]
    assert fn.logged.metrics == {"n": [2]}  # not what the try on messages logged
    for name, error in (("initial", "IndexError"), ("share", "ZeroDivisionError")):
        _, fn = rewards.load_reward(f"{file}:{name}")
        assert f"reward {name} raised {error}" in catch_message(
            rewards.call_reward_on_rank0, name, fn, ["p"] * 2, ["", "abc"], {}
        )


@needs("trl")
def test_two_rewards_of_trl_run_unchanged(reward_file):
    file = reward_file("from trl.rewards import accuracy_reward, think_format_reward\n")
    completions = [
        "<think>\nHalf.\n</think>\nIt is $\\boxed{\\frac{1}{2}}$",
        "It is $\\boxed{0.25}$",
        "No idea",
    ]
    for name, right in (("accuracy_reward", [1, 0, None]), ("think_format_reward", [1, 0, 0])):
        _, fn = rewards.load_reward(f"{file}:{name}")
        given = rewards.call_reward_on_rank0(
            name, fn, "ppp", completions, {"solution": ["$0.5$", "$0.5$", "no formula"]}
        )
        assert [None if math.isnan(value) else value for value in given] == right


# ---- for any task


MARKS = ["\\boxed{42}", "#### 42", "#### Plan\n\\boxed{42}", "Answer: 42"]


@pytest.mark.parametrize(
    ("spec", "texts", "num_tokens", "values"),
    [
        (
            "soft_overlong:100:20",
            [""] * 6,
            [0, 80, 85, 90, 100, 130],
            [0, 0, -0.25, -0.5, -1, -1],
        ),  # as in DAPO
        ("length:40", [""] * 5, [0, 20, 40, 60, 400], [-1, -0.5, 0, -0.5, -1]),
        ("boxed_once", MARKS, [3] * 4, [1] * 4),
        (
            "boxed_once",
            ["42", "\\boxed{1} \\boxed{2}", "\\boxed{42}\n#### 42", "\\boxed{}", ""],
            [3] * 5,
            [0] * 5,
        ),
    ],
)
def test_rewards_by_name_are_their_formulas(spec, texts, num_tokens, values):
    name, fn = rewards.load_reward(spec)
    assert (
        rewards.call_reward_on_rank0(
            name, fn, ["p"] * len(texts), texts, {"num_tokens": num_tokens}
        )
        == values
    )


def test_a_file_is_one_module_until_it_changes(reward_file):
    path = reward_file("class A: pass\ndef is_a(x): return isinstance(x, A)\n")
    kind = functions.load_functions("--env", f"{path}:A", kind="class")["A"]
    assert functions.load_function("--reward", f"{path}:is_a")[1](kind())
    reward_file("def is_a(x): return 7\n")
    assert functions.load_function("--reward", f"{path}:is_a")[1](0) == 7


def test_files_of_users_still_import_math_correct_from_its_old_address():
    from problems.rewards import math_correct as old_address
    from rewards.verifiers import math_correct

    assert old_address is math_correct
