"""
A fast BLAS and a fast heap for MLX on Linux CPUs: `import cpu_blas` before the first `import mlx`.

MLX's Linux wheel is linked against reference BLAS (about 3 GFLOP/s in float32). The dynamic loader
binds a symbol to the first library that offers it, so an OpenBLAS that is loaded globally before
MLX serves MLX's matmuls. The OpenBLAS in the package `scipy-openblas32` has a prefix in its names.
A library of two functions, called jumps, forwards the plain names to the prefixed ones; it is
compiled once into the user's cache directory. If that fails, MLX uses its own BLAS, and one line on
stderr says why.

MLX calls malloc and free for every array. glibc returns arrays of megabytes to the kernel at once
and faults them in again, which costs more than the arithmetic (swiglu and its gradient on 72 x 110
rows of 768 take 90 ms instead of 30). Here the heap never returns memory to the kernel.

On macOS MLX uses Accelerate, and no library is loaded. This file also sets environment variables
that MLX and the GPU's driver read only once, unless the user has set them.

Every program imports this file first. So it also prints one line in place of a traceback after a
Ctrl-C during the other imports. And it ends, with one line, a program that was started with a
Python without Gwen's packages, as by `python3 train.py`. It imports only the standard library, and
an old Python must be able to parse it.
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

# The first variable: macOS may stop a process whose GPU work delays the display; with it, macOS
# waits longer (github.com/ml-explore/mlx/issues/3267). The second keeps float32 products in float32
# on an M5, where MLX by default rounds the factors to 10 bits. The third makes attention use the
# same forward kernel with a gradient as without one; otherwise MLX 0.32.4 would compute scores in
# 16 bits for an array mask. Gwen computes the gradient itself.
ENVIRONMENT = {
    "AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1",
    "MLX_ENABLE_TF32": "0",
    "MLX_SDPA_VJP_FALLBACK": "1",
}

OLDEST_PYTHON = (3, 11)  # pyproject.toml's requires-python
# pyproject.toml's packages by their modules' names, without scipy-openblas32, which may be missing
PACKAGES = {
    "mlx": "mlx",
    "mlx_lm": "mlx-lm",
    "transformers": "transformers",
    "datasets": "datasets",
    "numpy": "numpy",
    "tqdm": "tqdm",
    "httpx2": "httpx2",
    "pandas": "pandas",
    "yaml": "pyyaml",
    "jinja2": "jinja2",
    "math_verify": "math-verify",
    "jsonschema": "jsonschema",
}

JUMPS = """
#define JUMP(name, real) \\
    void scipy_##name(int, int, int, int, int, int, \\
                      real, const real*, int, const real*, int, real, real*, int); \\
    void name(int order, int ta, int tb, int m, int n, int k, real alpha, const real* a, int lda, \\
              const real* b, int ldb, real beta, real* c, int ldc) { \\
        scipy_##name(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \\
    }
JUMP(cblas_sgemm, float)
JUMP(cblas_dgemm, double)
"""


def cache_directory() -> Path:
    """
    The cache directory, for files that Gwen can make again.

    Only this user may write there, since libraries are loaded from it. If it cannot be used so,
    this process makes a temporary directory instead, and a line on stderr says so.
    """
    try:
        caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / caches, "gwen")
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = cache.lstat()
        is_safe = (
            stat.S_ISDIR(status.st_mode)
            and status.st_uid == os.getuid()
            and not status.st_mode & 0o022
        )
        if is_safe:
            return cache
        reason = f"{cache} is not yours alone (chown, chmod 700)"
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        reason = str(error)
    return _make_temporary_cache(reason)


def _print_error(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads, or the disk is full
        print(line, file=sys.stderr)


@functools.cache
def _make_temporary_cache(reason: str) -> Path:
    _print_error(f"gwen: {reason}; nothing is kept for later runs")
    directory = tempfile.mkdtemp(prefix="gwen-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


# ---- the BLAS and the heap


def _set_up_blas() -> str:
    """Sets up the environment, the heap and the BLAS, and returns the BLAS's description."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if sys.platform != "linux":
        return "the platform's"
    try:
        if "mlx.core" in sys.modules:  # MLX has bound its BLAS already
            raise OSError("it was imported before gwen")
        _keep_freed_memory()
        # OpenBLAS's threads spin while they wait. While another process was busy, this made a
        # decode step of the demo model 80 times slower (284 ms instead of 3.4, on two cores). On
        # two free cores, a second thread would gain only a quarter. So there is one thread.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        ctypes.CDLL(_build_jumps(), mode=ctypes.RTLD_GLOBAL)
        return "OpenBLAS of scipy-openblas32"
    except OSError as error:
        _print_error(f"gwen: MLX runs on its slow built-in BLAS ({error})")
        return "MLX's built-in reference BLAS (slow)"


def _keep_freed_memory() -> None:
    """Makes glibc serve arrays of every size from one heap, and never shrink it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # from glibc's malloc.h
        m_trim_threshold = -1
        m_mmap_max = -4
        m_arena_max = -8
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_arena_max, 1)


def _build_jumps() -> str:
    """
    Loads scipy-openblas32's library, and compiles the library of jumps unless it exists.

    Returns the path of the jumps. Raises OSError, which names it, if something is missing.
    """
    try:
        import scipy_openblas32
    except ImportError as error:
        raise OSError("the package scipy-openblas32 is not installed") from error
    library = f"{scipy_openblas32.get_lib_dir()}/libscipy_openblas.so"
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # its names differ from MLX's

    key = hashlib.sha256(f"{JUMPS}{platform.machine()}".encode()).hexdigest()[:16]
    jumps = cache_directory() / f"blas-{key}.so"
    if jumps.exists():
        return str(jumps)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc or clang) is on the PATH")
    with tempfile.TemporaryDirectory(dir=jumps.parent) as scratch:
        built = Path(scratch) / "jumps.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(built)]
        result = subprocess.run(command, input=JUMPS, capture_output=True, text=True)
        if result.returncode:
            reason = result.stderr.strip() or result.returncode
            raise OSError(f"{compiler} failed: {reason!r:.200}")
        os.replace(
            built, jumps
        )  # atomic, so that two first runs at once both end with a whole file
    return str(jumps)


# ---- Gwen's programs


def _is_gwen_program() -> bool:
    """Whether one of Gwen's files was started, and not a user's program that imports one."""
    return Path(__file__).resolve().parent in Path(sys.argv[0]).resolve().parents


def _shorten_ctrl_c() -> None:
    """In Gwen's own programs, makes an uncaught Ctrl-C print one line."""
    if not _is_gwen_program():
        return
    default_hook = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _print_error("\nstopped by Ctrl-C")
        else:
            default_hook(kind, error, traceback)

    sys.excepthook = hook


def _refuse_other_python() -> None:
    """
    Ends one of Gwen's programs with one line and status 2 if this Python cannot run it.

    Without uv, `python3 train.py` starts the system's Python. In a user's own program, the line is
    the message of an ImportError instead.
    """
    version = sys.version_info[:2]
    missing = [
        package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None
    ]
    if version < OLDEST_PYTHON:
        problem = (
            f"{sys.executable} is Python {version[0]}.{version[1]}, "
            f"and Gwen needs 3.{OLDEST_PYTHON[1]} or later"
        )
    elif missing:
        problem = f"{sys.executable} has no {', '.join(missing)}"
    else:
        return

    is_checkout = (Path(__file__).resolve().parent / "pyproject.toml").is_file()
    if is_checkout:
        line = f"{problem}; start it with: {_uv_command()}"
        if shutil.which("uv") is None:
            line += " (uv is at https://docs.astral.sh/uv/)"
    else:  # an installed wheel without its packages
        line = f"{problem}; install Gwen again, with the packages that it needs"

    if not _is_gwen_program():
        raise ImportError(line)
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def _uv_command() -> str:
    """The command that would start this process with uv."""
    home = Path(__file__).resolve().parent
    words = ["uv", "run"]
    if Path.cwd() != home:
        words += ["--project", str(home)]
    # Python 3.10 and later have orig_argv
    original_words = getattr(sys, "orig_argv", [sys.executable, *sys.argv])
    python_words = original_words[1:]
    is_module = python_words[0].startswith("-")
    if is_module or not _is_gwen_program():
        words += ["python", *python_words]
    else:
        words += sys.argv
    return " ".join(map(shlex.quote, words))


_refuse_other_python()
_shorten_ctrl_c()
description = _set_up_blas()
