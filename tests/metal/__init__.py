"""An emulator for `mx.fast.metal_kernel`, which verifies Metal kernels without a Mac."""
