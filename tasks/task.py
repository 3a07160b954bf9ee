"""A task: prompts, rewards and an evaluation under one name."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from prompts.examples import Example
from rewards.rewards import Reward

Sides = tuple[list[Example], list[Example]]  # train, held out


DATA = Path(__file__).parent.parent / "data"


class Problems(Protocol):
    """Problems without end."""

    mix: Any  # their kinds and settings, which a resumed run compares
    held_out: list[Example]

    def make(self, places: Sequence[int], seed: int) -> list[Example]:
        """The examples at these places of a seed's order."""


class Task(NamedTuple):
    """Prompts, rewards, and a verifier or a rubric that evaluations use."""

    name: str
    rewards: dict[str, Reward]
    # one for each reward, and one under "rubric" if there is a rubric
    reward_weights: dict[str, float]
    # gives 1 for a right answer, whatever the rewards of training are
    verifier: Reward | None = None
    rubric: Path | None = None
    train: list[Example] = []  # noqa: RUF012  (never changed in place)
    held_out: list[Example] = []  # noqa: RUF012
    witness: Path | None = None  # a second rubric, only for evaluations
    problems: Problems | None = None  # without end, instead of `train`
    notes: Sequence[str] = ()  # lines that the user should read before training
    # functions that the model may call, by name
    tools: dict[str, Callable[..., Any]] = {}  # noqa: RUF012
    # by the column `environment`; "" if there is only one
    environments: dict[str, type] = {}  # noqa: RUF012

    def with_reward(self, name: str, reward: Reward) -> "Task":
        """The task with one more reward, of weight 1."""
        return self._replace(
            rewards=self.rewards | {name: reward}, reward_weights=self.reward_weights | {name: 1.0}
        )

    @property
    def counted_rewards(self) -> dict[str, Reward]:
        """The rewards with a weight. Those of weight 0 are metrics."""
        return {name: reward for name, reward in self.rewards.items() if self.reward_weights[name]}

    @property
    def metric(self) -> str:
        """The held-out figure: accuracy if there is a verifier, else the score of the rewards."""
        return "score" if self.verifier is None else "accuracy"
