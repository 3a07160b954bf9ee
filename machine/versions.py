"""The environment of a measurement, which a reader needs to know in order to repeat it."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

PACKAGES = ("mlx", "mlx-lm", "transformers", "datasets", "numpy")


def current_commit() -> str | None:
    """The commit of this code, or None if it is unknown."""
    root = Path(__file__).parents[1]
    # On a Mac without developer tools, git would open a window.
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "rev-parse", "HEAD"]
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        return result.stdout.strip() or None
    recorded = Path(__file__).with_name("commit.txt")  # .ci/wheel.py put it into the wheel
    return recorded.read_text() if recorded.is_file() else None


def describe_environment(blas: str) -> dict[str, Any]:
    """The versions, device and commit. blas: the description of the BLAS library."""
    device_info = mx.device_info()
    processor = platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(mx.default_device()),
        "machine": device_info.get("device_name", processor),
        "num_cpus": os.cpu_count(),
        "blas": blas,
        "versions": {package: version(package) for package in PACKAGES},
        "commit": current_commit(),
    }
