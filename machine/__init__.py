"""The machine that Gwen runs on, its GPU and memory, and the link to a run's other machines."""
