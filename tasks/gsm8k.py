"""School mathematics; the answer is a number."""

from problems.built_in import boxed_once
from problems.examples import Example, Records, hub_records, make_examples, one_line, read_records, short
from problems.verifiers import is_number, marked
from tasks.task import Sides, Task

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def bundled() -> Sides:
    try:
        train, test = (hub_records("openai/gsm8k", "main", split) for split in ("train", "test"))
    except Exception as error:  # the hub's client raises kinds of its own
        problem = f"the data of --task gsm8k is neither cached nor to be had from the hub ({one_line(error)})"
        raise ValueError(f"{problem}; give a file with columns question and answer: --data FILE.jsonl") from error
    return examples("openai/gsm8k", train, None), examples("openai/gsm8k", test, None)


def prepare(spec: str, columns: str | None) -> list[Example]:
    return examples(spec, read_records(spec), columns)


def examples(source: str, records: Records, columns: str | None) -> list[Example]:
    """Records with `question` (or `prompt`) and `answer`; of "6 * 7 = 42\\n#### 42" the answer keeps the 42."""
    present = {name for _, record in records if isinstance(record, dict) for name in record}
    if columns is None and "question" in present and "prompt" not in present:
        columns = "prompt=question"
    examples = make_examples(source, records, columns)
    for (where, _), example in zip(records, examples, strict=True):
        gold = str(example.get("answer")).rpartition("####")[2].strip()
        if not is_number(gold):
            problem = f"{source}, {where}: answer {short(example.get('answer'))} is not a number"
            raise ValueError(f"{problem}; write '42' or '... #### 42', or name the column: --columns answer=COLUMN")
        example["answer"] = gold
        if example.get("system") is None and isinstance(example["prompt"], str):
            example["system"] = SYSTEM
    return examples


TASK = Task(
    name="gsm8k",
    rewards={"correct": marked, "format": boxed_once},
    reward_weights={"correct": 1.0, "format": 0.1},  # the form alone never pays like the answer
    verifier=marked,
)
