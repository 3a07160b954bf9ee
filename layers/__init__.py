"""The computation between and after a model's matmuls: expressions, and equivalent kernels."""
