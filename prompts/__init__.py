"""Prompts and their answers: files, layouts of chats, chat templates, the held-out side."""
