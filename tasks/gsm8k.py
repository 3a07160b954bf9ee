"""School mathematics. The answer is a number."""

from prompts.data import load_data, read_prompt
from prompts.examples import Example, shorten_value
from rewards.built_in import boxed_once
from rewards.math_answers import is_number
from rewards.verifiers import marked
from tasks.task import Sides, Task

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def load_examples() -> Sides:
    """The splits train and test of the hub data set openai/gsm8k."""
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

    An answer such as "6 * 7 = 42\\n#### 42" is reduced to its number, 42.
    """
    example = with_system_message(example, "question")
    number = str(example.get("answer")).rpartition("####")[2].strip()
    if not is_number(number):
        raise ValueError(
            f"answer {shorten_value(example.get('answer'))} is not a number; "
            "write '42' or '... #### 42', or name the column: --columns answer=COLUMN"
        )
    return example | {"answer": number}


def with_system_message(example: Example, question: str) -> Example:
    """
    The example, checked and with the system message `SYSTEM`.

    An example that has a system message, or a list of messages as its prompt, keeps its own.
    question: the column that is the prompt of a row without `prompt`.
    """
    if question in example:
        example = {"prompt": example[question]} | example
    example = read_prompt(example)
    if example.get("system") is None and isinstance(example["prompt"], str):
        example = example | {"system": SYSTEM}
    return example


WEIGHTS = {"correct": 1.0, "format": 0.1}  # the reward for form is far below that for the answer
TASK = Task("gsm8k", {"correct": marked, "format": boxed_once}, WEIGHTS, verifier=marked)
