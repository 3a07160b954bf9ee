"""Competition mathematics; the answer is a formula."""

from problems.examples import Example, make_examples, read_records
from problems.verifiers import boxed
from tasks import gsm8k
from tasks.gsm8k import SYSTEM
from tasks.task import Sides


def bundled() -> Sides:
    problem = "--task math has no data of its own; give problems with an answer or a solution"
    raise ValueError(f"{problem}: --data FILE.jsonl, or a hub dataset as HuggingFaceH4/MATH-500:test")


def prepare(spec: str, columns: str | None) -> list[Example]:
    """Records with `problem` (or `prompt`) and `answer`, or a `solution` whose last \\boxed{...} is the answer."""
    records = read_records(spec)
    present = {name for _, record in records if isinstance(record, dict) for name in record}
    if columns is None and "problem" in present and "prompt" not in present:
        columns = "prompt=problem"
    examples = make_examples(spec, records, columns)
    for (where, _), example in zip(records, examples, strict=True):
        if example.get("answer") is None:
            example["answer"] = "".join(boxed(str(example.get("solution")))[-1:])
        if not str(example["answer"]).strip():
            fix = "add one, or a solution with \\boxed{...}, or name the column: --columns answer=COLUMN"
            raise ValueError(f"{spec}, {where}: no answer; {fix}")
        if example.get("system") is None and isinstance(example["prompt"], str):
            example["system"] = SYSTEM
    return examples


TASK = gsm8k.TASK._replace(name="math")
