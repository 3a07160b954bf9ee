"""The old address of `math_correct`, which files of users import."""
