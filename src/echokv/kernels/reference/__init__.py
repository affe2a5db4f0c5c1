"""Every op in plain PyTorch: what the op means, short enough to read beside the paper.

The docstrings here are the ops' contracts; `kernels/triton` has the same names and signatures.
"""
