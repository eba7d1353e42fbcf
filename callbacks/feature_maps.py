"""Pictures of feature maps while a run goes on."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from backbones import Stream
from callbacks.run_folder import run_folder
from common.files import write_npz
from common.pictures import pictures

MAP_COLOURS = torch.tensor(  # viridis at 0, 1/4, ..., 1: even in lightness and colour-blind safe
    [
        [0.267, 0.005, 0.329],
        [0.229, 0.322, 0.546],
        [0.128, 0.567, 0.551],
        [0.369, 0.789, 0.383],
        [0.993, 0.906, 0.144],
    ]
)


def colour_map(maps: Tensor) -> Tensor:
    """(B, H, W) values, stretched to [0, 1] per image, to viridis (B, 3, H, W)."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    at = (maps - low) / (high - low).clamp(min=1e-12) * (len(MAP_COLOURS) - 1)
    below = at.long().clamp(max=len(MAP_COLOURS) - 2)
    table = MAP_COLOURS.to(maps)
    part = (at - below)[..., None]
    return (table[below] * (1 - part) + table[below + 1] * part).permute(0, 3, 1, 2)


def picture_grid(images: Tensor, maps: Tensor, masks: Tensor | None = None) -> Tensor:
    """One row per image: image, mask (where there are masks), map, and the map over the image.

    Args:
        images: (B, 3, H, W) in [0, 1].
        maps: (B, h, w) raw values; each is resized to its image, nearest neighbour, so a cell shows as its patch.
        masks: (B, H, W) integers, 0 background.

    Returns:
        (3, B·H, columns·W) in [0, 1].
    """
    large = F.interpolate(maps[:, None].float(), size=images.shape[-2:], mode="nearest-exact")[:, 0]
    colours = colour_map(large)
    columns = [images, colours, 0.5 * images + 0.5 * colours]
    if masks is not None:
        columns.insert(1, (masks != 0).float()[:, None].expand_as(images).to(images))
    return torch.cat([torch.cat(list(column), 1) for column in columns], 2).clamp(0, 1)


class FeatureMaps(Callback):
    """Keeps CLS–patch similarity maps of the first validation images: a picture in TensorBoard, arrays on disk.

    The picture's columns are image, mask (where the data have masks), map, and the map over the image. The arrays,
    ``feature_maps.npz`` in the run's folder, are ``images`` uint8 (B, H, W, 3), ``maps`` (B, h, w), and ``masks``.

    Args:
        count: images shown.
        every_n_epochs: validations between pictures.
        stream: of the last block; see the backbone's ``forward_intermediates``.
    """

    def __init__(self, count: int = 8, every_n_epochs: int = 1, stream: Stream = "published") -> None:
        self.count, self.every_n_epochs, self.stream = count, every_n_epochs, stream
        self._shown: tuple[Tensor, Tensor, Tensor | None] | None = None

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        due = batch_idx == 0 and dataloader_idx == 0 and trainer.current_epoch % self.every_n_epochs == 0
        images = batch.get("image")
        if not due or not trainer.is_global_zero or not isinstance(images, Tensor) or not len(images):
            return  # features have no images, and dense tasks images of many sizes
        images = images[: self.count]
        features = pl_module.backbone.forward_intermediates(images, 1, self.stream)[0]
        maps = torch.einsum("bd,bdhw->bhw", F.normalize(features.cls, dim=-1), F.normalize(features.patches, dim=1))
        masks = batch["mask"][: self.count].cpu() if "mask" in batch else None
        self._shown = (pictures(images, trainer.datamodule).float().cpu(), maps.float().cpu(), masks)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._shown is None:
            return
        images, maps, masks = self._shown
        self._shown = None
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                picture = picture_grid(images, maps, masks)
                step = max(trainer.global_step - 1, 0)  # the step just done, at which the scores are logged too
                logger.experiment.add_image("maps/cls_similarity", picture, step)
        arrays = {"images": (images * 255).round().byte().permute(0, 2, 3, 1).numpy(), "maps": maps.numpy()}
        if masks is not None:
            arrays["masks"] = masks.numpy()
        if not trainer.fast_dev_run:  # it has no folder of its own
            write_npz(run_folder(trainer) / "feature_maps.npz", arrays)
