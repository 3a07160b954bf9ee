"""The old address of `math_correct`: rewards/verifiers.py has it now."""

from rewards.verifiers import math_correct

__all__ = ["math_correct"]
