"""
The BLAS that MLX gets on Linux: results are right with any BLAS; one line says why it is slow.

A process cannot unload a library, so each case runs in a separate process.
"""

import ctypes
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import cpu_blas
import pytest

ROOT = Path(cpu_blas.__file__).parent
on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have a BLAS of their own"
)

# Checks MLX's products of all four transpositions, of odd shapes and of two dtypes.
# Prints the description of the BLAS.
CHECK = """
import itertools
import cpu_blas
import mlx.core as mx
import numpy as np
rng = np.random.default_rng(0)
worst = 0.0
for m, n, k in ((1, 70, 33), (65, 3, 129), (130, 131, 140)):
    for a_shape, b_shape in itertools.product(((m, k), (k, m)), ((k, n), (n, k))):
        a = rng.standard_normal(a_shape)
        b = rng.standard_normal(b_shape)
        exact = (a if a_shape == (m, k) else a.T) @ (b if b_shape == (k, n) else b.T)
        for dtype in (mx.float32, mx.float64):
            left = mx.array(a, dtype=dtype)
            right = mx.array(b, dtype=dtype)
            left = left if a_shape == (m, k) else left.T
            right = right if b_shape == (k, n) else right.T
            product = mx.matmul(left, right, stream=mx.cpu)
            worst = max(worst, float(np.abs(np.array(product) - exact).max()))
assert worst < 1e-4, worst
print(cpu_blas.description)
"""


def run_program(program: str, **environment: str) -> tuple[str, str]:
    """
    Runs a program beside the root modules; returns its output and errors.

    environment: changes of the environment.
    """
    variables = os.environ | environment
    variables.pop("LD_PRELOAD", None)
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout, process.stderr


FAST = "OpenBLAS of scipy-openblas32\n"
SLOW = "MLX's built-in reference BLAS (slow)\n"


@on_linux
def test_the_forwarding_library_is_built_once_reused_and_computes_correctly(tmp_path):
    assert run_program(CHECK, XDG_CACHE_HOME=str(tmp_path)) == (FAST, "")
    (library,) = (tmp_path / "gwen").iterdir()
    build_time = library.stat().st_mtime_ns

    without_compiler = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/nowhere"}
    assert run_program(CHECK, **without_compiler) == (FAST, "")
    assert library.stat().st_mtime_ns == build_time


FAILING_COMPILER = "#!/bin/sh\necho first >&2\necho no space left >&2\nexit 1\n"


@on_linux
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("{}/empty", "no C compiler (cc, gcc or clang) is on the PATH)"),
        ("{}/bin:" + os.environ["PATH"], "cc failed: 'first\\nno space left')"),
    ],
)
def test_one_line_says_why_the_forwarding_library_cannot_be_built(tmp_path, path, reason):
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(FAILING_COMPILER)
    compiler.chmod(0o755)
    output, errors = run_program(
        CHECK, XDG_CACHE_HOME=str(tmp_path / "cache"), PATH=path.format(tmp_path)
    )
    assert output == SLOW
    assert errors.count("\n") == 1
    assert reason in errors


@on_linux
def test_an_import_after_mlx_computes_correctly_and_one_line_warns_that_it_is_slow():
    output, errors = run_program("import mlx.core\n" + CHECK)
    assert output == SLOW
    assert errors.startswith("gwen: MLX ")
    assert errors.endswith("such as train, before mlx)\n")
    assert errors.count("\n") == 1


def make_cache_of_another_user(cache, monkeypatch):
    cache.mkdir(mode=0o755)
    monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)


def make_writable_cache(cache, monkeypatch):
    cache.mkdir()
    cache.chmod(0o777)


def make_link(cache, monkeypatch):
    cache.with_name("aim").mkdir(mode=0o700)
    cache.symlink_to("aim")


def make_file(cache, monkeypatch):
    cache.write_text("")


def hide_home(cache, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    # If the home directory is unknown, expanduser returns the path unchanged.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


@pytest.mark.parametrize(
    "make_obstacle",
    [make_cache_of_another_user, make_writable_cache, make_link, make_file, hide_home],
)
def test_a_temporary_cache_replaces_a_cache_that_is_unsafe_or_impossible(
    monkeypatch, tmp_path, capsys, make_obstacle
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_obstacle(tmp_path / "gwen", monkeypatch)
    cache = cpu_blas.make_private_or_temporary_cache()
    assert cache.is_absolute()
    assert tmp_path not in cache.parents
    assert not list(cache.iterdir())
    assert cache.stat().st_mode & 0o777 == 0o700

    # The process makes the cache and prints the line only once.
    assert cpu_blas.make_private_or_temporary_cache() == cache
    assert capsys.readouterr().err.count("not kept for later runs\n") == 1


def test_nothing_is_loaded_on_macos(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: pytest.fail("a library was loaded"))
    spec = importlib.util.spec_from_file_location("cpu_blas_on_macos", cpu_blas.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Importing after mlx prints no warning here, because macOS needs no other BLAS.
    spec.loader.exec_module(module)
    assert module.description == "the platform's"


@on_linux
def test_matmuls_are_more_than_twice_as_fast_as_with_the_bundled_blas():
    measure = """
import time
import mlx.core as mx
a = mx.random.normal((320, 320))
mx.eval(a @ a)
best = 1e9
for _ in range(5):
    begin = time.process_time()  # not the time of other programs
    mx.eval(a @ a)
    best = min(best, time.process_time() - begin)
print(best)
"""
    bundled = float(run_program(measure)[0])
    fast = float(run_program("import cpu_blas" + measure)[0])
    times = f"bundled {bundled * 1e3:.1f} ms, {cpu_blas.description} {fast * 1e3:.1f} ms"
    assert bundled / fast > 2, times


def test_ctrl_c_during_the_imports_prints_one_line_and_ends_with_the_status_of_sigint(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, str(ROOT / "train.py")]
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert process.stderr == "\nstopped by Ctrl-C\n"
    assert process.returncode == -signal.SIGINT


def run_without_packages(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python without site-packages, like the system's `python3`."""
    return subprocess.run(
        [sys.executable, "-I", "-S", *words], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "program", sorted(path.name for path in ROOT.glob("*.py") if "__main__" in path.read_text())
)
def test_a_command_under_a_python_without_packages_advises_uv_run_in_one_line(program):
    code = f"import sys; sys.path.insert(0, '.'); sys.argv = [{program!r}, '--steps', '3']"
    code += "; sys.orig_argv = ['python3', *sys.argv]"
    code += "; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    process = run_without_packages("-c", code)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("error: ")
    assert process.stderr.count("\n") == 1
    assert f"uv run {program} --steps 3" in process.stderr


def test_a_program_of_the_user_under_such_a_python_can_catch_the_import_error():
    code = "import sys; sys.path.insert(0, '.'); sys.argv = ['/mine.py']\ntry:\n import cpu_blas\n"
    process = run_without_packages("-c", code + "except ImportError as error:\n print(error)")
    assert process.returncode == 0
    assert "uv run" in process.stdout
    assert "mlx" in process.stdout


def test_the_packages_that_cpu_blas_demands_are_those_in_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert names - {"scipy-openblas32"} == set(cpu_blas.PACKAGES.values())
    assert project["requires-python"] == ">=" + ".".join(map(str, cpu_blas.OLDEST_PYTHON))
    for module, package in cpu_blas.PACKAGES.items():
        installed = [name.lower().replace("_", "-") for name in packages_distributions()[module]]
        assert package in installed, module
