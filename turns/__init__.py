"""Turns: the tools and environments that a model may call, its calls, and the ids between them."""
