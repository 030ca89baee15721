"""The CUDA kernels of zerocast, `_cuda`, which zerocast finds by an entry point of this package."""
