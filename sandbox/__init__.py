"""Processes that check hostile answers."""
