"""Worker processes that check answers, which may contain attacks."""
