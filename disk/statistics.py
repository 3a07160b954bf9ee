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

    For zeros and ones, this is the distance from the mean to the farther end of Wilson's interval,
    which has a width even if all values are equal. For other values, the interval is Student's. If
    these are all equal, the result is None, because they do not determine a width.
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


def student_t(degrees_of_freedom: int) -> float:
    """
    The 97.5% point of Student's t for these degrees of freedom, within 0.15%.

    Source for three degrees of freedom and more: Abramowitz and Stegun, 26.7.5.
    """
    if degrees_of_freedom < 3:
        return (12.706, 4.303)[degrees_of_freedom - 1]
    return (
        1.95996
        + 2.37227 / degrees_of_freedom
        + 2.8225 / degrees_of_freedom**2
        + 2.55585 / degrees_of_freedom**3
        + 1.58953 / degrees_of_freedom**4
    )
