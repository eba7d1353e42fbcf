"""SSD grows linearly with the sequence: operations counted, not timed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from backbones.ops import ssd


def arguments(length):
    g = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(1, length, h, 16, generator=g, requires_grad=True) for h in (2, 1, 1))
    dt = torch.rand(1, length, 2, generator=g) * 0.1
    return x, dt, -torch.rand(2, generator=g) - 1, B, C


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a forward pass keeps for its backward pass."""

    def __init__(self):
        self.total = 0
        super().__init__(self._pack, lambda t: t)

    def _pack(self, tensor):
        self.total += tensor.numel() * tensor.element_size()
        return tensor


@pytest.mark.parametrize("chunk", [64, 256])
def test_operations_and_memory_are_linear(chunk):
    flops, saved = [], []
    for length in (1024, 2048, 4096):
        inputs = arguments(length)
        kept = SavedBytes()
        with FlopCounterMode(display=False) as counter, kept:
            ssd(*inputs, chunk_size=chunk).sum().backward()
        flops.append(counter.get_total_flops())
        saved.append(kept.total)
    for counts in (flops, saved):
        assert counts[1] / counts[0] == pytest.approx(2, rel=0.05)
        assert counts[2] / counts[1] == pytest.approx(2, rel=0.05)
