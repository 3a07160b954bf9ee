"""
The BLAS that MLX is given on Linux: right results whatever is found, one line on stderr when nothing is.

What is loaded into a process cannot be taken out again, so each case runs in a process of its own.
"""

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import cpu_blas
import pytest

ROOT = Path(cpu_blas.__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have a BLAS of their own")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler: apt-get install gcc")

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
print(cpu_blas.description)
print(worst)
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a program beside the root modules, with an environment that is this one's but for what is given."""
    variables = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"} | environment
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True)


def build(source: str, library: Path) -> None:
    subprocess.run(
        [str(COMPILER), "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)],
        input=source.encode(),
        check=True,
    )


def without_system_library(folder: Path) -> str:
    """A search path on which `libopenblas.so.0` is found first and is no library."""
    folder.mkdir(exist_ok=True)
    (folder / "libopenblas.so.0").write_bytes(b"no library" * 100)
    return str(folder)


def description_and_error(done: subprocess.CompletedProcess) -> tuple[str, float]:
    assert done.returncode == 0, done.stderr
    description, error = done.stdout.splitlines()
    return description, float(error)


SLOW = "MLX's built-in reference BLAS (slow)"


def test_the_description_says_which_blas_serves():
    found = {"system OpenBLAS", "OpenBLAS of scipy-openblas32", SLOW}
    assert cpu_blas.description in (found if sys.platform == "linux" else {"the platform's"})


@on_linux
def test_what_is_loaded_computes_right_and_says_nothing_when_it_is_fast():
    done = run(CHECK)
    description, error = description_and_error(done)
    assert error < 1e-4
    assert done.stderr == "" if description != SLOW else done.stderr.count("\n") == 1


FAILING = "#!/bin/sh\necho first >&2\necho no space left >&2\nexit 1\n"
NO_SHIM = {  # variables, with {} for a directory, and what the line says
    "no compiler": ({"PATH": "{}/empty"}, "no C compiler (cc, gcc or clang) is on the PATH"),
    "failing": ({"PATH": "{}/bin:" + os.environ["PATH"]}, "cc failed: 'first\\nno space left')"),
}


@on_linux
@needs_compiler
@pytest.mark.parametrize("case", NO_SHIM)
def test_where_no_shim_can_be_built_one_line_says_why(tmp_path, case):
    variables, said = NO_SHIM[case]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cc").write_text(FAILING)
    (tmp_path / "bin" / "cc").chmod(0o755)
    variables = {"XDG_CACHE_HOME": "{}/cache"} | variables
    search = without_system_library(tmp_path / "lib")
    done = run(CHECK, LD_LIBRARY_PATH=search, **{name: text.format(tmp_path) for name, text in variables.items()})
    description, error = description_and_error(done)
    assert description == SLOW and error < 1e-4
    assert done.stderr.count("\n") == 1 and said in done.stderr


PLAIN_BLAS = """
#define GEMM(name, real) \\
void name(int o, int ta, int tb, int m, int n, int k, real alpha, const real* a, int lda, \\
          const real* b, int ldb, real beta, real* c, int ldc) { \\
    for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) { \\
        real sum = 0; \\
        for (int l = 0; l < k; l++) \\
            sum += a[ta == 111 ? i * lda + l : l * lda + i] * b[tb == 111 ? l * ldb + j : j * ldb + l]; \\
        c[i * ldc + j] = alpha * sum; \\
    } \\
}
GEMM(cblas_sgemm, float)
GEMM(cblas_dgemm, double)
"""


@on_linux
@needs_compiler
def test_the_system_s_openblas_serves_without_a_compiler(tmp_path):
    build(PLAIN_BLAS, tmp_path / "libopenblas.so.0")
    done = run(CHECK, LD_LIBRARY_PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"), PATH="/nowhere")
    description, error = description_and_error(done)
    assert description == "system OpenBLAS" and error < 1e-4 and done.stderr == ""


def test_a_user_without_a_home_directory_has_a_cache_too(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does where nobody knows the home
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cpu_blas.cache_directory() == tmp_path / "gwen"
    assert (tmp_path / "gwen").stat().st_mode & 0o777 == 0o700


def another_s(cache, monkeypatch):
    cache.mkdir(mode=0o755)
    monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)


def open_to_others(cache, monkeypatch):
    cache.mkdir()
    cache.chmod(0o777)


def a_link(cache, monkeypatch):
    cache.with_name("aim").mkdir(mode=0o700)
    cache.symlink_to("aim")


@pytest.mark.parametrize("make", [another_s, open_to_others, a_link, lambda cache, _: cache.write_text("")])
def test_a_cache_in_which_others_may_write_is_not_used(monkeypatch, tmp_path, capsys, make):
    make(tmp_path / "gwen", monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = cpu_blas.cache_directory()
    assert tmp_path not in cache.parents and not list(cache.iterdir())
    assert cache.stat().st_mode & 0o777 == 0o700
    assert cpu_blas.cache_directory() == cache  # once a process
    assert capsys.readouterr().err.count("nothing is kept for later runs\n") == 1


@on_linux
@needs_compiler
def test_the_shim_is_built_once_and_found_again(tmp_path):
    environment = {
        "LD_LIBRARY_PATH": without_system_library(tmp_path / "lib"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    first = run(CHECK, **environment)
    assert description_and_error(first)[0] == "OpenBLAS of scipy-openblas32" and first.stderr == ""
    (shim,) = (tmp_path / "cache" / "gwen").iterdir()
    built = shim.stat().st_mtime_ns
    again = run(CHECK, **environment, PATH="/nowhere")  # no compiler now
    assert description_and_error(again)[0] == "OpenBLAS of scipy-openblas32"
    assert shim.stat().st_mtime_ns == built


@on_linux
def test_an_import_after_mlx_computes_right_and_says_in_one_line_what_is_lost():
    done = run("import mlx.core\n" + CHECK)
    description, error = description_and_error(done)
    assert description == SLOW and error < 1e-4
    assert done.stderr.count("\n") == 1 and "(it was imported before gwen)" in done.stderr


def test_nothing_is_loaded_on_macos(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: pytest.fail("a library was loaded"))
    spec = importlib.util.spec_from_file_location("cpu_blas_on_macos", cpu_blas.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # mlx is imported already: not even that is looked at
    assert module.description == "the platform's"


@on_linux
@needs_compiler
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
    bundled, fast = (float(run(program).stdout) for program in (measure, "import cpu_blas" + measure))
    assert bundled / fast > 2, f"bundled {bundled * 1e3:.1f} ms, {cpu_blas.description} {fast * 1e3:.1f} ms"


@pytest.mark.parametrize("program", ["train.py", "bench_rollout.py"])
def test_ctrl_c_while_a_program_imports_is_one_line_and_the_signal_s_own_status(program, tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, str(ROOT / program)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stderr == "\nstopped by Ctrl-C\n"
    assert done.returncode == -signal.SIGINT
