"""What kernels are told of a pass's rows: the structs of schedule.cuh and tiles.cuh."""

import ctypes

from echokv.kernels.cuda.launch import Arguments

TILE_ROWS, UNIT_TOKENS = 8, 128
"""Rows that tiles.cuh scores together at most, and keys that a unit of its work has."""


class Contexts(Arguments):
    """See schedule.cuh."""

    _fields_ = (
        ("lens", ctypes.c_void_p),
        ("rows", ctypes.c_uint32),
        ("width", ctypes.c_uint32),
    )


class Rows(Arguments):
    """See tiles.cuh."""

    _fields_ = (("contexts", Contexts), ("requests", ctypes.c_void_p))
