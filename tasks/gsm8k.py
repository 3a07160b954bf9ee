"""School mathematics; the answer is a number."""

from problems.built_in import boxed_once
from problems.data import load_data, read_prompt
from problems.examples import Example, shorten_value
from problems.verifiers import is_number, marked
from tasks.task import Sides, Task

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def bundled() -> Sides:
    try:
        train, test = (
            load_data(f"openai/gsm8k:main:{split}", None, read) for split in ("train", "test")
        )
    except ValueError as error:
        raise ValueError(
            f"{error}; or give a file with columns question and answer: --data FILE.jsonl"
        ) from error
    return train, test


def read(example: Example) -> Example:
    """A record with `question` (or `prompt`) and `answer`; of "6 * 7 = 42\\n#### 42" the answer keeps the 42."""
    example = add_system_message(example, "question")
    gold = str(example.get("answer")).rpartition("####")[2].strip()
    if not is_number(gold):
        fix = "write '42' or '... #### 42', or name the column: --columns answer=COLUMN"
        raise ValueError(f"answer {shorten_value(example.get('answer'))} is not a number; {fix}")
    return example | {"answer": gold}


def add_system_message(example: Example, question: str) -> Example:
    """A checked example, whose prompt is its column `question` where it has no other, with a system message."""
    example = read_prompt(
        {"prompt": example[question]} | example if question in example else example
    )
    is_alone = example.get("system") is None and isinstance(example["prompt"], str)
    return example | {"system": SYSTEM} if is_alone else example


WEIGHTS = {"correct": 1.0, "format": 0.1}  # the form alone never pays like the answer
TASK = Task("gsm8k", {"correct": marked, "format": boxed_once}, WEIGHTS, verifier=marked)
