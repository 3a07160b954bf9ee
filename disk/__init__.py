"""What is on disk: Hugging Face directories, adapters, checkpoints and run directories."""
