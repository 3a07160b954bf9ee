"""What a run will need, and what its first steps promise."""
