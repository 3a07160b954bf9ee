"""Which prompts are drawn: in epochs, or problems without end, and exactly so after a resume."""

import pytest
from conftest import read_log
from extras import needs
from small_run import SMALL_FLAGS, make_config
from test_procedural import here  # noqa: F401  a fixture

import train
from tasks.draws import EpochPrompts, epoch_indices

PROMPTS = [{"prompt": f"{n}?"} for n in range(40)]
IDS = [[n] for n in range(40)]


def test_prompts_come_in_epochs():
    config = make_config("--batch", "3")
    prompts = EpochPrompts(config, PROMPTS, IDS)
    assert prompts.state == {}
    for number in (0, 7, 30):
        indices = epoch_indices(40, 3, number, config.sampling.seed)
        assert prompts.next_prompts(number) == (
            [PROMPTS[i] for i in indices],
            [IDS[i] for i in indices],
        )


@needs("reasoning_gym")
@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_run_without_end_is_repeated_exactly(tmp_path):
    (tmp_path / "sizes.yaml").write_text("held_out: 4\nchain_sum:\n  level: 1\n")
    flags = ["--task", "rg:chain_sum,lcm", "--task-config", str(tmp_path / "sizes.yaml")]
    flags = [*SMALL_FLAGS, *flags, "--eval-every", "0", "--save-every", "1"]
    train.main(
        [*flags, "--steps", "4", "--run-dir", str(tmp_path / "whole"), "--warmup-steps", "99"]
    )
    train.main(
        [*flags, "--steps", "2", "--run-dir", str(tmp_path / "broken"), "--warmup-steps", "99"]
    )
    train.main(["--resume", str(tmp_path / "broken"), "--steps", "4"])
    rollouts, same = (read_log(tmp_path / name / "rollouts.jsonl") for name in ("whole", "broken"))
    assert rollouts == same
    prompts = [one["prompt"] for one in rollouts[::4]]
    assert len(set(prompts)) == len(prompts) == 12
    assert {one["category"] for one in rollouts} == {"chain_sum", "lcm"}
