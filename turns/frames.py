"""
The ids between two turns, from the model's own chat template: what a tool message adds after the end token.

Token in, token out: what the model wrote is never rendered again. Left out: what the messages say (episodes.py).
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from problems import chat_template

MARK = "\ufdd0"  # no character; it stands inside what looks like a control token and is none
CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": {}}}
# a turn that ends with a call, for the template
EXCHANGE: list[dict[str, Any]] = [
    {"role": "user", "content": "."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]


class Frames:
    """Renders what a model is told between its turns. end_ids: its end tokens."""

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], *, thinking: bool):
        from tokenizers import Tokenizer

        self.tokenizer, self.thinking = tokenizer, thinking
        self.end_ids, self.ends = set(end_ids), [str(tokenizer.convert_ids_to_tokens(one)) for one in end_ids]
        self.control = {str(one.content): number for number, one in tokenizer.added_tokens_decoder.items()}
        longest_first = sorted(self.control, key=len, reverse=True)
        self.pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        # without added tokens: it knows no control token, so no text becomes one
        backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"added_tokens": []}
        self.plain = Tokenizer.from_str(json.dumps(backend))

    def between(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """
        The ids of messages after a turn of the model, from its end token on up to where its next turn begins.

        What the messages say stays text. It is encoded with the template's words around it in one piece, as a tokenizer
        does; only the template's control tokens are control tokens.
        """
        before = self._render(EXCHANGE, tools, opened=False)
        after = self._render([*EXCHANGE, *self._marked(messages)], tools, opened=True)
        found = [(before.rfind(end), end) for end in self.ends]
        place, end = max(found)
        if place < 0:
            raise ValueError(
                f"the model's chat template ends a turn with none of its end tokens, {', '.join(self.ends)}"
            )
        pieces = after.split(end)
        return self._encode(end.join(pieces[before.count(end) :]))

    def rewrites(self) -> bool:
        """Whether the template shows an earlier turn otherwise than it was written, for example without its thought."""
        asked, wrote = EXCHANGE[0], EXCHANGE[1] | {"content": "x"}
        told = [{"role": "tool", "name": "f", "content": "y"}, {"role": "assistant", "content": "z"}]
        later = self._render([asked, wrote, *told], None, opened=False)
        return not later.startswith(self._render([asked], None, opened=True) + "x")

    def text(self, ids: Sequence[int]) -> str:
        """What the model wrote in a turn, without its end token."""
        return str(self.tokenizer.decode([one for one in ids if one not in self.end_ids], skip_special_tokens=False))

    def cut(self, text: str, most: int) -> str:
        """At most `most` tokens of a text, and a line that says so."""
        text = text.encode("utf-8", "replace").decode()
        shown = text[: 100 * most]  # no token of use is longer
        encoded = self.plain.encode(shown, add_special_tokens=False)
        if len(encoded.ids) > most:
            shown = shown[: encoded.offsets[most][0]]
        if len(shown) == len(text):
            return text
        return f"{shown}\n[cut: {len(shown)} of {len(text)} characters]"

    def _marked(self, held: Any) -> Any:
        """The same with a mark in each text that looks like a control token."""
        if isinstance(held, str):
            return self.pattern.sub(lambda found: f"{found[0][:1]}{MARK}{found[0][1:]}", held.replace(MARK, ""))
        if isinstance(held, dict):
            return {key: self._marked(value) for key, value in held.items()}
        return [self._marked(one) for one in held] if isinstance(held, list) else held

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, opened: bool) -> str:
        return chat_template.render(self.tokenizer, messages, self.thinking, opened=opened, tools=tools)

    def _encode(self, text: str) -> list[int]:
        ids = list[int]()
        for number, piece in enumerate(self.pattern.split(text)):  # text, control token, text, …
            if number % 2:
                ids.append(self.control[piece])
            elif piece:
                ids += self.plain.encode(piece.replace(MARK, ""), add_special_tokens=False).ids
        return ids
