"""
A fast BLAS and a fast heap for MLX on Linux CPUs: `import cpu_blas` before the first `import mlx`, and nothing else.

MLX's Linux wheel is linked against reference BLAS (about 3 GFLOP/s in float32). The dynamic loader binds a symbol
to the first library that offers it, so an OpenBLAS loaded globally before MLX serves MLX's matmuls: that of the package
`scipy-openblas32`, whose names have a prefix; a library of two jumps, compiled once into the user's cache directory,
stands before it. Without it MLX runs on its own, and one line on stderr says why.

MLX calls malloc and free for every array. glibc gives arrays of megabytes back to the kernel at once and faults them in
again, which costs more than the arithmetic (swiglu and its gradient on 72 x 110 rows of 768: 90 ms against 30); here
the heap keeps what it once had.

On macOS MLX uses Accelerate, and no library is loaded. What MLX and the GPU's driver read once from the environment is
set here; a value of the user's stays. As the first import of every program, this also makes a Ctrl-C during the others
one line. A Python that lacks Gwen's packages, as `python3 train.py` may be, is refused in one line too.
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

# With a display on, macOS may stop a process whose GPU work delays it; with the first of these it waits longer
# (github.com/ml-explore/mlx/issues/3267). The second keeps float32 products float32 on an M5, where MLX by
# default rounds what it multiplies to 10 bits. By the third the forward pass of attention is the same kernel under a
# gradient, which is ours, as without one; MLX 0.32.4 else has scores in 16 bits there for an array mask.
ENVIRONMENT = {
    "AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1",
    "MLX_ENABLE_TF32": "0",
    "MLX_SDPA_VJP_FALLBACK": "1",
}

OLDEST_PYTHON = (3, 11)  # pyproject.toml's requires-python
PACKAGES = {  # what pyproject.toml depends on, by the name of its module; scipy-openblas32 may be missing
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
    void scipy_##name(int, int, int, int, int, int, real, const real*, int, const real*, int, real, real*, int); \\
    void name(int order, int ta, int tb, int m, int n, int k, real alpha, const real* a, int lda, const real* b, \\
              int ldb, real beta, real* c, int ldc) { \\
        scipy_##name(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \\
    }
JUMP(cblas_sgemm, float)
JUMP(cblas_dgemm, double)
"""


def cache_directory() -> Path:
    """
    Where the user's machine keeps what Gwen can make again: a directory in which only this user may write, since
    programs are loaded from it. Where there is none, one for this process, and a line on stderr.
    """
    try:
        usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / usual, "gwen")
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = cache.lstat()
        if (
            stat.S_ISDIR(about.st_mode)
            and about.st_uid == os.getuid()
            and not about.st_mode & 0o022
        ):
            return cache
        why = f"{cache} is not yours alone (chown, chmod 700)"
    except (OSError, RuntimeError) as error:  # the second of a user without a home
        why = str(error)
    return _own_directory(why)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads, or the disk is full
        print(line, file=sys.stderr)


@functools.cache
def _own_directory(why: str) -> Path:
    _say(f"gwen: {why}; nothing is kept for later runs")
    directory = tempfile.mkdtemp(prefix="gwen-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _jumps() -> str:
    """The path of the jumps into scipy-openblas32's library, which is loaded. OSError says what is missing."""
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
        done = subprocess.run(command, input=JUMPS, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{compiler} failed: {(done.stderr.strip() or done.returncode)!r:.200}")
        os.replace(built, jumps)  # atomic: two first runs at once both end with a whole file
    return str(jumps)


def _keep_freed_memory() -> None:
    """Tells glibc to serve every size from one heap and never to shrink it, in the process's own allocator."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # from glibc's malloc.h
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_arena_max, 1)


def _load() -> str:
    """Loads the library and returns its description; prints one line where that fails."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if sys.platform != "linux":
        return "the platform's"
    try:
        if "mlx.core" in sys.modules:  # which has bound its BLAS already
            raise OSError("it was imported before gwen")
        _keep_freed_memory()
        # OpenBLAS's threads spin while they wait. Beside any other busy process that made one decode step of the
        # demo model 80 times slower (284 ms against 3.4, two cores), where two free cores gain a quarter: so one.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        ctypes.CDLL(_jumps(), mode=ctypes.RTLD_GLOBAL)
        return "OpenBLAS of scipy-openblas32"
    except OSError as error:
        _say(f"gwen: MLX runs on its slow built-in BLAS ({error})")
        return "MLX's built-in reference BLAS (slow)"


def _say_ctrl_c_in_one_line() -> None:
    """Where a program of ours runs, a Ctrl-C that nobody catches is one line, even during the other imports."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _say("\nstopped by Ctrl-C")
        else:
            show(kind, error, where)

    if _is_our_program():
        sys.excepthook = hook


def _is_our_program() -> bool:
    """Whether the process was started with a file of ours, and not with a program that imports one."""
    return Path(__file__).resolve().parent in Path(sys.argv[0]).resolve().parents


def _refuse_other_python() -> None:
    """
    Ends a program of ours in one line, with status 2, where this Python cannot run it: without uv,
    `python3 train.py` runs the system's Python. In a user's own program the line is an ImportError.
    """
    version = sys.version_info[:2]
    missing = [
        package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None
    ]
    if version < OLDEST_PYTHON:
        problem = f"{sys.executable} is Python {version[0]}.{version[1]}, and Gwen needs 3.{OLDEST_PYTHON[1]} or later"
    elif missing:
        problem = f"{sys.executable} has no {', '.join(missing)}"
    else:
        return

    home = Path(__file__).resolve().parent
    if (home / "pyproject.toml").is_file():
        words = ["uv", "run"]
        if Path.cwd() != home:
            words += ["--project", str(home)]
        python_words = getattr(sys, "orig_argv", [sys.executable, *sys.argv])[
            1:
        ]  # Python 3.10 and later have it
        is_module_or_foreign = python_words[0].startswith("-") or not _is_our_program()
        words += ["python", *python_words] if is_module_or_foreign else sys.argv
        line = f"{problem}; start it with: {' '.join(map(shlex.quote, words))}"
        if shutil.which("uv") is None:
            line += " (uv is at https://docs.astral.sh/uv/)"
    else:  # a wheel, which an installer left without its packages
        line = f"{problem}; install Gwen again, with the packages that it needs"

    if not _is_our_program():
        raise ImportError(line)
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


_refuse_other_python()
_say_ctrl_c_in_one_line()
description = _load()
