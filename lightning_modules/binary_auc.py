"""Binary-AUC of a frozen backbone's maps against foreground masks.

Shapes: B images, K maps an image, R registers, h x w patch grid.
"""

import zlib
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backbones import Backbone, BlockView
from common.collectives import gather_objects
from lightning_modules.frozen import FrozenBackboneModule
from lightning_modules.hparams import record_hyperparameters
from metrics import BinaryAUC

MAP_KINDS = ("similarity", "register_similarity", "mixing", "mixing_heads", "register_mixing")


def similarity_map(token: Tensor, patches: Tensor) -> Tensor:
    """Cosine of tokens (B, R, D) and patches (B, D, h, w); (B, R, h, w)."""
    return torch.einsum("brd,bdhw->brhw", F.normalize(token.float(), dim=-1), F.normalize(patches.float(), dim=1))


def block_maps(view: BlockView, kinds: list[str]) -> dict[str, Tensor]:
    """Maps (B, h, w) of one block by name."""
    features, mixing, register_mixing = view
    maps: dict[str, Tensor] = {}
    if "similarity" in kinds:
        maps["similarity"] = similarity_map(features.cls[:, None], features.patches)[:, 0]
    if "register_similarity" in kinds and features.registers is not None:
        each = similarity_map(features.registers, features.patches)
        maps |= {f"register{r}/similarity": each[:, r] for r in range(each.shape[1])}
    if mixing is not None:
        if "mixing" in kinds:
            maps["mixing"] = mixing.mean((1, 2))
        if "mixing_heads" in kinds:
            maps |= {f"head{h}/mixing": mixing[:, :, h].mean(1) for h in range(mixing.shape[2])}
    if "register_mixing" in kinds and register_mixing is not None:
        maps |= {f"register{r}/mixing": register_mixing[:, r].mean(1) for r in range(register_mixing.shape[1])}
    return maps


def shuffled(scores: Tensor, keys: list[str]) -> Tensor:
    """Each map (B, h, w) with its pixels permuted by a permutation drawn from the image's key."""
    flat = scores.flatten(1)
    orders = []
    for key in keys:
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        orders.append(torch.randperm(flat.shape[1], generator=generator))
    return flat.gather(1, torch.stack(orders).to(flat.device)).view_as(scores)


class BinaryAUCEvaluation(FrozenBackboneModule):
    """Scores several maps of several blocks in one pass over images with masks.

    Batches hold ``image``, ``mask`` and ``key``. Beside the maps asked for, ``shuffled`` scores the last block's
    first map with its pixels permuted: what a map without any relation to the mask gets.

    Args:
        backbone: frozen.
        maps: kinds of maps:
            ``similarity`` cosine of the CLS feature with each patch's,
            ``register_similarity`` the same of each register,
            ``mixing`` the CLS row of the token-mixing matrix, mean over heads,
            ``mixing_heads`` the same head by head,
            ``register_mixing`` the row of each register, mean over heads.
        blocks: block numbers (negative ones count from the end), or ``all``.
        ignore_index: id in the masks that takes no part.
        pictures: this many of the first images are kept with their maps and the last block's patch features, for
            analysis.figures.
        backbone_weights, weights_key: see FrozenBackboneModule.
    """

    headline_metric = "val/auc_of_mean_normalized"

    def __init__(
        self,
        backbone: Backbone,
        maps: list[str] = ["similarity"],  # noqa: B006  # never changed
        blocks: list[int] | Literal["all"] = [-1],  # noqa: B006
        ignore_index: int = 1000,
        pictures: int = 0,
        backbone_weights: str | None = None,
        weights_key: str = "teacher",
    ) -> None:
        super().__init__(backbone, backbone_weights, weights_key)
        record_hyperparameters(self, "backbone")
        if not maps or any(kind not in MAP_KINDS for kind in maps):
            raise ValueError(f"model.init_args.maps={maps}; allowed: {', '.join(MAP_KINDS)}")
        wanted = range(backbone.depth) if blocks == "all" else blocks
        self.maps = list(maps)
        self.blocks = sorted({backbone._block_index(int(b)) for b in wanted})
        if not self.blocks:
            raise ValueError("model.init_args.blocks is empty; name at least one block, or all")
        self.ignore_index, self.pictures = ignore_index, pictures
        self._pictures: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.metric: BinaryAUC | None = None
        self._kept: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []

    def named_maps(self, images: Tensor) -> dict[str, Tensor]:
        """All maps (B, h, w) asked for, by name, oldest block first."""
        views = self.backbone.inspect(images, self.blocks, mixing=any("mixing" in kind for kind in self.maps))
        named = {
            f"block{block}/{name}": scores
            for block, view in zip(self.blocks, views, strict=True)
            for name, scores in block_maps(view, self.maps).items()
        }
        if not named:
            raise ValueError(f"model.init_args.maps={self.maps}: {type(self.backbone).__name__} has none of these maps")
        return named

    def _start(self, images: Tensor) -> None:
        """Learns the maps' names from a blank image, so that a rank without images has them too."""
        blank = images.new_zeros(1, *images.shape[1:])
        self.names = [*self.named_maps(blank), "shuffled"]
        self.metric = BinaryAUC(len(self.names), self.ignore_index).to(images.device)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        images = batch["image"]
        if self.metric is None:
            self._start(images)
        assert self.metric is not None
        if not len(images):
            return
        named = self.named_maps(images)
        last = next(name for name in self.names if name.startswith(f"block{self.blocks[-1]}/"))
        scores = torch.stack([*named.values(), shuffled(named[last], batch["key"])], 1)
        self.metric.update(scores, batch["mask"])
        if (missing := self.pictures - sum(len(part["keys"]) for part in self._pictures)) > 0:
            self._pictures.append(self._keep(batch, scores, missing))

    def _keep(self, batch: dict[str, Any], scores: Tensor, count: int) -> dict[str, Any]:
        """The first ``count`` images of a batch with what figures show of them."""
        images, data = batch["image"][:count], self.trainer.datamodule
        mean, std = (torch.tensor(v).to(images)[:, None, None] for v in (data.mean, data.std))
        features = self.backbone.forward_intermediates(images, 1)[0]
        return {
            "keys": batch["key"][:count],
            "images": ((images * std + mean).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy(),
            "masks": batch["mask"][:count].cpu().numpy(),
            "maps": scores[:count].float().cpu().numpy(),
            "patches": features.patches.float().cpu().numpy(),
        }

    def on_validation_epoch_end(self) -> None:
        assert self.metric is not None
        values = self.metric.compute()
        self.metric.reset()
        self._kept = self._first_pictures()
        if self.trainer.sanity_checking:
            return
        kinds = ("auc", "auc_normalized", "auc_of_mean_normalized")
        self._rows = [
            {"map": name} | {kind: values[kind][i].item() for kind in kinds}
            | {"images": int(values["images"]), "skipped": int(values["skipped"])}
            for i, name in enumerate(self.names)
        ]  # fmt: skip
        for row in self._rows:
            self.log_dict({f"maps/{row['map']}/{kind}": row[kind] for kind in kinds})
        last = next(row for row in self._rows if str(row["map"]).startswith(f"block{self.blocks[-1]}/"))
        self.log("val/auc_of_mean_normalized", last["auc_of_mean_normalized"], prog_bar=True)

    def _first_pictures(self) -> list[dict[str, Any]]:
        """The first pictures over all ranks, whose spans follow each other."""
        parts, self._pictures = self._pictures, []
        if self.pictures:
            parts = [part for rank in gather_objects(parts) for part in rank]
        kept, missing = [], self.pictures
        for part in parts:
            if missing > 0:
                kept.append({name: values[:missing] for name, values in part.items()})
                missing -= len(part["keys"])
        return kept

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def results(self) -> list[dict[str, object]]:
        """Per map: the three forms of the score, and the images scored and skipped."""
        return self._rows

    def arrays(self) -> dict[str, Any]:
        """Of the pictures kept: ``keys``, ``images`` (P, H, W, 3) uint8, ``masks`` (P, H, W), ``map_names`` (K),
        ``maps`` (P, K, h, w), ``patches`` (P, D, h, w) of the last block. Nothing where ``pictures`` is 0."""
        if not self._kept:
            return {}
        joined = {k: np.concatenate([np.asarray(part[k]) for part in self._kept]) for k in self._kept[0]}
        return joined | {"map_names": np.array(self.names), "ignore_index": np.array(self.ignore_index)}

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        named = self.named_maps(batch["image"])
        return {
            "key": batch["key"], "label": batch["label"], "embedding": self(batch["image"]),
            "map_names": list(named), "maps": torch.stack(list(named.values()), 1),
        }  # fmt: skip
