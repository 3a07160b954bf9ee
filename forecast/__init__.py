"""Estimates of what a run will need, and trials of its first steps."""
