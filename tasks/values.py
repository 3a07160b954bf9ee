"""Three epistemic virtues, judged by a rubric."""

from problems.data import load_data, split_examples
from tasks.task import DATA, Sides, Task


def bundled() -> Sides:
    return split_examples(load_data(str(DATA / "values.jsonl")))


RUBRIC, WITNESS = DATA / "values_rubric.yaml", DATA / "values_witness.yaml"
TASK = Task(
    name="values", rewards={}, reward_weights={"rubric": 1.0}, rubric=RUBRIC, witness=WITNESS
)
