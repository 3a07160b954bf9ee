"""
Which prompts a step draws: in epochs, by what was learned of their difficulty, or problems without end.

All three are exact on resume: a draw is a function of the seed, its number and the state of the last whole step, which
the checkpoint holds. `note` ends a step; until then nothing that a draw did is in the state.

Axes: B prompts a draw, G completions a prompt.
"""

import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from config import Config
from problems.examples import Example, epoch_indices, prompt_key
from step.sample import Sample, by_group
from tasks.task import Problems, Task

Drawn = tuple[list[Example], list[list[int]]]  # B examples and the ids of their prompts
PRIOR = 1 / 6  # variance of a reward of 0 or 1 whose chance may be anything, Beta(1, 1)
PRIOR_COUNT = 2.0  # completions that this counts for
MEMORY = 2.0  # epochs after which half of the evidence is forgotten
PATIENCE = 1000  # places that are tried in a row for a prompt that is new
WINDOW = 32  # problems of a data set whose pass rate raises its level
MOST_DRAWS = 4  # batches of prompts drawn per step with --dynamic-sampling


class Epochs:
    """Prompts shuffled and passed over in epochs."""

    def __init__(self, config: Config, train: list[Example], prompt_ids: list[list[int]]):
        self.config, self.train, self.prompt_ids = config, train, prompt_ids

    def draw(self, number: int) -> Drawn:
        """The prompts of the run's draw of that number, counted from 0."""
        indices = self.choose(number)
        return [self.train[index] for index in indices], [self.prompt_ids[index] for index in indices]

    def choose(self, number: int) -> list[int]:
        return epoch_indices(len(self.train), self.config.sampling.batch, number, self.config.sampling.seed)

    def note(self, samples: Sequence[Sample]) -> None:
        """Takes in what the samples of a whole step earned."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the last whole step; JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from such a state."""

    def figures(self) -> dict[str, float]:
        """Metrics of the step that was noted last."""
        return {}


class BySignal(Epochs):
    """
    Prompts in proportion to the signal that they promise: the variance of the reward within their groups.

    Rewards are measured on a scale from the run's lowest to its highest. A prompt's variance is the mean of what its
    visits showed and of `PRIOR`; for rewards of 0 and 1 it is nearly that of a Beta posterior, but it also sees a judge
    who gives every answer 3 of 5. Evidence loses half its weight in `MEMORY` epochs, so what was not seen for long is
    drawn like what was never seen.
    """

    def __init__(self, config: Config, train: list[Example], prompt_ids: list[list[int]]):
        super().__init__(config, train, prompt_ids)
        if len(train) < config.sampling.batch * (MOST_DRAWS if config.sampling.dynamic_sampling else 1):
            raise ValueError(f"--curriculum: {len(train)} prompts are fewer than a step may draw; lower --batch")
        self.range: list[float] = []  # lowest and highest reward
        # of each prompt: completions counted, the sum of their groups' variance, both faded to its last draw; that draw
        self.known = np.zeros((len(train), 3))
        self.open: list[int] = []  # prompts of the step that is under way
        self.number, self.expected = 0, PRIOR  # its newest draw; the variance that was expected of the last step

    def fade(self, number: int) -> np.ndarray:
        """What is left of each prompt's evidence at a draw."""
        epochs = (number - self.known[:, 2]) * self.config.sampling.batch / len(self.train)
        return np.asarray(0.5 ** (epochs / MEMORY))

    def signal(self, number: int) -> np.ndarray:
        """The variance that is expected of each prompt's rewards at a draw."""
        counts, sums = self.known.T[:2] * self.fade(number)
        return np.asarray((PRIOR_COUNT * PRIOR + sums) / (PRIOR_COUNT + counts))

    def choose(self, number: int) -> list[int]:
        """
        B different prompts, none of those that the step has drawn already.

        Weighted sampling without replacement, Efraimidis and Spirakis 2006.
        """
        rng = random.Random(f"{self.config.sampling.seed} draw {number}")
        keys = np.log([rng.random() for _ in self.train]) / self.signal(number)
        keys[self.open] = -np.inf
        indices: list[int] = np.argsort(-keys, kind="stable")[: self.config.sampling.batch].tolist()
        self.open, self.number = self.open + indices, number
        return indices

    def note(self, samples: Sequence[Sample]) -> None:
        groups = [[s.reward for s in group if not math.isnan(s.reward)] for group in by_group(samples)]
        seen = [*self.range, *(reward for group in groups for reward in group)]
        self.range = [min(seen), max(seen)] if seen else []
        self.expected, fade = float(self.signal(self.number)[self.open].mean()), self.fade(self.number)
        for index, group in zip(self.open, groups, strict=False):
            if group:
                variance = np.var(group) / max(self.range[1] - self.range[0], 1e-9) ** 2
                count, total = fade[index] * self.known[index, :2] + [len(group), len(group) * variance]
                self.known[index] = count, total, self.number
        self.open = []

    def state(self) -> dict[str, Any]:
        table = [[int(index), *self.known[index].tolist()] for index in np.flatnonzero(self.known[:, 0])]
        return {"range": self.range or None, "seen": table}

    def restore(self, state: dict[str, Any]) -> None:
        self.range = list(state["range"] or [])
        for index, *known in state["seen"]:
            self.known[index] = known[:3]

    def figures(self) -> dict[str, float]:
        return {"curriculum/expected": self.expected, "curriculum/seen_frac": float((self.known[:, 0] > 0).mean())}


class Endless(Epochs):
    """
    Problems that are made when they are drawn; no prompt comes twice, nor one that is held out.

    Where no new one is found the run begins again with those that it had, and says so. A data set with a level rises by
    one when its last `WINDOW` problems were solved at the rate that the task's configuration names.
    """

    def __init__(self, config: Config, problems: Problems, render: Callable[[list[Example]], list[list[int]]]):
        super().__init__(config, [], [])
        self.problems, self.render = problems, render
        self.held_out = {prompt_key(example)[:16] for example in problems.held_out}
        self.place, self.seen = 0, list[str]()
        self.levels = dict(problems.mix.levels)
        self.recent: dict[str, list[float]] = {name: [] for name in self.levels}  # pass rates
        self.note([])

    def draw(self, number: int) -> Drawn:
        num, task = self.config.sampling.batch, self.config.data.task
        drawn = self._fresh(num)
        if len(drawn) < num:
            print(f"all different problems of {task} were seen; they come again", file=sys.stderr)
            self.seen = [prompt_key(example)[:16] for example in drawn]
            drawn += self._fresh(num - len(drawn))
        if len(drawn) < num:
            raise ValueError(
                f"--task {task} has no {num} different problems besides those held out; "
                "ask for larger ones, or for fewer to be held out, with --task-config"
            )
        return drawn, self.render(drawn)

    def _fresh(self, num: int) -> list[Example]:
        """`num` examples from `place` on whose prompts are new; fewer where `PATIENCE` places in a row bring none."""
        new, known, barren = list[Example](), self.held_out | set(self.seen), 0
        while len(new) < num and barren < PATIENCE:
            places = range(self.place, self.place + num - len(new))
            for example in self.problems.make(places, self.config.sampling.seed, self.levels):
                key = prompt_key(example)[:16]
                barren = barren + 1 if key in known else 0
                if key not in known:
                    new.append(example)
                    self.seen.append(key)
                    known.add(key)
            self.place = places.stop
        return new

    def note(self, samples: Sequence[Sample]) -> None:
        for group in by_group(samples) if self.levels else []:
            name, level = group[0].example["category"], group[0].example["level"]
            if level is not None and level == self.levels[name]:  # else of one that is over by now
                self._count(name, float(np.mean([sample.parts["correct"] >= 1 for sample in group])))
        levels, recent = dict(self.levels), dict(self.recent)
        self.noted = {"place": self.place, "seen": self.seen[:], "levels": levels, "recent": recent}

    def _count(self, name: str, rate: float) -> None:
        """Takes in the pass rate of one problem."""
        bound, top = self.problems.mix.raise_level_at, self.problems.num_levels[name] - 1
        self.recent[name] = [*self.recent[name], rate][-WINDOW:]
        mean = sum(self.recent[name]) / WINDOW
        if bound is not None and len(self.recent[name]) == WINDOW and mean >= bound and self.levels[name] < top:
            self.levels[name], self.recent[name] = self.levels[name] + 1, []
            solved = f"{mean:.0%} of the last {WINDOW} problems were solved"
            print(f"{name}: {solved}, so level {self.levels[name]} comes next")

    def state(self) -> dict[str, Any]:
        return self.noted

    def restore(self, state: dict[str, Any]) -> None:
        self.place, self.seen = state["place"], list(state["seen"])
        self.levels, self.recent = dict(state["levels"]), dict(state["recent"])
        self.note([])

    def figures(self) -> dict[str, float]:
        levels = {f"curriculum/level/{name}": float(level) for name, level in self.levels.items()}
        return {"curriculum/problems": float(self.place)} | levels


def make(
    config: Config, task: Task, prompt_ids: list[list[int]], render: Callable[[list[Example]], list[list[int]]]
) -> Epochs:
    """What draws the prompts of a run. render: ids of the prompts of examples that `prompt_ids` does not have."""
    if task.problems is not None:
        return Endless(config, task.problems, render)
    return (BySignal if config.sampling.curriculum else Epochs)(config, task.train, prompt_ids)
