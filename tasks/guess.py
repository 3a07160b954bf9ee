"""The task `guess`, in which the model guesses a number and is told "higher" or "lower"."""

import random
from typing import Any

from tasks.task import Sides, Task

LARGEST = 20
NUM_TRAIN = 1024
NUM_HELD_OUT = 128


class Guess:
    """An environment that thinks of a number from 1 to LARGEST, which the model must guess."""

    def reset(self, **_: Any) -> str:
        self.number = random.randint(1, LARGEST)
        self.is_found = False
        return f"I think of a number from 1 to {LARGEST}. Find it."

    def guess(self, number: int) -> str:
        """
        Says whether the number is right, or whether the one to find is higher or lower.

        Args:
            number: The guess.
        """
        if number == self.number:
            self.is_found = True
            return "right"
        return "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return float(self.is_found)


def load_examples() -> Sides:
    """Examples with empty prompts, because the environment makes the first message."""
    example = {"prompt": ""}
    return [example] * NUM_TRAIN, [example] * NUM_HELD_OUT


TASK = Task(name="guess", rewards={}, reward_weights={}, environments={"": Guess})
