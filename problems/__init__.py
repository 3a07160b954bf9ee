"""The old import path of `math_correct`, which users' files still use."""
