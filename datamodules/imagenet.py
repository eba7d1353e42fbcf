"""ImageNet-1k (or anything of its kind) from WebDataset shards."""

from collections.abc import Iterable
from typing import Any, Literal

from datamodules.albumentations_transforms import AlbumentationsImage, AlbumentationsViews, PipelineViews
from datamodules.dataset import Policy
from datamodules.masks import MaskEncoding
from datamodules.multicrop import MultiCropConfig
from datamodules.pixel_format import declared
from datamodules.samples import ShardError, Source
from datamodules.shard_datamodule import LoaderWrap, ShardDataModule, Split
from datamodules.transforms import EvaluationTransform, MultiCropTransform, ProbeTransform, Transform

VIEWS = ("multicrop", "probe", "features", "knn")


class ImageNetDataModule(ShardDataModule):
    """Labelled images in shards, as the tasks want to see them.

    Training batches hold ``crops`` (view ``multicrop``) or ``image`` (view ``probe``), with ``label`` and ``key``;
    evaluation batches hold ``image``, ``label``, ``key``, and ``mask`` where the shards have masks. With view ``knn``
    the evaluation loaders are two: the training set under the evaluation transform (the bank), and the validation set.
    With view ``features`` both sets go through the evaluation transform and the model's ``encode`` once, before the
    first step, and batches hold ``features``: no augmentation, and each process keeps what it read of the sets in
    memory.

    Args:
        root: folder with the shards, or where they are fetched from: a URL, or ``pipe:`` and a command with ``{name}``.
        train_shards, val_shards: globs (or {0000..1023} ranges) of shard names in it, or a folder of images without
            classes, such as ``.``; no ``val_shards`` is no validation, and predictions are made of the training set.
        view: ``multicrop``, ``probe``, ``features`` or ``knn``.
        batch_size: images per optimiser step over all devices and accumulated batches.
        num_workers: loading processes per device.
        multicrop: the views of ``multicrop``.
        probe_size, probe_scale: side and area range of the ``probe`` view.
        resize, crop: of the evaluation transform.
        seed: of order and augmentation; None takes seed_everything's.
        policy: what to do with bad samples: ``strict`` stops and names them, ``skip`` leaves them out and counts.
        shuffle_window: training samples shuffled together inside a rank's span.
        prefetch: batches each worker prepares ahead.
        mean, std: for normalisation; see ShardDataModule.
        cache_dir, cache_gib: where shards from a URL are kept on each node, and how much of each URL's.
        multicrop_pipelines: views of ``multicrop`` by albumentations, in the place of ``multicrop``.
        mask_encoding: how masks, where there are any, tell ids; see :data:`datamodules.masks.MaskEncoding`.
        probe_pipeline: the ``probe`` view by albumentations: transforms, each ``class_path: albumentations.NAME`` and
            ``init_args``, that end with an image of ``probe_size``; ``probe_scale`` then has no say.
        in_chans, bits, max_value, rgb, pages: what images consist of; see
            :class:`~datamodules.pixel_format.PixelFormat`.

    Attributes:
        wrap_loader: with view ``features``, what a model sets in its ``setup`` to make them: it is called for ``train``
            and ``val`` with a loader of the images.
    """

    def __init__(
        self,
        root: str,
        train_shards: str = "train-*.tar",
        val_shards: str | None = "val*.tar",
        view: Literal["multicrop", "probe", "features", "knn"] = "multicrop",
        batch_size: int = 1024,
        num_workers: int = 8,
        multicrop: MultiCropConfig = MultiCropConfig(),  # noqa: B008  # a value, never changed
        probe_size: int = 224,
        probe_scale: tuple[float, float] = (0.08, 1.0),
        resize: int = 256,
        crop: int = 224,
        seed: int | None = None,
        policy: Policy = "strict",
        shuffle_window: int = 2048,
        prefetch: int = 4,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        cache_dir: str | None = None,
        cache_gib: float = 200.0,
        multicrop_pipelines: list[PipelineViews] | None = None,
        probe_pipeline: list[dict] | None = None,
        mask_encoding: MaskEncoding = "auto",
        in_chans: int = 3,
        bits: Literal[8, 16, 32] = 8,
        max_value: float | None = None,
        rgb: tuple[int, int, int] | None = None,
        pages: Literal["one", "bands"] = "one",
    ) -> None:
        if view not in VIEWS:
            raise ValueError(f"data.init_args.view={view!r}; allowed: {', '.join(VIEWS)}")
        if val_shards is None and view == "knn":
            raise ValueError("data.init_args.view=knn wants data.init_args.val_shards: the images that are scored")
        pixels = declared(in_chans, bits, max_value, rgb, pages)
        evaluation = EvaluationTransform(resize, crop, mask_encoding=mask_encoding, pixels=pixels)
        training: Transform
        if view == "features":
            training = evaluation
        elif view == "multicrop":
            training = (
                MultiCropTransform(multicrop, pixels)
                if multicrop_pipelines is None
                else AlbumentationsViews(multicrop_pipelines, "data.init_args.multicrop_pipelines", pixels)
            )
        elif probe_pipeline is None:
            training = ProbeTransform(probe_size, probe_scale, pixels)
        else:
            training = AlbumentationsImage(
                probe_size, probe_pipeline, key="data.init_args.probe_pipeline", pixels=pixels
            )
        train, val = Split(train_shards, training), None if val_shards is None else Split(val_shards, evaluation)
        super().__init__(
            root,
            train=train,
            val={"bank": Split(train_shards, evaluation), "queries": val} if view == "knn" and val else val,
            predict=val or Split(train_shards, evaluation),
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
        self.view = view
        self.wrap_loader: LoaderWrap | None = None

    def _size_key(self, split: str, option: str) -> str:
        return option

    def _option(self, split: str) -> str:
        of_train = split in ("train", "val.bank") or not self._stages["val"]
        return "train_shards" if of_train else "val_shards"

    def _find(self, split: str) -> Source:
        """ShardError where it cannot be found, which for validation has one remedy more."""
        try:
            return super()._find(split)
        except ShardError as error:
            if split != "val":
                raise
            raise ShardError(f"{error}; or set data.init_args.val_shards=null to have no validation") from None

    def setup(self, stage: str) -> None:
        """Also forgets what another model has set; the Trainer calls the model's ``setup`` after this one.

        ValueError for a view that the model does not read.
        """
        self.wrap_loader = None
        module = None if self.trainer is None else self.trainer.lightning_module
        wanted = getattr(module, "views", None)
        if wanted is not None and stage != "predict":
            bank = "knn" in wanted
            if self.view not in wanted if stage == "fit" or bank else self.view == "knn":
                raise ValueError(f"data.init_args.view={self.view}: {type(module).__name__} reads {', '.join(wanted)}")
        super().setup(stage)

    @property
    def bank_size(self) -> int | None:
        """Samples of the bank; None for another view than ``knn``."""
        return len(self.source("val.bank")) if self.view == "knn" else None

    def train_dataloader(self) -> Iterable[Any]:
        if self.view == "features":
            return self._features("train", self.device_batch_size)
        return super().train_dataloader()

    def val_dataloader(self) -> Any:
        if self.view == "features" and self._stages["val"]:
            return self._features("val", self._evaluation_batch(self.position))
        return super().val_dataloader()

    def _features(self, split: str, batch_size: int) -> Iterable[Any]:
        if self.wrap_loader is None:
            found = (
                "there is none" if self.trainer is None else f"{type(self.trainer.lightning_module).__name__} has none"
            )
            raise ValueError(
                f"data.init_args.view=features wants a model with encode(images), such as LinearProbe; {found}"
            )
        return self.wrap_loader(split, self._evaluation_loader(split, persistent=False), batch_size, self.position)
