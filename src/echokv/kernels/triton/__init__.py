"""Every op in portable Triton; contracts are the docstrings of the same names in `reference`.

Each module declares `COMPILE_SIGNATURES`: (kernel, {argument: type or constexpr}, launch options)
entries at DeepSeek-V3.2's sizes, from which a test cross-compiles every kernel for sm_90. A type is
Triton's, with ":16" after it for a size that is a multiple of 16.
"""
