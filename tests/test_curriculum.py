"""Which prompts are drawn: epochs as before, by the signal that is expected, and exactly so after a resume."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import message_of, read_log, write_log
from extras import needs
from small_run import SMALL, make_config
from test_procedural import here  # noqa: F401  a fixture

import train
from problems.examples import epoch_indices
from tasks import curriculum, rg
from tasks.curriculum import PRIOR, BySignal, Epochs

PROMPTS = [{"prompt": f"{n}?"} for n in range(40)]
IDS = [[n] for n in range(40)]


def memory(*flags, num=40):
    return BySignal(make_config("--batch", "4", "--groups", "8", *flags), PROMPTS[:num], IDS[:num])


def earned(rewards):
    """Samples with these rewards, group by group."""
    return [SimpleNamespace(group=group, reward=float(one)) for group, its in enumerate(rewards) for one in its]


def play(prompts, rewards_of, steps, first=0):
    """Draws and notes; a prompt earns what `rewards_of` gives for its number. The numbers that were drawn."""
    drawn = []
    for number in range(first, first + steps):
        ids = [one[0] for one in prompts.draw(number)[1]]
        prompts.note(earned([rewards_of(n) for n in ids]))
        drawn += ids
    return drawn


def mixed(n):
    """A tenth of the prompts is worth the time: half of their completions are right."""
    return [1, 0] * 4 if n % 10 == 0 else [float(n % 2)] * 8


def test_without_memory_prompts_come_in_epochs():
    config = make_config("--batch", "3")
    prompts = curriculum.make(config, SimpleNamespace(problems=None, train=PROMPTS), IDS, None)
    assert type(prompts) is Epochs and prompts.figures() == {} and prompts.state() == {}
    for number in (0, 7, 30):
        indices = epoch_indices(40, 3, number, config.sampling.seed)
        assert prompts.draw(number) == ([PROMPTS[i] for i in indices], [IDS[i] for i in indices])


def test_prompts_whose_rewards_differ_come_more_often_than_those_solved_or_hopeless():
    drawn = play(memory(), mixed, 150)
    counts = np.bincount(drawn, minlength=40)
    useful = counts[::10].mean()
    assert (counts > 0).all(), "whatever was seen, nothing is given up"
    assert useful > 2 * counts[[n for n in range(40) if n % 10]].mean()
    assert useful > 1.5 * 150 * 4 / 40, "of what an epoch gives to each"


def test_a_draw_holds_no_prompt_twice_nor_does_a_step():
    prompts = memory("--dynamic-sampling")
    play(prompts, mixed, 40)
    for number in range(40, 60):
        step = [prompts.draw(number * 4 + more)[1] for more in range(4)]
        flat = [ids[0] for one in step for ids in one]
        assert len(set(flat)) == len(flat) == 16
        prompts.note(earned([mixed(ids[0]) for one in step for ids in one]))


def test_fewer_prompts_than_a_step_may_draw_are_refused():
    assert "--curriculum: 15 prompts" in message_of(memory, "--dynamic-sampling", num=15)
    assert "--curriculum: 3 prompts" in message_of(memory, num=3)


def test_the_expected_variance_is_that_of_the_rewards_between_the_lowest_and_highest_seen():
    prompts = memory()
    assert prompts.signal(0) == pytest.approx(np.full(40, PRIOR))
    ids = [one[0] for one in prompts.draw(0)[1]]
    prompts.note(earned([[-1, 3] * 4, [3] * 8, [-1] * 8, [1] * 8]))  # on a scale from -1 to 3
    epoch = 40 / 4
    for index, variance in zip(ids, [0.25, 0, 0, 0], strict=True):
        assert prompts.signal(0)[index] == pytest.approx((2 * PRIOR + 8 * variance) / 10)
        after = 2 * epoch  # half of the evidence is left
        assert prompts.signal(int(after))[index] == pytest.approx((2 * PRIOR + 4 * variance) / 6)
        assert prompts.signal(10**6)[index] == pytest.approx(PRIOR), "long unseen is like unseen"


def test_unreadable_rewards_say_nothing_and_a_restored_memory_draws_the_same():
    prompts, again = memory(), memory()
    ids = [one[0] for one in prompts.draw(0)[1]]
    prompts.note(earned([[1] * 8, [1] * 7 + [np.nan], [0] * 8, [np.nan] * 8]))
    assert prompts.known[ids[1]].tolist() == [7, 0, 0] and prompts.signal(1)[ids[3]] == pytest.approx(PRIOR)
    assert prompts.figures()["curriculum/seen_frac"] == 3 / 40
    again.restore(json.loads(json.dumps(prompts.state())))
    assert play(prompts, mixed, 5, 1) == play(again, mixed, 5, 1)


# ---- whole runs


def resumed_equals_whole(tmp_path, flags):
    """Whether four steps leave the same completions and weights as two, an end, and two more."""
    flags = [*SMALL, *flags, "--eval-every", "0", "--save-every", "1"]
    train.main([*flags, "--steps", "4", "--run-dir", str(tmp_path / "whole"), "--warmup-steps", "99"])
    train.main([*flags, "--steps", "2", "--run-dir", str(tmp_path / "broken"), "--warmup-steps", "99"])
    train.main(["--resume", str(tmp_path / "broken"), "--steps", "4"])
    whole, broken = (tmp_path / name for name in ("whole", "broken"))
    assert read_log(whole / "rollouts.jsonl") == read_log(broken / "rollouts.jsonl")
    assert read_log(whole / "metrics.jsonl")[-1].keys() == read_log(broken / "metrics.jsonl")[-1].keys()
    return read_log(whole / "metrics.jsonl"), read_log(whole / "rollouts.jsonl")


@pytest.mark.slow
def test_a_run_with_a_memory_is_repeated_exactly_by_one_that_stopped(tmp_path):
    rows = [{"prompt": f"Add {a} and seven.", "answer": b} for a, b in (("one", "eight"), ("two", "nine"))] * 8
    rows = [row | {"prompt": f"{row['prompt']}{'!' * n}"} for n, row in enumerate(rows)]
    write_log(tmp_path / "sums.jsonl", rows)
    data = ["--task", "demo", "--data", str(tmp_path / "sums.jsonl"), "--reward-weights", "rubric=0"]
    metrics, rollouts = resumed_equals_whole(tmp_path, [*data, "--curriculum", "--dynamic-sampling"])
    assert 0 < metrics[-1]["curriculum/seen_frac"] <= 1 and metrics[-1]["curriculum/expected"] > 0
    for step in range(1, 5):
        groups = {(one["group"], one["prompt"]) for one in rollouts if one["step"] == step}
        assert len({prompt for _, prompt in groups}) == len(groups)


@needs("reasoning_gym", "tasks")
@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_run_without_end_is_repeated_exactly_and_raises_the_level(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(curriculum, "WINDOW", 4)
    monkeypatch.setattr(rg.Problems, "score", lambda self, completions, **_: [1.0] * len(completions))
    (tmp_path / "sizes.yaml").write_text("held_out: 4\nraise_level_at: 0.9\nchain_sum:\n  level: 1\n")
    flags = ["--task", "rg:chain_sum,lcm", "--task-config", str(tmp_path / "sizes.yaml")]
    metrics, rollouts = resumed_equals_whole(tmp_path, flags)
    assert metrics[-1]["curriculum/level/chain_sum"] == 2 and metrics[-1]["curriculum/problems"] == 12
    assert "chain_sum: 100% of the last 4 problems were solved, so level 2 comes next" in capsys.readouterr().out
    prompts = [one["prompt"] for one in rollouts[::4]]
    assert len(set(prompts)) == len(prompts) == 12
    assert {one["category"] for one in rollouts} == {"chain_sum", "lcm"}
