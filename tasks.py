"""
Tasks: prompts in, chat ids out, and rewards that a program can verify. One task per section.

A task names its training prompts, its held-out problems, its rubric and its verifier. After the tasks come the pieces
that a user brings: data files, reward functions, and the order in which prompts are passed over. No model is known
here, and no array library: a row is a dictionary, a reward is a list of floats. What is left out: reading rubrics,
which belongs to the judge. Whatever a user got wrong is a ValueError of one line that names the value and the fix.
"""

import asyncio
import csv
import difflib
import importlib.util
import inspect
import io
import json
import logging
import os
import random
import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import rubrics
from answers import boxed, extract_answer, hash_answers, parse_number, same_number
from config import Config

Example = dict[str, Any]  # {"prompt": str or chat messages, "answer": str, further columns}
Reward = Callable[..., list[float]]  # called by keyword: prompts, completions and the columns of the data
DATA = Path(__file__).parent / "data"
SPLITS = ("train", "held_out", "test", "validation")  # all but the first are held out


class Task(NamedTuple):
    name: str
    train: list[Example]
    held_out: list[Example]
    rewards: dict[str, Reward]
    reward_weights: dict[str, float]  # one for each reward, and one under "rubric" where there is a rubric
    rubric: Path | None
    metric: str  # "accuracy" where a verifier knows the right answer, else "score"
    verifier: Reward | None  # gives 1 for a right answer, whatever the rewards of the training are
    witness: Path | None = None  # a second rubric, which only evaluations ask


def load(name: str, *, data: str | None = None, held_out: str | None = None, columns: str | None = None) -> Task:
    """
    The task of that name, on its own data or on the user's.

    data: as in `load_data`, replaces both sides: what its column `split` calls held out, else a tenth, is held out.
    held_out: replaces the held-out side only; alone it leaves nothing to train on, which is what an evaluation needs.
    No prompt is on both sides: training gives way.

    Raises ValueError when the task is unknown, or its data is missing or wrong.
    """
    if name not in _TASKS:
        raise ValueError(f"--task {name!r} is unknown{nearest(name, _TASKS)}; the tasks are {', '.join(_TASKS)}")
    task, bundled, prepare = _TASKS[name]
    if data is None and held_out is None:
        if columns is not None:
            raise ValueError(f"--columns {columns} renames columns of --data, which is not given; give both")
        train, test = bundled()
        return task._replace(train=train, held_out=test)
    train, test = split_examples(prepare(data, columns)) if data is not None else ([], [])
    if held_out is not None:
        test = prepare(held_out, columns)
        if any(example.get("split") is not None for example in test):
            test = split_examples(test)[1]
        seen = {_key(example) for example in test}
        train = [example for example in train if _key(example) not in seen]
    if data is not None and not train:
        raise ValueError(f"--data {data} leaves no prompt to train on, all are held out; add prompts")
    answers, verifier = [example.get("answer") for example in test], task.verifier
    said, asked = [str(right) for right in answers], [example["prompt"] for example in test]
    if verifier is not None and not any(verifier(prompts=asked, completions=said, answer=answers)):
        task = task._replace(verifier=None, metric="score")  # a user's data without answers that it can read
    return task._replace(train=train, held_out=test)


def spread(examples: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` of them, evenly spread, so over all categories; 0 and None take all."""
    num = min(limit or len(examples), len(examples))
    return [examples[place * len(examples) // num] for place in range(num)]


def nearest(name: str, known: Any) -> str:
    """The words ", did you mean ...?" with the nearest of the known names, nothing where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def split_examples(examples: list[Example], most: int = 256) -> tuple[list[Example], list[Example]]:
    """
    (train, held out) of a user's examples, with no prompt on both sides.

    A column `split` decides where there is one: "train", or "held_out", "test" or "validation". Else a tenth of the
    different prompts is held out, at least one and `most` at the most, chosen by hash and not by place: a longer file
    keeps most of its choice, and the order of the records does not matter.

    Raises ValueError when `split` holds another word.
    """
    if any(example.get("split") is not None for example in examples):
        if wrong := [_short(example["split"]) for example in examples if example["split"] not in SPLITS]:
            raise ValueError(f"column split holds {wrong[0]}; write train or held_out in all records, or rename it")
        chosen = {_key(example) for example in examples if example["split"] != "train"}
    else:
        keys = sorted({_key(example) for example in examples})
        chosen = set(keys[: min(most, max(1, len(keys) // 10))] if len(keys) > 1 else [])
    train = [example for example in examples if _key(example) not in chosen]
    return train, [example for example in examples if _key(example) in chosen]


def _key(example: Example) -> str:
    return sha256(json.dumps(example["prompt"], sort_keys=True).encode()).hexdigest()


# ---- prompts


def chat_ids(tokenizer: Any, prompt: Any, *, system: str | None = None, thinking: bool = False) -> list[int]:
    """
    Token ids of a prompt in the tokenizer's chat template, up to where the reply begins.

    prompt: the user's words, or messages [{"role", "content"}, ...]. Templates that do not know `enable_thinking`
    ignore it. Rendered as text first: what `apply_chat_template` returns as ids differs between versions.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
    except Exception as error:  # a template may raise what it likes
        raise ValueError(f"the model's chat template refuses {_short(prompt)} ({_one_line(error)})") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def render(
    tokenizer: Any, examples: Iterable[Example], *, max_tokens: int, context: int, thinking: bool, kind: str
) -> list[list[int]]:
    """
    Token ids of the prompt of each example, with its system message.

    Raises ValueError for one that leaves no room for `max_tokens` in the model's context; `kind` says which prompts.
    """
    rendered = []
    for number, example in enumerate(examples, 1):
        ids = chat_ids(tokenizer, example["prompt"], system=example.get("system"), thinking=thinking)
        if len(ids) + max_tokens > context:
            raise ValueError(
                f"{kind} {number}, {_short(example['prompt'])}, has {len(ids)} tokens; with --max-tokens {max_tokens} "
                f"it passes the model's context of {context}; shorten it or lower --max-tokens"
            )
        rendered.append(ids)
    return rendered


def prompt_text(prompt: Any) -> str:
    """What the user asked, for the judge: the string itself, or the last user message."""
    if isinstance(prompt, str):
        return prompt
    return [message["content"] for message in prompt if message["role"] == "user"][-1]


def epoch_indices(num_examples: int, batch: int, step: int, seed: int) -> list[int]:
    """
    The examples of one step, step counted from 0: prompts are shuffled and passed over in epochs, never drawn again
    before all were seen.

    A pure function of (seed, step), so a resumed run goes on where it stopped. A batch may span two epochs, and still
    holds no example twice when num_examples >= batch (see `_epoch_order`).
    """
    assert num_examples > 0 and batch > 0 and step >= 0, (num_examples, batch, step)
    places = range(step * batch, (step + 1) * batch)
    return [_epoch_order(num_examples, batch, place // num_examples, seed)[place % num_examples] for place in places]


@lru_cache(maxsize=8)
def _epoch_order(num_examples: int, batch: int, epoch: int, seed: int) -> tuple[int, ...]:
    """
    The order of one epoch.

    Examples are dealt once into blocks of num_examples - batch + 1, and each epoch shuffles within the blocks. So an
    example returns num_examples - (that size - 1) = batch places later at the soonest, which is the next batch.
    """
    order = list(range(num_examples))
    random.Random(f"{seed}").shuffle(order)
    size = max(num_examples - batch + 1, 1)
    rng = random.Random(f"{seed} epoch {epoch}")
    blocks = [order[begin : begin + size] for begin in range(0, num_examples, size)]
    return tuple(index for block in blocks for index in rng.sample(block, len(block)))


# ---- demo: sums in words

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBER = re.compile(
    rf"\b(?:({'|'.join(_TENS[2:])})(?:-({'|'.join(_SMALL[1:10])}))?|({'|'.join(_SMALL)})|(\d+))\b", re.I
)
_NAMES = ["Ann", "Ben", "Eva", "Tom"]
_THINGS = ["apples", "books", "coins", "eggs"]


def number_words(number: int) -> str:
    """0 to 99 in English words, 42 -> "forty-two"."""
    if number < 20:
        return _SMALL[number]
    return _TENS[number // 10] + (f"-{_SMALL[number % 10]}" if number % 10 else "")


def numbers_in(text: str) -> list[int]:
    """Every number that the text names, in words (0 to 99) or digits, in order."""
    found = []
    for tens, unit, small, digits in NUMBER.findall(text):
        if digits:
            found.append(int(digits[:9]))
        elif small:
            found.append(_SMALL.index(small.lower()))
        else:
            found.append(10 * _TENS.index(tens.lower()) + (_SMALL.index(unit.lower()) if unit else 0))
    return found


def demo_problem(a: int, b: int, form: int) -> Example:
    """One of three wordings of a + b; `carry` tells whether the units add up to ten or more."""
    first, second = number_words(a), number_words(b)
    name, thing = _NAMES[(a + b) % 4], _THINGS[(a * 3 + b) % 4]
    prompt = [
        f"What is {first} plus {second}?",
        f"Add {first} and {second}.",
        f"{name} has {first} {thing} and gets {second} more. How many {thing} is that?",
    ][form]
    return {"prompt": prompt, "answer": number_words(a + b), "carry": a % 10 + b % 10 >= 10}


def demo_pairs(held_out: bool) -> list[tuple[int, int]]:
    """The ordered pairs of 1 to 49 of one side of the split; (a, b) and (b, a) are always on the same side."""
    pairs = [(a, b) for a in range(1, 50) for b in range(a, 50)]
    random.Random(0).shuffle(pairs)
    quarter = len(pairs) // 4
    chosen = pairs[:quarter] if held_out else pairs[quarter:]
    return sorted({pair for a, b in chosen for pair in ((a, b), (b, a))})


def demo_examples(held_out: bool, num: int, seed: int = 0) -> list[Example]:
    """`num` different problems, two in three with a carry, in an order that `seed` fixes."""
    problems = [demo_problem(a, b, form) for a, b in demo_pairs(held_out) for form in range(3)]
    rng = random.Random(seed)
    rng.shuffle(problems)
    carry = [p for p in problems if p["carry"]][: num * 2 // 3]
    plain = [p for p in problems if not p["carry"]][: num - len(carry)]
    chosen = carry + plain
    assert len(chosen) == num, f"{num} problems were asked for, {len(chosen)} exist"
    rng.shuffle(chosen)
    return chosen


_KINDS = (  # of a word or sign in an answer: it adds, it equates, it says nothing by itself
    dict.fromkeys("plus and with + &".split(), "+")
    | dict.fromkeys("is are equals equal makes make gives give has have = :".split(), "=")
    | dict.fromkeys("the answer sum total result of that this it so in all together more add adding".split(), "")
    | dict.fromkeys(". , ; ! ( ) * $ \" '".split(), "")
)
_SUM = re.compile(r"=?(?:(?:n\+)+n=)?n=?")  # "n", "the answer is n" or "n plus n is n"


def demo_correct(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """
    1 where the completion says the answer and nothing that is false, else 0.

    The last number that it names is the answer. The others are the problem's own, all of them and each as often as
    there, or there are none; and the words between them make a sum of them. Reading only the last number was paying
    for "Twenty-seven plus twenty is forty-two."; without the second rule "Twenty-seven is forty-two." comes next.
    A word that is neither a sum's nor the problem's ("minus", "not", "hundred") could say anything, so it is wrong.
    """
    return [
        float(_is_right(prompt_text(prompt), text, str(right)))
        for prompt, text, right in zip(prompts, completions, answer, strict=True)
    ]


def _is_right(problem: str, text: str, right: str) -> bool:
    named = numbers_in(text)
    if not named or named[-1:] != numbers_in(right):
        return False
    if len(named) > 1 and sorted(named[:-1]) != sorted(numbers_in(problem)):
        return False
    known = dict.fromkeys(_words(f"{problem} {right}"), "") | _KINDS | {"\0": "n"}
    shape = "".join(known.get(word, "?") for word in _words(text))
    return shape.count("n") == len(named) and _SUM.fullmatch(shape) is not None


def _words(text: str) -> list[str]:
    """Words and signs in lower case; each number, whatever its spelling, is the sign "\\0"."""
    return re.findall(r"\w+|[^\w\s]", NUMBER.sub("\0", text.lower()))


def _demo_bundled() -> "Sides":
    return demo_examples(held_out=False, num=2000), demo_examples(held_out=True, num=512)


DEMO = Task(
    name="demo",
    train=[],
    held_out=[],
    rewards={"correct": demo_correct},
    reward_weights={"correct": 1.0, "rubric": 0.5},
    rubric=DATA / "demo_rubric.yaml",
    metric="accuracy",
    verifier=demo_correct,
)


# ---- values: three epistemic virtues, judged by a rubric


def _values_bundled() -> "Sides":
    return split_examples(load_data(str(DATA / "values.jsonl")))


VALUES = Task(
    name="values",
    train=[],
    held_out=[],
    rewards={},
    reward_weights={"rubric": 1.0},
    rubric=DATA / "values_rubric.yaml",
    metric="score",
    verifier=None,
    witness=DATA / "values_witness.yaml",
)


# ---- gsm8k: school mathematics, the answer is a number

GSM8K_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


def _gsm8k_bundled() -> "Sides":
    try:
        train, test = (_hub_records("openai/gsm8k", "main", split) for split in ("train", "test"))
    except Exception as error:  # the hub's client raises kinds of its own
        problem = f"the data of --task gsm8k is neither cached nor to be had from the hub ({_one_line(error)})"
        raise ValueError(f"{problem}; give a file with columns question and answer: --data FILE.jsonl") from error
    return _gsm8k_examples("openai/gsm8k", train, None), _gsm8k_examples("openai/gsm8k", test, None)


def _gsm8k_prepare(spec: str, columns: str | None) -> list[Example]:
    return _gsm8k_examples(spec, read_records(spec), columns)


def _gsm8k_examples(source: str, records: "Records", columns: str | None) -> list[Example]:
    """Records with `question` (or `prompt`) and `answer`; of "6 * 7 = 42\\n#### 42" the answer keeps the 42."""
    present = {name for _, record in records if isinstance(record, dict) for name in record}
    if columns is None and "question" in present and "prompt" not in present:
        columns = "prompt=question"
    examples = make_examples(source, records, columns)
    for (where, _), example in zip(records, examples, strict=True):
        gold = str(example.get("answer")).rpartition("####")[2].strip()
        if parse_number(gold) is None:
            problem = f"{source}, {where}: answer {_short(example.get('answer'))} is not a number"
            raise ValueError(f"{problem}; write '42' or '... #### 42', or name the column: --columns answer=COLUMN")
        example["answer"] = gold
        if example.get("system") is None and isinstance(example["prompt"], str):
            example["system"] = GSM8K_SYSTEM
    return examples


def gsm8k_correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the completion's answer is the same number as the reference, else 0."""
    found = [extract_answer(text) for text in completions]
    return [float(got is not None and same_number(got, right)) for got, right in zip(found, answer, strict=True)]


def gsm8k_format(completions: Sequence[str], **_: Any) -> list[float]:
    """1 where the completion marks an answer exactly once, by \\boxed{...} or by a line "#### 42", else 0."""
    return [float(len(boxed(text)) + len(hash_answers(text)) == 1) for text in completions]


GSM8K = Task(
    name="gsm8k",
    train=[],
    held_out=[],
    rewards={"correct": gsm8k_correct, "format": gsm8k_format},
    reward_weights={"correct": 1.0, "format": 0.1},  # the form alone never pays like the answer
    rubric=None,
    metric="accuracy",
    verifier=gsm8k_correct,
)


# ---- data files

Records = list[tuple[str, Any]]  # where a record stands ("line 3"), and what stands there
_TAKEN = ("prompts", "completions", "num_tokens")  # what rewards are called with besides the columns
_reprlib = reprlib.Repr()
_reprlib.maxstring = _reprlib.maxother = 60


def _short(value: Any) -> str:
    """A value for an error message: one line, a few dozen characters, whatever the value is."""
    return _reprlib.repr(value)


def _one_line(error: BaseException) -> str:
    """Kind and message of an error, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def load_data(spec: str, columns: str | None = None) -> list[Example]:
    """
    The examples of --data: all with the same keys, `prompt` first, None where a record lacks a column.

    spec: a file (.jsonl, .json with a list, .csv, .parquet), or a hub dataset id[:config][:split] (split train).
    columns: "prompt=question,answer=solution" gives columns of the file the names on the left.
    A prompt is a string or chat messages, `system` and `category` are strings, every further column is kept as it is.
    Without a prompt the column `messages` is taken, less the assistant's reply where it ends with one; the reply is the
    `answer` of data that has no such column.

    Raises ValueError naming file, line or record, value and fix.
    """
    return make_examples(spec, read_records(spec), columns)


def read_records(spec: str) -> Records:
    """What `load_data` reads, before it is checked. Raises ValueError when it cannot be read or holds no record."""
    path = Path(spec)
    reader = _READERS.get(path.suffix.lower())
    endings = ", ".join(_READERS)
    if os.path.isdir(path):  # not path.is_dir(), which raises for a name that is too long
        raise ValueError(f"--data {spec} is a directory; name one file in it ({endings})")
    if not os.path.isfile(path):
        hub = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([^:\[\]]*))?(?::(.+))?", spec)  # config holds no slice [...]
        if hub is None or re.fullmatch(r"\.[A-Za-z]+", path.suffix):
            raise ValueError(f"--data {spec}: no such file; give {endings} or a hub dataset owner/name:config:split")
        name, config, split = hub.groups()
        if split is None and config in SPLITS:  # a single part
            config, split = None, config
        try:
            records = _hub_records(name, config or None, split or "train")
        except Exception as error:  # the hub's client raises kinds of its own
            why = f"no such file, and no hub dataset that can be loaded ({_one_line(error)})"
            raise ValueError(f"--data {spec}: {why}; check the spelling and the network") from error
    elif reader is None:
        raise ValueError(f"--data {spec} has the unknown ending {path.suffix!r}; the endings read are {endings}")
    else:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"--data {spec} cannot be read: {error.strerror}") from error
        records = list(reader(spec, content))
    if not records:
        raise ValueError(f"--data {spec} holds no records; it needs at least one with a prompt")
    return records


def _text(spec: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")  # some editors put a mark before the first character
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        byte = f"0x{content[error.start]:02x}"
        raise ValueError(f"{spec}, line {line}: byte {byte} is not UTF-8; save the file as UTF-8") from error


def _json(spec: str, where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if "\n" in text and isinstance(error, json.JSONDecodeError):
            where = f"line {error.lineno}"
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error).split(":")[0]
        raise ValueError(f"{spec}, {where}: not JSON ({reason}): {_short(text.strip())}; correct that line") from error


def _jsonl_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_text(spec, content).split("\n"), 1):  # not splitlines: U+2028 may stand in a string
        if line.strip():
            yield f"line {number}", _json(spec, f"line {number}", line)


def _json_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    if not content.strip():
        return
    records = _json(spec, "line 1", _text(spec, content))
    if not isinstance(records, list):
        raise ValueError(f"{spec} holds {_short(records)}, not a list of records; write [{{...}}, ...] or use .jsonl")
    yield from ((f"record {number}", record) for number, record in enumerate(records, 1))


def _csv_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """Rows by the header's names; an empty cell is a missing value, a row of another length an error."""
    rows = csv.reader(io.StringIO(_text(spec, content), newline=""), strict=True)
    header: list[str] | None = None
    csv.field_size_limit(2**31 - 1)  # a cell may be a document; the module's own limit is 131,072 characters
    try:
        for row in filter(None, rows):
            where = f"line {rows.line_num}"
            if header is None:
                header = row
                if wrong := [name for name in header if not name.strip() or header.count(name) > 1]:
                    raise ValueError(f"{spec}, {where}: column {_short(wrong[0])} is empty or occurs twice; rename it")
            elif len(row) != len(header):
                count = f"{len(row)} fields where the header has {len(header)}"
                raise ValueError(f"{spec}, {where}: {count}; quote fields that hold a comma")
            else:
                yield where, {name: cell or None for name, cell in zip(header, row, strict=True)}
    except csv.Error as error:
        raise ValueError(f"{spec}, line {rows.line_num}: not CSV ({_one_line(error)}); quote that field") from error


def _parquet_records(spec: str, content: bytes) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet  # here, because importing it takes half a second

    try:
        rows = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    except Exception as error:  # a damaged file raises many kinds
        raise ValueError(f"{spec} is not a readable parquet file ({_one_line(error)}); write it again") from error
    yield from ((f"record {number}", row) for number, row in enumerate(rows, 1))


_READERS = {".jsonl": _jsonl_records, ".json": _json_records, ".csv": _csv_records, ".parquet": _parquet_records}


def _hub_records(name: str, config: str | None, split: str) -> Records:
    import datasets  # here, because importing it takes seconds

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its retries would fill a screen; what comes of them is said in one line
    try:
        rows = datasets.load_dataset(name, config, split=split).to_list()
    finally:
        logger.setLevel(level)
    return [(f"record {number}", row) for number, row in enumerate(rows, 1)]


def make_examples(source: str, records: Records, columns: str | None = None) -> list[Example]:
    """Checked examples of equal keys from records; see `load_data`. Raises ValueError naming the record."""
    for where, record in records:
        if not isinstance(record, dict):
            raise ValueError(f'{source}, {where}: {_short(record)} is not an object; write {{"prompt": "..."}}')
    present = dict.fromkeys(name for _, record in records for name in record)
    renames = parse_columns(columns)
    for ours, theirs in renames.items():
        if theirs not in present:
            hint = f"{nearest(theirs, present)}; it has {_short(list(present))}"
            raise ValueError(f"--columns {ours}={theirs}: {source} has no column {theirs!r}{hint}")
    examples = []
    for where, record in records:
        kept = {k: v for k, v in record.items() if k not in renames and k not in renames.values()}
        example = kept | {ours: record[theirs] for ours, theirs in renames.items() if theirs in record}
        try:
            examples.append(_checked(example if "prompt" in example else _of_messages(example)))
        except ValueError as error:
            raise ValueError(f"{source}, {where}: {error}") from error
    names = ["prompt", *dict.fromkeys(name for example in examples for name in example if name != "prompt")]
    return [{name: example.get(name) for name in names} for example in examples]


def _of_messages(example: Example) -> Example:
    """The example with a prompt from its column `messages`, if it has one; see `load_data`."""
    messages = example.get("messages")
    if not isinstance(messages, list):
        return example
    kept = {name: value for name, value in example.items() if name != "messages"}
    last = messages[-1] if messages else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        return {"answer": last.get("content")} | kept | {"prompt": messages[:-1]}
    return kept | {"prompt": messages}


def parse_columns(columns: str | None) -> dict[str, str]:
    """What "prompt=question,answer=solution" says, ours -> theirs. ValueError names a part that is malformed."""
    renames: dict[str, str] = {}
    for part in [] if columns is None else columns.split(","):
        ours, equals, theirs = (piece.strip() for piece in part.partition("="))
        if not (ours and equals and theirs) or ours in renames:
            raise ValueError(f"--columns: {part!r} is not OURS=THEIRS, each once; write prompt=question,answer=answer")
        renames[ours] = theirs
    return renames


def _checked(example: Example) -> Example:
    """The example with its messages reduced to role and content. ValueError says what is wrong with it."""
    if taken := [name for name in _TAKEN if name in example]:
        raise ValueError(
            f"column {taken[0]!r} is an argument of rewards; rename it: --columns my_{taken[0]}={taken[0]}"
        )
    prompt = example.get("prompt")
    if prompt is None:
        others = [name for name in example if name != "prompt"]
        raise ValueError(f"no prompt, only {_short(others)}; add one or name the column: --columns prompt=COLUMN")
    if isinstance(prompt, list):
        prompt = _messages(prompt)
    elif not isinstance(prompt, str):
        raise ValueError(f"prompt {_short(prompt)} is a {type(prompt).__name__}; it must be a string or chat messages")
    else:
        check_text("prompt", prompt)
    for name in ("system", "category"):
        if example.get(name) is not None:
            check_text(name, example[name])
    if example.get("system") is not None and not isinstance(prompt, str) and prompt[0]["role"] == "system":
        raise ValueError("both a system column and a system message in prompt; keep one of them")
    return example | {"prompt": prompt}


def _messages(prompt: list[Any]) -> list[dict[str, str]]:
    """Chat messages, checked: an optional system message first, user and assistant after it, a user's last."""
    if not prompt:
        raise ValueError('prompt is an empty list; write [{"role": "user", "content": "..."}]')
    for place, message in enumerate(prompt):
        where = f"message {place + 1} of prompt"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'{where} is {_short(message)}; write {{"role": "user", "content": "..."}}')
        if message["role"] not in (("system", "user", "assistant") if place == 0 else ("user", "assistant")):
            fix = "use user and assistant, and system only for the first message"
            raise ValueError(f"{where} has role {_short(message['role'])}; {fix}")
        check_text(f"content of {where}", message["content"])
    if prompt[-1]["role"] != "user":
        raise ValueError(f"the last message of prompt is the {prompt[-1]['role']}'s; it must be the user's")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def check_text(name: str, text: Any) -> None:
    """Raises ValueError, by `name`, for what is no text that a tokenizer takes."""
    if not isinstance(text, str):
        raise ValueError(f"{name} {_short(text)} is a {type(text).__name__}; it must be a string")
    if not text.strip():
        raise ValueError(f"{name} is empty; write some text")
    if re.search("[\ud800-\udfff]", text):
        raise ValueError(f"{name} {_short(text)} holds half of a surrogate pair, which is no character; remove it")


# ---- rewards that a user brings


def load_reward(spec: str) -> tuple[str, Reward]:
    """
    (name, function) of --reward: FILE.py:function, or one of ours by name with its numbers, as in soft_overlong:256:64.

    The file is executed with its own directory on the path, which is taken off again.
    Raises ValueError when the file, the function or an import in it is missing, or it is no function.
    """
    parts = spec.split(":")
    if parts[0] in GENERIC_REWARDS:
        return parts[0], _generic_reward(spec, parts)
    file, colon, name = spec.rpartition(":")
    if not (colon and file and name.isidentifier()):
        ours = ", ".join(GENERIC_REWARDS)
        raise ValueError(f"--reward {spec!r} is not FILE.py:function{nearest(spec, GENERIC_REWARDS)}; or one of {ours}")
    if name == "rubric":
        raise ValueError(f"--reward {spec}: the name rubric belongs to the judge's reward; rename the function")
    path = Path(file).absolute()
    if not os.path.isfile(path) or path.suffix != ".py":
        raise ValueError(f"--reward {spec}: {file} is not a Python file; write FILE.py:function")
    module = _import_file(spec, path)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        hint = f"{nearest(name, functions)}; it has {', '.join(functions) or 'none'}"
        raise ValueError(f"--reward {spec}: the file has no function {name!r}{hint}")
    if not callable(fn := getattr(module, name)):
        raise ValueError(f"--reward {spec}: {name} is of type {type(fn).__name__}, not a function")
    return name, fn


def _import_file(spec: str, path: Path) -> Any:
    module_spec = importlib.util.spec_from_file_location(f"reward file {path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up there
    sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        where = _place(error, str(path))
        raise ValueError(f"--reward {spec}: importing {path.name} failed, {_one_line(error)}{where}") from error
    finally:
        if str(path.parent) in sys.path:
            sys.path.remove(str(path.parent))
    return module


def call_reward(
    name: str, fn: Reward, prompts: Sequence[Any], completions: Sequence[str], columns: dict[str, Sequence[Any]]
) -> list[float]:
    """
    The rewards of N completions by a function, sync or async, each a finite float.

    Called by keyword with copies of the lists: prompts, completions and the columns, all of them where `fn` takes
    **kwargs, else those that it names. The trainer adds the column `num_tokens`, each completion's length in tokens.

    Raises ValueError naming the reward, and the column that is missing, what `fn` raised and where, or the row and its
    value.
    """
    arguments = {"prompts": prompts, "completions": completions} | columns
    assert all(len(column) == len(completions) for column in arguments.values()), "columns of unequal length"
    chosen = {key: list(arguments[key]) for key in reward_columns(name, fn, arguments)}
    try:
        rewards: Any = fn(**chosen)
        if inspect.isawaitable(rewards):
            rewards = asyncio.run(_awaited(rewards))
    except (Exception, SystemExit) as error:
        file = getattr(sys.modules.get(fn.__module__), "__file__", None)
        raise ValueError(f"reward {name} raised {_one_line(error)}{_place(error, file)}") from error
    return _checked_rewards(name, rewards, len(completions))


def _place(error: BaseException, file: str | None) -> str:
    """The last line of `file`, which is the user's own, that an error came through; "" where there is none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", at {file}:{lines[-1]}" if lines else ""


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def reward_columns(name: str, fn: Reward, known: Any) -> list[str]:
    """The known argument names that `fn` takes. ValueError names an argument that it needs and nobody gives."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError) as error:
        raise ValueError(f"reward {name} has no signature that Python can read; wrap it in a function") from error
    for p in parameters:
        by_keyword = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name in known
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and not by_keyword:
            raise ValueError(
                f"reward {name} needs {p.name!r}, which is no column of the data; it has {', '.join(known)}"
            )
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return list(known)
    return [p.name for p in parameters if p.name in known and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def reward_arguments(examples: Sequence[Example]) -> list[str]:
    """The names of everything that a reward may ask for, with these examples."""
    return ["prompts", "completions", "num_tokens", *(name for name in examples[0] if name != "prompt")]


def _checked_rewards(name: str, rewards: Any, num_rows: int) -> list[float]:
    if hasattr(rewards, "tolist"):  # arrays of any library
        rewards = rewards.tolist()
    if not isinstance(rewards, (list, tuple)):
        raise ValueError(f"reward {name} gave {_short(rewards)}, not a list; return one number for each completion")
    if len(rewards) != num_rows:
        raise ValueError(f"reward {name} gave {len(rewards)} values for {num_rows} completions; return one for each")
    checked = []
    for row, value in enumerate(rewards):
        value = value.item() if getattr(value, "ndim", None) == 0 else value  # an array of no axes
        if value is None:
            raise ValueError(f"reward {name} gave None for row {row} of {num_rows}; return a number for each")
        number: Any = value if isinstance(value, Real) else float("nan")
        if not abs(number) < 1e15:  # so written, it refuses nan; the square of more overflows float32
            raise ValueError(f"reward {name} gave {_short(value)} for row {row}; return a finite number below 1e15")
        checked.append(float(number))
    return checked


# ---- rewards for any task; the trainer passes `num_tokens`, the length of each completion in tokens


def length_reward(target: float) -> Reward:
    """0 at `target` tokens, falling linearly with the distance to -1 at none and at twice as many, or more."""

    def length(num_tokens: Sequence[int], **_: Any) -> list[float]:
        return [-min(abs(count - target) / target, 1.0) for count in num_tokens]

    return length


def soft_overlong(max_len: float, cache: float) -> Reward:
    """
    0 up to max_len - cache tokens, from there linearly down to -1 at max_len, and -1 beyond.

    Source: DAPO, arXiv:2503.14476, equation 13.
    """

    def overlong(num_tokens: Sequence[int], **_: Any) -> list[float]:
        return [min(max((max_len - cache - count) / cache, -1.0), 0.0) for count in num_tokens]

    return overlong


GENERIC_REWARDS: dict[str, Callable[..., Reward]] = {
    "length": length_reward,
    "soft_overlong": soft_overlong,
    "boxed_once": lambda: gsm8k_format,
}


def _generic_reward(spec: str, parts: list[str]) -> Reward:
    """One of `GENERIC_REWARDS` with the numbers of its spec, which must be positive and as many as it takes."""
    needed = list(inspect.signature(GENERIC_REWARDS[parts[0]]).parameters)
    if len(parts) - 1 != len(needed) or not all(re.fullmatch("[1-9][0-9]{0,8}", part) for part in parts[1:]):
        form = ":".join([parts[0], *(f"<{name}>" for name in needed)])
        raise ValueError(f"--reward {spec!r} is not {form}, with positive whole numbers")
    return GENERIC_REWARDS[parts[0]](*map(int, parts[1:]))


# ---- the tasks: each with its own data and the reader of a user's

Sides = tuple[list[Example], list[Example]]  # train, held out
_TASKS: dict[str, tuple[Task, Callable[[], Sides], Callable[[str, str | None], list[Example]]]] = {
    "demo": (DEMO, _demo_bundled, load_data),
    "values": (VALUES, _values_bundled, load_data),
    "gsm8k": (GSM8K, _gsm8k_bundled, _gsm8k_prepare),
}


def make(config: Config, held_out: str | None = None) -> Task:
    """
    The task with the pieces that the settings override.

    held_out: data to evaluate on, whole, instead of the held-out side. ValueError names the flag that is wrong.
    """
    task = load(config.task, data=config.data or None, held_out=held_out, columns=config.columns or None)
    if config.rubric:
        task = task._replace(rubric=Path(config.rubric), witness=None)
    elif config.reward and "rubric" not in config.reward_weights:
        task = task._replace(rubric=None)  # what nobody asked for would outweigh the user's own reward
    if config.reward:
        loaded = [load_reward(spec) for spec in config.reward]
        rewards = dict(loaded)
        if len(rewards) < len(loaded):
            raise ValueError(f"--reward {' '.join(config.reward)}: two rewards have the same name")
        if taken := sorted(rewards.keys() & {"mean", "std", "zero_std_frac", "s"}):
            raise ValueError(f"--reward {taken[0]}: reward/{taken[0]} is a metric of its own; rename the function")
        rubric = {"rubric": task.reward_weights.get("rubric", 1.0)} if task.rubric else {}
        task = task._replace(rewards=rewards, reward_weights=dict.fromkeys(rewards, 1.0) | rubric)
    if config.truncated == "punish":
        if "soft_overlong" in task.rewards:
            raise ValueError("--truncated punish is the reward soft_overlong, which is given already; leave one out")
        name, reward = load_reward(f"soft_overlong:{config.max_tokens}:{max(config.max_tokens // 5, 1)}")
        task = task._replace(rewards=task.rewards | {name: reward}, reward_weights=task.reward_weights | {name: 1.0})
    known = [*task.rewards, *(["rubric"] if task.rubric else [])]
    if unknown := [name for name in config.reward_weights if name not in known]:
        raise ValueError(f"--reward-weights {unknown[0]}: the rewards are {', '.join(known)}")
    weights = {name: config.reward_weights.get(name, task.reward_weights.get(name, 1.0)) for name in known}
    # a weight of 0 switches a reward off, so that nobody pays for judging that counts for nothing
    rewards = {name: reward for name, reward in task.rewards.items() if weights[name]}
    rubric_path = task.rubric if weights.get("rubric") else None
    if not rewards and rubric_path is None:
        raise ValueError("--reward-weights leave no reward; give one of them a weight other than 0")
    # what is wrong with a reward or a rubric is said here, before a model is loaded
    for name, reward in rewards.items():
        try:
            reward_columns(name, reward, reward_arguments(task.train or task.held_out))
        except ValueError as error:
            if config.reward:
                raise
            way = "give --reward, or --task values for a rubric alone"  # the user may never have named this reward
            raise ValueError(f"{error}; {name} is a reward of --task {config.task}: {way}") from error
    # no rubric in the reward, no judge that would need a witness; one that is asked for is taken
    witness = Path(config.eval_rubric) if config.eval_rubric else task.witness if rubric_path else None
    for path in filter(None, (rubric_path, witness)):
        rubrics.load_rubric(path)
    if config.eval_every and not task.held_out:
        raise ValueError(f"--data {config.data} holds out no prompt to evaluate; add prompts or set --eval-every 0")
    return task._replace(rewards=rewards, reward_weights=weights, rubric=rubric_path, witness=witness)
