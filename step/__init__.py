"""The parts of a training step, from the generation of samples to the loss."""
