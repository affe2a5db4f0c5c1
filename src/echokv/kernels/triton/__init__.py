"""Every op in portable Triton; contracts are the docstrings of the same names in `reference`.

Each module declares `COMPILE_SIGNATURES`, from which a test cross-compiles every kernel for sm_90.
"""
