"""
Means over problems and their confidence intervals, with unreadable values left out.

This file does not cover how an evaluation's figures are written in words (eval_record.py).
"""

import math

import numpy as np

WILSON_Z = 1.96  # the 97.5% point of the normal distribution


def mean(values: np.ndarray) -> float | None:
    """The mean of the readable values; None if there are none."""
    readable = values[~np.isnan(values)]
    return float(readable.mean()) if readable.size else None


def half_width(by_problem: np.ndarray) -> float | None:
    """
    Half the width of the 95% confidence interval of a mean over problems; None below two values.

    For zeros and ones this is the distance to the farther end of Wilson's interval, which keeps a
    width when all values are equal. Otherwise it is Student's t, and None if all values are equal,
    because they tell no width.
    """
    readable = by_problem[~np.isnan(by_problem)]
    if readable.size < 2:
        return None
    if np.isin(readable, (0, 1)).all():
        return _wilson_half_width(readable)

    deviation = readable.std(ddof=1)
    width = student_t(readable.size - 1) * deviation / math.sqrt(readable.size)
    return float(width) or None


def _wilson_half_width(outcomes: np.ndarray) -> float:
    """The distance from the mean of zeros and ones to the farther end of Wilson's interval."""
    fraction = outcomes.mean()
    size = WILSON_Z**2 / outcomes.size
    center = (fraction + size / 2) / (1 + size)
    variance = size * (fraction * (1 - fraction) + size / 4)
    return float(abs(fraction - center) + math.sqrt(variance) / (1 + size))


def student_t(degrees: int) -> float:
    """
    The 97.5% point of Student's t, within 0.15%.

    Source: Abramowitz and Stegun, 26.7.5, from three degrees of freedom on.
    """
    if degrees < 3:
        return (12.706, 4.303)[degrees - 1]
    return (
        1.95996
        + 2.37227 / degrees
        + 2.8225 / degrees**2
        + 2.55585 / degrees**3
        + 1.58953 / degrees**4
    )
