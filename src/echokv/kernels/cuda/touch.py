"""Having the addresses of host rows translated before they are read."""

import ctypes

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer

MODULE = CudaModule("touch", threads=32)
KERNELS = ("touch_pages",)

PAGE_BYTES = 2 << 20


class TouchArguments(Arguments):
    """See touch.cu."""

    _fields_ = (
        ("from", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("page_bytes", ctypes.c_uint64),
    )


def touch_pages(host_rows: Tensor, device: torch.device) -> None:
    """Read a word of every 2 MiB of a layer's host rows.

    Random reads of more than about 1 GiB of host memory otherwise wait for addresses to be
    translated (docs/performance.md). It takes some microseconds of one small launch, to be hidden
    beside other work, and as long again until it helps.

    Args:
        host_rows: [N_H, row_bytes] uint8, host memory that the device can read.
        device: who will read them.
    """
    check_tensor("host_rows", host_rows, (None, None), host_rows.dtype)
    nbytes = host_rows.nbytes
    if nbytes < 16 or pointer(host_rows) % 16 != 0:
        raise ValueError(
            f"host_rows must start at a multiple of 16 and have 16 bytes or more,"
            f" they are {nbytes} bytes at {pointer(host_rows):#x}"
        )
    MODULE.launch(
        "touch_pages", touch_arguments(host_rows), device,
        blocks=-(-touches(nbytes) // MODULE.threads),
    )  # fmt: skip


def touch_arguments(host_rows: Tensor) -> TouchArguments:
    """As the kernel takes them."""
    return TouchArguments(pointer(host_rows), host_rows.nbytes, PAGE_BYTES)


def touches(nbytes: int) -> int:
    """Words that are read: one a page, and one more, as memory may start anywhere in a page."""
    return -(-nbytes // PAGE_BYTES) + 1
