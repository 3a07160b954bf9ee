"""Tools and environments that a model uses in conversations with several turns."""
