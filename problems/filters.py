"""
Filters of logits, where a model samples and does not train: the penalty for repetition, and a user's own.

    --logits FILE.py:function       logits (N, V), ids so far (N, L) -> logits (N, V)
"""

import functools
from collections.abc import Callable

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from flags import Parser
from problems.rewards import load_function, place_of, raised

Filter = Callable[[mx.array, mx.array], mx.array]  # logits (N, V) and ids (N, L), see `sampler.History` -> logits


def add_filter_flags(parser: Parser) -> None:
    """Adds the flags that `load_filter` reads."""
    penalty = (
        "divide logits above 0 of tokens that prompt or completion hold, multiply those below, as transformers does"
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help=f"{penalty} (default: 1)")
    parser.add_argument("--logits", metavar="FILE.py:fn", help="your filter: fn(logits, ids) -> logits")


def load_filter(spec: str | None, penalty: float) -> Filter | None:
    """The penalty for repetition, then the user's filter; None without either. Raises ValueError for a bad one."""
    if not 0 < penalty < 1e6:
        raise ValueError(f"--repetition-penalty is {penalty:g}; it must be above 0, and 1 is none")
    own = None
    if spec is not None:
        _, fn = load_function("--logits", spec)
        own = functools.partial(_filtered, f"--logits {spec}{place_of(fn)}", fn)
    if penalty == 1:
        return own
    if own is None:
        return functools.partial(penalized, penalty=penalty)
    return lambda logits, ids: own(penalized(logits, ids, penalty), ids)


def _filtered(what: str, fn: Filter, logits: mx.array, ids: mx.array) -> mx.array:
    try:
        found = fn(logits, ids)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} {raised(error, fn)}") from error
    if not isinstance(found, mx.array) or found.shape != logits.shape:
        gave = f"the shape {found.shape}" if isinstance(found, mx.array) else f"a {type(found).__name__}"
        raise ValueError(f"{what} gave {gave}; return the logits as an mx.array of shape {logits.shape}")
    return found.astype(mx.float32)


def penalized(logits: mx.array, ids: mx.array, penalty: float) -> mx.array:
    """
    Logits (N, V) with those of the ids (N, L) nearer to never: divided by the penalty above 0, else times it.

    Source: CTRL, arXiv:1909.05858; transformers' RepetitionPenaltyLogitsProcessor.
    """
    seen = mx.zeros(logits.shape).at[mx.arange(len(ids))[:, None], mx.maximum(ids, 0)].add(ids >= 0) > 0
    return mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)
