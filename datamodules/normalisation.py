"""By what a data module normalises images: values of its own, of the model's weights, or of the data."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from datamodules.pixel_format import RGB, PixelFormat
from datamodules.remote import ShardCache, is_remote
from datamodules.samples import ShardError
from datamodules.shard_info import INFO_FILES
from datamodules.statistics import check_length, training_statistics

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def check_normalisation(mean: Sequence[float] | None, std: Sequence[float] | None, pixels: PixelFormat) -> None:
    """ValueError for one of the two alone, for another number of values than channels, and for other units."""
    if mean is None and std is None:
        return
    if mean is None or std is None:
        there, missing = ("std", "mean") if mean is None else ("mean", "std")
        raise ValueError(
            f"data.init_args.{there} is set and data.init_args.{missing} is not: set both, or leave both out"
        )
    for name, values in (("mean", mean), ("std", std)):
        check_length(name, values, pixels.in_chans)
        if pixels.bits < 32 and max(map(abs, values)) > 1:
            raise ValueError(
                f"data.init_args.{name}={list(values)}: of images of {pixels.bits} bits it is a share of the full "
                f"scale, in [0, 1]; divide by {pixels.scale:g}"
            )


class NormalizesImages:
    """Mixed into a data module: ``mean``, ``std`` and ``in_chans`` of its images."""

    trainer: Any
    root: str
    cache_dir: str | None
    cache_gib: float
    pixels: PixelFormat
    splits: Mapping[str, Any]
    _mean: tuple[float, ...] | None
    _std: tuple[float, ...] | None

    @property
    def in_chans(self) -> int:
        """Channels of the images."""
        return self.pixels.in_chans

    @property
    def mean(self) -> tuple[float, ...]:
        """What each channel is normalised by, as a share of the full scale; of floats as they are.

        ValueError where nobody says it.
        """
        return self._of_weights("mean", IMAGENET_MEAN) if self._mean is None else self._mean

    @property
    def std(self) -> tuple[float, ...]:
        """See ``mean``."""
        return self._of_weights("std", IMAGENET_STD) if self._std is None else self._std

    def _of_weights(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Of weights that were trained on as many channels; else what is recorded with the data, or the default."""
        module = None if self.trainer is None else self.trainer.lightning_module
        fed = getattr(getattr(module, "backbone", None), "pixels", None)
        if fed is not None and len(fed.mean) == self.in_chans:
            return getattr(fed, name)
        return default if self.pixels.record() == RGB.record() else self._recorded[name]

    @cached_property
    def _recorded(self) -> dict[str, tuple[float, ...]]:
        train = self.splits["train"].shards if "train" in self.splits else None
        return training_statistics(self._info, train if isinstance(train, str) else None, self.root, self.pixels)

    @cached_property
    def _info(self) -> str:
        """The root's ``_info.json``; empty where there is none."""
        if is_remote(self.root):
            try:
                return self._cache.index(INFO_FILES)
            except ShardError:  # reading the shards meets the same
                return ""
        path = Path(self.root).expanduser() / INFO_FILES[0]
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    @property
    def _cache(self) -> ShardCache:
        """Where shards of a remote root are kept."""
        folder = Path(self.cache_dir).expanduser() if self.cache_dir else None
        return ShardCache(self.root, folder, int(self.cache_gib * 2**30))
