"""What a model computes between its matmuls and after them: expressions, and the kernels that equal them."""
