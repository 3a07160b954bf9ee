"""
The BLAS that MLX is given on Linux: right results whatever is there, one line on stderr when it is not.

What is loaded into a process cannot be taken out again, so each case runs in a process of its own.
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

# Prints the description and the largest error of MLX's products of all four transpositions, odd shapes, two dtypes.
CHECK = """
import cpu_blas
import mlx.core as mx
import numpy as np
rng = np.random.default_rng(0)
worst = 0.0
for m, n, k in ((1, 70, 33), (65, 3, 129), (130, 131, 140)):
    for a_shape, b_shape in (((m, k), (k, n)), ((k, m), (k, n)), ((m, k), (n, k)), ((k, m), (n, k))):
        a, b = rng.standard_normal(a_shape), rng.standard_normal(b_shape)
        for dtype in (mx.float32, mx.float64):
            left, right = mx.array(a, dtype=dtype), mx.array(b, dtype=dtype)
            left = left if a_shape == (m, k) else left.T
            right = right if b_shape == (k, n) else right.T
            product = mx.matmul(left, right, stream=mx.cpu)
            exact = (a if a_shape == (m, k) else a.T) @ (b if b_shape == (k, n) else b.T)
            worst = max(worst, float(np.abs(np.array(product) - exact).max()))
assert worst < 1e-4, worst
print(cpu_blas.description)
"""


def run(program: str, **environment: str) -> tuple[str, str]:
    """What a program beside the root modules prints, in an environment that is this one's but for what is given."""
    variables = {
        key: value for key, value in os.environ.items() if key != "LD_PRELOAD"
    } | environment
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


FAST, SLOW = "OpenBLAS of scipy-openblas32\n", "MLX's built-in reference BLAS (slow)\n"


@on_linux
def test_the_jumps_are_built_once_found_again_and_compute_right(tmp_path):
    assert run(CHECK, XDG_CACHE_HOME=str(tmp_path)) == (FAST, "")
    (jumps,) = (tmp_path / "gwen").iterdir()
    built = jumps.stat().st_mtime_ns
    assert run(CHECK, XDG_CACHE_HOME=str(tmp_path), PATH="/nowhere") == (
        FAST,
        "",
    )  # no compiler now
    assert jumps.stat().st_mtime_ns == built


FAILING = "#!/bin/sh\necho first >&2\necho no space left >&2\nexit 1\n"


@on_linux
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("{}/empty", "no C compiler (cc, gcc or clang) is on the PATH)"),
        ("{}/bin:" + os.environ["PATH"], "cc failed: 'first\\nno space left')"),
    ],
)
def test_where_no_jumps_can_be_built_one_line_says_why(tmp_path, path, reason):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cc").write_text(FAILING)
    (tmp_path / "bin" / "cc").chmod(0o755)
    said, errors = run(CHECK, XDG_CACHE_HOME=str(tmp_path / "cache"), PATH=path.format(tmp_path))
    assert said == SLOW and errors.count("\n") == 1 and reason in errors


@on_linux
def test_an_import_after_mlx_computes_right_and_says_in_one_line_what_is_lost():
    said, errors = run("import mlx.core\n" + CHECK)
    assert (
        said == SLOW
        and errors.startswith("gwen: MLX ")
        and errors.endswith("imported before gwen)\n")
        and errors.count("\n") == 1
    )


def another_s(cache, monkeypatch):
    cache.mkdir(mode=0o755)
    monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)


def open_to_others(cache, monkeypatch):
    cache.mkdir()
    cache.chmod(0o777)


def a_link(cache, monkeypatch):
    cache.with_name("aim").mkdir(mode=0o700)
    cache.symlink_to("aim")


def no_home(cache, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(
        os.path, "expanduser", lambda path: path
    )  # what it does where nobody knows the home


@pytest.mark.parametrize(
    "make", [another_s, open_to_others, a_link, lambda cache, _: cache.write_text(""), no_home]
)
def test_where_others_may_write_or_nobody_can_a_cache_of_this_process_serves(
    monkeypatch, tmp_path, capsys, make
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make(tmp_path / "gwen", monkeypatch)
    cache = cpu_blas.make_private_or_temporary_cache()
    assert cache.is_absolute() and tmp_path not in cache.parents and not list(cache.iterdir())
    assert cache.stat().st_mode & 0o777 == 0o700
    assert cpu_blas.make_private_or_temporary_cache() == cache  # once a process
    assert capsys.readouterr().err.count("not kept for later runs\n") == 1


def test_nothing_is_loaded_on_macos(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: pytest.fail("a library was loaded"))
    spec = importlib.util.spec_from_file_location("cpu_blas_on_macos", cpu_blas.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # mlx is imported already: not even that is looked at
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
    begin = time.process_time()  # whatever else the machine does
    mx.eval(a @ a)
    best = min(best, time.process_time() - begin)
print(best)
"""
    bundled, fast = (float(run(program)[0]) for program in (measure, "import cpu_blas" + measure))
    assert bundled / fast > 2, (
        f"bundled {bundled * 1e3:.1f} ms, {cpu_blas.description} {fast * 1e3:.1f} ms"
    )


def test_ctrl_c_while_a_program_imports_is_one_line_and_the_signal_s_own_status(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise KeyboardInterrupt")
    command, variables = (
        [sys.executable, str(ROOT / "train.py")],
        os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("\nstopped by Ctrl-C\n", -signal.SIGINT)


def without_packages(*words: str) -> subprocess.CompletedProcess[str]:
    """A command of ours under a Python that has no site-packages, as the system's `python3` has none of Gwen's."""
    return subprocess.run(
        [sys.executable, "-I", "-S", *words], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "program", sorted(path.name for path in ROOT.glob("*.py") if "__main__" in path.read_text())
)
def test_a_command_under_a_python_without_packages_says_in_one_line_to_use_uv_run(program):
    code = f"import sys; sys.path.insert(0, '.'); sys.argv = [{program!r}, '--steps', '3']"
    code += "; sys.orig_argv = ['python3', *sys.argv]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = without_packages("-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert f"uv run {program} --steps 3" in done.stderr


def test_a_user_s_own_program_under_such_a_python_may_catch_the_import_error():
    code = "import sys; sys.path.insert(0, '.'); sys.argv = ['/mine.py']\ntry:\n import cpu_blas\n"
    done = without_packages("-c", code + "except ImportError as error:\n print(error)")
    assert done.returncode == 0 and "uv run" in done.stdout and "mlx" in done.stdout


def test_the_packages_that_a_python_must_have_are_those_that_pyproject_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert names - {"scipy-openblas32"} == set(cpu_blas.PACKAGES.values())
    assert project["requires-python"] == ">=" + ".".join(map(str, cpu_blas.OLDEST_PYTHON))
    for module, package in cpu_blas.PACKAGES.items():
        installed = [name.lower().replace("_", "-") for name in packages_distributions()[module]]
        assert package in installed, module
