"""The benchmarks and their harness."""
