"""How a run begins, from Python or from a command, one seed or several, and what happens when it is stopped."""
