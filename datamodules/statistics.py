"""Mean and standard deviation of a split's channels: computed over every pixel, kept in ``_info.json``, found there.

Shapes: H x W pixels, C channels.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from datamodules.pixel_format import PixelFormat
from datamodules.samples import ShardError, Source
from datamodules.shard_names import matching

logger = logging.getLogger(__name__)

TRAINING = ("train", "training")


class Statistics:
    """Sums over images of one format. Integers are added up as integers, so the order and number of images cost no
    precision; floats by Chan's update of mean and squared deviations in float64.

    Args:
        pixels: of the images.
    """

    def __init__(self, pixels: PixelFormat) -> None:
        self.pixels, self.images, self.count = pixels, 0, 0
        self._sum, self._squares = [0] * pixels.in_chans, [0] * pixels.in_chans
        self._mean, self._deviation = np.zeros(pixels.in_chans), np.zeros(pixels.in_chans)

    def add(self, image: np.ndarray) -> None:
        """Takes one more image (H, W, C) in."""
        flat = image.reshape(-1, self.pixels.in_chans)
        self.images += 1
        if self.pixels.bits < 32:
            values = flat.astype(np.uint64)
            self._sum = [a + int(b) for a, b in zip(self._sum, values.sum(0), strict=True)]
            self._squares = [a + int(b) for a, b in zip(self._squares, (values * values).sum(0), strict=True)]
        else:
            values = flat.astype(np.float64)
            mean = values.mean(0)
            away, total = mean - self._mean, self.count + len(flat)
            self._deviation += ((values - mean) ** 2).sum(0) + away**2 * (self.count * len(flat) / total)
            self._mean += away * (len(flat) / total)
        self.count += len(flat)

    def record(self) -> dict[str, Any]:
        """``mean`` and ``std`` of value / scale for each channel, over ``images`` and their ``values_per_channel``.

        A channel of one value, which cannot be scaled, gets the std 1, with a warning.
        """
        if not self.count:
            raise ShardError("there are no images to take mean and std of")
        scale, n = self.pixels.scale, self.count
        if self.pixels.bits < 32:
            mean = [total / n / scale for total in self._sum]
            std = [
                math.sqrt((squares * n - total * total) / n**2) / scale
                for total, squares in zip(self._sum, self._squares, strict=True)
            ]
        else:
            mean, std = self._mean.tolist(), np.sqrt(self._deviation / n).tolist()
        for number, value in enumerate(std):
            if not value:
                logger.warning("channel %d is %g everywhere: its std is recorded as 1", number, mean[number] * scale)
        return {"mean": mean, "std": [value or 1.0 for value in std], "images": self.images, "values_per_channel": n}


def statistics_of(source: Source, pixels: PixelFormat) -> dict[str, Any]:
    """Reads every image of a source; see :meth:`Statistics.record`."""
    from datamodules.decoding import sample_pixels

    sums, reader = Statistics(pixels), source.reader()
    try:
        for index in range(len(source)):
            sums.add(sample_pixels(reader.read(index, pixels.fields), pixels))
    finally:
        reader.close()
    return sums.record()


class Recorded(NamedTuple):
    """What ``_info.json`` says of a split's pixels."""

    split: str
    pixels: Mapping[str, Any] | None
    """``in_chans`` and ``bits``."""
    statistics: Mapping[str, Any] | None


def recorded(info: str, pattern: str | None = None) -> list[Recorded]:
    """Of the splits of an ``_info.json``, those with shards that a pattern means; of all for None."""
    try:
        splits = json.loads(info)["splits"]
        return [
            Recorded(name, split.get("pixels"), split.get("statistics"))
            for name, split in splits.items()
            if pattern is None or matching(split["filenames"], pattern)
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # whoever reads the shards says what is wrong with it


def training_statistics(info: str, pattern: str | None, root: str, pixels: PixelFormat) -> dict[str, tuple[float, ...]]:
    """``mean`` and ``std`` by which all splits are normalised, as kept in an ``_info.json``: those of the split that is
    trained on, else of the one called train, else of the only split that has any.

    Args:
        info: its text.
        pattern: of the training split's shards; None where they are not known by one.
        root: of the shards, for messages.
        pixels: what images consist of.

    Raises:
        ValueError: where nothing is kept, naming the command that does so.
    """
    have = [one for one in recorded(info) if one.statistics]
    trained = [] if pattern is None else [one for one in recorded(info, pattern) if one.statistics]
    named = [one for one in have if one.split in TRAINING]
    found = next(iter(trained or named or (have if len(have) == 1 else [])), None)
    if found is None or found.statistics is None:
        folder = pattern is not None and (Path(root).expanduser() / pattern).is_dir()
        then = (
            "prints them as the options to pass to this run, --data.mean and --data.std: nothing is written into a "
            "folder of images"
            if folder
            else "computes them and keeps them with the shards; or set both"
        )
        pages = "" if pixels.pages == "one" else f" --pages {pixels.pages}"
        raise ValueError(
            f"data.init_args.mean and std are not known for images of {pixels.in_chans} channels and {pixels.bits} "
            f"bits: python -m datamodules.prepare statistics --root {root} --shards {pattern or 'SHARDS'} --channels "
            f"{pixels.in_chans} --bits {pixels.bits}{pages} {then}"
        )
    values = {name: tuple(found.statistics[name]) for name in ("mean", "std")}
    for name, of_channels in values.items():
        check_length(name, of_channels, pixels.in_chans)
    rank_zero_info(f"mean and std are those recorded of the split {found.split} in {root}")
    return values


def check_length(name: str, values: Sequence[float], in_chans: int) -> None:
    """ValueError where there is not one value a channel."""
    if len(values) != in_chans:
        raise ValueError(
            f"data.init_args.{name}={list(values)} has {len(values)} values, data.init_args.in_chans is {in_chans}; "
            "give one for each channel, or leave mean and std out to take those recorded with the shards"
        )
