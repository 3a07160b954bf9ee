"""
The prompts of each step, drawn from shuffled epochs or from endless problems.

A resumed run draws exactly the prompts that it would have drawn. A draw depends only on the seed,
the draw's number, and the state after the last whole step, which the checkpoint contains. The state
changes only in `commit`, which ends a step. This file does not cover how problems are made
(tasks/rg.py, tasks/ifeval.py).

Axes: B prompts of a draw.
"""

import random
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from config import Config
from prompts.examples import Example, prompt_key
from tasks.task import Problems

Draw = tuple[list[Example], list[list[int]]]  # B examples, and the token ids of their prompts
PATIENCE = 1000  # the search for a new prompt ends after so many places in a row without one


class EpochPrompts:
    """Prompts in shuffled epochs. `state`: JSON for checkpoints, the state after the last step."""

    state: dict[str, Any] = {}  # noqa: RUF012  (never changed in place)

    def __init__(self, config: Config, train: list[Example], prompt_ids: list[list[int]]):
        self.config = config
        self.train = train
        self.prompt_ids = prompt_ids

    def next_prompts(self, number: int) -> Draw:
        """The prompts of one draw. number: the draw's number in the run, from 0."""
        sampling = self.config.sampling
        indices = epoch_indices(len(self.train), sampling.batch, number, sampling.seed)
        examples = [self.train[index] for index in indices]
        return examples, [self.prompt_ids[index] for index in indices]

    def commit(self) -> None:
        """Marks the end of a whole step."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint's state."""


class EndlessPrompts(EpochPrompts):
    """
    Problems that are made when they are drawn. No problem is drawn twice, and none is held out.

    Once all problems were drawn, a printed line says so, and they are drawn again.
    """

    def __init__(
        self, config: Config, problems: Problems, render: Callable[[list[Example]], list[list[int]]]
    ):
        """render: encodes the prompts of examples."""
        super().__init__(config, [], [])
        self.problems = problems
        self.render = render
        self.held_out = set(map(_short_key, problems.held_out))
        self.place = 0  # the next place in the seed's order
        self.seen = list[str]()  # the keys of the prompts drawn so far
        self.commit()

    def next_prompts(self, number: int) -> Draw:
        """The next problems. The number has no effect; this method updates `place` and `seen`."""
        size = self.config.sampling.batch
        task = self.config.data.task
        examples = self._draw_new(size)
        if len(examples) < size:
            print(
                f"every distinct problem of {task} was used once; they repeat now", file=sys.stderr
            )
            self.seen = list(map(_short_key, examples))
            examples += self._draw_new(size - len(examples))
        if len(examples) < size:
            raise ValueError(
                f"--task {task} has no {size} different problems besides those held out; "
                "ask for larger ones, or for fewer to be held out, with --task-config"
            )
        return examples, self.render(examples)

    def _draw_new(self, num: int) -> list[Example]:
        """
        `num` examples with new prompts, made from the places that begin at `place`.

        Returns fewer examples if `PATIENCE` places in a row have no new prompt.
        """
        new = list[Example]()
        excluded = self.held_out | set(self.seen)
        num_barren = 0
        while len(new) < num and num_barren < PATIENCE:
            places = range(self.place, self.place + num - len(new))
            for example in self.problems.make(places, self.config.sampling.seed):
                key = _short_key(example)
                if key in excluded:
                    num_barren += 1
                    continue
                num_barren = 0
                new.append(example)
                self.seen.append(key)
                excluded.add(key)
            self.place = places.stop
        return new

    def commit(self) -> None:
        self.state = {"place": self.place, "seen": self.seen[:]}

    def load_state(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.seen = list(state["seen"])
        self.commit()


def _short_key(example: Example) -> str:
    return prompt_key(example)[:16]


def epoch_indices(num_examples: int, batch: int, step: int, seed: int) -> list[int]:
    """
    The indices of one step's examples. No example is used again before all others were used.

    step: from 0. The result depends only on the arguments, so a resumed run continues where it
    stopped. A batch may span two epochs, but if num_examples >= batch it contains no example twice
    (see `_epoch_order`).
    """
    assert num_examples > 0 and batch > 0 and step >= 0, (num_examples, batch, step)
    indices = []
    for place in range(step * batch, (step + 1) * batch):
        epoch, offset = divmod(place, num_examples)
        indices.append(_epoch_order(num_examples, batch, epoch, seed)[offset])
    return indices


@lru_cache(maxsize=8)
def _epoch_order(num_examples: int, batch: int, epoch: int, seed: int) -> tuple[int, ...]:
    """
    The order of the examples in one epoch.

    All epochs have the same blocks, of size = num_examples - batch + 1 examples each. An epoch
    shuffles the examples within each block. So an example is used again at least
    num_examples - (size - 1) = batch places later, which is in the next batch at the earliest.
    """
    order = list(range(num_examples))
    random.Random(f"{seed}").shuffle(order)
    size = max(num_examples - batch + 1, 1)
    rng = random.Random(f"{seed} epoch {epoch}")
    shuffled: list[int] = []
    for start in range(0, num_examples, size):
        block = order[start : start + size]
        shuffled += rng.sample(block, len(block))
    return tuple(shuffled)
