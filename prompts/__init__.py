"""Prompts and their answers: data files, chat layouts, chat templates, and the held-out side."""
