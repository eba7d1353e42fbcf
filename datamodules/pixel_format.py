"""What images consist of: channels, bits, and what is known of their values.

Shapes: H x W pixels, C channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from datamodules.samples import IMAGE_FIELDS

MOST_CHANNELS = 512
"""That OpenCV takes."""
SCALES = {8: 255.0, 16: 65535.0, 32: 1.0}
"""By bits: what values are divided by before mean and std are applied."""


@dataclass(frozen=True)
class PixelFormat:
    """Images of C channels with integers of 8 or 16 bits, or floats of 32, in each.

    Three channels of 8 bits are ordinary images, and in three channels of any kind saturation, hue and grey values are
    those of RGB. What differs is decoded to (H, W, C) uint8, uint16 or float32, and leaves the workers as uint8 (8
    bits) or float32 (16 and 32) in its own units.

    Args:
        in_chans: C.
        bits: 8, 16, or 32 for floats, which are taken as they are.
        max_value: the highest value there is, where that is not what the bits allow, such as 4095 of cameras of 12
            bits; what changed brightness and bicubic overshoot are cut to, and what solarize turns values about. Floats
            have none unless it is said, and are then neither cut nor solarized.
        rgb: numbers of the channels that pictures show as red, green and blue; None for grey of one, and the first
            three of more.
        pages: of a TIFF file with several: ``one`` refuses it, ``bands`` takes each as a channel.
    """

    in_chans: int = 3
    bits: Literal[8, 16, 32] = 8
    max_value: float | None = None
    rgb: tuple[int, int, int] | None = None
    pages: Literal["one", "bands"] = "one"

    def __post_init__(self) -> None:
        if not 1 <= self.in_chans <= MOST_CHANNELS:
            raise ValueError(f"in_chans={self.in_chans}; allowed: 1 to {MOST_CHANNELS}")
        if self.bits not in SCALES:
            raise ValueError(f"bits={self.bits}; allowed: 8, 16, and 32 for floats")
        if self.pages not in ("one", "bands"):
            raise ValueError(f"pages={self.pages!r}; allowed: one, bands")
        most = self.scale if self.bits < 32 else np.inf
        if self.max_value is not None and not 0 < self.max_value <= most:
            raise ValueError(f"max_value={self.max_value:g} with bits={self.bits}; allowed: above 0, up to {most:g}")
        if self.rgb is not None and (len(self.rgb) != 3 or not all(0 <= c < self.in_chans for c in self.rgb)):
            raise ValueError(
                f"rgb={list(self.rgb)} with in_chans={self.in_chans}; wanted three of the channels 0 to "
                f"{self.in_chans - 1}"
            )

    @property
    def plain(self) -> bool:
        """Whether these are ordinary images, 8 bits in RGB with nothing said of their range."""
        return self.in_chans == 3 and self.bits == 8 and self.max_value is None

    @property
    def dtype(self) -> np.dtype:
        """Of decoded images."""
        return np.dtype({8: np.uint8, 16: np.uint16, 32: np.float32}[self.bits])

    @property
    def buffer(self) -> torch.dtype:
        """Of what leaves the workers. torch can do little with uint16, and resampled values lie between integers."""
        return torch.uint8 if self.bits == 8 else torch.float32

    @property
    def scale(self) -> float:
        """255, 65535, or 1 for floats: mean and std are those of value / scale."""
        return SCALES[self.bits]

    @property
    def top(self) -> float | None:
        """The highest value; None for floats of no known range."""
        return self.max_value if self.max_value is not None else None if self.bits == 32 else self.scale

    @property
    def fields(self) -> Sequence[str]:
        """A sample's members that may hold such an image."""
        return IMAGE_FIELDS if self.plain else ("npy", *IMAGE_FIELDS)

    def record(self) -> dict[str, Any]:
        """What ``_info.json`` keeps of it."""
        return {"in_chans": self.in_chans, "bits": self.bits}

    def check_record(self, recorded: Mapping[str, Any], where: str) -> None:
        """ValueError where what was recorded of shards differs from what is declared for them."""
        for name, value in self.record().items():
            if recorded.get(name, value) != value:
                raise ValueError(
                    f"data.init_args.{name}={value}, but {where} were written with {name}={recorded[name]}; set it so"
                )


RGB = PixelFormat()


def declared(
    in_chans: int, bits: Literal[8, 16, 32], max_value: float | None, rgb: tuple[int, int, int] | None,
    pages: Literal["one", "bands"] = "one",
) -> PixelFormat:  # fmt: skip
    """A data module's format; ValueErrors name its keys."""
    try:
        return PixelFormat(in_chans, bits, max_value, rgb, pages)
    except ValueError as error:
        raise ValueError(f"data.init_args.{error}") from None
