"""ADE20K, or any images with label maps, for semantic segmentation."""

from typing import Literal

from datamodules.dataset import Policy
from datamodules.segmentation_transforms import LabelRule, SegmentationEvaluation, SegmentationTraining
from datamodules.shard_datamodule import ShardDataModule, Split

VIEWS = ("train", "knn")


class ADE20KDataModule(ShardDataModule):
    """Images with label maps; the defaults are ADE20K's with mmsegmentation's augmentations.

    Training batches hold ``image`` (n, 3, size, size), ``target`` (n, size, size) and ``valid`` (n, 2), rows and
    columns that show the image; evaluation batches hold ``image``, a list of (3, h, w), and ``target``, a list of
    label maps (H, W) at their own size.

    Args:
        root: folder with the shards, which ``python -m datamodules.prepare ade20k`` writes.
        train_shards, val_shards: globs (or ranges) of shard names in it.
        labels: what the numbers in label maps mean.
        view: ``train``; or ``knn``, whose evaluation loaders are two: the training images as those of the evaluation,
            which are the bank, and the validation images.
        size: side of training windows, pixels.
        resize: longest and shortest side of resized images.
        ratios: range of a training image's size over that.
        distort: change the colours of training images.
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
        train_shards: str = "training-*.tar",
        val_shards: str = "validation-*.tar",
        labels: LabelRule = LabelRule(),  # noqa: B008  # a value, never changed
        view: Literal["train", "knn"] = "train",
        size: int = 512,
        resize: tuple[int, int] = (2048, 512),
        ratios: tuple[float, float] = (0.5, 2.0),
        distort: bool = True,
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
        if view not in VIEWS:
            raise ValueError(f"data.init_args.view={view!r}; allowed: {', '.join(VIEWS)}")
        self.labels, self.view = labels, view
        evaluation = SegmentationEvaluation(labels, resize)
        val = Split(val_shards, evaluation)
        super().__init__(
            root,
            train=Split(train_shards, SegmentationTraining(labels, size, resize, ratios, distort)),
            val={"bank": Split(train_shards, evaluation), "queries": val} if view == "knn" else val,
            predict=val,
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

    def _size_key(self, split: str, option: str) -> str:
        return option

    def _option(self, split: str) -> str:
        return "train_shards" if split in ("train", "val.bank") else "val_shards"

    def setup(self, stage: str) -> None:
        """ValueError for a view that the model does not read."""
        module = None if self.trainer is None else self.trainer.lightning_module
        wanted = getattr(module, "views", None)
        if wanted is not None and stage != "predict" and self.view not in wanted:
            raise ValueError(f"data.init_args.view={self.view}: {type(module).__name__} reads {', '.join(wanted)}")
        super().setup(stage)
