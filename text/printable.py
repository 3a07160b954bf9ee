"""
Makes text from models, users and servers safe to print, without secrets or invisible characters.

This file does not cover how documents are read (documents.py).
"""

import functools
import os
import re
import sys

# control characters other than line feeds and tabs
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180b-\u180f\u200b\u200e\u200f"
    r"\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
# an environment variable whose name ends like this contains a secret
_SECRET_NAME = re.compile("(KEY|TOKEN|SECRET|PASSWORD)$")
LEAST_SECRET = 6  # a value with fewer characters is too common to be a secret


def escape_and_redact_for_printing(text: str) -> str:
    """Return the text without secrets and invisible characters, so that it is safe to print."""
    return escape_invisible(redact_secrets(text))


def escape_invisible(text: str) -> str:
    """
    Return the text with the code point in place of each character that is invisible or misleading.

    Such a character would reverse, hide or break the text around it.

    The replaced characters are control and format characters (bidirectional overrides, zero-width
    marks, fillers and tags), line separators, and lone surrogates, which cannot be written to a
    file. Line feeds, tabs, and the joiners that emoji and some scripts need are kept.
    """
    return _INVISIBLE.sub(lambda match: f"\u27e8U+{ord(match[0]):04X}\u27e9", text)


def redact_secrets(text: str, *more_secrets: str) -> str:
    """
    Replace secrets with `***`.

    The secrets are `more_secrets`, keys and passwords in environment variables, and user names and
    passwords in URLs. A secret with fewer than LEAST_SECRET characters is not replaced, except in a
    URL.
    """
    from_environment = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    for secret in [*more_secrets, *from_environment]:
        if len(secret) >= LEAST_SECRET:
            text = text.replace(secret, "***")
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", text)


@functools.cache
def print_once(line: str) -> None:
    """Print a line on stderr, but only once per process."""
    print(escape_invisible(line), file=sys.stderr)
