"""The task `gsm8k`, with school mathematics problems whose answers are numbers."""

from prompts.data import load_data, read_prompt_example
from prompts.examples import Example, shorten_value
from rewards.built_in import exactly_one_marked_answer
from rewards.math_answers import right_answer_is_number
from rewards.verifiers import marked
from tasks.task import Sides, Task

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def load_examples() -> Sides:
    """The training and test splits of the data set openai/gsm8k on the Hugging Face hub."""
    try:
        train = load_data("openai/gsm8k:main:train", None, read_record)
        test = load_data("openai/gsm8k:main:test", None, read_record)
    except ValueError as error:
        raise ValueError(
            f"{error}; to use a file instead, give --data FILE.jsonl with the columns question "
            "and answer"
        ) from error
    return train, test


def read_record(example: Example) -> Example:
    """
    Reads a record that has the columns `question` (or `prompt`) and `answer`.

    An answer such as "6 * 7 = 42\\n#### 42" is shortened to the number after `####`.
    """
    example = read_prompt_and_add_system(example, "question")
    number = str(example.get("answer")).rpartition("####")[2].strip()
    if not right_answer_is_number(number):
        raise ValueError(
            f"the answer {shorten_value(example.get('answer'))} is not a number; "
            "write '42' or '... #### 42', or name another column with --columns answer=COLUMN"
        )
    return example | {"answer": number}


def read_prompt_and_add_system(example: Example, question_column: str) -> Example:
    """
    A checked copy of the example, with `SYSTEM` as its system message.

    `SYSTEM` is not added if the example already has a system message, or if its prompt is a list of
    messages. question_column: the column to use as the prompt if there is no column `prompt`.
    """
    if question_column in example:
        example = {"prompt": example[question_column]} | example
    example = read_prompt_example(example)
    if example.get("system") is None and isinstance(example["prompt"], str):
        example = example | {"system": SYSTEM}
    return example


# the reward for the format is much smaller than the reward for the answer
WEIGHTS = {"correct": 1.0, "format": 0.1}
TASK = Task(
    "gsm8k", {"correct": marked, "format": exactly_one_marked_answer}, WEIGHTS, verifier=marked
)
