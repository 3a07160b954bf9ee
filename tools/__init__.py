"""Tools and environments that a model uses in turns."""
