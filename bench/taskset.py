"""
Plays the same conversations with the package `verifiers` and inside Gwen, and compares them.

    uv run train.py --model demo:tools --task calculator --steps 150 --run-dir runs/calculator
    uv run --extra env python -m bench.taskset --run runs/calculator

The taskset examples/environments/sums_taskset.py and Gwen's task `calculator` have the same prompts
and the same tool. The run's model answers greedily in both, and the output shows how many
conversations have the same token ids. If a tool call cannot be read, `verifiers` ends the
conversation, but Gwen answers with an error and goes on; the shorter conversation is then equal to
the beginning of the longer one.
"""

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import numpy as np

from bench import harness
from flags import Parser, exit_on_mistakes
from machine.memory import BatchSize
from machine.output import guard_output
from prompts.examples import Example
from run import GrpoRun
from serving.harness import close_harnesses
from step.generation import generate_completions
from step.sample import Sample, new_samples
from train import Trainer

ROOT = Path(__file__).parent.parent
VERIFIERS = "verifiers==0.4.0"
SETTINGS: dict[str, Any] = {
    "model": "demo:tools",
    "max_tokens": 64,
    "max_context": 256,
    "eval_every": 0,
}
MOST_TURNS = 3


def command_of_harness(num_episodes: int) -> str:
    """Returns the command that plays the taskset in a Python with packages of its own."""
    tasksets = shlex.quote(str(ROOT / "examples" / "environments"))
    adapter = shlex.quote(str(ROOT / "serving" / "adapters" / "verifiers_harness.py"))
    return (
        f"env PYTHONPATH={tasksets} uv run --no-project --with {VERIFIERS} python {adapter} "
        f"sums_taskset agent.max_turns={MOST_TURNS} --num-train {num_episodes} --num-held-out 1"
    )


def play_greedily(trainer: Trainer, examples: list[Example], batch_size: int) -> list[Sample]:
    """Plays one greedy conversation for each example, and returns the conversations."""
    run = trainer.run
    assert isinstance(run, GrpoRun)
    player = run.player or run.toolbox
    assert player is not None
    prompts = [player.encode_prompt(example) for example in examples]
    samples, stats = generate_completions(
        run.model,
        run.tokenizer,
        new_samples(examples, prompts, 1),
        run.sampling._replace(temperature=0.0),
        key=0,
        batch_size=BatchSize(batch_size),
        toolbox=run.toolbox,
        player=run.player,
        environment_seed="bench",
        is_evaluation=True,
    )
    if stats.failures:
        print(f"{len(stats.failures)} episodes failed; the first: {stats.failures[0]}")
    return samples


def have_equal_beginnings(a: Sample, b: Sample) -> bool:
    """Whether two conversations are equal up to the end of the shorter one."""
    num_both = min(len(a.response_ids), len(b.response_ids))
    return a.prompt == b.prompt and a.response_ids[:num_both] == b.response_ids[:num_both]


def compare_and_print_inside_and_outside(run_dir: str, num_episodes: int, batch_size: int) -> None:
    """Plays the conversations in both ways, and prints how many of them are equal."""
    settings = SETTINGS | {"init_adapter": run_dir}
    with tempfile.TemporaryDirectory() as folder:
        outside = Trainer.start(
            **settings,
            env_server=command_of_harness(num_episodes),
            run_dir=f"{folder}/outside",
        )
        inside = Trainer.start(
            **settings, task="calculator", max_turns=MOST_TURNS, run_dir=f"{folder}/inside"
        )
        assert outside.run.task is not None
        examples = outside.run.task.train
        outer = play_greedily(outside, examples, batch_size)
        # the answer only matters for the reward, which is not compared
        rows = [{"prompt": example["prompt"], "answer": "0"} for example in examples]
        inner = play_greedily(inside, rows, batch_size)

    equal = []
    num_equal_beginnings = 0
    for a, b in zip(outer, inner, strict=True):
        num_equal_beginnings += have_equal_beginnings(a, b)
        if a.prompt == b.prompt and a.response_ids == b.response_ids:
            assert a.logprobs is not None and b.logprobs is not None
            equal.append(float(np.abs(a.logprobs - b.logprobs).max()))
    turns = [sample.conversation["turns"] for sample in inner if sample.conversation]
    print(f"{len(inner)} conversations, {np.mean(turns):.2f} turns on average")
    print(
        f"in {num_equal_beginnings} conversations, both versions are equal up to the end of the "
        "shorter one"
    )
    largest = f"; log-probabilities differ by at most {max(equal):.1e}" if equal else ""
    print(f"{len(equal)} equal as a whole{largest}")


@guard_output()
@exit_on_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "bench.taskset",
        "Compare conversations played by the package verifiers with the same ones played by Gwen.",
    )
    parser.add_argument("--run", required=True, help="a run of the task calculator")
    numbers: harness.Numbers = {
        "episodes": (200, 1, "number of conversations"),
        "rollout_batch_size": (8, 1, "number of conversations that are decoded together"),
    }
    args = harness.add_number_flags_and_parse(parser, argv, numbers)
    try:
        compare_and_print_inside_and_outside(args.run, args.episodes, args.rollout_batch_size)
    finally:
        close_harnesses()


if __name__ == "__main__":
    main(sys.argv[1:])
