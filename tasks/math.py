"""Competition mathematics. The answer is a formula."""

from typing import NoReturn

from prompts.examples import Example, first_answer
from rewards.statements import boxed_texts
from tasks import gsm8k


def load_examples() -> NoReturn:
    """Raises ValueError: this task has no data of its own."""
    raise ValueError(
        "--task math has no data of its own; give problems with an answer or a solution: "
        "--data FILE.jsonl, or a hub dataset as HuggingFaceH4/MATH-500:test"
    )


def read(example: Example) -> Example:
    """
    Reads a record with `problem` (or `prompt`) and `answer`.

    Without an `answer`, the last \\boxed{...} of the `solution` is the answer.
    """
    example = gsm8k.with_system_message(example, "problem")
    if example.get("answer") is None:
        last_boxed = boxed_texts(str(example.get("solution")))[-1:]
        example = example | {"answer": "".join(last_boxed)}
    if not first_answer(example).strip():
        raise ValueError(
            "no answer; add one, or a solution with \\boxed{...}, or name the column: "
            "--columns answer=COLUMN"
        )
    return example


TASK = gsm8k.TASK._replace(name="math")
