"""ImageNet-S: images with foreground masks, for evaluation."""

from typing import Literal

from datamodules.dataset import Policy
from datamodules.masks import MOST_CLASSES, MaskEncoding
from datamodules.pixel_format import declared
from datamodules.shard_datamodule import ShardDataModule, Split
from datamodules.transforms import EvaluationTransform


class ImageNetSDataModule(ShardDataModule):
    """Images and masks: batches hold ``image``, ``mask`` (B, crop, crop) int32, ``label`` and ``key``.

    Mask ids are ImageNet-S's: 0 background, 1000 ignored, anything else foreground; pixels without one are an error.

    Args:
        root: folder with the shards.
        val_shards: glob (or ranges) of shard names in it.
        batch_size: images per step over all devices.
        num_workers: loading processes per device.
        resize, crop: of the evaluation transform.
        policy: what to do with bad samples: ``strict`` stops and names them, ``skip`` leaves them out and counts.
        prefetch: batches each worker prepares ahead.
        mean, std: for normalisation; see ShardDataModule.
        cache_dir, cache_gib: where shards from a URL are kept on each node, and how much of each URL's.
        mask_encoding: how masks tell ids: ``index`` by grey level, ``rgb`` as R + 256·G with B = 0 (ImageNet-S),
            ``palette`` by a palette's numbers (Pascal VOC), ``alpha`` as what is opaque; ``auto`` takes index for one
            channel and rgb for three.
        largest_id: highest id beside 1000.
        in_chans, bits, max_value, rgb: what images consist of; see :class:`~datamodules.pixel_format.PixelFormat`.
    """

    def __init__(
        self,
        root: str,
        val_shards: str = "val*.tar",
        batch_size: int = 256,
        num_workers: int = 8,
        resize: int = 256,
        crop: int = 224,
        policy: Policy = "strict",
        prefetch: int = 4,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        cache_dir: str | None = None,
        cache_gib: float = 200.0,
        mask_encoding: MaskEncoding = "auto",
        largest_id: int = MOST_CLASSES,
        in_chans: int = 3,
        bits: Literal[8, 16, 32] = 8,
        max_value: float | None = None,
        rgb: tuple[int, int, int] | None = None,
    ) -> None:
        transform = EvaluationTransform(
            resize, crop, masks_required=True, labels_required=False, mask_encoding=mask_encoding,
            largest_id=largest_id, pixels=declared(in_chans, bits, max_value, rgb),
        )  # fmt: skip
        super().__init__(
            root,
            val=Split(val_shards, transform),
            batch_size=batch_size,
            num_workers=num_workers,
            policy=policy,
            prefetch=prefetch,
            mean=mean,
            std=std,
            cache_dir=cache_dir,
            cache_gib=cache_gib,
        )

    def _size_key(self, split: str, option: str) -> str:
        return option

    def _option(self, split: str) -> str:
        return "val_shards"
