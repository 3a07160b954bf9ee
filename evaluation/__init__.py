"""Held-out evaluation: answers, what they are worth, and what else they measure."""
