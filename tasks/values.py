"""The task `values`, in which a judge scores three epistemic virtues with a rubric."""

from prompts.data import load_data
from prompts.held_out import split_examples
from tasks.task import DATA, Sides, Task


def load_examples() -> Sides:
    """The prompts in data/values.jsonl, split into training prompts and held-out prompts."""
    return split_examples(load_data(str(DATA / "values.jsonl")))


RUBRIC = DATA / "values_rubric.yaml"
WITNESS = DATA / "values_witness.yaml"
TASK = Task(
    name="values", rewards={}, reward_weights={"rubric": 1.0}, rubric=RUBRIC, witness=WITNESS
)
