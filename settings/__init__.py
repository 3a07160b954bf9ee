"""Where the settings of a run come from, and which of them it takes."""
