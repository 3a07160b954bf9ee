"""Prompts and their answers: data files, chat layouts, chat templates, and held-out examples."""
