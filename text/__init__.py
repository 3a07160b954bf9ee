"""Text from outside: made safe to print, parsed as JSON or YAML, translated from TRL's names."""
