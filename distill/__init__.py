"""Distillation: a teacher that scores the student's completions."""
