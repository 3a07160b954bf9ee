"""Export formats for other programs, and the `gwen` command of an installed Gwen."""
