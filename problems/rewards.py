"""The old address of `math_correct`, which is now in rewards/verifiers.py."""

from rewards.verifiers import math_correct

__all__ = ["math_correct"]
