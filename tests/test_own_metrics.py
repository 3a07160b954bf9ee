"""Metrics of one's own: rewards of weight 0, and what rewards give to TRL's `log_metric` and `log_extra`."""

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


def steps_of(at, reward_file, names, *flags):
    """The metrics, completions and trained weights of two steps."""
    at.mkdir()
    short_run = "--steps 2 --eval-every 2 --eval-limit 4 --reward".split()
    run = make_run(at, *short_run, *(f"{reward_file}:{name}" for name in names.split(",")), *flags)
    list(train.train(run))
    weights = {name: np.array(value) for name, value in run.learner.trainable.items()}
    return run, run.journal.metrics.read(), run.journal.rollouts.read(), weights


@pytest.mark.parametrize("function", ["", "group_again"])
def test_a_completion_without_any_reward_is_trained_with_0_and_the_run_says_so(
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
    run, metrics, rows, _ = steps_of(tmp_path / "run", reward_file, "often", *flags)
    num = sum(row["reward"] is None for row in rows if row["step"] == 1)
    assert 0 < num < len(rows) / 2 and metrics[0]["reward/none"] == num
    if function:
        for row in rows:
            assert row["advantage"] < 0 if row["reward"] is None else row["advantage"] > 0
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
def test_a_reward_of_weight_0_is_recorded_and_changes_no_weight(tmp_path, reward_file, mode):
    _, _, plain_rows, plain = steps_of(tmp_path / "plain", reward_file, "right,by_chance", *mode)
    zero = ["--reward-weights", "length=0"]
    run, metrics, rows, weights = steps_of(
        tmp_path / "measured", reward_file, "right,by_chance,length", *zero, *mode
    )
    assert plain.keys() == weights.keys() and all(
        (plain[name] == weights[name]).all() for name in plain
    )
    for before, row in zip(plain_rows, rows, strict=True):
        length = len(row["completion"])
        assert row["rewards"]["length"] == (None if length % 2 else 1e9 * length)
        assert (before["reward"], before["advantage"]) == (row["reward"], row["advantage"])
        assert row["extra"] == {"upper": row["completion"].upper()}
    assert all(step["reward/none"] == 0 and step["reward/length"] for step in metrics)
    assert metrics[0]["metric/longest"] == max(
        len(row["completion"]) for row in rows if row["step"] == 1
    )
    assert all(
        record["eval/reward/length"] and record["eval/metric/longest"]
        for record in run.journal.evaluations
    )
    (run.dir / "config.yaml").write_text(json.dumps(run.config.to_flags(run.sizes)))
    drawn = {
        chart["title"]: chart for chart in charts.make_charts(seeds.load_seed_groups([run.dir]))
    }
    assert "length, weight 0" in [
        curve["label"] for curve in drawn["Reward by component"]["series"]
    ]
    assert drawn["Logged by rewards"]["series"][0]["y"] == [
        float(f"{s['metric/longest']:.4g}") for s in metrics
    ]


def test_a_metric_may_give_no_number_and_a_reward_may_not_hide_behind_it():
    silent, counted = (rewards.UserReward(name, fn) for name, fn in FUNCTIONS)
    inputs = [{"prompt": "p"}] * 2, ["a", "b"], {}
    both = {"silent": silent, "counted": counted}
    rewards.call_rewards(both, *inputs, {"silent": 0.0, "counted": 1.0})
    text = catch_message(rewards.call_rewards, both, *inputs, {"silent": 1.0, "counted": 0.0})
    assert "reward silent returned None for all 2 completions" in text


FUNCTIONS = [
    ("silent", lambda completions: [None] * len(completions)),
    ("counted", lambda completions: [1.0, 2.0]),
]


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
def test_what_cannot_be_logged_is_told_in_a_line(log, message):
    def user_reward(completions, log_metric, log_extra):
        log(log_metric, log_extra)
        return [1.0] * len(completions)

    fn = rewards.UserReward("mine", user_reward)
    assert message in catch_message(
        rewards.call_rewards, {"mine": fn}, [{"prompt": "p"}] * 2, ["a", "b"], {}
    )


def test_values_of_any_type_are_recorded_as_json():
    def user_reward(completions, log_extra):
        log_extra("x", [np.float32(2), {1}, float("inf"), np.arange(2)])
        return [1.0] * len(completions)

    fn = rewards.UserReward("mine", user_reward)
    _, logged = rewards.call_rewards({"mine": fn}, [{"prompt": "p"}] * 4, ["a"] * 4, {})
    assert json.loads(json.dumps(logged.extra["x"], allow_nan=False)) == [2.0, "{1}", "inf", [0, 1]]


def test_a_wrong_answer_is_not_paid_most_where_another_reward_pays_right_ones_more():
    """As GSM8K is trained: one for the answer, a tenth for its form."""

    def make_answer(right, form, weights):
        return {"values": [right], "reward": [weights[0] * right + weights[1] * form]}

    def find_cheats(*weights):
        before = {n: make_answer(n / 10 // 0.7, n % 2, weights) for n in range(10)}
        return answer_changes.wrong_with_highest_reward_if_alarming(
            {0: before, 9: {n: make_answer(n / 10 // 0.4, 1.0, weights) for n in range(10)}}
        )

    assert find_cheats(1.0, 0.1) == (set(), set())
    assert find_cheats(0.0, 1.0) == ({1, 3, 5}, {0, 1, 2, 3})
    rows = {n: make_answer(0, 1.0, (0.0, 1.0)) for n in range(4)} | {
        n: make_answer(0, 0.0, (0.0, 1.0)) for n in range(4, 10)
    }
    assert answer_changes.wrong_with_highest_reward_if_alarming({0: rows, 9: rows}) == (
        set(),
        set(),
    ), "training has not made it so"
