"""
Computes means over problems and confidence intervals of these means.

Unreadable values, which are nan, are left out. eval_record.py describes the figures in words.
"""

import math

import numpy as np

FEWEST_FOR_INTERVAL = 5  # a mean over fewer problems is shown without an interval
WILSON_Z = 1.96  # the 97.5% quantile of the normal distribution


def mean_ignoring_nan(values: np.ndarray) -> float | None:
    """The mean of the values that are not nan, or None if there are no such values."""
    readable = values[~np.isnan(values)]
    return float(readable.mean()) if readable.size else None


def confidence_half_width(value_by_problem: np.ndarray) -> float | None:
    """
    Half the width of the 95% confidence interval of a mean over problems.

    If every value is 0 or 1, the result is the distance from the mean to the farther end of the
    Wilson interval. This distance is above 0 even if all values are equal. For other values, the
    interval is based on Student's t-distribution.

    value_by_problem: one value for each problem. Values that are nan are left out.

    Returns None if there are fewer than two values, or if all values are equal but not 0 or 1.
    """
    readable = value_by_problem[~np.isnan(value_by_problem)]
    if readable.size < 2:
        return None
    if np.isin(readable, (0, 1)).all():
        return _distance_to_farther_wilson_end(readable)

    deviation = readable.std(ddof=1)
    width = student_t_quantile(readable.size - 1) * deviation / math.sqrt(readable.size)
    return float(width) or None


def _distance_to_farther_wilson_end(outcomes: np.ndarray) -> float:
    """The distance from the mean of zeros and ones to the farther end of the Wilson interval."""
    fraction = outcomes.mean()
    size = WILSON_Z**2 / outcomes.size
    center = (fraction + size / 2) / (1 + size)
    variance = size * (fraction * (1 - fraction) + size / 4)
    return float(abs(fraction - center) + math.sqrt(variance) / (1 + size))


def student_t_quantile(degrees_of_freedom: int) -> float:
    """
    The 97.5% quantile of Student's t-distribution, with an error of at most 0.15%.

    Source of the formula for three or more degrees of freedom: Abramowitz and Stegun, 26.7.5.
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
