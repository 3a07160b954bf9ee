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
from tasks import rg
from tasks.task import Problems, Task

Drawn = tuple[list[Example], list[list[int]]]  # B examples and the ids of their prompts
PRIOR = 1 / 6  # variance of a reward of 0 or 1 whose chance may be anything, Beta(1, 1)
PRIOR_COUNT = 2.0  # completions that this counts for
VISITS = 2  # in a row that a prompt must be solved whole before it rests
REST = 2.0  # epochs that it rests; also after how many half of the evidence is forgotten
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
    who gives every answer 3 of 5. Evidence loses half its weight in `REST` epochs, so what was not seen for long is
    drawn like what was never seen. A prompt solved whole in its last `VISITS` visits rests for `REST` epochs.
    """

    def __init__(self, config: Config, train: list[Example], prompt_ids: list[list[int]]):
        super().__init__(config, train, prompt_ids)
        if len(train) < config.sampling.batch * (MOST_DRAWS if config.sampling.dynamic_sampling else 1):
            raise ValueError(f"--curriculum: {len(train)} prompts are fewer than a step may draw; lower --batch")
        self.low, self.high = math.inf, -math.inf
        num = len(train)
        # completions counted and the sum of their groups' variance, both faded to the draw they were seen at last
        self.counts, self.spreads, self.seen_at = np.zeros(num), np.zeros(num), np.full(num, -1)
        self.solved = np.zeros(num, int)  # visits in a row that were solved whole
        self.open: list[tuple[int, list[int]]] = []  # draws of the step that is under way
        self.noted: dict[str, float] = {}

    def fade(self, number: int) -> np.ndarray:
        """What is left of each prompt's evidence at a draw."""
        epochs = (number - self.seen_at) * self.config.sampling.batch / len(self.train)
        return np.where(self.seen_at < 0, 0.0, 0.5 ** (epochs / REST))

    def signal(self, number: int) -> np.ndarray:
        """The variance that is expected of each prompt's rewards at a draw."""
        fade = self.fade(number)
        return (PRIOR_COUNT * PRIOR + fade * self.spreads) / (PRIOR_COUNT + fade * self.counts)

    def resting(self, number: int) -> np.ndarray:
        return (self.solved >= VISITS) & (self.fade(number) > 0.5)

    def choose(self, number: int) -> list[int]:
        """
        B different prompts, none of those that the step has drawn already.

        Weighted sampling without replacement, Efraimidis and Spirakis 2006. Those at rest come last, the longest first.
        """
        rng = random.Random(f"{self.config.sampling.seed} draw {number}")
        chance = np.array([rng.random() for _ in self.train])
        keys = np.log(chance) / self.signal(number)
        resting = self.resting(number)
        keys[resting] = -1e9 - self.seen_at[resting]
        keys[[index for _, indices in self.open for index in indices]] = -np.inf
        indices: list[int] = np.argsort(-keys, kind="stable")[: self.config.sampling.batch].tolist()
        self.open.append((number, indices))
        return indices

    def note(self, samples: Sequence[Sample]) -> None:
        readable = [sample.reward for sample in samples if not math.isnan(sample.reward)]
        self.low, self.high = min([self.low, *readable]), max([self.high, *readable])
        expected = [self.signal(number)[indices].mean() for number, indices in self.open]
        groups = iter(by_group(samples))
        for number, indices in self.open:
            fade = self.fade(number)
            for index, group in zip(indices, groups, strict=False):
                values = np.array([sample.reward for sample in group if not math.isnan(sample.reward)])
                if not values.size:
                    continue
                scaled = (values - self.low) / max(self.high - self.low, 1e-9)
                self.counts[index] = fade[index] * self.counts[index] + values.size
                self.spreads[index] = fade[index] * self.spreads[index] + values.size * scaled.var()
                self.solved[index] = self.solved[index] + 1 if scaled.min() > 0.99 else 0
                self.seen_at[index] = number
        number = self.open[-1][0] + 1
        self.open = []
        self.noted = {
            "curriculum/expected": float(np.mean(expected)),
            "curriculum/seen_frac": float((self.seen_at >= 0).mean()),
            "curriculum/resting_frac": float(self.resting(number).mean()),
        }

    def state(self) -> dict[str, Any]:
        seen = np.flatnonzero(self.seen_at >= 0)
        columns = (self.counts, self.spreads, self.seen_at, self.solved)
        table = [[int(index), *(column[index].item() for column in columns)] for index in seen]
        return {"range": [self.low, self.high] if table else None, "seen": table}

    def restore(self, state: dict[str, Any]) -> None:
        if state["range"]:
            self.low, self.high = state["range"]
        for index, count, spread, seen_at, solved in state["seen"]:
            self.counts[index], self.spreads[index] = count, spread
            self.seen_at[index], self.solved[index] = seen_at, solved

    def figures(self) -> dict[str, float]:
        return self.noted


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
        self.levels = dict(problems.mix.levels)
        self.recent: dict[str, list[float]] = {name: [] for name in self.levels}
        self.place, self.seen = 0, list[str]()
        self.ahead, self.open = 0, list[str]()  # the same, of the step that is under way
        self.repeats = False  # every prompt was seen

    def draw(self, number: int) -> Drawn:
        num = self.config.sampling.batch
        known = self.held_out | set(self.seen) | set(self.open)
        drawn, self.ahead = rg.fresh(self._make, self.ahead, num, known)
        if len(drawn) < num:
            self.repeats = True
            taken = self.held_out | set(self.open) | {prompt_key(example)[:16] for example in drawn}
            again, self.ahead = rg.fresh(self._make, self.ahead, num - len(drawn), taken)
            drawn += again
        if len(drawn) < num:
            raise ValueError(
                f"--task {self.config.data.task} has no {num} different problems besides those held out; "
                "ask for larger ones, or for fewer to be held out, with --task-config"
            )
        self.open += [prompt_key(example)[:16] for example in drawn]
        return drawn, self.render(drawn)

    def _make(self, places: Sequence[int]) -> list[Example]:
        return self.problems.make(places, self.config.sampling.seed, self.levels)

    def note(self, samples: Sequence[Sample]) -> None:
        if self.repeats:
            print(f"all different problems of {self.config.data.task} were seen; they come again", file=sys.stderr)
            self.seen, self.repeats = [], False
        self.place, self.seen, self.open = self.ahead, self.seen + self.open, []
        for group in by_group(samples) if self.levels else []:
            rate = float(np.mean([sample.parts["correct"] >= 1 for sample in group]))
            self._count(group[0].example["category"], group[0].example["level"], rate)

    def _count(self, name: str, level: int | None, rate: float) -> None:
        """Takes in the pass rate of one problem, of a level that may be over by now."""
        bound = self.problems.mix.raise_level_at
        if name not in self.levels or level != self.levels[name]:
            return
        self.recent[name] = [*self.recent[name], rate][-WINDOW:]
        mean, top = sum(self.recent[name]) / WINDOW, self.problems.num_levels[name] - 1
        if bound is not None and len(self.recent[name]) == WINDOW and mean >= bound and self.levels[name] < top:
            self.levels[name], self.recent[name] = self.levels[name] + 1, []
            solved = f"{mean:.0%} of the last {WINDOW} problems were solved"
            print(f"{name}: {solved}, so level {self.levels[name]} comes next")

    def state(self) -> dict[str, Any]:
        return {"place": self.place, "seen": self.seen, "levels": self.levels, "recent": self.recent}

    def restore(self, state: dict[str, Any]) -> None:
        self.place = self.ahead = state["place"]
        self.seen, self.levels, self.recent = list(state["seen"]), dict(state["levels"]), dict(state["recent"])

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
