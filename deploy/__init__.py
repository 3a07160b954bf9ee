"""Formats for other programs, and the commands of an installed Gwen."""
