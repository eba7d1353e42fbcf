"""Normalised images of any channels as pictures.

Shapes: B images, C channels, H x W pixels.
"""

import colorsys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

KEPT = ("image", "target", "predicted")
"""What dense tasks keep of an image."""
SHARE = 0.01
"""Of an image's values in a channel, what comes out black, and what comes out white, where these have a wide range."""


def pictures(images: Tensor, data: Any) -> Tensor:
    """(B, C, H, W) as a data module normalised them to (B, 3, H, W) RGB in [0, 1].

    One channel is shown grey, two as red and green, of more those that the data's ``pixels.rgb`` names, else the first
    three. Images of 8 bits are shown as they are, up to their highest value; of 16 bits, and floats, each image's
    channels are stretched between their 1st and 99th percentile.

    Args:
        images: of any device and float dtype.
        data: the data module, which has ``mean`` and ``std``, and of other than RGB of 8 bits ``pixels``.
    """
    mean, std = (torch.tensor(v).to(images)[:, None, None] for v in (data.mean, data.std))
    values = images * std + mean
    pixels = getattr(data, "pixels", None)
    rgb = getattr(pixels, "rgb", None)
    if rgb is not None:
        values = values[:, list(rgb)]
    values = values[:, :3]
    if pixels is not None and pixels.bits != 8:
        flat = values.float().flatten(2)
        low, high = flat.quantile(torch.tensor([SHARE, 1 - SHARE], device=flat.device), dim=2)[..., None, None]
        values = (values - low) / (high - low).clamp(min=1e-12)
    elif pixels is not None and pixels.max_value is not None:
        values = values * (255 / pixels.max_value)
    values = values.clamp(0, 1)
    if values.shape[1] == 2:
        values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
    return values.expand(-1, 3, -1, -1)


@cache
def class_colours(count: int) -> list[tuple[int, int, int]]:
    """Colours, 0 to 255, that tell classes apart: hues a golden section of the circle from one to the next."""
    hues = (0.08 + 0.618034 * i for i in range(count))
    values = (
        colorsys.hsv_to_rgb(hue % 1, (0.85, 0.55)[i // 3 % 2], (1.0, 0.75, 0.9)[i % 3]) for i, hue in enumerate(hues)
    )
    return [(round(255 * r), round(255 * g), round(255 * b)) for r, g, b in values]


def coloured(picture: np.ndarray, num_classes: int) -> np.ndarray:
    """(h, w, 3) uint8 as it is; a label map (h, w) in the classes' colours, black where there is no class."""
    if picture.ndim == 3:
        return picture
    colours = np.array([*class_colours(num_classes), (0, 0, 0)], np.uint8)
    return colours[np.where((picture >= 0) & (picture < num_classes), picture, num_classes)]


def kept_pictures(arrays: Mapping[str, np.ndarray], kind: str) -> list[dict[str, np.ndarray]]:
    """What a module keeps of the images that it is ``worst`` or ``best`` at, the most extreme first."""
    found: list[dict[str, np.ndarray]] = []
    while f"{kind}{len(found)}_image" in arrays:
        found.append({name: arrays[f"{kind}{len(found)}_{name}"] for name in (*KEPT, "score", "key")})
    return found
