"""Runs with tools and environments: their records, advantages, resumption and error messages."""

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

ENVIRONMENTS = '''
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


def depth_of_wells(environments, **_):
    return [
        float(environment.depth) if isinstance(environment, Well) else None
        for environment in environments
    ]


def num_attempts(environments, completions, **_):
    assert all("messages" not in text for text in completions)
    return [len(environment.opened) for environment in environments]


def length(completions, **_):
    return [len(text) / 100 for text in completions]


def num_tool_results(completions, **_):
    return [
        float(sum(message["role"] == "tool" for message in messages)) for messages in completions
    ]


class Warmer:
    """Rewards each turn for the nearness of its last guess."""

    reward_per_turn = True

    def reset(self, **row):
        self.number, self.nearness = random.randint(1, 20), 0.0
        return "I think of a number from 1 to 20. Find it."

    def guess(self, number: int) -> str:
        """
        Guesses.

        Args:
            number: The guess.
        """
        self.nearness = 1 - abs(number - self.number) / 20
        if number == self.number:
            return "right"
        return "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        reward = self.nearness
        self.nearness = 0.0
        return reward


class NoReward(Warmer):
    get_reward = None


class TextReward(Warmer):
    def get_reward(self):
        return "near"


class FailingReset(Door):
    def reset(self, **row):
        raise OSError("the hinge is rusty")


def calculator(x: int) -> int:
    """
    Returns the number.

    Args:
        x: A number.
    """
    return x

calculator_alias = calculator
'''


@pytest.fixture
def environments_file(tmp_path):
    path = tmp_path / "environments.py"
    path.write_text(ENVIRONMENTS)
    return str(path)


def start_run(tmp_path, **settings):
    return train.Trainer.start(run_dir=str(tmp_path / "run"), **SMALL | settings)


def read_run_log(run, name):
    return read_log(run.dir / f"{name}.jsonl")


def tool_messages(record):
    return [message for message in record["messages"] if message["role"] == "tool"]


def rows_on_page(run_dir):
    """The completions that the page of a run shows."""
    page_data = page.completion_groups_for_page(history.load_history(run_dir))
    return [row for group in page_data["groups"] for row in group["rows"]]


def test_a_run_records_conversations_and_trains_on_the_tokens_of_the_model(golden):
    run_dir = golden("tools")
    rollouts = read_log(run_dir / "rollouts.jsonl")
    steps = read_log(run_dir / "metrics.jsonl")

    assert any(record["turns"] > 1 for record in rollouts)
    for record in rollouts:
        turn_lengths = [end - begin for begin, end in record["own"]]
        assert len(turn_lengths) == record["turns"] or record["finish_reason"] == "length"
        assert sum(turn_lengths) <= 48
        assert record["own"][-1][1] == len(record["ids"])
        roles = [message["role"] for message in record["messages"]]
        assert roles.count("assistant") == record["turns"]
        for call in record["tool_calls"]:
            assert call.keys() == {"turn", "name", "arguments", "seconds", "error"}

    # The page shows all results of tools.
    texts = [row["text"] for row in rows_on_page(run_dir)]
    results = [message["content"] for record in rollouts for message in tool_messages(record)]
    assert results
    assert sum(text.count("calculator replies: ") for text in texts) == len(results)
    for result in results:
        assert any(f"calculator replies: {result}" in text for text in texts)
    assert (run_dir / "report.html").is_file()

    # The metrics agree with the rollouts of the last step.
    last_rollouts = [record for record in rollouts if record["step"] == 3]
    num_calls = sum(len(record["tool_calls"]) for record in last_rollouts)
    assert steps[-1]["tools/calls"] == num_calls
    assert steps[-1]["tools/turns"] == np.mean([record["turns"] for record in last_rollouts])
    assert steps[-1]["completion/repeated"] is None, "calls repeat by nature"
    for metrics in steps:
        assert metrics["mismatch/logprob_abs_max"] < 1e-3, "trainer and sampler see other tokens"


@pytest.mark.slow
def test_a_resumed_run_with_an_environment_repeats_the_uninterrupted_one(
    tmp_path, environments_file
):
    settings = {
        "env": f"{environments_file}:Door",
        "max_turns": 3,
        "max_context": 256,
        "max_tokens": 80,
        "eval_every": 2,
        "eval_limit": 8,
    }
    uninterrupted = start_run(tmp_path / "a", **settings)
    uninterrupted.fit()

    interrupted = start_run(tmp_path / "b", **settings)
    metrics = next(iter(interrupted.steps()))
    assert metrics["step"] == 1
    resumed = train.Trainer.resume(interrupted.dir)
    resumed.fit()

    def figures_of(run, log, fields):
        return [[record[field] for field in fields] for record in read_run_log(run, log)]

    for log, fields in (
        ("rollouts", ("prompt", "ids", "reward", "messages")),
        ("eval", ("eval/score", "eval/greedy")),
    ):
        assert figures_of(resumed, log, fields) == figures_of(uninterrupted, log, fields)


def test_environments_give_prompts_tools_and_rewards(tmp_path, environments_file):
    run = start_run(
        tmp_path,
        env=f"{environments_file}:Door",
        reward=[f"{environments_file}:num_attempts,num_tool_results"],
        reward_weights={"num_tool_results": 0.0},
        max_context=256,
        max_tokens=40,
        steps=1,
    )
    run.fit()
    rollouts = read_run_log(run, "rollouts")
    prompts = {record["prompt"] for record in rollouts}
    assert len(prompts) == 2
    assert all(prompt.startswith("What is ") for prompt in prompts)
    for record in rollouts:
        rewards = record["rewards"]
        errors = [call["error"] for call in record["tool_calls"]]
        assert rewards["num_attempts"] == errors.count(None)
        assert rewards["Door"] == float(rewards["num_attempts"] > 0)
        assert rewards["num_tool_results"] == len(tool_messages(record))
        assert record["reward"] == rewards["num_attempts"] + rewards["Door"]


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
def test_a_run_ends_normally_after_a_tool_hangs_inside_mlx(tmp_path):
    """Python's own shutdown would abort with the exit status 134."""
    (tmp_path / "hangs.py").write_text(HANGS)
    flags = "--model demo:tools --steps 1 --batch 1 --groups 8 --eval-every 0 --max-tokens 40"
    tool_flags = f"--tool-timeout 0.3 --tools {tmp_path}/hangs.py:calculator"
    process = run_command(
        "train.py", *flags.split(), *tool_flags.split(), "--run-dir", tmp_path / "run"
    )
    assert process.returncode == 0, process.stderr
    rollouts = read_log(tmp_path / "run" / "rollouts.jsonl")
    errors = {call["error"] for record in rollouts for call in record["tool_calls"]}
    assert "the call took longer than 0.3 s" in errors


def replace_file(settings, path):
    """The settings with this path instead of FILE."""
    return json.loads(json.dumps(settings).replace("FILE", path))


@pytest.mark.parametrize(
    ("settings", "expected_text"),
    [
        ({"task": "env"}, "--task env needs an environment; name it with --env FILE.py:Class"),
        ({"env": "FILE:Missing"}, "has no class 'Missing'"),
        ({"env": "FILE:num_attempts"}, "not a class"),
        ({"env": "FILE:Door,FILE:Well"}, "give each of several environments a different name"),
        ({"tools": ["FILE:num_attempts"]}, "--tools: the tool num_attempts has no schema"),
        (
            {"tools": ["FILE:calculator,calculator_alias"]},
            "two tools have the same name; rename one",
        ),
        (
            {"tools": ["FILE:calculator,calculater"]},
            "has no function 'calculater', did you mean 'calculator'?",
        ),
        (
            {"env": "FILE:Door", "tools": ["FILE:calculator"]},
            "Door of --env and the functions of --tools both have a tool calculator",
        ),
        (
            {"env": "FILE:NoReward"},
            "the environment NoReward of --env has reward_per_turn, but no method get_reward",
        ),
        (
            {"env": "FILE:Warmer", "advantage": "rloo"},
            "--advantage rloo needs one reward per conversation, but Warmer has",
        ),
        (
            {"env": "FILE:Warmer", "scale_rewards": "batch"},
            "--scale-rewards batch needs one reward",
        ),
        (
            {"env": "FILE:Warmer", "reward_gate": "form"},
            "--reward-gate form needs one reward",
        ),
    ],
)
def test_impossible_settings_of_environments_and_tools_are_refused_before_a_model_is_loaded(
    environments_file, settings, expected_text
):
    all_settings = SMALL | replace_file(settings, environments_file)
    config, _ = resolve_settings(all_settings, None, None, lambda name: (name, "as requested"))
    assert expected_text in catch_message(make_task, config)


def test_an_environment_whose_first_reset_fails_leaves_no_run_directory(
    tmp_path, environments_file
):
    message = catch_message(start_run, tmp_path, env=f"{environments_file}:FailingReset")
    expected_text = "environment FailingReset: reset raised OSError: the hinge is rusty, at "
    assert f"{expected_text}{environments_file}:" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("row", "settings", "expected_text"),
    [
        (
            {"prompt": "Open.", "environment": "window"},
            {"env": "door=FILE:Door"},
            "column environment contains 'window'",
        ),
        (
            {"environment": "door"},
            {"reward": ["boxed_once"]},
            "has rows without a prompt; add a prompt to each row",
        ),
        (
            {"prompt": "Open.", "chat_template_kwargs": {"tone": "kind"}},
            {"env": "FILE:Door"},
            "column chat_template_kwargs does not work with tools",
        ),
    ],
)
def test_rows_that_no_environment_can_take_are_refused(
    tmp_path, environments_file, row, settings, expected_text
):
    rows = [dict(row) for _ in range(20)]
    if "prompt" in row:
        for number, numbered_row in enumerate(rows):
            numbered_row["prompt"] += str(number)
    data = write_log(tmp_path / "data.jsonl", rows)
    settings = replace_file(settings, environments_file)
    config = check_settings(SMALL | {"task": "own", "data": data} | settings)
    assert expected_text in catch_message(GrpoRun, config, tmp_path)


def test_turns_with_rewards_have_separate_advantages(tmp_path, environments_file, monkeypatch):
    """
    The oracle computes the advantages from the records of the run. The last turn also gets the
    rewards of the whole conversation.
    """
    batches = []
    run_optimizer_steps = update.run_optimizer_steps

    def record_batches(learner, new_batches, *args):
        batches.extend(new_batches)
        return run_optimizer_steps(learner, new_batches, *args)

    monkeypatch.setattr(update, "run_optimizer_steps", record_batches)
    run = start_run(
        tmp_path,
        env=f"{environments_file}:Warmer",
        reward=[f"{environments_file}:length"],
        reward_weights={"Warmer": 0.5},
        batch=2,
        groups=6,
        steps=1,
        max_tokens=80,
        max_turns=4,
    )
    run.fit()

    rollouts = read_run_log(run, "rollouts")
    groups = [[], []]
    for record in rollouts:
        rewards = record["rewards"]
        turn_rewards = list(record["turn_rewards"])
        assert len(turn_rewards) == record["turns"]
        assert rewards["Warmer"] == sum(turn_rewards)
        assert record["reward"] == pytest.approx(0.5 * sum(turn_rewards) + rewards["length"])
        # An unfinished turn has no reward.
        turn_rewards += [0.0] * (len(record["own"]) - record["turns"])
        weighted_rewards = [0.5 * reward for reward in turn_rewards]
        weighted_rewards[-1] += rewards["length"]
        groups[record["group"]].append(weighted_rewards)

    expected_advantages = []
    for group in groups:
        expected_advantages += oracle.turn_advantages(group, "group")
    assert len({len(advantages) for advantages in expected_advantages}) > 1
    assert any(advantages[0] != advantages[-1] for advantages in expected_advantages)

    for record, advantages in zip(rollouts, expected_advantages, strict=True):
        assert record["advantage"] == pytest.approx(advantages[0], rel=1e-4, abs=1e-6)
    for batch in batches:
        for row, token_advantages in zip(batch.rows, np.array(batch.advantages), strict=True):
            turns = rollouts[row]["own"]
            turn_lengths = [end - begin for begin, end in turns]
            expected = np.repeat(expected_advantages[row], turn_lengths)
            num_tokens = len(expected)
            np.testing.assert_allclose(
                token_advantages[:num_tokens], expected, rtol=1e-4, atol=1e-6
            )
            assert (token_advantages[num_tokens:] == 0).all()


def test_a_turn_reward_that_is_not_a_number_ends_the_run_with_a_message(
    tmp_path, environments_file
):
    run = start_run(tmp_path, env=f"{environments_file}:TextReward", steps=1)
    expected_text = "environment TextReward: get_reward returned 'near' for a turn; return a number"
    assert expected_text in catch_message(run.fit)


def test_rows_that_only_name_an_environment_get_the_prompt_of_the_environment(
    tmp_path, environments_file
):
    """
    The file is one module, so that rewards can check the class of an environment. Evaluations reset
    with other seeds, because no prompt is held out.
    """
    rows = [{"environment": ("door", "well", "gate")[number % 3]} for number in range(20)]
    file = environments_file
    run = start_run(
        tmp_path,
        data=write_log(tmp_path / "data.jsonl", rows),
        env=f"door={file}:Door,well={file}:Well,gate={file}:Door",
        reward=[f"{file}:depth_of_wells"],
        batch=8,
        groups=2,
        steps=1,
        eval_every=1,
        eval_limit=4,
        max_tokens=16,
    )
    run.fit()
    first_evaluation, _ = read_run_log(run, "eval")
    assert first_evaluation["eval/num"] == 4

    rollouts = read_run_log(run, "rollouts")
    num_wells = 0
    for record in rollouts:
        rewards = record["rewards"]
        is_well = record["prompt"].startswith("Lower")
        num_wells += is_well
        depth = float(record["prompt"].split()[-1].removesuffix(".")) if is_well else None
        assert rewards["depth_of_wells"] == depth
        assert (rewards["Well"] is None) == (not is_well)
        assert (rewards["Door"] is None) == is_well
    assert 0 < num_wells < len(rollouts)


def test_chat_plays_held_out_episodes_of_a_run_or_an_environment(
    tmp_path, environments_file, capsys
):
    environment = f"{environments_file}:Warmer"
    run = start_run(tmp_path, env=environment, steps=1, max_tokens=64)
    run.fit()
    run.save()
    capsys.readouterr()
    for flags in (["--run", str(run.dir)], ["--model", "demo:tools", "--env", environment]):
        chat.main([*flags, "--num", "6", "--max-tokens", "80", "--temp", "0"])
        lines = capsys.readouterr().out.splitlines()
        assert lines.count("[user] I think of a number from 1 to 20. Find it.") == 6
        assert sum("] reward " in line for line in lines) == 6
        next_lines = [
            next_line
            for line, next_line in zip(lines, [*lines[1:], ""], strict=True)
            if line.startswith("calls guess(number=")
        ]
        assert next_lines
        assert all(line.startswith("guess replies: ") for line in next_lines)


def test_chat_answers_a_prompt_with_the_tools_of_the_flags(capsys):
    prompt = "What is 12 * 13 + 100?"
    flags = "--model demo:tools --max-tokens 40 --num 2 --tools tasks.calculator:calculator"
    chat.main([*flags.split(), "--prompt", prompt])
    lines = capsys.readouterr().out.splitlines()
    assert lines.count(f"[user] {prompt}") == 2
    assert sum(line in ("[stop]", "[length]", "[turns]") for line in lines) == 2


@pytest.mark.parametrize("main", [evaluate.main, chat.main])
@pytest.mark.parametrize("task", ["calculator", "guess"])
def test_evaluate_and_chat_use_the_model_that_a_training_on_the_task_would_use(capsys, main, task):
    limit = ["--limit", "2"] if main is evaluate.main else []
    main(["--task", task, "--max-tokens", "8", *limit])
    output = capsys.readouterr()
    config, _ = resolve_settings({"task": task}, None, None, model_choice.choose_model_and_reason)
    model = config.model.name
    assert f"model: {model}, the model of the task" in output.err
    if main is evaluate.main:
        assert json.loads(output.out.splitlines()[-1])["eval/num"] == 2

    choice = model_choice.choose_model_and_reason("smollm2", None, model)
    assert choice == ("smollm2", "as requested")
