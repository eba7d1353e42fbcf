"""Softmax attention."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.mixers.base import Mixing, spread


class SoftmaxAttention(nn.Module):
    """Multi-head attention: Y = softmax(Q K^T / √d) V."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"embed_dim={dim} is not a multiple of num_heads={num_heads}")
        self.num_heads = num_heads
        self.head_shape = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, L, D) to three of (B, heads, L, D / heads)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def _attend(self, x: Tensor) -> Tensor:
        """(B, heads, L, D / heads)."""
        return F.scaled_dot_product_attention(*self._qkv(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.head_outputs(x).flatten(2))

    def head_outputs(self, x: Tensor) -> Tensor:
        return self._attend(x).transpose(1, 2)

    def _some(self, x: Tensor, max_heads: int | None) -> tuple[Tensor, ...]:
        """Queries, keys and values of at most so many heads."""
        heads = spread(self.num_heads, max_heads, x)
        return tuple(part[:, heads] for part in self._qkv(x))

    def _matrix(self, q: Tensor, k: Tensor, rows: Tensor | None = None) -> Tensor:
        q = q if rows is None else q[:, :, rows]
        return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)

    def mixing(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        q, k, _ = self._qkv(x)
        return self._matrix(q, k, rows)

    def decompose(self, x: Tensor, max_heads: int | None = None) -> list[Mixing]:
        q, k, v = self._some(x, max_heads)
        return [Mixing("attention", self._matrix(q, k), v, F.scaled_dot_product_attention(q, k, v))]
