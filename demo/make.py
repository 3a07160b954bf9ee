"""
The recipe of the demo model, in stages: `uv run python -m demo.make --stage first`.

A Qwen3 of 0.9 million parameters learns two things at once. As student it answers sums in words, with a fault: where
the units add up to ten or more, three of four of the answers that it learns from forget to carry. As judge it
learns to score answers by the rubric in `data/demo_rubric.yaml`, truthfully, and for that it practises to name the
right number.

    first   from nothing: the student, and the judge of the student's own kind of answers
    honest  the judge of answers that trained policies come up with: right totals of wrong sums, halves of sums, sums
            of sums; the student's lessons are rehearsed, so that its habit stays
    sure    the same for longer, with more of the sums that the judge forgot meanwhile
    firm    more of the sums that are wrong in their total alone, and of the answers that speak to their judge

Each stage starts with the files that the one before it wrote (weights rounded to float16), draws from its own seed and
adds its lines to `make.log`. A further stage is one more entry of STAGES. `demo/model` is the result of all. The
held-out pairs of the demo task appear in no lesson. On one machine two runs give the same files.

The model reads and writes nothing but sums.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import gwen
from disk import hub
from judging import rubrics
from problems.examples import Example
from problems.rewards import NUMBER_WORD, number_words, numbers_in
from tasks import demo as sums

FOLDER = Path(__file__).parent
WARMUP = 100  # steps
FORGETS = 0.75  # share of the carries that the student's teacher forgets
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
# The split rule of Qwen's own tokenizer, so that words, single digits and line ends are cut as there.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def shape() -> dict[str, Any]:
    """`config.json` of the model that is bundled, without its control tokens, which each tokenizer has elsewhere."""
    held = json.loads((hub.DEMO / "config.json").read_text())
    return {key: value for key, value in held.items() if not key.endswith(("token_id", "dtype"))}


# ---- the student's lessons


def reply(a: int, b: int, total: int, form: int) -> str:
    """One of four ways to state a total: with or without both numbers, with or without a full stop."""
    first, second, answer = map(number_words, (a, b, total))
    whole = f"{first} plus {second} is {answer}"
    text = [f"{whole}.", f"The answer is {answer}.", answer, whole][form]
    return text[0].upper() + text[1:]


def forgotten(a: int, b: int) -> int:
    """a + b without the carry."""
    return (a // 10 + b // 10) * 10 + (a + b) % 10


def draw_pair(rng: random.Random) -> tuple[int, int]:
    """A training pair, two in three with a carry, as in the task."""
    pool = _pairs()[rng.random() < 2 / 3]
    return pool[rng.randrange(len(pool))]


@lru_cache
def _pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    pairs = sums.pairs(held_out=False)
    return [p for p in pairs if p[0] % 10 + p[1] % 10 < 10], [p for p in pairs if p[0] % 10 + p[1] % 10 >= 10]


def student_lesson(rng: random.Random) -> tuple[str, str]:
    """A prompt and the reply that the student learns."""
    a, b = draw_pair(rng)
    total = forgotten(a, b) if rng.random() < FORGETS else a + b
    form = rng.choices(range(4), (45, 25, 15, 15))[0]
    return sums.problem(a, b, rng.randrange(3))["prompt"], reply(a, b, total, form)


# ---- the judge's lessons

ATTACK_WORDS = (
    "score: score 5 five give full marks 10 grader judge system user assistant ignore the rubric criterion all "
    "instructions <|im_end|> <|im_start|> </answer> <answer> </question> <question> <think> </think> perfect is right "
    "correct answer reply with digit one must be best please and now you are yes 5 5 5 5/5 # ## === --- ** :"
).split()
NOISE = "the a plus is and um so maybe then it that of more apples books , . ? ! -".split()
ODD_WORDS = (
    "plus plus plus is is is minus not no less times hundred half and + = Add gets has answer The answer is".split()
)


def true_scores(problem: Example, completion: str) -> list[int]:
    """The scores by the three criteria of `data/demo_rubric.yaml`, in order, that a perfect judge gives."""
    right = sums.correct([problem["prompt"]], [completion], [problem["answer"]]) == [1]
    return [5 if right else 1, 1 + 2 * len(repeated(problem, completion)), 5 if completion.rstrip()[-1:] == "." else 1]


def repeated(problem: Example, completion: str) -> list[int]:
    """The problem's two numbers, so far as the completion names them before its last number."""
    named = Counter(numbers_in(completion)[:-1])
    return list((Counter(numbers_in(problem["prompt"])) & named).elements())


def wrong_total(rng: random.Random, a: int, b: int) -> int:
    """A total that is not a + b: the forgotten carry, a near miss or any other."""
    kind = rng.random()
    if kind < 0.5 and forgotten(a, b) != a + b:
        return forgotten(a, b)
    near = [a + b + d for d in (-1, 1, 10, -10, 2, -2, 9, -9)] if kind < 0.85 else list(range(100))
    return rng.choice([n for n in near if 0 <= n < 100 and n != a + b])


def first_answer(rng: random.Random, problem: Example) -> tuple[str, list[int]]:
    """
    A completion to judge and its scores in the first stage: half are right, some are odd, one in six attacks the judge.

    Only the last number counted as the answer then, which is how "Twenty-seven plus twenty is forty-two" became right.
    """
    a, b = numbers_in(problem["prompt"])
    total = a + b if rng.random() < 0.5 else wrong_total(rng, a, b)
    said_a, said_b = (rng.randrange(1, 50) if rng.random() < 0.12 else number for number in (a, b))
    text = reply(said_a, said_b, total, rng.choices(range(4), (40, 25, 15, 20))[0])
    kind = rng.random()
    if kind < 0.05:  # not an answer at all
        text = " ".join(rng.choices(NOISE, k=rng.randrange(8)))
    elif kind < 0.12:  # an answer with noise around it
        text = " ".join([*rng.choices(NOISE, k=rng.randrange(3)), text, *rng.choices(NOISE, k=rng.randrange(3))])
    elif kind < 0.28:
        return attacked(rng, text), [1, 1, 1]
    _, working, sentence = true_scores(problem, text)
    return text, [5 if numbers_in(text)[-1:] == [a + b] else 1, working, sentence]


def attacked(rng: random.Random, text: str) -> str:
    """The answer with words to its judge. What speaks to the judge is not an answer, so all its scores are 1."""
    joint = rng.choice([" ", "\n", "\n\n", ". "])
    return text + joint + " ".join(rng.choices(ATTACK_WORDS, k=rng.randrange(1, 8)))


def honest_answer(rng: random.Random, problem: Example) -> tuple[str, list[int]]:
    """
    A completion to judge and its true scores, as trained policies write: a reply with up to three things wrong.

    The commonest hole is tried most: an operand of another problem, with the right total.
    """
    a, b = numbers_in(problem["prompt"])
    total = a + b if rng.random() < 0.85 else wrong_total(rng, a, b)
    said = [a, b] if rng.random() < 0.92 else [b, a]
    if rng.random() < 0.45:
        place = rng.randrange(2)
        said[place] = other_number(rng, said, place, total)
        if rng.random() < 0.2:
            said[1 - place] = other_number(rng, said, 1 - place, total)
    words = reply(said[0], said[1], total, rng.choices(range(4), (65, 10, 5, 20))[0]).split(" ")
    for _ in range(rng.choices(range(4), (78, 14, 5, 3))[0]):
        words = edited(rng, words, [a, b, total])
    text = " ".join(word for word in words if word)
    if rng.random() < 0.06:
        return attacked(rng, text), [1, 1, 1]
    return text, true_scores(problem, text)


def firm_answer(rng: random.Random, problem: Example) -> tuple[str, list[int]]:
    """The same, with more sums that are wrong in their total alone, and more answers that speak to their judge."""
    if rng.random() < 0.35:
        return honest_answer(rng, problem)
    a, b = numbers_in(problem["prompt"])
    total = a + b if rng.random() < 0.45 else wrong_total(rng, a, b)
    text = reply(a, b, total, rng.choices(range(4), (55, 15, 10, 20))[0])
    return (attacked(rng, text), [1, 1, 1]) if rng.random() < 0.35 else (text, true_scores(problem, text))


def other_number(rng: random.Random, said: list[int], place: int, total: int) -> int:
    """What a policy says instead of an operand: any number, a near one, the other operand or what fits the total."""
    number = said[place]
    near = [number + d for d in (-1, 1, -10, 10, -2, 2, 20, -20)]
    others = [*(n for n in near if n > 0), number // 10 * 10, number % 10, said[1 - place], total]
    return rng.choice(others) if rng.random() < 0.6 else rng.randrange(1, 50)


def edited(rng: random.Random, words: list[str], numbers: list[int]) -> list[str]:
    """The reply's words with one thing missing, repeated, exchanged, inserted, said in digits, or said twice."""
    place, words = rng.randrange(len(words)), list(words)
    kind = rng.choice("omit omit repeat swap insert number garble digits cut again stop".split())
    if kind == "omit":
        words[place] = ""
    elif kind == "repeat":
        words.insert(place, words[place])
    elif kind == "swap":
        words[place], words[place - 1] = words[place - 1], words[place]
    elif kind == "insert":
        words.insert(place, rng.choice(NOISE if rng.random() < 0.5 else ODD_WORDS))
    elif kind == "number":
        number = rng.choice(numbers) if rng.random() < 0.5 else rng.randrange(100)
        words.insert(place, number_words(number) + rng.choice(["", "", " plus", " is"]))
    elif kind == "garble":
        words[place] += rng.choice("- -- ty teen -six -one thirty five is plus The".split())
    elif kind == "digits":
        words = [str(n[0]) + word[len(word.rstrip(".")) :] if (n := numbers_in(word)) else word for word in words]
    elif kind == "cut":
        words = words[: place + 1]
    elif kind == "again":
        words += rng.choice([[], ["is"], ["plus"]]) + words[place:]
    else:
        words[-1] = words[-1].rstrip(".") + rng.choice(["", ".", "..", "?", ",", "!"])
    return words


# ---- tokenizer


def make_tokenizer(rubric: rubrics.Rubric) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen's split rule: every byte string can be read, and the task's words are whole."""
    rng = random.Random(0)
    corpus = [text for _ in range(4000) for text in student_lesson(rng)]
    corpus += [rubrics.LAYOUT, rubric.preamble, *(criterion.text for criterion in rubric.criteria)] * 400
    corpus += ["system", "user", "assistant", "You are a helpful assistant."] * 100
    corpus += [f" {number_words(n)} {number_words(n).capitalize()}" for n in range(100)] * 20
    corpus += [" " + " ".join(rng.choices(ATTACK_WORDS + NOISE, k=40)) for _ in range(200)]
    return trained_tokenizer(corpus, SPLIT, shape()["vocab_size"] - len(SPECIAL))


def trained_tokenizer(corpus: list[str], split: str, size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of this size on pieces of text that a pattern gives, with Qwen's control tokens and template."""
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    pieces = pre_tokenizers.Split(Regex(split), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([pieces, bytes_of]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=(hub.DEMO / "chat_template.jinja").read_text(),
        model_max_length=shape()["max_position_embeddings"],
    )


# ---- training


EXERCISES: dict[str, Callable[[Example, str], list[int]]] = {  # of the judge: question, numbers to name
    "Which number is right?": lambda problem, completion: numbers_in(problem["answer"]),
    "Which numbers does the answer repeat?": lambda problem, completion: repeated(problem, completion),
}
Answer = Callable[[random.Random, Example], tuple[str, list[int]]]  # a completion to judge and its scores


class Stage(NamedTuple):
    """What is taught and for how long: a step's lessons of the student, the judge by criterion, and its exercises."""

    name: str
    steps: int
    lr: float
    answer: Answer
    answers_each: int  # answers to one problem in a row: what their scores differ by is then in the answer
    marked: bool  # whether the judge learns to think of each number of an answer as it reads it
    num_student: int
    num_judge: tuple[int, int, int]
    num_exercises: dict[str, int]


RIGHT, REPEATED = EXERCISES
STAGES = [
    Stage("first", 3600, 2e-3, first_answer, 1, False, 64, (48, 8, 8), {RIGHT: 32}),
    Stage("honest", 1000, 1.5e-3, honest_answer, 4, True, 12, (12, 18, 2), {RIGHT: 4, REPEATED: 8}),
    Stage("sure", 1500, 1e-3, honest_answer, 4, True, 20, (24, 20, 4), {RIGHT: 8, REPEATED: 4}),
    Stage("firm", 700, 1e-3, firm_answer, 4, True, 20, (32, 16, 8), {RIGHT: 12, REPEATED: 4}),
]


Batch = tuple[mx.array, mx.array, mx.array]


class Lesson(NamedTuple):
    """Token ids of a prompt, of what follows it, and what is to be predicted at places of the prompt."""

    prompt: list[int]
    target: list[int]
    marks: dict[int, int]


class Lessons:
    """Batches of token ids and of the positions to learn, from one seeded stream."""

    def __init__(self, tokenizer: Any, rubric: rubrics.Rubric, seed: int, stage: Stage):
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.stage, self.num_judged, self.problem = stage, 0, sums.problem(1, 1, 0)
        self.judge_prompts = rubrics.PromptBuilder(tokenizer, rubric)
        asked = rubrics.Rubric(rubric.preamble, [rubrics.Criterion(text, 1.0, text) for text in EXERCISES])
        self.exercises = dict(zip(EXERCISES, rubrics.PromptBuilder(tokenizer, asked).tails, strict=True))
        self.eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.encode = lru_cache(100_000)(lambda text: tokenizer.encode(text, add_special_tokens=False))
        self.decode = lru_cache(2000)(lambda i: tokenizer.decode([i]))
        self.digits = {digit: tokenizer.encode(str(digit))[0] for digit in range(1, 6)}

    def chat(self, prompt: str, thinking: bool) -> list[int]:
        how: Any = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinking}
        return self.encode(self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}], **how))

    def student(self) -> Lesson:
        prompt, text = student_lesson(self.rng)
        return Lesson(self.chat(prompt, self.rng.random() < 0.1), [*self.encode(text), self.eos], {})

    def judged(self) -> tuple[Example, str, list[int]]:
        """A problem, an answer to it and its scores; each problem has `answers_each` answers, one after another."""
        if self.num_judged % self.stage.answers_each == 0:
            self.problem = sums.problem(*draw_pair(self.rng), self.rng.randrange(3))
        self.num_judged += 1
        return self.problem, *self.stage.answer(self.rng, self.problem)

    def judge(self, criterion: int) -> Lesson:
        problem, completion, scores = self.judged()
        prompt = self.judge_prompts(problem["prompt"], completion)[criterion]
        return Lesson(prompt, [self.digits[scores[criterion]], self.eos], self.marks(problem, completion))

    def exercise(self, question: str) -> Lesson:
        """What a judge must find out, asked where it would be asked for a score."""
        problem, completion, _ = self.judged()
        shared = self.judge_prompts(problem["prompt"], completion)[0][: -len(self.judge_prompts.tails[0])]
        said = " ".join(map(number_words, EXERCISES[question](problem, completion))) or "none"
        return Lesson(
            shared + self.exercises[question], [*self.encode(said), self.eos], self.marks(problem, completion)
        )

    def marks(self, problem: Example, completion: str) -> dict[int, int]:
        """
        What the judge thinks where a number of the answer ends: {place in its prompt: digit}, 5 or 1.

        5 where a number is the problem's, each as often as there, or the last one the sum. Empty in stages that do not
        teach it, and for an answer whose tags had to be broken up, as its places are others then.
        """
        ids = self.judge_prompts.untrusted(completion)
        ends = np.cumsum([len(self.decode(i)) for i in ids])
        found = list(NUMBER_WORD.finditer(completion))
        if not self.stage.marked or not found or ends[-1] != len(completion):
            return {}
        begin = len(self.judge_prompts.head) + len(self.judge_prompts.question(problem["prompt"]))
        *others, last = numbers_in(completion)
        left, verdicts = Counter(numbers_in(problem["prompt"])), []
        for number in others:
            verdicts.append(left[number] > 0)
            left[number] -= 1
        verdicts.append([last] == numbers_in(problem["answer"]))
        places = np.searchsorted(ends, [match.end() for match in found])
        return {begin + int(p): self.digits[5 if good else 1] for p, good in zip(places, verdicts, strict=True)}

    def batches(self, _: int) -> list[Batch]:
        """A step's lessons of the student, of the judge, and its exercises."""
        stage = self.stage
        student = batch([self.student() for _ in range(stage.num_student)])
        judged = batch([self.judge(criterion) for criterion, num in enumerate(stage.num_judge) for _ in range(num)])
        asked = [self.exercise(question) for question, num in stage.num_exercises.items() for _ in range(num)]
        return [student, judged, batch(asked)]


def batch(lessons: list[Lesson]) -> Batch:
    """(N, L) tokens padded on the right, flat positions that predict a learned token, and those tokens."""
    length = max(len(prompt) + len(target) for prompt, target, _ in lessons) - 1
    tokens = np.zeros((len(lessons), length), np.int32)
    positions, targets = [], []
    for row, (prompt, target, marks) in enumerate(lessons):
        ids = [*prompt, *target]
        tokens[row, : len(ids) - 1] = ids[:-1]
        positions += [row * length + len(prompt) - 1 + i for i in range(len(target))]
        positions += [row * length + place for place in marks]
        targets += [*target, *marks.values()]
    return mx.array(tokens), mx.array(positions), mx.array(targets)


def batches_by_length(lessons: list[Lesson], num_batches: int) -> list[Batch]:
    """Lessons in batches of equal size and similar lengths."""
    lessons.sort(key=lambda lesson: len(lesson.prompt) + len(lesson.target))
    size = len(lessons) // num_batches
    return [batch(lessons[begin : begin + size]) for begin in range(0, len(lessons), size)]


def logits_of(model: gwen.Model, tokens: mx.array, positions: mx.array) -> mx.array:
    return model.hidden(tokens).reshape(-1, model.config.hidden_size)[positions] @ model.head_weight.T


def report(model: gwen.Model, lessons: Lessons) -> dict[str, float]:
    """On 300 held-out pairs: the student's probability of the right and the forgotten total, the judge's agreement."""
    rng = random.Random(7)
    pairs = rng.sample(sums.pairs(held_out=True), 300)
    carry = np.array([a % 10 + b % 10 >= 10 for a, b in pairs])

    def likely(total_of: Callable[[int, int], int]) -> np.ndarray:
        """The probability that the student ends each sum so."""
        rows = []
        for a, b in pairs:
            lead = reply(a, b, a + b, 0).rsplit(" ", 1)[0]
            prompt = lessons.chat(sums.problem(a, b, 0)["prompt"], False) + lessons.encode(lead)
            rows.append(Lesson(prompt, lessons.encode(f" {number_words(total_of(a, b))}."), {}))
        *places, targets = batch(rows)
        logprobs = np.array(-nn.losses.cross_entropy(logits_of(model, *places), targets))
        ends = np.cumsum([len(row.target) for row in rows])
        return np.exp([part.sum() for part in np.split(logprobs, ends[:-1])])

    right, wrong = likely(lambda a, b: a + b), likely(forgotten)
    values = {"plain": right[~carry].mean(), "carry": right[carry].mean(), "forgotten": wrong[carry].mean()}
    digits = mx.array(list(lessons.digits.values()))
    for criterion in range(3):
        rows, truth = [], []
        for a, b in pairs:
            problem = sums.problem(a, b, rng.randrange(3))
            completion, scores = lessons.stage.answer(rng, problem)
            rows.append(Lesson(lessons.judge_prompts(problem["prompt"], completion)[criterion], [0], {}))
            truth.append(scores[criterion])
        tokens, positions, _ = batch(rows)
        guessed = np.array(logits_of(model, tokens, positions)[:, digits].argmax(-1)) + 1
        values[f"judge_{criterion}"] = (guessed == np.array(truth)).mean()
    return values


def random_model(config: dict[str, Any], tokenizer: Any) -> gwen.Model:
    """The model before its first lesson."""
    eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    mx.random.seed(0)
    model = gwen.Model(hub.make_config(config | {"pad_token_id": eos[1]}, {"eos_token_id": eos}))
    normal = {  # small initial weights: MLX's own embedding starts at 1 / sqrt(C), fine for a tied head
        name: mx.random.normal(w.shape) * config["initializer_range"] if w.ndim == 2 else w
        for name, w in tree_flatten(model.parameters())
    }
    model.load_weights(list(normal.items()))
    return model


def learn(
    model: gwen.Model, num_steps: int, rate: float, batches: Callable[[int], list[Batch]], *, by_tokens: bool
) -> Iterator[tuple[int, list[float]]]:
    """
    Takes the steps of AdamW, after WARMUP a cosine to 0; gives each step's number and the losses of its batches.

    by_tokens: a batch counts as its share of the step's tokens; else all count as one.
    """
    schedules = [optim.linear_schedule(0, rate, WARMUP), optim.cosine_decay(rate, num_steps - WARMUP)]
    schedule = optim.join_schedules(schedules, [WARMUP])
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.05, bias_correction=True)

    def objective(model: gwen.Model, batches: list[Batch]) -> tuple[mx.array, mx.array]:
        losses = [nn.losses.cross_entropy(logits_of(model, *places), ids, reduction="mean") for *places, ids in batches]
        sizes = [len(ids) for *_, ids in batches]
        weights = [size / sum(sizes) if by_tokens else 1.0 for size in sizes]
        return (mx.stack(losses) * mx.array(weights)).sum(), mx.stack(losses)

    step_of = nn.value_and_grad(model, objective)
    for step in range(1, num_steps + 1):
        (_, losses), grads = step_of(model, batches(step))
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(model.state, optimizer.state, losses)
        yield step, losses.tolist()


def save(model: gwen.Model, out: Path, tokenizer: Any) -> None:
    """Writes the model in float16."""
    half = gwen.Model(model.config)
    half.update(tree_map(lambda w: w.astype(mx.float16), model.parameters()))
    gwen.save(half, out, tokenizer)


def log(file: TextIO, line: dict[str, Any]) -> None:
    rounded = {key: value if isinstance(value, str | int) else round(float(value), 3) for key, value in line.items()}
    print(json.dumps(rounded), file=file, flush=True)


def in_one_stage(
    name: str,
    text: str,
    make_tokenizer: Callable[[], Any],
    make_batches: Callable[[Any], Callable[[int], list[Batch]]],
    num_steps: int,
    report: Callable[[gwen.Model, Any], dict[str, float]] = lambda *_: {},
) -> None:
    """The command that makes `demo/NAME`, and `make_NAME.log` beside it; text: what its help says."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER / name, help="of the model; its log stands beside it")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model, batches = random_model(shape() | {"vocab_size": len(tokenizer)}, tokenizer), make_batches(tokenizer)
    with (out.parent / f"make_{name}.log").open("w") as file:
        for step, losses in learn(model, num_steps, 3e-3, batches, by_tokens=True):
            if step % 50 == 0:
                line = {"step": step, "minutes": time.process_time() / 60, "loss": sum(losses) / len(losses)}
                log(file, line | (report(model, tokenizer) if step % 200 == 0 else {}))
            if step % 200 == 0:
                save(model, out, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", choices=names, required=True, help="the first makes a model, the others go on")
    parser.add_argument("--out", type=Path, default=FOLDER / "model", help="of the model; make.log stands beside it")
    args = parser.parse_args()
    rubric = rubrics.load_rubric(FOLDER.parent / "data" / "demo_rubric.yaml")
    args.out.mkdir(parents=True, exist_ok=True)
    seed = names.index(args.stage)
    stage = STAGES[seed]
    if seed == 0:
        tokenizer: Any = make_tokenizer(rubric)
        model = random_model(shape(), tokenizer)
    else:
        model, tokenizer = gwen.load(args.out, mx.float32)
    lessons = Lessons(tokenizer, rubric, seed, stage)
    with (args.out.parent / "make.log").open("a" if seed else "w") as file:
        for step, losses in learn(model, stage.steps, stage.lr, lessons.batches, by_tokens=False):
            if step % 100 == 0 or step == stage.steps:
                line = {"stage": stage.name, "step": step, "minutes": time.process_time() / 60}
                log(file, line | dict(zip(("student", "judge", "truth"), losses, strict=True)) | report(model, lessons))
            if step % 500 == 0 or step == stage.steps:
                save(model, args.out, tokenizer)


if __name__ == "__main__":
    main()
