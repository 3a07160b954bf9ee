"""The machine: its GPU and memory, and the other machines of a run."""
