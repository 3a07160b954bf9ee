"""Metal kernels verified without a Mac: an emulator for `mx.fast.metal_kernel`."""
