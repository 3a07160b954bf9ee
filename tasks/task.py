"""A task: prompts, rewards and an evaluation under one name."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from prompts.examples import Example
from rewards.rewards import Reward

Sides = tuple[list[Example], list[Example]]  # train, held out


DATA = Path(__file__).parent.parent / "data"


class Problems(Protocol):
    """Endless problems, made on demand."""

    mix: Any  # the kinds and settings of the problems; a resumed run checks that they are the same
    held_out: list[Example]

    def make(self, places: Sequence[int], seed: int) -> list[Example]:
        """The examples at these places of a seed's order."""


class Task(NamedTuple):
    """Prompts, rewards, and the verifier or rubric that evaluations use."""

    name: str
    rewards: dict[str, Reward]
    # the weight of each reward by name, and of the rubric, if any, under "rubric"
    reward_weights: dict[str, float]
    # gives 1 for a right answer, whatever rewards training uses
    verifier: Reward | None = None
    rubric: Path | None = None
    train: list[Example] = []  # noqa: RUF012  (never changed in place)
    held_out: list[Example] = []  # noqa: RUF012
    witness: Path | None = None  # a second rubric, only for evaluations
    problems: Problems | None = None  # endless problems, in place of `train`
    notes: Sequence[str] = ()  # lines that the user should read before training
    # functions that the model may call, by name
    tools: dict[str, Callable[..., Any]] = {}  # noqa: RUF012
    # the classes by their name in the column `environment`; "" if there is only one
    environments: dict[str, type] = {}  # noqa: RUF012

    def with_reward(self, name: str, reward: Reward) -> "Task":
        """The task with one more reward, which has weight 1."""
        return self._replace(
            rewards=self.rewards | {name: reward}, reward_weights=self.reward_weights | {name: 1.0}
        )

    @property
    def counted_rewards(self) -> dict[str, Reward]:
        """The rewards whose weight is not 0. Rewards of weight 0 are metrics."""
        return {name: reward for name, reward in self.rewards.items() if self.reward_weights[name]}

    @property
    def metric(self) -> str:
        """The name of the held-out figure: "accuracy" with a verifier, "score" without one."""
        return "score" if self.verifier is None else "accuracy"
