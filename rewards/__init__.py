"""Built-in rewards, users' reward functions, verifiers, and the audit that tests rewards."""
