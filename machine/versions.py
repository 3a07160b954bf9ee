"""Facts about the software and hardware that are needed to reproduce a run or a measurement."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

PACKAGES = ("mlx", "mlx-lm", "transformers", "datasets", "numpy")


def current_commit() -> str | None:
    """The Git commit of this code, or None if the commit is unknown."""
    root = Path(__file__).parents[1]
    # On a Mac without developer tools, running git would open a dialog.
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "rev-parse", "HEAD"]
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        return result.stdout.strip() or None
    recorded = Path(__file__).with_name("commit.txt")  # .ci/wheel.py adds this file to the wheel
    return recorded.read_text() if recorded.is_file() else None


def collect_environment_facts(blas_description: str) -> dict[str, Any]:
    """The software versions, hardware, BLAS library and Git commit of this environment."""
    device_info = mx.device_info()
    processor = platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(mx.default_device()),
        "machine": device_info.get("device_name", processor),
        "num_cpus": os.cpu_count(),
        "blas": blas_description,
        "versions": {package: version(package) for package in PACKAGES},
        "commit": current_commit(),
    }
