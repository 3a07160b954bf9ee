"""Runs with tools and environments: what they record, what they train, how they go on, and what they refuse."""

import json

import numpy as np
import oracle
import pytest
from conftest import catch_message, read_log, run_command, write_log

import chat
import evaluate
import train
import update
from disk import model_choice
from reporting import history, page
from run import GrpoRun
from settings.checks import check_settings
from settings.sources import resolve_settings
from tasks import make_task

SMALL = {
    "model": "demo:tools",
    "batch": 2,
    "groups": 4,
    "eval_every": 0,
    "steps": 2,
    "save_every": 1,
}

WORLD = '''
import random

class Door:
    """A door with a code."""

    def reset(self, **row):
        self.code, self.opened = random.randint(10, 99), []
        return f"What is {self.code} * 11 + 100?"

    def calculator(self, expression: str) -> str:
        """
        Computes.

        Args:
            expression: What.
        """
        self.opened.append(expression)
        return str(self.code * 11 + 100)

    def get_reward(self):
        return float(bool(self.opened))


class Well:
    def reset(self, **row) -> str | None:
        assert "environment" not in row
        self.depth, self.lowered = random.randint(2, 9), 0
        return f"Lower the bucket by {self.depth}."

    async def lower(self, steps: int) -> int:
        """
        Lowers the bucket.

        Args:
            steps: How many.

        Returns:
            How deep it is.
        """
        self.lowered += steps
        return self.lowered

    async def get_reward(self) -> float:
        return float(self.lowered == self.depth)


def of_wells(environments, **_):
    return [float(one.depth) if isinstance(one, Well) else None for one in environments]


def tried(environments, completions, **_):
    assert all("messages" not in text for text in completions)
    return [len(one.opened) for one in environments]


def lengthy(completions, **_):
    return [len(text) / 100 for text in completions]


def talked(completions, **_):
    return [float(sum(message["role"] == "tool" for message in talk)) for talk in completions]


class Warmer:
    """Pays each turn for how near its last guess was."""

    reward_per_turn = True

    def reset(self, **row):
        self.number, self.near = random.randint(1, 20), 0.0
        return "I think of a number from 1 to 20. Find it."

    def guess(self, number: int) -> str:
        """
        Guesses.

        Args:
            number: The guess.
        """
        self.near = 1 - abs(number - self.number) / 20
        return "right" if number == self.number else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        near, self.near = self.near, 0.0
        return near


class Silent(Warmer):
    get_reward = None


class Worded(Warmer):
    def get_reward(self):
        return "near"


class Rusty(Door):
    def reset(self, **row):
        raise OSError("the hinge is rusty")


def calculator(x: int) -> int:
    """
    Gives it back.

    Args:
        x: A number.
    """
    return x

again = calculator
'''


@pytest.fixture
def world(tmp_path):
    (tmp_path / "world.py").write_text(WORLD)
    return f"{tmp_path}/world.py"


def start(tmp_path, **settings):
    return train.Trainer.start(run_dir=str(tmp_path / "run"), **SMALL | settings)


def records(run, name):
    return read_log(run.dir / f"{name}.jsonl")


def test_a_run_records_conversations_and_trains_what_the_model_wrote(golden):
    run = golden("tools")
    lines, steps = read_log(run / "rollouts.jsonl"), read_log(run / "metrics.jsonl")
    assert any(line["turns"] > 1 for line in lines)
    for line in lines:
        own = [one for begin, end in line["own"] for one in line["ids"][begin:end]]
        assert len(line["own"]) == line["turns"] or line["finish_reason"] == "length"
        assert len(own) <= 48 and line["own"][-1][1] == len(line["ids"])
        assert sum(message["role"] == "assistant" for message in line["messages"]) == line["turns"]
        assert all(
            called.keys() == {"turn", "name", "arguments", "seconds", "error"}
            for called in line["tool_calls"]
        )
    shown = [
        row
        for group in page.completion_groups_for_page(history.load_history(run))["groups"]
        for row in group["rows"]
    ]
    replies = [
        message["content"]
        for line in lines
        for message in line["messages"]
        if message["role"] == "tool"
    ]
    assert sum(row["text"].count("calculator replies: ") for row in shown) == len(replies) > 0
    assert all(
        any(f"calculator replies: {reply}" in row["text"] for row in shown) for reply in replies
    )
    last = [line for line in lines if line["step"] == 3]
    assert steps[-1]["tools/calls"] == sum(len(line["tool_calls"]) for line in last)
    assert steps[-1]["completion/repeated"] is None  # calls repeat by nature
    assert steps[-1]["tools/turns"] == np.mean([line["turns"] for line in last])
    assert all(
        one["mismatch/logprob_abs_max"] < 1e-3 for one in steps
    )  # the trainer sees what the sampler saw
    assert (run / "report.html").is_file()


@pytest.mark.slow
def test_a_resumed_run_with_an_environment_repeats_the_uninterrupted_one(tmp_path, world):
    settings = {
        "env": f"{world}:Door",
        "max_turns": 3,
        "max_context": 256,
        "max_tokens": 80,
        "eval_every": 2,
    }
    whole = start(tmp_path / "a", **settings, eval_limit=8)
    whole.fit()
    broken = start(tmp_path / "b", **settings, eval_limit=8)
    for figures in broken.steps():
        assert figures["step"] == 1
        break
    again = train.Trainer.resume(broken.dir)
    again.fit()
    compared = {
        "rollouts": ("prompt", "ids", "reward", "messages"),
        "eval": ("eval/score", "eval/greedy"),
    }
    for name, fields in compared.items():
        ours, theirs = (
            [[line[key] for key in fields] for line in records(one, name)] for one in (whole, again)
        )
        assert ours == theirs


def test_environments_give_prompts_tools_and_rewards(tmp_path, world):
    settings = {
        "reward": [f"{world}:tried,talked"],
        "reward_weights": {"talked": 0.0},
        "max_context": 256,
    }
    run = start(tmp_path, env=f"{world}:Door", **settings, max_tokens=40, steps=1)
    run.fit()
    lines = records(run, "rollouts")
    assert len({line["prompt"] for line in lines}) == 2 and all(
        line["prompt"].startswith("What is ") for line in lines
    )
    for line in lines:
        assert line["rewards"]["tried"] == len(
            [one for one in line["tool_calls"] if one["error"] is None]
        )
        assert line["rewards"]["Door"] == float(line["rewards"]["tried"] > 0)
        assert line["rewards"]["talked"] == sum(
            message["role"] == "tool" for message in line["messages"]
        )
        assert line["reward"] == line["rewards"]["tried"] + line["rewards"]["Door"]


HANGS = '''
import mlx.core as mx

def calculator(expression: str) -> str:
    """
    Hangs.

    Args:
        expression: What.
    """
    while True:
        mx.eval(mx.random.normal((256, 256)) @ mx.random.normal((256, 256)))
'''


@pytest.mark.slow
def test_a_tool_that_hangs_inside_mlx_spoils_no_end(tmp_path):
    """Python's own end would abort, exit status 134."""
    (tmp_path / "hangs.py").write_text(HANGS)
    how = "--model demo:tools --steps 1 --batch 1 --groups 8 --eval-every 0 --max-tokens 40 --tool-timeout 0.3".split()
    done = run_command(
        "train.py",
        *how,
        "--tools",
        f"{tmp_path}/hangs.py:calculator",
        "--run-dir",
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stderr
    lines = read_log(tmp_path / "run" / "rollouts.jsonl")
    assert "the call took longer than 0.3 s" in {
        called["error"] for line in lines for called in line["tool_calls"]
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "env"}, "--task env needs an environment; name it with --env FILE.py:Class"),
        ({"env": "WORLD:Missing"}, "has no class 'Missing'"),
        ({"env": "WORLD:tried"}, "not a class"),
        ({"env": "WORLD:Door,WORLD:Well"}, "give each of several environments a different name"),
        ({"tools": ["WORLD:tried"]}, "--tools: the tool tried has no schema"),
        ({"tools": ["WORLD:calculator,again"]}, "two tools have the same name; rename one"),
        (
            {"tools": ["WORLD:calculator,calculater"]},
            "has no function 'calculater', did you mean 'calculator'?",
        ),
        (
            {"env": "WORLD:Door", "tools": ["WORLD:calculator"]},
            "Door of --env and the functions of --tools both have a tool calculator",
        ),
        (
            {"env": "WORLD:Silent"},
            "the environment Silent of --env has reward_per_turn, but no method get_reward",
        ),
        (
            {"env": "WORLD:Warmer", "advantage": "rloo"},
            "--advantage rloo needs one reward per conversation, but Warmer has",
        ),
        (
            {"env": "WORLD:Warmer", "scale_rewards": "batch"},
            "--scale-rewards batch needs one reward",
        ),
        (
            {"env": "WORLD:Warmer", "reward_gate": "form"},
            "--reward-gate form needs one reward",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_a_line_before_a_model_is_loaded(world, settings, said):
    text = json.dumps(settings).replace("WORLD", world)
    config = resolve_settings(
        SMALL | json.loads(text), None, None, lambda name: (name, "as requested")
    )[0]
    assert said in catch_message(make_task, config)


def test_an_environment_that_fails_at_its_first_reset_leaves_no_directory(tmp_path, world):
    said = catch_message(start, tmp_path, env=f"{world}:Rusty")
    assert f"environment Rusty: reset raised OSError: the hinge is rusty, at {world}:" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        (
            {"prompt": "Open.", "environment": "window"},
            {"env": "door=WORLD:Door"},
            "column environment contains 'window'",
        ),
        (
            {"environment": "door"},
            {"reward": ["boxed_once"]},
            "has rows without a prompt; add a prompt to each row",
        ),
        (
            {"prompt": "Open.", "chat_template_kwargs": {"tone": "kind"}},
            {"env": "WORLD:Door"},
            "column chat_template_kwargs does not work with tools",
        ),
    ],
)
def test_rows_that_no_environment_can_take_are_refused(tmp_path, world, row, settings, said):
    rows = [row | {"prompt": f"{row['prompt']}{n}"} if "prompt" in row else row for n in range(20)]
    named = json.loads(json.dumps(settings).replace("WORLD", world))
    config = check_settings(
        SMALL | {"task": "own", "data": write_log(tmp_path / "data.jsonl", rows)} | named
    )
    assert said in catch_message(GrpoRun, config, tmp_path)


def test_turns_that_are_paid_have_advantages_of_their_own(tmp_path, world, monkeypatch):
    """By the oracle, from what the run records; the last turn gets what other rewards give."""
    settings = {
        "env": f"{world}:Warmer",
        "reward": [f"{world}:lengthy"],
        "reward_weights": {"Warmer": 0.5},
    }
    taught, train_on = [], update.run_optimizer_steps
    monkeypatch.setattr(
        update,
        "run_optimizer_steps",
        lambda learner, *args: taught.extend(args[0]) or train_on(learner, *args),
    )
    run = start(tmp_path, **settings, batch=2, groups=6, steps=1, max_tokens=80, max_turns=4)
    run.fit()
    advantages = {
        row: np.array(batch.advantages[place])
        for batch in taught
        for place, row in enumerate(batch.rows)
    }
    lines, groups = records(run, "rollouts"), [[], []]
    for line in lines:
        earned = [*line["turn_rewards"], *[0.0] * (len(line["own"]) - line["turns"])]
        assert len(line["turn_rewards"]) == line["turns"] and line["rewards"]["Warmer"] == sum(
            earned
        )
        assert line["reward"] == pytest.approx(0.5 * sum(earned) + line["rewards"]["lengthy"])
        groups[line["group"]].append([0.5 * one for one in earned])
        groups[line["group"]][-1][-1] += line["rewards"]["lengthy"]
    expected = [its for group in groups for its in oracle.turn_advantages(group, "group")]
    assert len({len(its) for its in expected}) > 1 and any(its[0] != its[-1] for its in expected)
    for row, (line, its) in enumerate(zip(lines, expected, strict=True)):
        assert line["advantage"] == pytest.approx(its[0], rel=1e-4, abs=1e-6)
        if row not in advantages:
            continue
        of_tokens = [
            one
            for one, (begin, end) in zip(its, line["own"], strict=True)
            for _ in range(begin, end)
        ]
        np.testing.assert_allclose(
            advantages[row][: len(of_tokens)], of_tokens, rtol=1e-4, atol=1e-6
        )
        assert (advantages[row][len(of_tokens) :] == 0).all()


def test_a_turns_reward_that_is_no_number_ends_the_run_in_a_line(tmp_path, world):
    run = start(tmp_path, env=f"{world}:Worded", steps=1)
    assert (
        "environment Worded: get_reward returned 'near' for a turn; return a number"
        in catch_message(run.fit)
    )


def test_rows_that_only_name_an_environment_get_its_prompt_and_rewards_know_its_class(
    tmp_path, world
):
    """The file of class and reward is one module; evaluations reset from other seeds, as no prompt is held out."""
    rows = [{"environment": ("door", "well", "gate")[n % 3]} for n in range(20)]
    settings = {
        "data": write_log(tmp_path / "data.jsonl", rows),
        "env": f"door={world}:Door,well={world}:Well,gate={world}:Door",
        "reward": [f"{world}:of_wells"],
    }
    run = start(
        tmp_path, **settings, batch=8, groups=2, steps=1, eval_every=1, eval_limit=4, max_tokens=16
    )
    run.fit()
    lines, (before, _) = records(run, "rollouts"), records(run, "eval")
    assert before["eval/num"] == 4
    wells = [line for line in lines if line["prompt"].startswith("Lower")]
    assert 0 < len(wells) < len(lines)
    for line in lines:
        depth = float(line["prompt"].split()[-1][:-1]) if line in wells else None
        assert line["rewards"]["of_wells"] == depth
        assert (line["rewards"]["Well"] is None, line["rewards"]["Door"] is None) == (
            line not in wells,
            line in wells,
        )


def test_chat_plays_held_out_episodes_of_a_run_a_task_or_an_environment(tmp_path, world, capsys):
    run = start(tmp_path, env=f"{world}:Warmer", steps=1, max_tokens=64)
    run.fit()
    run.save()
    capsys.readouterr()
    for flags in (["--run", str(run.dir)], ["--model", "demo:tools", "--env", f"{world}:Warmer"]):
        chat.main([*flags, "--num", "6", "--max-tokens", "80", "--temp", "0"])
        said = capsys.readouterr().out.splitlines()
        assert said.count("[user] I think of a number from 1 to 20. Find it.") == 6
        called = [
            place for place, line in enumerate(said) if line.startswith("calls guess(number=")
        ]
        assert called and all(said[place + 1].startswith("guess replies: ") for place in called)
        assert sum("] reward " in line for line in said) == 6


def test_chat_gives_a_prompt_the_tools_of_its_flags(capsys):
    flags = [
        "--model",
        "demo:tools",
        "--prompt",
        "What is 12 * 13 + 100?",
        "--max-tokens",
        "40",
        "--num",
        "2",
    ]
    chat.main([*flags, "--tools", "tasks.calculator:calculator"])
    said = capsys.readouterr().out.splitlines()
    assert said.count("[user] What is 12 * 13 + 100?") == 2
    assert sum(line in ("[stop]", "[length]", "[turns]") for line in said) == 2


@pytest.mark.parametrize("main", [evaluate.main, chat.main])
@pytest.mark.parametrize("task", ["calculator", "guess"])
def test_a_task_is_evaluated_and_played_with_the_model_that_a_training_takes(capsys, main, task):
    main(
        ["--task", task, "--max-tokens", "8", *(["--limit", "2"] if main is evaluate.main else [])]
    )
    trained, said = (
        resolve_settings({"task": task}, None, None, model_choice.choose_model_and_reason)[
            0
        ].model.name,
        capsys.readouterr(),
    )
    assert f"model: {trained}, the model of the task" in said.err
    assert main is chat.main or json.loads(said.out.splitlines()[-1])["eval/num"] == 2
    assert model_choice.choose_model_and_reason("smollm2", None, trained) == (
        "smollm2",
        "as requested",
    )
