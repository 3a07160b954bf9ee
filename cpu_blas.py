"""
Sets up a fast BLAS and a fast heap for MLX on Linux CPUs. Import this file before mlx.

MLX's Linux wheel is linked against the reference BLAS (about 3 GFLOP/s in float32). The dynamic
loader binds a symbol to the first loaded library that exports it. So if OpenBLAS is loaded globally
before MLX, MLX's matmuls use OpenBLAS. In the OpenBLAS of the package `scipy-openblas32`, all
function names have a prefix. So a small library of two functions, which is compiled once into the
user's cache directory, forwards the plain names to the prefixed names. If this setup fails, MLX
uses its own BLAS, and one line on stderr gives the reason.

MLX calls malloc and free for every array. By default, glibc returns the memory of large arrays to
the operating system immediately and must request memory again for the next array, which takes more
time than the arithmetic. For example, swiglu and its gradient on 72 x 110 rows of width 768 take 90
ms instead of 30 ms. With the settings in this file, the heap never returns memory.

On macOS, MLX uses Accelerate, and no library is loaded. This file also sets some environment
variables, because MLX and the GPU driver read them only once. Variables that the user has already
set are not changed.

Every program imports this file first. So this file has two more tasks. If the user presses Ctrl-C
during the other imports, one line is printed instead of a traceback. If a program was started with
a Python that lacks Gwen's packages, as with `python3 train.py`, this file prints one line and ends
the program. This file imports only the standard library, and an old Python version must be able to
parse it.
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

ENVIRONMENT = {
    # macOS may stop a process whose GPU work delays the display. This setting makes macOS wait
    # longer (github.com/ml-explore/mlx/issues/3267).
    "AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1",
    # By default, MLX rounds the factors of float32 products to 10 bits on an M5. This setting
    # keeps float32 products in float32.
    "MLX_ENABLE_TF32": "0",
    # This setting makes MLX's attention use the same forward kernel with a gradient as without a
    # gradient. Otherwise, MLX 0.32.4 would compute scores in 16 bits if the mask is an array. Gwen
    # computes the gradient of attention itself.
    "MLX_SDPA_VJP_FALLBACK": "1",
}

OLDEST_PYTHON = (3, 11)  # the same version as requires-python in pyproject.toml

# The packages required in pyproject.toml, by module name. scipy-openblas32 is not included, because
# Gwen also works without it.
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

FORWARDING_SOURCE = """
#define FORWARD(name, real) \\
    void scipy_##name(int, int, int, int, int, int, \\
                      real, const real*, int, const real*, int, real, real*, int); \\
    void name(int order, int ta, int tb, int m, int n, int k, real alpha, const real* a, int lda, \\
              const real* b, int ldb, real beta, real* c, int ldc) { \\
        scipy_##name(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \\
    }
FORWARD(cblas_sgemm, float)
FORWARD(cblas_dgemm, double)
"""


def make_private_or_temporary_cache() -> Path:
    """
    Returns the cache directory, and creates it if it is missing.

    Libraries are loaded from this directory, so only this user may have write access to it. If
    other users have write access, or the directory cannot be created, this process uses a temporary
    directory instead, and a line on stderr gives the reason.
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
        reason = f"{cache} is not a directory that only you can write to (see chown, chmod 700)"
    except (OSError, RuntimeError) as error:  # RuntimeError if the user has no home directory
        reason = str(error)
    return _make_temporary_cache(reason)


def _print_to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be a closed pipe or a file on a full disk
        print(line, file=sys.stderr)


@functools.cache
def _make_temporary_cache(reason: str) -> Path:
    _print_to_stderr(f"gwen: {reason}; cached files are not kept for later runs")
    directory = tempfile.mkdtemp(prefix="gwen-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


# ---- the BLAS and the heap


def _set_up_and_describe_blas() -> str:
    """Sets environment variables, the heap and the BLAS, and returns a description of the BLAS."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if sys.platform != "linux":
        return "the platform's"
    try:
        if "mlx.core" in sys.modules:  # MLX is already bound to its own BLAS
            raise OSError("import Gwen's modules, such as train, before mlx")
        _keep_freed_memory()
        # OpenBLAS uses a single thread, because its threads spin while they wait. On two cores, of
        # which another process used one, a second thread made a decode step of the demo model 80
        # times slower (284 ms instead of 3.4 ms). On two free cores, a second thread would make the
        # step only a quarter faster.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        ctypes.CDLL(str(_load_openblas_and_build_forwarder()), mode=ctypes.RTLD_GLOBAL)
        return "OpenBLAS of scipy-openblas32"
    except OSError as error:
        _print_to_stderr(f"gwen: MLX uses its slow built-in BLAS ({error})")
        return "MLX's built-in reference BLAS (slow)"


def _keep_freed_memory() -> None:
    """Makes glibc allocate arrays of any size from a single heap that never shrinks."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # constants from glibc's malloc.h
        m_trim_threshold = -1
        m_mmap_max = -4
        m_arena_max = -8
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_arena_max, 1)


def _load_openblas_and_build_forwarder() -> Path:
    """
    Loads the OpenBLAS library, and compiles the forwarding library unless it already exists.

    Returns the path of the forwarding library. Raises OSError if the package scipy-openblas32 or a
    C compiler is missing, or if compiling fails.
    """
    try:
        import scipy_openblas32
    except ImportError as error:
        raise OSError("the package scipy-openblas32 is not installed") from error
    library = f"{scipy_openblas32.get_lib_dir()}/libscipy_openblas.so"
    # this library's function names have a prefix, so they do not replace those of MLX's BLAS
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)

    key = hashlib.sha256(f"{FORWARDING_SOURCE}{platform.machine()}".encode()).hexdigest()[:16]
    forwarding_library = make_private_or_temporary_cache() / f"blas-{key}.so"
    if forwarding_library.exists():
        return forwarding_library
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc or clang) is on the PATH")
    with tempfile.TemporaryDirectory(dir=forwarding_library.parent) as scratch:
        built = Path(scratch) / "forwarding.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(built)]
        result = subprocess.run(command, input=FORWARDING_SOURCE, capture_output=True, text=True)
        if result.returncode:
            reason = result.stderr.strip() or result.returncode
            raise OSError(f"{compiler} failed: {reason!r:.200}")
        # replacing is atomic, so two simultaneous first runs both end up with a complete file
        os.replace(built, forwarding_library)
    return forwarding_library


# ---- Gwen's programs


def _was_gwen_program_started() -> bool:
    """Whether the started program is one of Gwen's files, and not a user's own program."""
    return Path(__file__).resolve().parent in Path(sys.argv[0]).resolve().parents


def _install_short_ctrl_c_message() -> None:
    """Makes an uncaught Ctrl-C print one line instead of a traceback, in Gwen's own programs."""
    if not _was_gwen_program_started():
        return
    default_hook = sys.excepthook

    def print_interrupt_in_one_line(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _print_to_stderr("\nstopped by Ctrl-C")
        else:
            default_hook(kind, error, traceback)

    sys.excepthook = print_interrupt_in_one_line


def _exit_or_raise_unless_gwen_can_run() -> None:
    """
    Ends the process with one line and status 2 if this Python cannot run Gwen.

    For example, `python3 train.py` without uv starts the system's Python, which may lack Gwen's
    packages. In a user's own program, an ImportError with the same line as its message is raised
    instead.
    """
    version = sys.version_info[:2]
    missing = [
        package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None
    ]
    if version < OLDEST_PYTHON:
        problem = (
            f"{sys.executable} is Python {version[0]}.{version[1]}, "
            f"but Gwen needs Python 3.{OLDEST_PYTHON[1]} or later"
        )
    elif missing:
        problem = f"the packages {', '.join(missing)} are not installed for {sys.executable}"
    else:
        return

    is_checkout = (Path(__file__).resolve().parent / "pyproject.toml").is_file()
    if is_checkout:
        line = f"{problem}; start the program with: {_command_to_rerun_with_uv()}"
        if shutil.which("uv") is None:
            line += " (install uv from https://docs.astral.sh/uv/)"
    else:  # Gwen was installed from a wheel, but without the packages that it needs
        line = f"{problem}; install Gwen again, with the packages that it needs"

    if not _was_gwen_program_started():
        raise ImportError(line)
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def _command_to_rerun_with_uv() -> str:
    """The command that starts the same program with uv."""
    home = Path(__file__).resolve().parent
    words = ["uv", "run"]
    if Path.cwd() != home:
        words += ["--project", str(home)]
    # sys.orig_argv exists in Python 3.10 and later
    original_words = getattr(sys, "orig_argv", [sys.executable, *sys.argv])
    python_words = original_words[1:]
    is_module = python_words[0].startswith("-")
    if is_module or not _was_gwen_program_started():
        words += ["python", *python_words]
    else:
        words += sys.argv
    return " ".join(map(shlex.quote, words))


_exit_or_raise_unless_gwen_can_run()
_install_short_ctrl_c_message()
description = _set_up_and_describe_blas()
