"""COCO, or any images with boxes and masks of objects, for detection and instance segmentation."""

import json

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from datamodules.dataset import Policy
from datamodules.detection_transforms import DetectionEvaluation, DetectionTraining, WindowRule
from datamodules.samples import ShardError, Source
from datamodules.selection import Selection
from datamodules.shard_datamodule import ShardDataModule, Split
from datamodules.shards import ShardSet

LEAST_SIDE = 32
"""Pixels; images with a shorter side below it are not trained on."""


def objects_known(info: str, shards: ShardSet) -> tuple[np.ndarray, np.ndarray]:
    """What an ``_info.json`` says of samples: (n, 2) width and height of their images, (n) how many annotations.

    ShardError where it does not say it of a shard, or of another number of samples.

    Args:
        info: its text; empty for none.
        shards: the samples.
    """
    splits = json.loads(info)["splits"].values() if info else []
    said = {
        name: (sizes, counts)
        for split in splits
        if "sizes" in split and "annotated" in split
        for name, sizes, counts in zip(split["filenames"], split["sizes"], split["annotated"], strict=True)
    }
    names = list(shards.names)
    if lacking := next((str(path) for path, name in zip(shards.paths, names, strict=True) if name not in said), None):
        raise ShardError(
            f"_info.json in data.init_args.root does not say of {lacking} how large its images are and how many "
            "annotations each has, by which training batches are made; write the shards with python -m "
            "datamodules.prepare coco"
        )
    for path, name, length in zip(shards.paths, names, shards.lengths.tolist(), strict=True):
        if {length} != {*map(len, said[name])}:
            raise ShardError(
                f"_info.json in data.init_args.root has {len(said[name][0])} sizes and {len(said[name][1])} counts of "
                f"annotations for {path}, which holds {length} samples; write the shards again"
            )
    sizes = np.array([size for name in names for size in said[name][0]], np.int64).reshape(-1, 2)
    return sizes, np.array([count for name in names for count in said[name][1]], np.int64)


class COCODataModule(ShardDataModule):
    """Images with boxes and masks of objects; the defaults are COCO's with mmdetection's augmentations.

    Training batches hold ``image`` (n, 3, H, W), padded right and bottom, ``valid`` (n, 2), rows and columns that show
    the image, ``original`` (n, 2), ``image_id`` (n), and lists of ``boxes`` (m, 4) x1, y1, x2, y2, ``labels`` (m) and
    ``masks`` (m, H, W); evaluation batches have ``truth`` in the place of the last three, see
    :class:`~datamodules.detection_transforms.DetectionEvaluation`.

    Images without any annotation, or with a side below 32 pixels, are not trained on. They are left out of the plan
    of an epoch by what ``_info.json`` says of each, so an epoch's steps are counted without them and each batch is
    full; the numbers of samples, which their augmentation hangs on, count those that are left. Batches are of upright
    images or of others; what is left over in the end of an epoch makes mixed ones. Evaluation sees every image once.

    Args:
        root: folder with the shards, which ``python -m datamodules.prepare coco`` writes.
        train_shards, val_shards: globs (or ranges) of shard names in it.
        resize: longest and shortest side of resized images.
        scales: shorter sides of which one is drawn for each training image; empty for ``resize``'s.
        window: of DETR's multi-scale crop; None for none.
        flip: how often training images are flipped, from 0 to 1.
        divisor: of the sides of batches.
        batch_size: images per optimiser step over all devices and accumulated batches.
        num_workers: loading processes per device.
        seed: of order and augmentation; None takes seed_everything's.
        policy: what to do with bad samples: ``strict`` stops and names them, ``skip`` leaves them out and counts.
        shuffle_window: training samples shuffled together inside a rank's span.
        prefetch: batches each worker prepares ahead.
        mean, std: for normalisation; see ShardDataModule.
        cache_dir, cache_gib: where shards from a URL are kept on each node, and how much of each URL's.
    """

    def __init__(
        self,
        root: str,
        train_shards: str = "train2017-*.tar",
        val_shards: str = "val2017-*.tar",
        resize: tuple[int, int] = (1333, 800),
        scales: tuple[int, ...] = (),
        window: WindowRule | None = None,
        flip: float = 0.5,
        divisor: int = 32,
        batch_size: int = 16,
        num_workers: int = 8,
        seed: int | None = None,
        policy: Policy = "strict",
        shuffle_window: int = 2048,
        prefetch: int = 4,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        cache_dir: str | None = None,
        cache_gib: float = 200.0,
    ) -> None:
        super().__init__(
            root,
            train=Split(train_shards, DetectionTraining(resize, scales, window, flip, divisor)),
            val=Split(val_shards, DetectionEvaluation(resize, divisor)),
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
            policy=policy,
            shuffle_window=shuffle_window,
            prefetch=prefetch,
            mean=mean,
            std=std,
            cache_dir=cache_dir,
            cache_gib=cache_gib,
        )

    def _find(self, split: str) -> Source:
        source = super()._find(split)
        if split != "train":
            return source
        where = f"data.init_args.{self._option(split)}={self.splits[split].shards!r}"
        if not isinstance(source, ShardSet):
            raise ShardError(
                f"{where} is a folder of images, of whose objects nothing is known; write shards with python -m "
                "datamodules.prepare coco"
            )
        sizes, counts = objects_known(self._info, source)
        bare, small = counts == 0, sizes.min(1) < LEAST_SIDE
        if (left := bare | small).all():
            raise ShardError(f"{where}: none of the {len(left)} images has an annotation and sides of {LEAST_SIDE}")
        if left.any():
            rank_zero_info(
                f"{where}: {int(left.sum())} of {len(left)} images are not trained on: {int(bare.sum())} have no "
                f"annotation, {int(small.sum())} a side below {LEAST_SIDE}"
            )
        return Selection(source, ~left, sizes[:, 0] < sizes[:, 1])

    def setup(self, stage: str) -> None:
        """ValueError, beside ShardDataModule's, where the data name more classes than the model has."""
        super().setup(stage)
        count = getattr(None if self.trainer is None else self.trainer.lightning_module, "label_count", None)
        names = self.class_names
        if count is not None and names is not None and len(names) > count:
            raise ValueError(
                f"the data in {self.root} name {len(names)} classes, model.init_args.num_classes is {count}; set it to "
                "the data's"
            )

    def _size_key(self, split: str, option: str) -> str:
        return option

    def _option(self, split: str) -> str:
        return "train_shards" if split == "train" else "val_shards"
