"""Reports on a run through logs, console lines, warnings, a verdict, an HTML page and trackers."""
