"""All model computation except the matmuls, as MLX expressions and as equivalent GPU kernels."""
