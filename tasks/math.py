"""The task `math`, with competition mathematics problems whose answers are formulas."""

from typing import NoReturn

from prompts.examples import Example, first_answer
from rewards.statements import boxed_texts
from tasks import gsm8k


def load_examples() -> NoReturn:
    """Raises ValueError, because this task has no data of its own."""
    raise ValueError(
        "--task math has no data of its own; add --data FILE.jsonl with problems that have an "
        "answer or a solution, or a hub data set such as --data HuggingFaceH4/MATH-500:test"
    )


def read_record(example: Example) -> Example:
    """
    Reads a record that has the columns `problem` (or `prompt`) and `answer`.

    If the record has no `answer`, the last \\boxed{...} in the column `solution` is the answer.
    """
    example = gsm8k.read_prompt_and_add_system(example, "problem")
    if example.get("answer") is None:
        last_boxed = boxed_texts(str(example.get("solution")))[-1:]
        example = example | {"answer": "".join(last_boxed)}
    if not first_answer(example).strip():
        raise ValueError(
            "there is no answer; add one, add a solution with \\boxed{...}, or name another column "
            "with --columns answer=COLUMN"
        )
    return example


TASK = gsm8k.TASK._replace(name="math")
