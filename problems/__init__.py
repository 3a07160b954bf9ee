"""The old address of `math_correct`, which users' files import."""
