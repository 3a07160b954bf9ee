"""What a run tells: its logs, console lines and warnings, its page, the trackers that follow it."""
