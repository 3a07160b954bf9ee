"""What a task is: prompts, rewards and an evaluation in one name."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from problems.examples import Example
from problems.rewards import Reward

Sides = tuple[list[Example], list[Example]]  # train, held out


DATA = Path(__file__).parent.parent / "data"


class Problems(Protocol):
    """Problems without end."""

    mix: Any  # what they are made of, which a resumed run compares
    held_out: list[Example]

    def make(self, places: Sequence[int], seed: int) -> list[Example]:
        """The examples at these places of a seed's order."""


class Task(NamedTuple):
    name: str
    rewards: dict[str, Reward]
    reward_weights: dict[
        str, float
    ]  # one for each reward, and one under "rubric" where there is a rubric
    verifier: Reward | None = (
        None  # gives 1 for a right answer, whatever the rewards of the training are
    )
    rubric: Path | None = None
    train: list[Example] = []  # noqa: RUF012  (never changed in place)
    held_out: list[Example] = []  # noqa: RUF012
    witness: Path | None = None  # a second rubric, which only evaluations ask
    problems: Problems | None = None  # without end, in place of `train`
    notes: Sequence[str] = ()  # lines that its user should read before it trains
    tools: dict[str, Callable[..., Any]] = {}  # noqa: RUF012  (functions that the model may call, by name)
    environments: dict[str, type] = {}  # noqa: RUF012  (by the column `environment`; "" where there is one)

    def with_reward(self, name: str, reward: Reward) -> "Task":
        """The task with one more reward, of weight 1."""
        return self._replace(
            rewards=self.rewards | {name: reward}, reward_weights=self.reward_weights | {name: 1.0}
        )

    @property
    def counted_rewards(self) -> dict[str, Reward]:
        """Its rewards but those of weight 0, which are metrics."""
        return {name: reward for name, reward in self.rewards.items() if self.reward_weights[name]}

    @property
    def metric(self) -> str:
        """The held-out figure: where a verifier knows the right answer accuracy, else the score of the rewards."""
        return "score" if self.verifier is None else "accuracy"
