"""What a reader needs to repeat a measurement."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx


def describe_environment(blas: str) -> dict[str, Any]:
    """Versions, device and commit."""
    commit, root = None, Path(__file__).parents[1]
    if (root / ".git").exists() and shutil.which("git"):  # on a Mac without developer tools git opens a window
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
        commit = asked.stdout.strip() or None
    elif (built := Path(__file__).with_name("commit.txt")).is_file():  # .ci/wheel.py put it into the wheel
        commit = built.read_text()
    packages = ["mlx", "mlx-lm", "transformers", "datasets", "numpy"]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(mx.default_device()),
        "machine": mx.device_info().get("device_name", platform.processor() or platform.machine()),
        "num_cpus": os.cpu_count(),
        "blas": blas,
        "versions": {package: version(package) for package in packages},
        "commit": commit,
    }
