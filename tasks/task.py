"""The classes for tasks, which combine prompts, rewards and an evaluation under one name."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from prompts.examples import Example
from rewards.rewards import Reward

Sides = tuple[list[Example], list[Example]]  # training examples, held-out examples
DATA = Path(__file__).parent.parent / "data"


class EndlessProblems(Protocol):
    """The interface of endless problems, which are made when they are needed."""

    mix: Any  # the kinds and settings of the problems, which must not change when a run resumes
    held_out: list[Example]

    def make_examples(self, indices: Sequence[int], seed: int) -> list[Example]:
        """The examples at the given indices in the order of the seed."""


class Task(NamedTuple):
    """A task, with its prompts, its rewards, and the verifier or rubric that evaluations use."""

    name: str
    rewards: dict[str, Reward]
    # the weight of each reward by its name; the weight of the rubric is under "rubric"
    reward_weights: dict[str, float]
    # returns 1 for a right answer, even if training uses other rewards
    verifier: Reward | None = None
    rubric: Path | None = None
    train: list[Example] = []  # noqa: RUF012  (never changed in place)
    held_out: list[Example] = []  # noqa: RUF012
    witness: Path | None = None  # a second rubric, which is used only in evaluations
    problems: EndlessProblems | None = None  # endless problems, which replace `train`
    notes: Sequence[str] = ()  # lines that are printed for the user before training

    # functions that the model may call, by name
    tools: dict[str, Callable[..., Any]] = {}  # noqa: RUF012
    # the environment classes by their names in the column `environment`; "" if there is only one
    environments: dict[str, type] = {}  # noqa: RUF012
    # an outside harness (a `serving.harness.Harness`) that plays the episodes; None if there is
    # none
    harness: Any = None

    def with_reward(self, name: str, reward: Reward) -> "Task":
        """The task with an additional reward, which has weight 1."""
        return self._replace(
            rewards=self.rewards | {name: reward}, reward_weights=self.reward_weights | {name: 1.0}
        )

    @property
    def has_environments_or_harness(self) -> bool:
        """Whether the model acts in environments, which are the task's own or a harness's."""
        return bool(self.environments) or self.harness is not None

    @property
    def rewards_with_nonzero_weight(self) -> dict[str, Reward]:
        """The rewards whose weight is not 0, in contrast to metrics, whose weight is 0."""
        return {name: reward for name, reward in self.rewards.items() if self.reward_weights[name]}

    @property
    def metric(self) -> str:
        """The name of the main evaluation result: "accuracy" with a verifier, else "score"."""
        return "score" if self.verifier is None else "accuracy"
