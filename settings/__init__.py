"""Reads the settings of a run from flags, the environment and recipes, and checks the settings."""
