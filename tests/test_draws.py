"""The prompts of a run: in epochs, or unlimited problems, and the same after a resume."""

import pytest
from conftest import read_log
from extras import needs
from small_run import SMALL_FLAGS, make_config
from test_procedural import run_in_process  # noqa: F401  a fixture

import train
from tasks.draws import EpochPrompts, epoch_indices

PROMPTS = [{"prompt": f"{n}?"} for n in range(40)]
IDS = [[n] for n in range(40)]


def test_prompts_are_drawn_in_epochs():
    config = make_config("--batch", "3")
    prompts = EpochPrompts(config, PROMPTS, IDS)
    assert prompts.state == {}
    for number in (0, 7, 30):
        indices = epoch_indices(40, 3, number, config.sampling.seed)
        examples, ids = prompts.next_prompts(number)
        assert examples == [PROMPTS[index] for index in indices]
        assert ids == [IDS[index] for index in indices]


@needs("reasoning_gym")
@pytest.mark.slow
@pytest.mark.usefixtures("run_in_process")
def test_a_resumed_run_draws_the_same_problems_as_an_uninterrupted_run(tmp_path):
    (tmp_path / "sizes.yaml").write_text("held_out: 4\nchain_sum:\n  level: 1\n")
    flags = ["--task", "rg:chain_sum,lcm", "--task-config", str(tmp_path / "sizes.yaml")]
    flags += [*SMALL_FLAGS, *"--eval-every 0 --save-every 1 --warmup-steps 99".split()]
    uninterrupted = tmp_path / "uninterrupted"
    resumed = tmp_path / "resumed"
    train.main([*flags, "--steps", "4", "--run-dir", str(uninterrupted)])
    train.main([*flags, "--steps", "2", "--run-dir", str(resumed)])
    train.main(["--resume", str(resumed), "--steps", "4"])

    rollouts = read_log(resumed / "rollouts.jsonl")
    assert rollouts == read_log(uninterrupted / "rollouts.jsonl")
    prompts = [record["prompt"] for record in rollouts[::4]]
    assert len(prompts) == 12
    assert len(set(prompts)) == 12
    assert {record["category"] for record in rollouts} == {"chain_sum", "lcm"}
