"""A user's metrics: rewards with weight 0, and TRL's functions `log_metric` and `log_extra`."""

import json

import numpy as np
import pytest
from conftest import catch_message
from small_run import make_run

import train
from reporting import answer_changes, charts, seeds
from rewards import rewards

MINE = """
def right(completions, answer, **_):
    return [float(text == right_answer) for text, right_answer in zip(completions, answer)]
def by_chance(completions, **_):
    return [float(len(text) % 3) for text in completions]
def length(completions, log_metric, log_extra, **_):
    log_metric("longest", max(map(len, completions)))
    log_extra("upper", [text.upper() for text in completions])
    return [None if len(text) % 2 else 1e9 * len(text) for text in completions]
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def train_two_steps(run_dir, reward_file, names, *flags):
    """Trains a run; returns it with its metrics, completions and trained weights."""
    run_dir.mkdir()
    rewards = [f"{reward_file}:{name}" for name in names.split(",")]
    short_run = "--steps 2 --eval-every 2 --eval-limit 4".split()
    run = make_run(run_dir, *short_run, "--reward", *rewards, *flags)
    list(train.train(run))
    weights = {name: np.array(value) for name, value in run.learner.trainable.items()}
    return run, run.journal.metrics.read(), run.journal.rollouts.read(), weights


@pytest.mark.parametrize("function", ["", "group_again"])
def test_a_completion_without_any_reward_is_trained_with_0_and_the_run_warns(
    tmp_path, reward_file, capsys, function
):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "seen = []\n"
        "def often(completions, **_):\n"
        "    return [None if place % 3 == 1 else 1.0 for place in range(len(completions))]\n"
        "def group_again(rewards):\n"
        "    seen.append(rewards)\n"
        "    return rewards - rewards.mean(axis=1, keepdims=True)\n"
    )
    flags = ["--advantage", f"{reward_file}:group_again"] if function else []
    flags += ["--reward-weights", "rubric=0"]
    run, metrics, rows, _ = train_two_steps(tmp_path / "run", reward_file, "often", *flags)
    num = sum(row["reward"] is None for row in rows if row["step"] == 1)
    assert 0 < num < len(rows) / 2
    assert metrics[0]["reward/none"] == num
    if function:
        for row in rows:
            if row["reward"] is None:
                assert row["advantage"] < 0
            else:
                assert row["advantage"] > 0

    [text] = [row["text"] for row in run.journal.warnings.read() if row["name"] == "no reward"]
    assert text.startswith(
        f"{num} of {len(rows) // 2} completions of step 1 have no reward, because each of "
        "their rewards is None. They are trained with the reward 0"
    )
    assert "sample.reward_or_nan_if_unreadable" in text
    assert capsys.readouterr().err.count("have no reward") == 1


MODES = [
    [],
    ["--combine-rewards", "normalize"],
    ["--advantage", "reinforce", "--scale-rewards", "none"],
    ["--scale-rewards", "batch"],
    ["--reward-gate", "form"],
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: " ".join(mode) or "default")
def test_a_reward_with_weight_0_is_recorded_and_does_not_affect_training(
    tmp_path, reward_file, mode
):
    _, _, expected_rows, expected_weights = train_two_steps(
        tmp_path / "without", reward_file, "right,by_chance", *mode
    )
    run, metrics, rows, weights = train_two_steps(
        tmp_path / "with",
        reward_file,
        "right,by_chance,length",
        "--reward-weights",
        "length=0",
        *mode,
    )

    assert weights.keys() == expected_weights.keys()
    assert all((weights[name] == expected_weights[name]).all() for name in weights)

    # the records
    for row, expected in zip(rows, expected_rows, strict=True):
        length = len(row["completion"])
        assert row["rewards"]["length"] == (None if length % 2 else 1e9 * length)
        assert row["reward"] == expected["reward"]
        assert row["advantage"] == expected["advantage"]
        assert row["extra"] == {"upper": row["completion"].upper()}
    for step in metrics:
        assert step["reward/none"] == 0
        assert step["reward/length"]
    lengths = [len(row["completion"]) for row in rows if row["step"] == 1]
    assert metrics[0]["metric/longest"] == max(lengths)
    for record in run.journal.evaluations:
        assert record["eval/reward/length"]
        assert record["eval/metric/longest"]

    # the charts
    (run.dir / "config.yaml").write_text(json.dumps(run.config.to_flags(run.sizes)))
    list_of_charts = charts.make_charts(seeds.load_seed_groups([run.dir]))
    series = {chart["title"]: chart["series"] for chart in list_of_charts}
    labels = [curve["label"] for curve in series["Reward by component"]]
    assert "length, weight 0" in labels
    longest = [float(f"{step['metric/longest']:.4g}") for step in metrics]
    assert series["Logged by rewards"][0]["y"] == longest


def test_a_reward_may_return_only_none_if_its_weight_is_0():
    functions = {
        "silent": rewards.UserReward("silent", lambda completions: [None] * len(completions)),
        "counted": rewards.UserReward("counted", lambda completions: [1.0, 2.0]),
    }
    inputs = ([{"prompt": "p"}] * 2, ["a", "b"], {})
    rewards.call_rewards(functions, *inputs, {"silent": 0.0, "counted": 1.0})
    message = catch_message(
        rewards.call_rewards, functions, *inputs, {"silent": 1.0, "counted": 0.0}
    )
    assert "reward silent returned None for all 2 completions" in message


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            lambda metric, extra: metric("x", float("nan")),
            "raised ValueError: log_metric got nan for 'x'; pass a finite number, at",
        ),
        (
            lambda metric, extra: metric("x", "many"),
            "raised TypeError: must be real number, not str, at",
        ),
        (
            lambda metric, extra: extra("x", [1]),
            "raised ValueError: log_extra got 1 values for 'x'; pass 2, one for each completion, at",
        ),
    ],
)
def test_a_value_that_cannot_be_logged_causes_a_one_line_error(log, message):
    def user_reward(completions, log_metric, log_extra):
        log(log_metric, log_extra)
        return [1.0] * len(completions)

    functions = {"mine": rewards.UserReward("mine", user_reward)}
    assert message in catch_message(
        rewards.call_rewards, functions, [{"prompt": "p"}] * 2, ["a", "b"], {}
    )


def test_values_of_any_type_are_recorded_as_json():
    def user_reward(completions, log_extra):
        log_extra("x", [np.float32(2), {1}, float("inf"), np.arange(2)])
        return [1.0] * len(completions)

    functions = {"mine": rewards.UserReward("mine", user_reward)}
    _, logged = rewards.call_rewards(functions, [{"prompt": "p"}] * 4, ["a"] * 4, {})
    assert json.loads(json.dumps(logged.extra["x"], allow_nan=False)) == [2.0, "{1}", "inf", [0, 1]]


def test_a_wrong_answer_does_not_have_the_highest_reward_if_right_answers_earn_more():
    """The recipe of GSM8K has the weight 1 for the right answer and 0.1 for its form."""

    def make_answer(right, form, weights):
        return {"values": [right], "reward": [weights[0] * right + weights[1] * form]}

    def find_problems(before, after):
        return answer_changes.wrong_with_highest_reward_if_alarming({0: before, 9: after})

    for weights, expected in (
        ((1.0, 0.1), (set(), set())),
        ((0.0, 1.0), ({1, 3, 5}, {0, 1, 2, 3})),
    ):
        before = {n: make_answer(n / 10 // 0.7, n % 2, weights) for n in range(10)}
        after = {n: make_answer(n / 10 // 0.4, 1.0, weights) for n in range(10)}
        assert find_problems(before, after) == expected

    # answers that training did not change do not count
    answers = {n: make_answer(0, float(n < 4), (0.0, 1.0)) for n in range(10)}
    assert find_problems(answers, answers) == (set(), set())
