"""CUDA C++ where Triton can not reach the hardware; contracts are in `kernels/reference`."""
