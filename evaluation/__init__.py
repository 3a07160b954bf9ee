"""Held-out evaluation: the answers, their grades, and other measurements of them."""
