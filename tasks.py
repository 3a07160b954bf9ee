"""
Tasks: prompts in, chat ids out, and rewards that a program can verify. One task per section.

A task names its training prompts, its held-out problems, its rubric and its verifier, and what its prompts look like.
`make` puts in their place what a user brings: data, reward functions, a rubric. No model is known here. Whatever a
user got wrong is a ValueError of one line that names the value and the fix. Left out: reading data
(problems/examples.py) and reward functions (problems/rewards.py).
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import Config
from flags import flag_of
from judging import rubrics
from problems import chat_template, procedural
from problems.examples import (
    Example,
    Records,
    hub_records,
    load_data,
    make_examples,
    nearest,
    one_line,
    prompt_key,
    prompt_text,
    read_records,
    short,
    split_examples,
)
from problems.rewards import (
    NUMBER_WORD,
    Calling,
    Reward,
    boxed,
    boxed_once,
    load_reward,
    math_correct,
    number_words,
    numbers_in,
    read_number,
    reward_arguments,
    reward_columns,
)

Sides = tuple[list[Example], list[Example]]  # train, held out
DATA = Path(__file__).parent / "data"
REWARD_TIMEOUT = 60.0  # seconds for a row in --reward-workers; beyond it the row gets the call's lowest reward


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
    problems: procedural.Problems | None = None  # without end, in place of `train`


def load(name: str, *, data: str | None = None, held_out: str | None = None, columns: str | None = None) -> Task:
    """
    The task of that name, on its own data or on the user's.

    data: as in `load_data`, replaces both sides: what its column `split` calls held out, else a tenth, is held out.
    held_out: replaces the held-out side only; alone it leaves nothing to train on, which is what an evaluation needs.
    No prompt is on both sides: training gives way.

    Raises ValueError when the task is unknown, or its data is missing or wrong.
    """
    if name not in _TASKS:
        known = f"the tasks are {', '.join(_TASKS)} and rg:NAME"
        raise ValueError(f"--task {name!r} is unknown{nearest(name, _TASKS)}; {known}")
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
        seen = {prompt_key(example) for example in test}
        train = [example for example in train if prompt_key(example) not in seen]
    if data is not None and not train:
        raise ValueError(f"--data {data} leaves no prompt to train on, all are held out; add prompts")
    answers, verifier = [example.get("answer") for example in test], task.verifier
    said, asked = [str(right) for right in answers], [example["prompt"] for example in test]
    if verifier is not None and not any(verifier(prompts=asked, completions=said, answer=answers)):
        task = task._replace(verifier=None, metric="score")  # a user's data without answers that it can read
    return task._replace(train=train, held_out=test)


def make(config: Config, held_out: str | None = None) -> Task:
    """
    The task that a run's settings name, with what they put in place of its own.

    held_out: data to evaluate on, whole, instead of the held-out side.

    Raises ValueError, naming the flag, for what is wrong with data, rewards or rubrics: before a model is loaded.
    """
    data = config.data
    if data.task.startswith("rg:"):
        task = _procedural(config, held_out)
    elif data.task_config:
        raise ValueError(f"--task-config {data.task_config} is for --task rg:NAME, not for --task {data.task}")
    else:
        task = load(data.task, data=data.path or None, held_out=held_out, columns=data.columns or None)
    if config.data.rubric:
        task = task._replace(rubric=Path(config.data.rubric), witness=None)
    elif config.data.reward and "rubric" not in config.data.reward_weights:
        task = task._replace(rubric=None)  # what nobody asked for would outweigh the user's own reward
    if config.data.reward:
        task = _with_own_rewards(task, config)
    if config.objective.truncated == "punish":
        task = _with_punishment(task, config.sampling.max_tokens)
    if config.objective.loss_type == "distill":
        task = _looked_at(task, config)
    task = _weighted(task, config.data.reward_weights, taught=bool(config.objective.teacher))
    if not task.rubric:
        task = task._replace(witness=None)  # no judge in the reward that would need one
    if config.evaluation.rubric:
        task = task._replace(witness=Path(config.evaluation.rubric))
    _check_arguments(task, own=bool(config.data.reward))
    for path in filter(None, (task.rubric, task.witness)):
        rubrics.load_rubric(path)
    if config.evaluation.every and not task.held_out:
        raise ValueError(f"--data {data.path} holds out no prompt to evaluate; add prompts or set --eval-every 0")
    return task


def _with_own_rewards(task: Task, config: Config) -> Task:
    """The task with the rewards of --reward, each of weight 1, instead of its own; a rubric keeps its weight."""
    data = config.data
    calling = Calling(data.reward_format == "messages", data.reward_workers, REWARD_TIMEOUT)
    loaded = [load_reward(spec, calling) for spec in data.reward]
    own = dict(loaded)
    if len(own) < len(loaded):
        raise ValueError(f"--reward {' '.join(data.reward)}: two rewards have the same name")
    if taken := sorted(own.keys() & {"mean", "std", "zero_std_frac", "s", "none"}):
        raise ValueError(f"--reward {taken[0]}: reward/{taken[0]} is a metric of its own; rename the function")
    rubric = {"rubric": task.reward_weights.get("rubric", 1.0)} if task.rubric else {}
    return task._replace(rewards=own, reward_weights=dict.fromkeys(own, 1.0) | rubric)


def _looked_at(task: Task, config: Config) -> Task:
    """The task for a loss without rewards: no judge that nobody named, and no reward of its own that lacks a column."""
    if not config.data.rubric:
        task = task._replace(rubric=None)
    if config.data.reward:
        return task
    known = reward_arguments(task.train or task.held_out)
    kept = {name: reward for name, reward in task.rewards.items() if _is_served(name, reward, known)}
    return task._replace(rewards=kept)


def _is_served(name: str, reward: Reward, known: list[str]) -> bool:
    """Whether the data has the columns that a reward needs."""
    try:
        reward_columns(name, reward, known)
    except ValueError:
        return False
    return True


def _with_punishment(task: Task, max_tokens: int) -> Task:
    """The task with the reward of --truncated punish, which falls over the last fifth of `max_tokens`."""
    if "soft_overlong" in task.rewards:
        raise ValueError("--truncated punish is the reward soft_overlong, which is given already; leave one out")
    name, reward = load_reward(f"soft_overlong:{max_tokens}:{max(max_tokens // 5, 1)}")
    return task._replace(rewards=task.rewards | {name: reward}, reward_weights=task.reward_weights | {name: 1.0})


def _weighted(task: Task, given: dict[str, float], taught: bool) -> Task:
    """
    The task with the weights of --reward-weights. What weighs 0 is left out: nobody pays for judging without use.

    taught: a teacher says enough, so no reward may be left.
    """
    known = [*task.rewards, *(["rubric"] if task.rubric else [])]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"--reward-weights {unknown[0]}: the rewards are {', '.join(known)}")
    weights = {name: given.get(name, task.reward_weights.get(name, 1.0)) for name in known}
    counted = {name: reward for name, reward in task.rewards.items() if weights[name]}
    rubric = task.rubric if weights.get("rubric") else None
    if not counted and rubric is None and not taught:
        raise ValueError("--reward-weights leave no reward; give one of them a weight other than 0")
    return task._replace(rewards=counted, reward_weights=weights, rubric=rubric)


def _check_arguments(task: Task, own: bool) -> None:
    """ValueError for a reward that needs a column which the data lacks; `own`: the user named the rewards."""
    for name, reward in task.rewards.items():
        try:
            reward_columns(name, reward, reward_arguments(task.train or task.held_out))
        except ValueError as error:
            if own:
                raise
            way = "give --reward, or --task values for a rubric alone"  # the user may never have named this reward
            raise ValueError(f"{error}; {name} is a reward of --task {task.name}: {way}") from error


# ---- prompts


def refuse_useless_rewards(config: Config, task: Task) -> None:
    """Raises ValueError where rewards have nothing to be compared with, or where none is there to choose groups by."""
    counted = [name for name, weight in task.reward_weights.items() if weight]
    for name in ("dynamic_sampling", "curriculum"):
        if getattr(config.sampling, name) and not counted:
            raise ValueError(
                f"{flag_of(name)} goes by rewards, and none has a weight; leave it out or set --reward-weights"
            )
    if config.sampling.groups == 1 and config.objective.loss_type != "distill" and counted:
        weights = ",".join(f"{name}=0" for name in counted)
        raise ValueError(
            f"--groups 1 leaves the reward {counted[0]} nothing to be compared with; set --groups 2 or more, or "
            f"--reward-weights {weights}"
        )


def chat_ids(tokenizer: Any, prompt: Any, *, system: str | None = None, thinking: bool = False) -> list[int]:
    """
    Token ids of a prompt in the tokenizer's chat template, up to where the reply begins.

    prompt: the user's words, or messages [{"role", "content"}, ...].
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    marked = chat_template.as_text(tokenizer, messages)
    return chat_template.encode(tokenizer, chat_template.render(tokenizer, marked, thinking))


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
                f"{kind} {number}, {short(example['prompt'])}, has {len(ids)} tokens; with --max-tokens {max_tokens} "
                f"it passes the model's context of {context}; shorten it or lower --max-tokens"
            )
        rendered.append(ids)
    return rendered


# ---- demo: sums in words

_NAMES = ["Ann", "Ben", "Eva", "Tom"]
_THINGS = ["apples", "books", "coins", "eggs"]


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


def demo_examples(held_out: bool, num: int) -> list[Example]:
    """`num` different problems, two in three with a carry, always the same."""
    problems = [demo_problem(a, b, form) for a, b in demo_pairs(held_out) for form in range(3)]
    rng = random.Random(0)
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
    return re.findall(r"\w+|[^\w\s]", NUMBER_WORD.sub("\0", text.lower()))


def _demo_bundled() -> Sides:
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


def _values_bundled() -> Sides:
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


def _gsm8k_bundled() -> Sides:
    try:
        train, test = (hub_records("openai/gsm8k", "main", split) for split in ("train", "test"))
    except Exception as error:  # the hub's client raises kinds of its own
        problem = f"the data of --task gsm8k is neither cached nor to be had from the hub ({one_line(error)})"
        raise ValueError(f"{problem}; give a file with columns question and answer: --data FILE.jsonl") from error
    return _gsm8k_examples("openai/gsm8k", train, None), _gsm8k_examples("openai/gsm8k", test, None)


def _gsm8k_prepare(spec: str, columns: str | None) -> list[Example]:
    return _gsm8k_examples(spec, read_records(spec), columns)


def _gsm8k_examples(source: str, records: Records, columns: str | None) -> list[Example]:
    """Records with `question` (or `prompt`) and `answer`; of "6 * 7 = 42\\n#### 42" the answer keeps the 42."""
    present = {name for _, record in records if isinstance(record, dict) for name in record}
    if columns is None and "question" in present and "prompt" not in present:
        columns = "prompt=question"
    examples = make_examples(source, records, columns)
    for (where, _), example in zip(records, examples, strict=True):
        gold = str(example.get("answer")).rpartition("####")[2].strip()
        if read_number(gold) is None:
            problem = f"{source}, {where}: answer {short(example.get('answer'))} is not a number"
            raise ValueError(f"{problem}; write '42' or '... #### 42', or name the column: --columns answer=COLUMN")
        example["answer"] = gold
        if example.get("system") is None and isinstance(example["prompt"], str):
            example["system"] = GSM8K_SYSTEM
    return examples


GSM8K = Task(
    name="gsm8k",
    train=[],
    held_out=[],
    rewards={"correct": math_correct, "format": boxed_once},
    reward_weights={"correct": 1.0, "format": 0.1},  # the form alone never pays like the answer
    rubric=None,
    metric="accuracy",
    verifier=math_correct,
)


# ---- math: competition mathematics, the answer is a formula


def _math_bundled() -> Sides:
    problem = "--task math has no data of its own; give problems with an answer or a solution"
    raise ValueError(f"{problem}: --data FILE.jsonl, or a hub dataset as HuggingFaceH4/MATH-500:test")


def _math_prepare(spec: str, columns: str | None) -> list[Example]:
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
            example["system"] = GSM8K_SYSTEM
    return examples


MATH = GSM8K._replace(name="math")


# ---- rg: problems without end


def _procedural(config: Config, held_out: str | None) -> Task:
    """The task rg:NAME. ValueError where it is asked for together with data, or with what needs prompts to return."""
    name = config.data.task
    if data := config.data.path or held_out:
        raise ValueError(f"--data {data} and --task {name}, which makes its own problems; leave one of them out")
    if config.sampling.curriculum:
        raise ValueError(f"--curriculum remembers prompts, and none of --task {name} comes twice; leave it out")
    mix = procedural.parse_mix(name, config.data.task_config or None)
    if mix.raise_level_at is not None and config.data.reward:
        sizes = config.data.task_config
        raise ValueError(f"--reward replaces the scores that raise_level_at in {sizes} needs; drop one")
    problems = procedural.Problems(mix)
    return Task(
        name=name,
        train=[],
        held_out=problems.held_out,
        rewards={"correct": nothing_beside(problems.score), "format": procedural.answered_once},
        reward_weights={"correct": 1.0, "format": 0.1},  # the form alone never pays like the answer
        rubric=None,
        metric="accuracy",
        verifier=problems.solved,
        problems=problems,
    )


def nothing_beside(score: Reward) -> Reward:
    """
    `score` without what it pays for a right answer inside a longer one: reasoning-gym gives "-12" and "not 12" 2/3 of
    the reward of "12", by their lengths.
    """

    def correct(completions: Sequence[str], answer: Sequence[Any], **columns: Any) -> list[float]:
        scores = score(completions=completions, answer=answer, **columns)
        said = [procedural.extract(text) or "" for text in completions]
        rows = zip(scores, said, answer, strict=True)
        return [0.0 if value < 1 and right and str(right) in text else value for value, text, right in rows]

    return correct


# ---- the tasks: each with its own data and the reader of a user's

_TASKS: dict[str, tuple[Task, Callable[[], Sides], Callable[[str, str | None], list[Example]]]] = {
    "demo": (DEMO, _demo_bundled, load_data),
    "values": (VALUES, _values_bundled, load_data),
    "gsm8k": (GSM8K, _gsm8k_bundled, _gsm8k_prepare),
    "math": (MATH, _math_bundled, _math_prepare),
}
