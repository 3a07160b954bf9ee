"""
Reads JSON and YAML that users write.

Refuses duplicate keys, invalid syntax, and files that are too large or might never end, such as
pipes.

The modules that use a document check its content. printable.py makes text safe for a terminal.
"""

import json
import os
import reprlib
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import yaml


def read_json(text: str | bytes) -> Any:
    """
    Parse JSON.

    Raises ValueError if the text is not JSON, is nested too deeply, or repeats a key in an object.
    """
    try:
        return json.loads(text, object_pairs_hook=_dict_without_duplicate_keys)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def _dict_without_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {reprlib.repr(key)} occurs twice in one object")
    return content


class _DuplicateRefusingLoader(yaml.SafeLoader):
    """
    A YAML loader that refuses duplicate keys.

    Otherwise a forgotten dash would merge two list items, and later values would silently replace
    earlier ones.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    problem = f"the key {key.value!r:.60} occurs twice in one entry"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def read_text(path: str | Path, error_prefix: str, max_megabytes: int) -> str:
    """
    Read a text file of at most `max_megabytes` megabytes.

    Raises ValueError, whose message starts with `error_prefix`, if the file is larger, unreadable
    or not a regular file. Reading a device or a pipe might never end.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_megabytes * 10**6:
            raise ValueError(f"it is not a regular file of at most {max_megabytes} MB")
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{error_prefix} cannot be read: {reason}") from error


def load_yaml(path: str | Path, error_prefix: str) -> Any:
    """
    Load a user's YAML file of at most one megabyte.

    Raises ValueError, whose message starts with `error_prefix`, if the file is unreadable or is not
    YAML.
    """
    text = read_text(path, error_prefix, 1)
    try:
        return yaml.load(text, _DuplicateRefusingLoader)
    except Exception as error:
        # An impossible date, a bad tag or deep nesting raises an error that is not a YAMLError.
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None)
        problem = problem or str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{error_prefix} is not valid YAML{line}: {problem}; correct it"
        ) from error
