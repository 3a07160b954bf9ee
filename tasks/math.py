"""Competition mathematics; the answer is a formula."""

from problems.examples import Example, first_answer
from problems.verifiers import boxed
from tasks import gsm8k
from tasks.task import Sides


def bundled() -> Sides:
    problem = "--task math has no data of its own; give problems with an answer or a solution"
    raise ValueError(
        f"{problem}: --data FILE.jsonl, or a hub dataset as HuggingFaceH4/MATH-500:test"
    )


def read(example: Example) -> Example:
    """A record with `problem` (or `prompt`) and `answer`, or a `solution` whose last \\boxed{...} is the answer."""
    example = gsm8k.add_system_message(example, "problem")
    if example.get("answer") is None:
        example = example | {"answer": "".join(boxed(str(example.get("solution")))[-1:])}
    if not first_answer(example).strip():
        fix = (
            "add one, or a solution with \\boxed{...}, or name the column: --columns answer=COLUMN"
        )
        raise ValueError(f"no answer; {fix}")
    return example


TASK = gsm8k.TASK._replace(name="math")
