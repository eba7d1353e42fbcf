"""Attention whose softmax is replaced by feature maps of queries and keys, linear in the tokens."""

from torch import Tensor

from backbones.mixers.attention import SoftmaxAttention
from backbones.mixers.base import Mixing

KEY_AXES = ("tokens", "channels")


class LinearAttention(SoftmaxAttention):
    """Y = ψ(Q) (ψ(K)^T V), linear in L: ψ is a softmax over the head's channels for Q, over ``key_axis`` for K.

    With ``key_axis="tokens"`` the rows of M = ψ(Q) ψ(K)^T sum to 1 (Shen et al. 2021); with "channels" they do not.
    """

    def __init__(self, dim: int, num_heads: int, key_axis: str = "tokens") -> None:
        super().__init__(dim, num_heads)
        if key_axis not in KEY_AXES:
            raise ValueError(f"key_axis={key_axis!r}; allowed: {', '.join(KEY_AXES)}")
        self.key_axis = key_axis

    def _features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q.softmax(-1), k.softmax(-2 if self.key_axis == "tokens" else -1)

    def _attend(self, x: Tensor) -> Tensor:
        return self._product(*self._qkv(x))

    def _product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self._features(q, k)
        return q @ (k.transpose(-1, -2).to(v.dtype) @ v).to(q.dtype)

    def _matrix(self, q: Tensor, k: Tensor, rows: Tensor | None = None) -> Tensor:
        q, k = self._features(q, k)
        return (q if rows is None else q[:, :, rows]) @ k.transpose(-1, -2)

    def decompose(self, x: Tensor, max_heads: int | None = None) -> list[Mixing]:
        q, k, v = self._some(x, max_heads)
        return [Mixing("attention", self._matrix(q, k), v, self._product(q, k, v), width=v.shape[-1])]
