"""
Draws the prompts of each training step, from shuffled epochs of the data or from endless problems.

A resumed run draws exactly the prompts that it would have drawn without the interruption. The
prompts of a draw depend only on the seed, the number of the draw, and the state after the last
finished step, which is stored in the checkpoint. The state changes only in `commit`, which ends a
step. This file does not cover how problems are made (tasks/rg.py, tasks/ifeval.py).

Axes: B is the number of prompts in a draw.
"""

import copy
import random
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from config import Config
from prompts.examples import Example, hash_prompt_without_system
from tasks.task import EndlessProblems

Draw = tuple[list[Example], list[list[int]]]  # B examples, and the token ids of their prompts
PATIENCE = 1000  # the search for new prompts ends after this many used prompts in a row


class EpochPrompts:
    """
    Draws prompts from the training data, which is shuffled again in each epoch.

    To write your own curriculum, override any methods in a subclass, and set `trainer.run.prompts`
    to an instance of it before the first step. A subclass that overrides `commit` must also
    override `load_state`.

    state: everything that later draws depend on, as it was after the last finished step.
    Checkpoints store this attribute as JSON; a resumed run does not restore any other attribute.
    """

    state: dict[str, Any] = {}  # noqa: RUF012  (each object has a copy of its own)

    def __init__(self, config: Config, train: list[Example], prompt_ids: list[list[int]]):
        self.config = config
        self.train = train
        self.prompt_ids = prompt_ids
        if not isinstance(type(self).state, property):
            self.state = copy.deepcopy(self.state)

    def next_prompts(self, draw_number: int) -> Draw:
        """
        The prompts of one draw.

        draw_number: the number of the draw in the run, counted from 0.
        """
        sampling = self.config.sampling
        indices = epoch_indices(len(self.train), sampling.batch, draw_number, sampling.seed)
        examples = [self.train[index] for index in indices]
        return examples, [self.prompt_ids[index] for index in indices]

    def observe_step(self, figures: dict[str, Any]) -> None:
        """
        Receives the metrics of a finished step, before `commit`.

        figures: the metrics, named as in `metrics.jsonl`. With several machines, the machines
        measure different times, so do not let measured times decide which prompts are drawn.
        """

    def commit(self) -> None:
        """Marks the end of a step, after which the state may go into a checkpoint."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self.state = state


class EndlessPrompts(EpochPrompts):
    """
    Draws problems from an endless source, which makes each problem when it is drawn.

    Held-out problems are never drawn. No problem is drawn twice while the source still has new
    problems. When it has none, a message is printed, and the problems repeat.
    """

    def __init__(
        self,
        config: Config,
        problems: EndlessProblems,
        encode: Callable[[list[Example]], list[list[int]]],
    ):
        """encode: a function that encodes the prompts of examples as token ids."""
        super().__init__(config, [], [])
        self.problems = problems
        self.encode = encode
        self.held_out = set(map(_short_prompt_hash, problems.held_out))
        self.place = 0  # the index of the next problem in the seed's order
        self.seen = list[str]()  # the keys of all prompts that have been drawn
        self.commit()

    def next_prompts(self, draw_number: int) -> Draw:
        """The problems of the next draw. Updates `place` and `seen`, and ignores `draw_number`."""
        size = self.config.sampling.batch
        task = self.config.data.task
        examples = self._draw_unseen(size)
        if len(examples) < size:
            print(
                f"every distinct problem of {task} has been used once; problems now repeat",
                file=sys.stderr,
            )
            self.seen = list(map(_short_prompt_hash, examples))
            examples += self._draw_unseen(size - len(examples))
        if len(examples) < size:
            raise ValueError(
                f"--task {task} has fewer than {size} different problems that are not held out; "
                "use --task-config to make the problems larger, or to hold out fewer problems"
            )
        return examples, self.encode(examples)

    def _draw_unseen(self, max_examples: int) -> list[Example]:
        """
        Up to `max_examples` examples with new prompts, from the next problems in the seed's order.

        There are fewer examples if `PATIENCE` problems in a row have no new prompt.
        """
        new = list[Example]()
        excluded = self.held_out | set(self.seen)
        num_used_in_a_row = 0
        while len(new) < max_examples and num_used_in_a_row < PATIENCE:
            places = range(self.place, self.place + max_examples - len(new))
            for example in self.problems.make_examples(places, self.config.sampling.seed):
                key = _short_prompt_hash(example)
                if key in excluded:
                    num_used_in_a_row += 1
                    continue
                num_used_in_a_row = 0
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


def _short_prompt_hash(example: Example) -> str:
    return hash_prompt_without_system(example)[:16]


def epoch_indices(num_examples: int, batch_size: int, step: int, seed: int) -> list[int]:
    """
    The indices of the examples in one step; each example is used once in each epoch.

    step: the number of the step, counted from 0.

    The indices depend only on the arguments, so a resumed run continues where it stopped. A batch
    may span two epochs, but contains no example twice if num_examples >= batch_size (see
    `_epoch_order`).
    """
    assert num_examples > 0 and batch_size > 0 and step >= 0, (num_examples, batch_size, step)
    indices = []
    for place in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(place, num_examples)
        indices.append(_epoch_order(num_examples, batch_size, epoch, seed)[offset])
    return indices


@lru_cache(maxsize=8)
def _epoch_order(num_examples: int, batch_size: int, epoch: int, seed: int) -> tuple[int, ...]:
    """
    The indices of all examples in the order of one epoch.

    The examples are divided into blocks, which are the same in every epoch. A block has at most
    `block_size` = num_examples - batch_size + 1 examples. Each epoch shuffles the examples only
    within their blocks. So an example is used again at least num_examples - (block_size - 1) =
    batch_size places later, which is in the next batch at the earliest.
    """
    order = list(range(num_examples))
    random.Random(f"{seed}").shuffle(order)
    block_size = max(num_examples - batch_size + 1, 1)
    rng = random.Random(f"{seed} epoch {epoch}")
    shuffled: list[int] = []
    for start in range(0, num_examples, block_size):
        block = order[start : start + block_size]
        shuffled += rng.sample(block, len(block))
    return tuple(shuffled)
