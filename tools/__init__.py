"""Tools and environments that a model uses in conversations of several turns."""
