"""The machine that Gwen runs on, its GPU and memory, and its connection to other machines."""
