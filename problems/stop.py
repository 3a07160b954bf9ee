"""
Texts of a user that end a completion.

Left out: when a row of a rollout is searched for them (sampler.py).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Stop(NamedTuple):
    """Texts that end a completion, at the token that completes one."""

    texts: Sequence[str]
    tokenizer: Any

    def find(self, ids: list[int], start: int) -> int | None:
        """How many of the ids, more than `start`, it takes to complete a text; None if they hold none."""
        # A token has at least one byte. Four more hold a character in parts, or a space that decoders strip.
        width = max(len(text.encode()) for text in self.texts) + 4
        if not self._in(ids[max(start + 1 - width, 0) :]):
            return None
        ends = range(start + 1, len(ids) + 1)
        return next((end for end in ends if self._in(ids[max(end - width, 0) : end])), None)

    def _in(self, ids: list[int]) -> bool:
        decoded = self.tokenizer.decode(ids)
        return any(text in decoded for text in self.texts)

    def cut(self, text: str) -> str:
        """A text up to where the first of these begins."""
        return text[: min((place for one in self.texts if (place := text.find(one)) >= 0), default=None)]
