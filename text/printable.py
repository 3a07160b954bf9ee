"""
Makes text from models, users and servers safe to print: no secrets, no invisible characters.

This file does not cover how documents are read (documents.py).
"""

import os
import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # line feeds and tabs count as text
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180b-\u180f\u200b\u200e\u200f"
    r"\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
_SECRET_NAME = re.compile("(KEY|TOKEN|SECRET|PASSWORD)$")  # of environment variables
LEAST_SECRET = 6  # characters; a shorter value is too common to be a secret


def make_printable(text: str) -> str:
    """Return a text that is safe on a terminal: without secrets or invisible characters."""
    return escape_invisible(redact_secrets(text))


def escape_invisible(text: str) -> str:
    """
    Replace each character that would reverse, hide or break the surrounding text with its code.

    These are control and format characters (bidirectional overrides, zero-width marks, fillers,
    tags), line separators, and lone surrogates, which no file can hold. Line feeds and tabs stay,
    and so do the joiners that emoji and scripts need.
    """
    return _INVISIBLE.sub(lambda match: f"\u27e8U+{ord(match[0]):04X}\u27e9", text)


def redact_secrets(text: str, *secrets: str) -> str:
    """
    Replace the given secrets, and all passwords and keys in the environment or in URLs, with `***`.

    A secret of fewer than LEAST_SECRET characters is not replaced.
    """
    from_environment = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    for secret in [*secrets, *from_environment]:
        if len(secret) >= LEAST_SECRET:
            text = text.replace(secret, "***")
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", text)
