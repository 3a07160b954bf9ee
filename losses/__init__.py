"""What a step minimizes, token by token, and how far a step may go."""
