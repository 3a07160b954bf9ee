"""Evaluates a model on held-out problems by sampling answers, grading them and measuring them."""
