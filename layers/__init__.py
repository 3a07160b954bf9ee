"""What a model computes between and after its matmuls: expressions, and kernels that equal them."""
