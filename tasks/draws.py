"""
Which prompts a step draws: in epochs, or problems without end.

Both are exact on resume: a draw is a function of the seed, its number and the state of the last whole step, which the
checkpoint holds. `note` ends a step; until then nothing that a draw did is in the state.

Axes: B prompts a draw.
"""

import random
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from config import Config
from problems.examples import Example, prompt_key
from tasks.task import Problems

Drawn = tuple[list[Example], list[list[int]]]  # B examples and the ids of their prompts
PATIENCE = 1000  # places that are tried in a row for a prompt that is new


class EpochPrompts:
    """Prompts shuffled and passed over in epochs. `state`: what a checkpoint keeps of the last whole step; JSON."""

    state: dict[str, Any] = {}  # noqa: RUF012  (never changed in place)

    def __init__(self, config: Config, train: list[Example], prompt_ids: list[list[int]]):
        self.config, self.train, self.prompt_ids = config, train, prompt_ids

    def next_prompts(self, number: int) -> Drawn:
        """The prompts of the run's draw of that number, counted from 0."""
        indices = epoch_indices(
            len(self.train), self.config.sampling.batch, number, self.config.sampling.seed
        )
        return [self.train[index] for index in indices], [
            self.prompt_ids[index] for index in indices
        ]

    def commit(self) -> None:
        """A step is whole."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from such a state."""


class EndlessPrompts(EpochPrompts):
    """Problems made when they are drawn, none twice or held out; once all were seen, it says so and begins again."""

    def __init__(
        self, config: Config, problems: Problems, render: Callable[[list[Example]], list[list[int]]]
    ):
        super().__init__(config, [], [])
        self.problems, self.render = problems, render
        self.held_out = {prompt_key(example)[:16] for example in problems.held_out}
        self.place, self.seen = 0, list[str]()
        self.commit()

    def next_prompts(self, number: int) -> Drawn:
        """The next problems, whatever the number: `place` and `seen` move on."""
        num, task = self.config.sampling.batch, self.config.data.task
        drawn = self._fresh(num)
        if len(drawn) < num:
            print(f"all different problems of {task} were seen; they come again", file=sys.stderr)
            self.seen = [prompt_key(example)[:16] for example in drawn]
            drawn += self._fresh(num - len(drawn))
        if len(drawn) < num:
            fix = "ask for larger ones, or for fewer to be held out, with --task-config"
            raise ValueError(
                f"--task {task} has no {num} different problems besides those held out; {fix}"
            )
        return drawn, self.render(drawn)

    def _fresh(self, num: int) -> list[Example]:
        """`num` examples from `place` on whose prompts are new; fewer where `PATIENCE` places in a row bring none."""
        new, known, barren = list[Example](), self.held_out | set(self.seen), 0
        while len(new) < num and barren < PATIENCE:
            places = range(self.place, self.place + num - len(new))
            for example in self.problems.make(places, self.config.sampling.seed):
                key = prompt_key(example)[:16]
                barren = barren + 1 if key in known else 0
                if key not in known:
                    new.append(example)
                    self.seen.append(key)
                    known.add(key)
            self.place = places.stop
        return new

    def commit(self) -> None:
        self.state = {"place": self.place, "seen": self.seen[:]}

    def load_state(self, state: dict[str, Any]) -> None:
        self.place, self.seen = state["place"], list(state["seen"])
        self.commit()


def epoch_indices(num_examples: int, batch: int, step: int, seed: int) -> list[int]:
    """
    Indices of one step's examples, from shuffled epochs: no example returns before all were seen. Steps start at 0.

    A pure function of (seed, step), so a resumed run continues where it stopped. A batch may span two epochs but has no
    example twice if num_examples >= batch (see `_epoch_order`).
    """
    assert num_examples > 0 and batch > 0 and step >= 0, (num_examples, batch, step)
    places = range(step * batch, (step + 1) * batch)
    return [
        _epoch_order(num_examples, batch, place // num_examples, seed)[place % num_examples]
        for place in places
    ]


@lru_cache(maxsize=8)
def _epoch_order(num_examples: int, batch: int, epoch: int, seed: int) -> tuple[int, ...]:
    """
    The order of one epoch.

    Examples are assigned once to blocks of size num_examples - batch + 1, and each epoch shuffles within the blocks. So
    an example returns at least num_examples - (size - 1) = batch places later: in the next batch at the earliest.
    """
    order = list(range(num_examples))
    random.Random(f"{seed}").shuffle(order)
    size, rng = max(num_examples - batch + 1, 1), random.Random(f"{seed} epoch {epoch}")
    blocks = [order[begin : begin + size] for begin in range(0, num_examples, size)]
    return tuple(index for block in blocks for index in rng.sample(block, len(block)))
