"""Exchanges between the processes of a run; in a single process each of them is the identity."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Processes of the run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_reduce(t: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """``t`` reduced in place over all processes."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(t, op)
    return t


def all_reduce_min(number: int) -> int:
    """The least of an integer over all processes."""
    if world_size() == 1:
        return number
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return int(all_reduce(torch.tensor(number, device=device), dist.ReduceOp.MIN))


def gather_rows(rows: Tensor) -> Tensor:
    """Concatenates (n_r, ...) of all ranks in rank order; ranks may have different numbers of rows, or none."""
    if world_size() == 1:
        return rows
    count = rows.new_tensor([len(rows)], dtype=torch.int64)
    counts = [count.clone() for _ in range(world_size())]
    dist.all_gather(counts, count)
    sizes = [int(c.item()) for c in counts]
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [padded.clone() for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather_objects(value: Any) -> list[Any]:
    """One picklable object of each rank, in rank order."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered
