"""Functions that parse JSON and YAML, make text safe to print, and explain the names of TRL."""
