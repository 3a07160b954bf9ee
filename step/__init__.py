"""A step: its groups, which rows go through the model together, and what the policy's loss sees of them."""
