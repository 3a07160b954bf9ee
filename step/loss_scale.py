"""The factor that keeps small float16 gradients above zero while a step computes them."""

from typing import NamedTuple


class LossScale(NamedTuple):
    """Doubles after 200 good steps and halves after an overflow, where it is `dynamic`."""

    value: float = 1.0
    good_steps: int = 0
    dynamic: bool = False

    def after(self, overflow: bool) -> "LossScale":
        if not self.dynamic:
            return self
        if overflow:
            return self._replace(value=max(self.value / 2, 1.0), good_steps=0)
        if self.good_steps + 1 == 200:
            return self._replace(value=min(self.value * 2, 2.0**24), good_steps=0)
        return self._replace(good_steps=self.good_steps + 1)
