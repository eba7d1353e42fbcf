"""Norms of a frozen backbone's tokens, how far its mixers mix them, and which heads' class rows say little.

Shapes: B images, D width, h x w patch grid, N = h·w patches, L tokens, F numbers of an image.
"""

import logging
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from backbones import Backbone, Features, MixingBackbone, SequenceBackbone, Stream
from common.collectives import gather_objects, gather_rows
from common.precision import at_least_float32, exact
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.readings import Readings, ReadsBoth
from metrics import grid_diagonal, masks_to_grid, mixing_distance, norm_statistics, row_entropy, uniform_distance

logger = logging.getLogger(__name__)

NORMS = (
    "patch_norm_median", "patch_norm_q99", "patch_norm_max", "outlier_share", "cls_norm", "register_norm",
    "outliers", "outliers_on_background", "cells", "cells_of_background",
)  # fmt: skip
"""Of an image and block; the last four are numbers of patches that the mask tells of, NaN without masks."""
MIXINGS = ("distance", "self_share", "token_share", "cls_row_entropy", "cls_row_token_share")
"""Of an image, block and head."""


class TokenStatistics(ReadsBoth):
    """Measures tokens and token mixing block by block, over images with or without masks.

    Norms, one row a block and stream, are those of the stream *before* the final norm, as "Vision Transformers Need
    Registers" takes them: of an image's patches the median, the 99 % quantile and the largest, the share of outliers
    (see :func:`metrics.norm_statistics`), and the class token's (what the embedding is read from) and the registers'
    mean. Where batches hold ``mask``, also the share of outliers on background, beside the background's own share.

    Mixing, one row a block and head, is of M of Y = MX, the mean of both directions of scans with their skip:
    :func:`metrics.mixing_distance` between patches, beside what a uniform M has; the share of a patch's row of abs(M)
    that lies on the patch itself, and on tokens that are no patches; of the class token's row (with registers the mean
    of theirs) the entropy over the patches, and the share that lies on no patch. A head is lazy where its class row is
    near uniform (``lazy_uniform``: mean entropy at least ``lazy_entropy``) or looks past the patches
    (``lazy_elsewhere``: mean share at least ``lazy_share``). Backbones without such matrices, and Mamba-1, whose
    channels have one each, have norms alone.

    Args:
        backbone: frozen.
        blocks: block (or stage) numbers (negative ones count from the end), or ``all``.
        outlier_factor: how many times its image's median an outlier's norm is.
        lazy_entropy: of 1, the entropy of N equal weights.
        lazy_share: of the row's weight.
        ignore_index: id in the masks that takes no part.
        backbone_weights, weights_key: see FrozenBackboneModule.
        stream: whose norms; ``both`` takes the published one and the other.
    """

    def __init__(
        self,
        backbone: Backbone,
        blocks: list[int] | Literal["all"] = "all",
        outlier_factor: float = 4.0,
        lazy_entropy: float = 0.95,
        lazy_share: float = 0.9,
        ignore_index: int = 1000,
        backbone_weights: str | None = None,
        weights_key: str = "teacher",
        stream: Readings = "published",
    ) -> None:
        super().__init__(backbone, backbone_weights, weights_key, stream)
        record_hyperparameters(self, "backbone")
        for name, value in (("lazy_entropy", lazy_entropy), ("lazy_share", lazy_share)):
            if not 0 <= value <= 1:
                raise ValueError(f"model.init_args.{name}={value} must be between 0 and 1")
        if outlier_factor <= 0:
            raise ValueError(f"model.init_args.outlier_factor={outlier_factor} must be above 0")
        self.blocks = backbone.block_indices(backbone.depth if blocks == "all" else blocks)
        if not self.blocks:
            raise ValueError("model.init_args.blocks is empty; name at least one block, or all")
        self.outlier_factor, self.ignore_index = outlier_factor, ignore_index
        self.lazy_entropy, self.lazy_share = lazy_entropy, lazy_share
        mixes = isinstance(backbone, MixingBackbone) and backbone.mixes_tokens()
        self._mixes = mixes and (not isinstance(backbone, SequenceBackbone) or bool(backbone.mixer_heads))
        if not self._mixes:
            logger.warning("%s has no token-mixing matrix a head: its norms alone are told", type(backbone).__name__)
        self._keys: list[str] = []
        self._norms: dict[tuple[int, Stream], list[Tensor]] = {}  # (images, F) of each batch
        self._mixings: dict[int, list[Tensor]] = {}  # (images, heads, F) of each batch
        self._grids: dict[int, tuple[int, int]] = {}
        self._rows: list[dict[str, Any]] = []

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        images, masks, count = batch["image"], batch.get("mask"), len(batch["image"])
        if not count:  # a rank without images still learns what there is to gather
            images = images.new_zeros(1, *images.shape[1:])
            masks = None if masks is None else masks.new_zeros(1, *masks.shape[1:])
        self._keys += batch["key"]
        found = self._read(images, self.stream)
        for stream, blocks in (found | (self.read_other(lambda other: self._read(images, other)) or {})).items():
            for block, features in zip(self.blocks, blocks, strict=True):
                self._norms.setdefault((block, stream), []).append(self._norms_of(features, masks)[:count].cpu())
        if self._mixes:
            assert isinstance(self.backbone, MixingBackbone)
            for block, (matrix, layout) in zip(self.blocks, self.backbone.mixings(images, self.blocks), strict=True):
                self._grids[block] = layout.grid
                self._mixings.setdefault(block, []).append(_mixing_of(matrix, layout)[:count].cpu())

    test_step = validation_step

    def _read(self, images: Tensor, stream: Stream) -> dict[Stream, list[Features]]:
        """Features before the final norm, by the stream that ``stream`` is."""
        blocks = self.backbone.forward_intermediates(images, self.blocks, stream, norm=False)
        return {self.backbone.resolve_stream(stream): blocks}

    def _norms_of(self, features: Features, masks: Tensor | None) -> Tensor:
        """(B, F) NORMS of one block, in float64."""
        found, outliers = norm_statistics(
            at_least_float32(features.patches).norm(dim=1).flatten(1), self.outlier_factor
        )
        nothing = torch.full_like(found["median"], torch.nan)
        registers = features.registers
        register_norm = nothing if registers is None else exact(at_least_float32(registers).norm(dim=2)).mean(1)
        numbers = [nothing] * 4
        if masks is not None:
            grid = features.patches.shape[-2:]
            ids = masks_to_grid(masks, (grid[0], grid[1])).flatten(1).to(outliers.device)
            told, background = ids != self.ignore_index, ids == 0
            counted = outliers & told, outliers & background, told, background
            numbers = [exact(cells.sum(1)) for cells in counted]
        cls_norm = exact(at_least_float32(features.cls).norm(dim=1))
        return torch.stack([*found.values(), cls_norm, register_norm, *numbers], 1)

    def on_validation_epoch_end(self) -> None:
        keys = [key for rank in gather_objects(self._keys) for key in rank]
        # summed in the order of the keys, so that neither batches nor processes change a bit
        order = torch.from_numpy(np.argsort(np.array(keys, dtype=np.str_), kind="stable"))

        def ordered(parts: list[Tensor]) -> np.ndarray:
            rows = torch.cat(parts).to(self.device) if self.device.type == "cuda" else torch.cat(parts)
            return gather_rows(rows).cpu()[order].double().numpy()

        streams = dict.fromkeys(stream for _, stream in self._norms)
        rows = [
            self._norm_row(block, stream, ordered(self._norms[block, stream]))
            for block in self.blocks
            for stream in streams
        ]
        for block, parts in self._mixings.items():
            images = ordered(parts)
            rows += [self._mixing_row(block, head, images[:, head]) for head in range(images.shape[1])]
        keys_of_rows = dict.fromkeys(key for row in rows for key in row)
        self._keys, self._norms, self._mixings = [], {}, {}
        if not self.trainer.sanity_checking:
            self._rows = [{key: row.get(key) for key in keys_of_rows} for row in rows]
            self.log("val/outlier_share", max(row["outlier_share"] for row in rows if "outlier_share" in row))

    on_test_epoch_end = on_validation_epoch_end

    def _norm_row(self, block: int, stream: Stream, images: np.ndarray) -> dict[str, Any]:
        """One line of the table from (images, F)."""
        of = dict(zip(NORMS, images.T, strict=True))
        means = {name: _mean(of[name]) for name in NORMS[:6]}
        told = ~np.isnan(of["outliers"])
        outliers, hits, cells, background = (float(of[name][told].sum()) for name in NORMS[6:])
        return (
            {"block": block, "head": None, **self.read_stream(stream), "images": len(images)}
            | means
            | {
                "patch_norm_max": float(of["patch_norm_max"].max()),
                "images_with_outliers": float((of["outlier_share"] > 0).mean()),
                "outliers_on_background": hits / outliers if outliers else None,
                "background_share": background / cells if cells else None,
            }
        )

    def _mixing_row(self, block: int, head: int, images: np.ndarray) -> dict[str, Any]:
        means = {name: _mean(values) for name, values in zip(MIXINGS, images.T, strict=True)}
        grid, entropy, share = self._grids[block], means["cls_row_entropy"], means["cls_row_token_share"]
        uniform, diagonal = uniform_distance(grid), grid_diagonal(grid)
        distance = means["distance"]
        return {"block": block, "head": head, "images": len(images)} | means | {
            "distance_of_diagonal": None if distance is None else distance / diagonal,
            "uniform_distance": uniform,
            "uniform_of_diagonal": uniform / diagonal,
            "lazy_uniform": None if entropy is None else entropy >= self.lazy_entropy,
            "lazy_elsewhere": None if share is None else share >= self.lazy_share,
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Per block and stream the norms (``head`` is null), per block and head the mixing (``stream`` is null)."""
        return self._rows

    def counts(self) -> dict[str, float]:
        """The thresholds that rows were judged by."""
        return {
            "outlier_factor": self.outlier_factor, "lazy_entropy": self.lazy_entropy, "lazy_share": self.lazy_share
        }  # fmt: skip


def _mixing_of(matrix: Tensor, layout: Any) -> Tensor:
    """(B, heads, L, L) to MIXINGS (B, heads, F)."""
    patches = layout.patches
    matrix = at_least_float32(matrix)
    weight = matrix.abs()
    rows = weight[:, :, patches]
    between, total = rows[..., patches], rows.sum(-1)
    own = between.diagonal(dim1=-2, dim2=-1) / total
    tokens = (1 - between.sum(-1) / total).clamp(min=0)
    found = [mixing_distance(between, layout.grid), own.nanmean(-1), tokens.nanmean(-1)]
    nothing = torch.full_like(found[0], torch.nan)
    if len(layout.readout):
        row = matrix[:, :, layout.readout].mean(2)
        seen = row[..., patches]
        found += [row_entropy(seen), (1 - seen.abs().sum(-1) / row.abs().sum(-1)).clamp(min=0)]
    else:
        found += [nothing, nothing]
    return torch.stack(found, -1)


def _mean(values: np.ndarray) -> float | None:
    """Over images that have the value; None where none has."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else None
