"""What tests need of the optional libraries: skipped with a reason where one is missing, but not where CI is set."""

import importlib.util
import os

import pytest


def needs(module: str, extra: str) -> pytest.MarkDecorator:
    """Skips a test, or with `pytestmark` a file, without `module`; where CI is set it runs, and fails."""
    missing = importlib.util.find_spec(module) is None and not os.environ.get("CI")
    return pytest.mark.skipif(missing, reason=f"{module} is in the extra `{extra}`: uv run --extra {extra} pytest")
