"""Memory that a batch's images are written to and stay in, from the worker to the device."""

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

Buffers = dict[str, Tensor | list[Tensor]]
"""A batch's entries whose rows are written one by one: (n, ...) tensors, or lists of these."""
Rows = dict[str, Any]
"""One sample's rows of these buffers: numpy arrays (...), or lists of these, which share the buffers' memory."""


def allocate(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.uint8) -> list[Tensor]:
    """Tensors in one piece of memory: a shared one inside a worker, so that handing them over copies nothing."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    if get_worker_info() is None or not sum(sizes):
        memory = torch.empty(sum(sizes), dtype=torch.uint8)
    else:
        memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(sum(sizes)))
        _fault_in(memory)
    return [piece.view(dtype).view(shape) for piece, shape in zip(memory.split(sizes), shapes, strict=True)]


def _fault_in(memory: Tensor) -> None:
    """Asks Linux for all pages at once, which costs less than faulting them in one by one."""
    if sys.platform == "linux":
        populate_write = 23  # MADV_POPULATE_WRITE; kernels before 5.14 refuse it, and then nothing is lost
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), ctypes.c_int(populate_write)
        )


def rows_of(buffers: Buffers, row: int) -> Rows:
    """One sample's rows."""
    return {
        name: [one[row].numpy() for one in buffer] if isinstance(buffer, list) else buffer[row].numpy()
        for name, buffer in buffers.items()
    }


def first_rows(buffers: Buffers, count: int) -> Buffers:
    """The buffers without the rows from ``count`` on, which were not written."""
    return {
        name: [one[:count] for one in buffer] if isinstance(buffer, list) else buffer[:count]
        for name, buffer in buffers.items()
    }
