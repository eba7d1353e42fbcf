"""Builds timm's models with the options that their families have, and says what their errors mean."""

from difflib import get_close_matches
from typing import Any

import timm
import torch
from torch import Tensor, nn

from backbones.checkpoints import no_published_weights

REFUSALS = (AssertionError, RuntimeError, ValueError, IndexError)
"""What timm's families raise for images or sizes that they do not take."""


def create(
    name: str, img_size: int | tuple[int, int] | None, pretrained: bool, drop_path: float, in_chans: int = 3
) -> nn.Module:
    """timm's model without a classifier, for images of several sizes where its family can be built so.

    Raises:
        ValueError: for a name that timm does not know, an option that the family does not have, a size that it cannot
            be built for, or weights that are not to be had.
    """
    _check_name(name)
    options: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    if drop_path:
        options["drop_path_rate"] = drop_path
    if pretrained:
        options["pretrained"] = True
    if in_chans != 3:
        options["in_chans"] = in_chans
    try:
        try:  # families with positions resample them with this switch, Swin's builds its masks; others do not know it
            return timm.create_model(name, num_classes=0, dynamic_img_size=True, **options)
        except TypeError:
            return timm.create_model(name, num_classes=0, **options)
    except TypeError as error:
        refused = [key for key in options if f"'{key}'" in str(error)]
        if not refused:
            raise
        hint = {"img_size": "leave it null: the family has no size to set", "drop_path_rate": "set drop_path to 0"}
        hint["in_chans"] = "it takes images of 3 channels"
        key = "drop_path" if refused[0] == "drop_path_rate" else refused[0]
        raise ValueError(
            f"{key}={options[refused[0]]}: timm's {name} does not have this option; {hint[refused[0]]}"
        ) from None
    except (OSError, *REFUSALS) as error:
        if pretrained:
            raise ValueError(f"pretrained=true: {no_published_weights(name, error)}") from None
        if img_size is None:
            raise
        raise ValueError(
            f"img_size={img_size}: timm's {name} cannot be built for it ({reason(error)}); {_published(name)}"
        ) from None


def _check_name(name: str) -> None:
    """ValueError for what is no name of a model of timm's own, with what to write in its place."""
    if not name.strip():
        raise ValueError("name is empty; give one of timm's registry, such as vit_small_patch16_224")
    if ":" in name or "/" in name:
        last = name.replace("\\", "/").rpartition("/")[2].rpartition(":")[2]
        instead = (
            f"write name: {last}, of which pretrained: true takes the same weights"
            if timm.is_model(last)
            else "write the name of its architecture, and give its weights as a file (model.init_args.backbone_weights)"
        )
        raise ValueError(f"name={name!r} is an address, and a name in timm's registry is wanted; {instead}")
    architecture, _, tag = name.partition(".")
    if not timm.is_model(name):
        known = timm.list_models()
        start = architecture.lower().split("_")[0]
        near = get_close_matches(architecture.lower(), known, 5) or [k for k in known if start in k][:5]
        raise ValueError(f"name: timm has no model {name!r}; near it: {', '.join(near) or 'none'}")
    family = getattr(timm.model_entrypoint(name), "family", None)
    if family is not None:
        raise ValueError(
            f"name={name!r} is one of this project's own and none of timm's: write class_path: backbones."
            f"{family.__name__} with its own init_args in the place of backbones.TimmModel (see configs/backbone)"
        )
    if tag:
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
        if tag not in tags:
            raise ValueError(
                f"name={name!r}: timm's {architecture} has no weights of the tag {tag!r}; its tags: "
                f"{', '.join(tags) or 'none'}"
            )


def reason(error: Exception) -> str:
    """An error's first line, or what kind it is where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _published(name: str) -> str:
    config = timm.get_pretrained_cfg(name)
    return "leave it null" if config is None else f"its published size is {' x '.join(map(str, config.input_size[1:]))}"


def feature_info(model: nn.Module) -> list[dict[str, Any]]:
    """timm's, its blocks by the names that they have in the model: Gemma's leaves out what holds them."""
    names = [name for name, _ in model.named_modules()]
    found = []
    for info in model.feature_info:
        inside = [name for name in names if f".{name}".endswith(f".{info['module']}")]
        exact = info["module"] in names or len(inside) != 1
        found.append(dict(info) if exact else dict(info) | {"module": inside[0]})
    return found


def own_size(model: nn.Module) -> tuple[int, int]:
    """Height and width that a model of timm's was built for, or, where it takes any, those of its published weights."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or getattr(model, "_traits", {}).get(
        "img_size"
    )
    height, width = size or model.pretrained_cfg["input_size"][-2:]
    return int(height), int(width)


def size_refused(model: nn.Module, name: str, step: int, images: Tensor, error: Exception) -> str | None:
    """In words, why a model of timm's does not take images of a size; None where an error has another cause.

    Runs the model on blank images, one of that size and one of its own.

    Args:
        model: timm's.
        name: in timm's registry.
        step: pixels that a side should be a multiple of.
        images: (B, C, H, W) on which it failed.
        error: what it raised.
    """
    height, width = images.shape[-2:]
    if isinstance(error, torch.OutOfMemoryError) or _takes(model, images, (height, width)):
        return None
    size, why = own_size(model), reason(error)
    near = (-(-height // step) * step, -(-width // step) * step)
    if near not in ((height, width), size) and _takes(model, images, near):
        return (
            f"timm's {name} does not take images of {height} x {width} ({why}); it takes multiples of {step} pixels, "
            f"such as {near[0]} x {near[1]}"
        )
    if size != (height, width) and _takes(model, images, size):
        own = " x ".join(map(str, size))
        side = str(size[0]) if size[0] == size[1] else own
        return (
            f"timm's {name} does not take images of {height} x {width} ({why}); as it is built it takes {own}: set "
            f"data.init_args.crop, multicrop.global_size and multicrop.local_size to {side}, each that is in use"
        )
    if size == (height, width):
        return f"timm's {name} does not take the size it was built for, {height} x {width} ({why}); {_published(name)}"
    return None


def _takes(model: nn.Module, images: Tensor, size: tuple[int, int]) -> bool:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(images.new_zeros(1, images.shape[1], *size))
    except REFUSALS:
        return False
    finally:
        model.train(training)
    return True
