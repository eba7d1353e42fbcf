"""Segmentation without training: a patch's classes by those of the patches most like it.

Shapes: P patches of an image, D_i width of the block, C classes, N patches of the bank.
"""

import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones import Backbone, Stream
from common.collectives import gather_rows
from heads.layers import resize
from heads.sliding import classes_at
from lightning_modules.frozen import FrozenBackboneModule
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.segmentation_scores import ScoresSegmentation
from metrics import nearest_votes


class PatchKNN(ScoresSegmentation, FrozenBackboneModule):
    """Retrieval of patches (Balažević et al. 2023): frozen features alone are read, by mIoU.

    The first evaluation loader is the bank, the second holds the images that are segmented (datamodule view ``knn``).
    A patch of the bank carries the shares of classes among its labelled pixels; a patch that is segmented takes the
    mean of its neighbours', weighted by softmax(cosine / temperature).

    Args:
        backbone: frozen.
        num_classes: C.
        block: which block is read, counted from 0, or from the end.
        k: neighbours.
        temperature: of the weights.
        patches_per_image: of an image of the bank, chosen by its key; fewer where it has fewer.
        ignore_index: of pixels without a class.
        backbone_weights, weights_key, stream: see FrozenBackboneModule.
    """

    views = ("knn",)

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int = 150,
        block: int = -1,
        k: int = 30,
        temperature: float = 0.02,
        patches_per_image: int = 50,
        ignore_index: int = 255,
        backbone_weights: str | None = None,
        weights_key: str = "teacher",
        stream: Stream = "published",
    ) -> None:
        super().__init__(backbone, backbone_weights, weights_key, stream)
        record_hyperparameters(self, "backbone")
        for name, value in (("k", k), ("patches_per_image", patches_per_image)):
            if value < 1:
                raise ValueError(f"model.init_args.{name}={value}; allowed: 1 and more")
        if temperature <= 0:
            raise ValueError(f"model.init_args.temperature={temperature}; allowed: above 0")
        self.block, self.k, self.temperature = backbone.block_index(block), k, temperature
        self.patches_per_image = patches_per_image
        self.start_scores(num_classes, ignore_index)
        self._reset()

    def _reset(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._bank: tuple[Tensor, Tensor] | None = None

    def patches(self, image: Tensor) -> Tensor:
        """(3, h, w) of any size to unit vectors (D_i, rows, columns); the image is padded to whole patches by zeros."""
        patch = self.backbone.patch_size
        padded = F.pad(image, (0, -image.shape[-1] % patch, 0, -image.shape[-2] % patch))
        features = self.backbone.forward_intermediates(padded[None], [self.block], self.stream)[0].patches[0]
        return F.normalize(features.float(), dim=0)

    def shares(self, target: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
        """(P, C) shares of the classes among a patch's labelled pixels; 0 where there are none.

        Args:
            target: label map (H, W) at its own size.
            size: (h, w) of the image that the patches are of.
            grid: rows and columns of patches, which may reach beyond it.
        """
        cell = self.backbone.feature_info[self.block]["reduction"]
        labels = F.interpolate(target[None, None].double(), size, mode="nearest-exact")[0, 0].long()
        rows, columns = (torch.arange(side, device=labels.device) // cell for side in size)
        patch = (rows[:, None] * grid[1] + columns).flatten()
        counted = labels.flatten() != self.ignore_index
        index = patch[counted] * self.num_classes + labels.flatten()[counted]
        counts = torch.bincount(index, minlength=grid[0] * grid[1] * self.num_classes).view(-1, self.num_classes)
        return counts / counts.sum(1, keepdim=True).clamp(min=1)

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 1 and self._bank is None:
            self._bank = self._gathered()
        for key, image, target in zip(batch["key"], batch["image"], batch["target"], strict=True):
            features = self.patches(image)
            grid = features.shape[1], features.shape[2]
            flat = features.flatten(1).mT
            if dataloader_idx == 0:
                shares = self.shares(target, (image.shape[1], image.shape[2]), grid)
                chosen = self._chosen(key, shares)
                self._parts.append((flat[chosen], shares[chosen]))
                continue
            assert self._bank is not None
            votes = nearest_votes(flat, *self._bank, self.k, self.temperature).mT.view(1, -1, *grid)
            cell = self.backbone.feature_info[self.block]["reduction"]
            votes = resize(votes, torch.Size((cell * grid[0], cell * grid[1])))
            votes = votes[..., : image.shape[1], : image.shape[2]]
            self.score(key, image, classes_at(votes, (target.shape[0], target.shape[1]))[0], target)

    def _chosen(self, key: str, shares: Tensor) -> Tensor:
        """Numbers of an image's patches that go into the bank; those without a labelled pixel do not."""
        labelled = shares.sum(1).nonzero()[:, 0]
        order = torch.randperm(len(labelled), generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
        return labelled[order[: self.patches_per_image].to(labelled.device)]

    def _gathered(self) -> tuple[Tensor, Tensor]:
        """Vectors (N, D_i) and shares (N, C) of all processes. ValueError where there are none."""
        width = self.backbone.feature_info[self.block]["num_chs"]
        empty = (torch.empty(0, width, device=self.device), torch.empty(0, self.num_classes, device=self.device))
        vectors, shares = (gather_rows(torch.cat(part)) for part in zip(empty, *self._parts, strict=True))
        self._parts = []
        if not len(vectors):
            raise ValueError("the bank, data.init_args.train_shards, has no labelled patch")
        return vectors, shares

    def on_validation_epoch_end(self) -> None:
        self._reset()
        if not self.trainer.sanity_checking:
            self.log_dict({f"val/{name}": value for name, value in self.finish_scores().items()}, prog_bar=True)

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end
