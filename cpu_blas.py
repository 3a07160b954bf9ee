"""
A fast BLAS and a fast heap for MLX on Linux CPUs: `import cpu_blas` before the first `import mlx`.

MLX's Linux wheel is linked against reference BLAS (about 3 GFLOP/s in float32). The dynamic loader
binds a symbol to the first library that offers it, so an OpenBLAS that is loaded globally before
MLX serves MLX's matmuls. That of the package `scipy-openblas32` prefixes its names. A library of
two jumps leads from the plain names to these; it is compiled once into the user's cache directory.
If that fails, MLX uses its own BLAS, and one line on stderr says why.

MLX calls malloc and free for every array. glibc returns arrays of megabytes to the kernel at once
and faults them in again, which costs more than the arithmetic (swiglu and its gradient on 72 x 110
rows of 768: 90 ms against 30). Here the heap keeps all memory that it once had.

On macOS MLX uses Accelerate, and no library is loaded. This file also sets what MLX and the GPU's
driver read once from the environment, unless the user has set it.

Every program imports this file first. So it also reduces a Ctrl-C during the other imports to one
line, and refuses in one line a Python without Gwen's packages, as `python3 train.py` may use.
Before MLX it imports only the standard library, and an old Python must be able to read it.
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

# With a display on, macOS may stop a process whose GPU work delays it; with the first of these it
# waits longer (github.com/ml-explore/mlx/issues/3267). The second keeps float32 products float32 on
# an M5, where MLX by default rounds the factors to 10 bits. With the third, attention under a
# gradient, which is ours, uses the same forward kernel as without one; for an array mask MLX 0.32.4
# would use scores in 16 bits there.
ENVIRONMENT = {
    "AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1",
    "MLX_ENABLE_TF32": "0",
    "MLX_SDPA_VJP_FALLBACK": "1",
}

OLDEST_PYTHON = (3, 11)  # pyproject.toml's requires-python
# the packages of pyproject.toml by the names of their modules; scipy-openblas32 may be missing
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
    The directory for files that Gwen can make again.

    Only this user may write there, since programs are loaded from it. If there is no such
    directory, this process makes a temporary one, and a line on stderr says so.
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
        if "mlx.core" in sys.modules:  # it has bound its BLAS already
            raise OSError("it was imported before gwen")
        _keep_freed_memory()
        # OpenBLAS's threads spin while they wait. Beside any other busy process that made one
        # decode step of the demo model 80 times slower (284 ms against 3.4, two cores). On two free
        # cores a second thread gains a quarter. So there is one thread.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        ctypes.CDLL(_build_jumps(), mode=ctypes.RTLD_GLOBAL)
        return "OpenBLAS of scipy-openblas32"
    except OSError as error:
        _print_error(f"gwen: MLX runs on its slow built-in BLAS ({error})")
        return "MLX's built-in reference BLAS (slow)"


def _keep_freed_memory() -> None:
    """Makes glibc serve every size from one heap and never shrink it, in this process."""
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
    Loads scipy-openblas32's library, and compiles the jumps into it unless they exist.

    Returns the path of the jumps. Raises OSError if something is missing, and names it.
    """
    try:
        import scipy_openblas32
    except ImportError as error:
        raise OSError("the package scipy-openblas32 is not installed") from error
    library = f"{scipy_openblas32.get_lib_dir()}/libscipy_openblas.so"
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # it has none of MLX's names

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
        os.replace(built, jumps)  # atomic: two first runs at once both end with a whole file
    return str(jumps)


# ---- programs of Gwen


def _is_gwen_program() -> bool:
    """Whether the process was started with a file of Gwen, not with a program that imports one."""
    return Path(__file__).resolve().parent in Path(sys.argv[0]).resolve().parents


def _shorten_ctrl_c() -> None:
    """In a program of Gwen, prints one line for a Ctrl-C that nobody catches."""
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
    Ends a program of Gwen in one line, with status 2, if this Python cannot run it.

    Without uv, `python3 train.py` runs the system's Python. In a user's own program the line is an
    ImportError.
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
    """The command of this process, for uv."""
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
