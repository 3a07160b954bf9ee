"""What a task is made of: data, rewards, problems without end, the processes that check hostile answers."""
