"""DINO's projection head. Parameter names are DINO's."""

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn


class WeightNormLinear(nn.Module):
    """A bias-free linear layer with weight g · v / ‖v‖ per output."""

    def __init__(self, in_dim: int, out_dim: int, train_norm: bool) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out_dim, 1), requires_grad=train_norm)
        self.weight_v = nn.Parameter(trunc_normal_(torch.empty(out_dim, in_dim), std=0.02))

    def prototypes(self) -> Tensor:
        """The weight (out_dim, in_dim), by the operation behind torch's own weight normalisation."""
        return torch._weight_norm(self.weight_v, self.weight_g, 0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.prototypes())


class DINOHead(nn.Module):
    """MLP to a bottleneck, L2 normalisation, weight-normalised prototypes.

    Args:
        in_dim: width of the embedding.
        out_dim: number of prototypes.
        hidden_dim: width of the MLP.
        bottleneck_dim: width before the prototypes.
        num_layers: linear layers of the MLP, at least 1.
        use_bn: batch normalisation in the MLP.
        norm_last_layer: keep the prototypes' norms at 1.
    """

    def __init__(
        self, in_dim: int, out_dim: int = 65536, hidden_dim: int = 2048, bottleneck_dim: int = 256,
        num_layers: int = 3, use_bn: bool = False, norm_last_layer: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"head num_layers={num_layers} must be at least 1")
        widths = [in_dim] + [hidden_dim] * (num_layers - 1) + [bottleneck_dim]
        layers: list[nn.Module] = []
        for i, (fan_in, fan_out) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            layers.append(nn.Linear(fan_in, fan_out))
            if i < num_layers - 1:
                layers += ([nn.BatchNorm1d(fan_out)] if use_bn else []) + [nn.GELU()]
        self.mlp = nn.Sequential(*layers) if num_layers > 1 else layers[0]
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        self.last_layer = WeightNormLinear(bottleneck_dim, out_dim, train_norm=not norm_last_layer)

    def bottleneck(self, x: Tensor) -> Tensor:
        """(B, in_dim) to unit vectors (B, bottleneck_dim), whose products with the prototypes are the logits."""
        return F.normalize(self.mlp(x), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_dim) to (B, out_dim) logits."""
        return self.last_layer(self.bottleneck(x))
