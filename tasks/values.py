"""Three epistemic virtues, judged by a rubric."""

from problems.examples import load_data, split_examples
from tasks.task import DATA, Sides, Task


def bundled() -> Sides:
    return split_examples(load_data(str(DATA / "values.jsonl")))


TASK = Task(
    name="values",
    rewards={},
    reward_weights={"rubric": 1.0},
    rubric=DATA / "values_rubric.yaml",
    witness=DATA / "values_witness.yaml",
)
