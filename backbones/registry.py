"""Named sizes in timm's registry: ``timm.create_model("vim_small_patch16_224")``."""

import sys
from typing import Any

from timm.models import register_model

from backbones.base import Backbone

# what timm.create_model passes to every entry point; they mean nothing without published timm weights
_TIMM_ONLY = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "scriptable", "exportable", "no_jit")


def register_sizes(family: type[Backbone], **sizes: dict[str, Any]) -> None:
    """Registers ``name = family(**arguments)`` for each size, in the module that defines the family."""
    for name, arguments in sizes.items():
        entry = _entry_point(family, name, arguments)
        setattr(sys.modules[family.__module__], name, entry)
        register_model(entry)


def _entry_point(family: type[Backbone], name: str, arguments: dict[str, Any]) -> Any:
    def create(pretrained: bool = False, num_classes: int = 0, **overrides: Any) -> Backbone:
        if pretrained:
            raise ValueError(f"{name}: no weights are published through timm; use backbones.weights.load")
        if num_classes:
            raise ValueError(
                f"{name}: num_classes={num_classes}; these backbones carry no classifier, only 0 is allowed"
            )
        for key in _TIMM_ONLY:
            overrides.pop(key, None)
        if "drop_path_rate" in overrides:
            overrides["drop_path"] = overrides.pop("drop_path_rate")
        return family(**{**arguments, **overrides})

    create.__name__ = create.__qualname__ = name
    create.__module__ = family.__module__
    create.__doc__ = f"{family.__name__} with {arguments}."
    return create
