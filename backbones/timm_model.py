"""Any timm model with patch tokens or a feature map, behind the Backbone interface."""

from collections.abc import Sequence

import timm
import torch
from torch import Tensor, nn

from backbones.base import Backbone, BlockView, Features


class TimmModel(Backbone):
    """A timm model; its blocks are the stages that ``forward_intermediates`` of timm lists.

    Where a model has no class token, ``Features.cls`` is the mean over the patches. Mixing matrices are read from
    timm's own attention modules and are an error for models without them.

    Args:
        name: name in timm's registry.
        img_size: None keeps the model's own; only for models that take it.
        pretrained: load timm's published weights.
        drop_path: stochastic depth rate.

    Raises:
        ValueError: where timm does not know the name or the model offers no intermediate features.
    """

    def __init__(
        self, name: str, img_size: int | None = None, pretrained: bool = False, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        if not timm.is_model(name):
            near = timm.list_models(f"*{name.split('_')[0]}*")[:5]
            raise ValueError(f"timm has no model {name!r}; near it: {', '.join(near) or 'none'}")
        sizes = {"drop_path_rate": drop_path} | ({} if img_size is None else {"img_size": img_size})
        try:  # transformers resample their positions with this switch; other families do not know it
            model = timm.create_model(name, pretrained, num_classes=0, dynamic_img_size=True, **sizes)
        except TypeError:
            model = timm.create_model(name, pretrained, num_classes=0, **sizes)
        if not hasattr(model, "forward_intermediates"):
            raise ValueError(f"timm's {name} offers no forward_intermediates, so it has no feature maps to probe")
        self.model = model
        self.weights_source = f"timm's {name}" if pretrained else "random initialisation"
        self.embed_dim = model.num_features
        self.num_prefix = getattr(model, "num_prefix_tokens", 0)
        self.has_cls = getattr(model, "cls_token", None) is not None
        embed = getattr(model, "patch_embed", None)
        patch = getattr(embed, "patch_size", None)
        reduction = model.feature_info[-1]["reduction"]
        self.patch_size = patch[0] if isinstance(patch, tuple) and len({reduction, patch[0]}) == 1 else reduction
        self.depth = len(model.feature_info)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Through timm's own switch. ValueError for models that have none."""
        if not hasattr(self.model, "set_grad_checkpointing"):
            raise ValueError(f"timm's {type(self.model).__name__} has no gradient checkpointing")
        self.model.set_grad_checkpointing(enable)
        super().set_grad_checkpointing(enable)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def _features(self, images: Tensor, wanted: Sequence[int]) -> dict[int, Features]:
        order = sorted(set(wanted))
        options = {"return_prefix_tokens": True} if self.num_prefix else {}
        outputs = self.model.forward_intermediates(
            images,
            indices=order,
            norm=bool(self.num_prefix),
            output_fmt="NCHW",
            intermediates_only=True,
            **options,
        )
        found = {}
        for i, output in zip(order, outputs, strict=True):
            if not self.num_prefix:
                found[i] = Features(output.mean((2, 3)), output)
                continue
            patches, prefix = output
            first = int(self.has_cls)
            cls = prefix[:, 0] if first else patches.mean((2, 3))
            found[i] = Features(cls, patches, prefix[:, first:] if self.num_prefix > first else None)
        return found

    def forward_intermediates(self, images: Tensor, n: int = 1) -> list[Features]:
        wanted = self._last_blocks(n)
        features = self._features(images, wanted)
        return [features[i] for i in wanted]

    def inspect(self, images: Tensor, blocks: Sequence[int] = (-1,), mixing: bool = True) -> list[BlockView]:
        wanted = [self._block_index(b) for b in blocks]
        if not mixing:
            features = self._features(images, wanted)
            return [BlockView(features[i], None) for i in wanted]
        with _AttentionMaps(self.model) as attention:
            features = self._features(images, range(self.depth))
        if not self.has_cls:
            raise ValueError(f"{type(self.model).__name__} has no class token, so no CLS row of a mixing matrix")
        h, w = features[wanted[0]].patches.shape[-2:]
        views = []
        for i in wanted:
            rows = attention.maps[i][:, :, : self.num_prefix, self.num_prefix :].transpose(1, 2).unflatten(-1, (h, w))
            views.append(BlockView(features[i], rows[:, :1], rows[:, 1:] if self.num_prefix > 1 else None))
        return views

    def token_mixing(self, images: Tensor, block: int = -1) -> Tensor:
        wanted = self._block_index(block)
        with _AttentionMaps(self.model) as attention:
            self.model(images)
        return attention.maps[wanted]


class _AttentionMaps:
    """While open, timm's attention modules take their explicit path and their maps are kept, in forward order."""

    def __init__(self, model: nn.Module) -> None:
        self.maps: list[Tensor] = []
        self._modules = [m for m in model.modules() if hasattr(m, "fused_attn") and hasattr(m, "attn_drop")]
        if not self._modules:
            raise ValueError(f"{type(model).__name__} has no attention modules, so no token-mixing matrix")

    def __enter__(self) -> "_AttentionMaps":
        self._fused = [m.fused_attn for m in self._modules]
        self._hooks = []
        for module in self._modules:
            module.fused_attn = False
            self._hooks.append(module.attn_drop.register_forward_pre_hook(self._keep))
        return self

    def _keep(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.maps.append(inputs[0])

    def __exit__(self, *_: object) -> None:
        for module, fused, hook in zip(self._modules, self._fused, self._hooks, strict=True):
            module.fused_attn = fused
            hook.remove()
