"""School mathematics. The answer is a number."""

from prompts.data import load_data, read_prompt
from prompts.examples import Example, shorten_value
from rewards.built_in import boxed_once
from rewards.math_answers import is_number
from rewards.verifiers import marked
from tasks.task import Sides, Task

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def load_examples() -> Sides:
    """The splits train and test of the hub's openai/gsm8k."""
    try:
        train = load_data("openai/gsm8k:main:train", None, read)
        test = load_data("openai/gsm8k:main:test", None, read)
    except ValueError as error:
        raise ValueError(
            f"{error}; or give a file with columns question and answer: --data FILE.jsonl"
        ) from error
    return train, test


def read(example: Example) -> Example:
    """
    Reads a record with `question` (or `prompt`) and `answer`.

    Of an answer such as "6 * 7 = 42\\n#### 42" only the 42 stays.
    """
    example = add_system_message(example, "question")
    number = str(example.get("answer")).rpartition("####")[2].strip()
    if not is_number(number):
        raise ValueError(
            f"answer {shorten_value(example.get('answer'))} is not a number; "
            "write '42' or '... #### 42', or name the column: --columns answer=COLUMN"
        )
    return example | {"answer": number}


def add_system_message(example: Example, question: str) -> Example:
    """
    A checked example with a system message, unless it has one or its prompt is a list of messages.

    question: the column to use as the prompt of rows that have no `prompt`.
    """
    if question in example:
        example = {"prompt": example[question]} | example
    example = read_prompt(example)
    if example.get("system") is None and isinstance(example["prompt"], str):
        example = example | {"system": SYSTEM}
    return example


WEIGHTS = {"correct": 1.0, "format": 0.1}  # the form alone never pays like the answer
TASK = Task("gsm8k", {"correct": marked, "format": boxed_once}, WEIGHTS, verifier=marked)
