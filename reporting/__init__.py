"""The reports of a run: logs, console lines, warnings, the verdict, the page, and trackers."""
