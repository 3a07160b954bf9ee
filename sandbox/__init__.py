"""Processes that check answers, which may be hostile."""
