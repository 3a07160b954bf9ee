"""Text from outside: made safe to print, parsed as JSON or YAML, or translated from TRL's names."""
