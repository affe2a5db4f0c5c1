"""DeepGEMM's kernels behind the ops' contracts (`sgl-deep-gemm`, the `hopper` extra).

It compiles each kernel with nvcc at its first use (2 to 6 s each on the machine measured) and
keeps it in a cache in the home directory.
"""
