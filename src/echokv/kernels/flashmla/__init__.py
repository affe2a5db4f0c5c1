"""FlashMLA's kernels behind the ops' contracts (`sgl-flash-mla`, the `hopper` extra)."""
