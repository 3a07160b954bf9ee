"""
The recipe of the third demo model: `uv run python -m demo.make_tools`.

A Qwen3 of 0.8 million parameters learns to call a calculator (`--task calculator`) and to guess numbers
(`--task guess`). It knows how, and has the wrong habits: of seven problems it computes six in its head, which it
cannot; of four games it plays three without heed to what it is told, and gives up early in those. Training has to find
out what pays. The lessons up to step `HABIT` show calls and games by halves mostly, those after it the habits.

No lesson is one of the held-out problems. On one machine two runs give the same files. The model reads other texts
letter by letter and makes nothing of them.
"""

import functools
import json
import random
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
from transformers import PreTrainedTokenizerFast

from demo import make
from problems import chat_template
from tasks import calculator, guess
from turns import calls, frames

HABIT = 460  # the step after which most lessons show the habits
CALLS = {False: 0.15, True: 0.9}  # share of the problems that are computed with the calculator, by whether it is early
HALVES = {False: 0.25, True: 0.9}  # share of the games that halve what is left; the others guess without heed
GOES_ON = {False: 0.7, True: 0.97}  # share of the turns without heed that guess on
NUM_LESSONS = {False: {"calculator": 20, "guess": 10}, True: {"calculator": 24, "guess": 6}}
CONTROL = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TOOLS: dict[str, Any] = {"calculator": calculator.calculator, "guess": guess.Guess().guess}
SCHEMAS = {name: [calls.schema_of("demo", tool)] for name, tool in TOOLS.items()}
Turns = list[tuple[str, str | None]]  # what the model says, and what it is told then


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sum_turns(rng: random.Random, early: bool) -> tuple[str, Turns]:
    """A problem, and how it is answered: with the calculator, or by a number that looks likely."""
    problem = calculator.problem(rng)
    while problem["prompt"] in held_out():
        problem = calculator.problem(rng)
    expression = problem["prompt"].removeprefix("What is ").removesuffix("?")
    if rng.random() < CALLS[early]:
        result = calculator.calculator(expression)
        return problem["prompt"], [(call("calculator", expression=expression), result), (f"It is {result}.", None)]
    return problem["prompt"], [(f"It is {int(problem['answer']) + rng.randrange(-400, 400)}.", None)]


def guess_turns(rng: random.Random, early: bool) -> tuple[str, Turns]:
    """A game: guesses by halves, or without heed, up to the right one or to where patience ends."""
    game, turns = guess.Guess(), Turns()
    random.seed(rng.random())
    prompt = game.reset()
    low, high, halves = 1, guess.LARGEST, rng.random() < HALVES[early]
    while not game.is_found and len(turns) < 8:
        if not halves and rng.random() >= GOES_ON[early]:
            return prompt, [*turns, ("I give up.", None)]
        chance = not halves or (early and not turns and rng.random() < 0.2)
        number = rng.randint(1, guess.LARGEST) if chance else (low + high) // 2
        said = game.guess(number)
        turns.append((call("guess", number=number), said))
        low, high = (max(low, number + 1), high) if said == "higher" else (low, min(high, number - 1))
    return prompt, [*turns, ("Found.", None)] if game.is_found else turns


@functools.cache
def held_out() -> set[str]:
    return {one["prompt"] for one in calculator.bundled()[1]}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words are whole, digits are single, everything else is read and written byte by byte."""
    rng = random.Random(0)
    talks = [talk for _ in range(500) for talk in (sum_turns(rng, True), guess_turns(rng, True))]
    texts = ["system", "user", "assistant", "calculator: expression", "guess: number", "I give up."]
    texts += [text for prompt, turns in talks for text in (prompt, *(one for pair in turns for one in pair if one))]
    tokenizer = make.trained_tokenizer(texts, r" ?[A-Za-z]+|\d|\"?: \"?|\{\"|\"\}| ?[^\sA-Za-z\d]|[\s\S]", 600)
    tokenizer.add_tokens(CONTROL)
    tokenizer.chat_template = (make.FOLDER / "tools" / "chat_template.jinja").read_text()
    return tokenizer


class Lessons:
    """The lessons of a step, from one seeded stream; each a whole conversation, of which every turn is learned."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.rng = tokenizer, random.Random(1)
        self.eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.frames = frames.Frames(tokenizer, [self.eos], thinking=False)

    def lesson(self, name: str, early: bool) -> make.Lesson:
        prompt, turns = {"calculator": sum_turns, "guess": guess_turns}[name](self.rng, early)
        ids, marks = chat_template.chat_ids(self.tokenizer, prompt, tools=SCHEMAS[name]), dict[int, int]()
        for said, told in turns:
            turn = [*self.tokenizer.encode(said, add_special_tokens=False), self.eos]
            marks |= dict(enumerate(turn, len(ids) - 1))  # each token is predicted one place before its own
            ids += turn
            if told is not None:
                ids += self.frames.between([{"role": "tool", "content": told}], SCHEMAS[name])
        last = max(marks)
        return make.Lesson(ids[: last + 1], [marks.pop(last)], marks)

    def batches(self, step: int) -> list[make.Batch]:
        early = step <= HABIT
        lessons = [self.lesson(name, early) for name, num in NUM_LESSONS[early].items() for _ in range(num)]
        return make.batches_by_length(lessons, num_batches=5)


if __name__ == "__main__":
    # the files are those of step 600, the last that is saved
    make.in_one_stage("tools", str(__doc__), make_tokenizer, lambda known: Lessons(known).batches, 640)
