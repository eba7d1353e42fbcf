"""Named sizes in timm's registry, with what its users expect: ``timm.create_model("vim_small_patch16_224")``."""

import sys
from collections.abc import Sequence
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import FeatureInfo, PretrainedCfg, register_model
from torch import Tensor, nn

from backbones.base import Backbone, Stream

# what timm.create_model passes to every entry point; they mean nothing without published timm weights
_TIMM_ONLY = ("cache_dir", "scriptable", "exportable", "no_jit")


# what timm's training script passes, mostly 0
_DROPOUTS = {"drop_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate", "patch_drop_rate", "drop_block_rate"}


class FeatureExtractor(nn.Module):
    """What ``features_only=True`` returns: images (B, C, H, W) to a list of maps (B, D_i, h_i, w_i).

    Args:
        backbone: what runs.
        out_indices: numbers of blocks or stages (negative ones count from the end), or how many of the last ones.
        stream: see :meth:`Backbone.forward_intermediates`.

    Attributes:
        feature_info: timm's, with ``channels()``, ``reduction()`` and ``module_name()``.
    """

    def __init__(self, backbone: Backbone, out_indices: int | Sequence[int], stream: Stream = "published") -> None:
        super().__init__()
        self.backbone, self.out_indices, self.stream = backbone, backbone.block_indices(out_indices), stream
        backbone.resolve_stream(stream)
        self.feature_info = FeatureInfo(backbone.feature_info, self.out_indices)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """As the backbone's."""
        self.backbone.set_grad_checkpointing(enable)

    def forward(self, images: Tensor) -> list[Tensor]:
        return [f.patches for f in self.backbone.forward_intermediates(images, self.out_indices, self.stream)]


def register_sizes(family: type[Backbone], **sizes: dict[str, Any]) -> None:
    """Registers ``name = family(**arguments)`` for each size, in the module that defines the family."""
    for name, arguments in sizes.items():
        entry = _entry_point(family, name, arguments)
        setattr(sys.modules[family.__module__], name, entry)
        register_model(entry)


def _entry_point(family: type[Backbone], name: str, arguments: dict[str, Any]) -> Any:
    def create(
        pretrained: bool = False, features_only: bool = False, out_indices: int | Sequence[int] | None = None,
        global_pool: str | None = None, dynamic_img_size: bool = True, pretrained_cfg: Any = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None, **overrides: Any,
    ) -> Backbone | FeatureExtractor:  # fmt: skip
        if pretrained:
            raise ValueError(f"{name}: no weights are published through timm; use backbones.weights.load")
        if not dynamic_img_size:
            raise ValueError(f"{name}: dynamic_img_size=False is not allowed; every size that fits the patch is taken")
        if out_indices is not None and not features_only:
            raise ValueError(f"{name}: out_indices={out_indices} means nothing without features_only=True")
        for key in _TIMM_ONLY:
            overrides.pop(key, None)
        for key in _DROPOUTS & overrides.keys():
            if rate := overrides.pop(key):
                raise ValueError(f"{name}: {key}={rate}; these backbones have no dropout, only 0 is allowed")
        if "drop_path_rate" in overrides:
            overrides["drop_path"] = overrides.pop("drop_path_rate")
        given = _given_cfg(name, pretrained_cfg, pretrained_cfg_overlay)
        if (given.get("num_classes") or 0) > 0:  # these two are defaults of the model's, as in timm
            overrides.setdefault("num_classes", given["num_classes"])
        if "input_size" in given:
            overrides.setdefault("in_chans", given["input_size"][0])
        model = family(**{**arguments, **overrides})
        if global_pool is not None:
            model.reset_classifier(model.num_classes, global_pool)
        model.pretrained_cfg = model.default_cfg = _default_cfg(model, {**arguments, **overrides}) | given
        if not features_only:
            return model
        pyramid = len({info["reduction"] for info in model.feature_info}) > 1
        return FeatureExtractor(model, (model.depth if pyramid else 3) if out_indices is None else out_indices)

    create.family = family  # type: ignore[attr-defined]
    create.__name__ = create.__qualname__ = name
    create.__module__ = family.__module__
    create.__doc__ = f"{family.__name__} with {arguments}."
    return create


def _given_cfg(name: str, config: Any, overlay: dict[str, Any] | None) -> dict[str, Any]:
    """What timm's two arguments say, the overlay above. ValueError for a tag of weights, or a key unknown to timm."""
    if isinstance(config, str) and config:
        raise ValueError(f"{name}.{config}: no weights are published through timm, so there are no tags; leave it out")
    if isinstance(config, PretrainedCfg):
        plain = PretrainedCfg()
        config = {k: v for k, v in vars(config).items() if v != getattr(plain, k)}
    given = {**(config or {}), **(overlay or {})}
    allowed = sorted(vars(PretrainedCfg()))
    if unknown := sorted(given.keys() - set(allowed)):
        raise ValueError(f"{name}: pretrained_cfg has {unknown[0]!r}; allowed: {', '.join(allowed)}")
    return given


def _default_cfg(model: Backbone, arguments: dict[str, Any]) -> dict[str, Any]:
    """How timm's data pipeline should feed the model: ImageNet's statistics, bicubic 256 to a crop of 224."""
    size = arguments.get("img_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return {
        "num_classes": model.num_classes, "input_size": (arguments.get("in_chans", 3), height, width),
        "fixed_input_size": False, "interpolation": "bicubic", "crop_pct": 224 / 256,
        "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD, "classifier": "head",
        "first_conv": "patch_embed.proj", "pool_size": None,
    }  # fmt: skip
