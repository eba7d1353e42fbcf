"""Ranks of a frozen backbone's token-mixing matrices, block by block and direction by direction.

Shapes: B images, L tokens, C tokens in a chunk, n inner size (a head's channels, or a scan's state).
"""

from typing import Any, Literal

import torch
from torch import Tensor

from backbones import Backbone, MixingBackbone
from common.collectives import gather_rows
from lightning_modules.frozen import FrozenBackboneModule
from lightning_modules.hparams import record_hyperparameters
from metrics import effective_rank, numerical_rank, partition, rank_bound, singular_values
from metrics.mixing_rank import TOLERANCE

FIELDS = (
    "residual", "rank", "effective_rank", "block_rank_max", "block_effective_rank", "decay_rank_max", "bound_exceeded",
)  # fmt: skip
BOTH = "both"


class TokenMixingRanks(FrozenBackboneModule):
    """Measures M of Y = MX in float64 over images and heads, and checks what algebra says of its rank.

    Per block and direction: the largest error of Y = MX over the image's largest abs(Y); numerical and effective
    rank of M; of the C x C blocks of M off the diagonal, the largest numerical rank and the mean effective rank; the
    largest rank of the decay mask's blocks off the diagonal (1 for a scalar decay); and the bound of
    :func:`metrics.rank_bound`. A scan's blocks are those on its own side of the diagonal. ``both`` is the mean of
    the two directions. The skip D of scans, a diagonal, is left out.

    Args:
        backbone: frozen; any of ours.
        blocks: block numbers (negative ones count from the end), or ``all``.
        chunk: C.
        max_heads: at most so many heads, spread evenly over all, are measured.
        tolerance: singular values up to this share of the largest count as zero.
        backbone_weights, weights_key: see FrozenBackboneModule.
    """

    headline = "val/effective_rank"

    def __init__(
        self,
        backbone: Backbone,
        blocks: list[int] | Literal["all"] = "all",
        chunk: int = 14,
        max_heads: int = 24,
        tolerance: float = TOLERANCE,
        backbone_weights: str | None = None,
        weights_key: str = "teacher",
    ) -> None:
        super().__init__(backbone, backbone_weights, weights_key)
        record_hyperparameters(self, "backbone")
        if not isinstance(backbone, MixingBackbone) or not backbone.decomposes:
            raise ValueError(
                f"model.init_args.backbone={type(backbone).__name__} does not take its mixers apart; allowed are "
                "VisionTransformer, LinearVisionTransformer, VisionMamba, MambaReg and their Mamba-1 forms"
            )
        for name, value in (("chunk", chunk), ("max_heads", max_heads)):
            if value < 1:
                raise ValueError(f"model.init_args.{name}={value} must be at least 1")
        wanted = range(backbone.depth) if blocks == "all" else blocks
        self.blocks = sorted({backbone.block_index(int(b)) for b in wanted})
        if not self.blocks:
            raise ValueError("model.init_args.blocks is empty; name at least one block, or all")
        self.chunk, self.max_heads, self.tolerance = chunk, max_heads, tolerance
        self._found: dict[tuple[int, str], list[Tensor]] = {}  # rows (images · heads, fields)
        self._spectra: dict[tuple[int, str], list[Tensor]] = {}
        self._widths: dict[tuple[int, str], tuple[int, int | None, bool]] = {}
        self._arrays: dict[str, Tensor] = {}
        self._rows: list[dict[str, Any]] = []

    def setup(self, stage: str) -> None:
        super().setup(stage)
        trainer = getattr(self, "_trainer", None)
        if trainer is not None and trainer.strategy.root_device.type == "mps":
            raise ValueError(
                "ranks are measured in float64, which this device does not have: --trainer.accelerator cpu"
            )
        self.backbone.double()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        images = batch["image"].double()
        count = len(images)
        if not count:  # a rank without images still learns what there is to gather
            images = images.new_zeros(1, *images.shape[1:])
        backbone: Any = self.backbone
        with torch.autocast(images.device.type, enabled=False):
            for block, parts in zip(self.blocks, backbone.decompose(images, self.blocks), strict=True):
                heads = parts[0].matrix.shape[1]
                some = torch.linspace(0, heads - 1, min(heads, self.max_heads), device=images.device).round().long()
                matrices = {}
                for part in parts:
                    M, decay = part.matrix[:, some], None if part.decay is None else part.decay[:, some]
                    error = (part.matrix @ part.inputs - part.outputs).abs().amax((1, 2, 3))
                    error = error / part.outputs.abs().amax((1, 2, 3))
                    residual = error[:, None].expand(len(images), len(some))
                    self._measure((block, part.direction), count, M, decay, part.width, residual)
                    matrices[part.direction] = M
                if len(parts) > 1:
                    M = torch.stack(list(matrices.values())).mean(0)
                    self._measure((block, BOTH), count, M, None, parts[0].width, torch.zeros_like(residual))
                    matrices[BOTH] = M
                if batch_idx == 0 and count:
                    self._arrays |= {f"matrix/block{block}/{k}": M[0, :4].cpu() for k, M in matrices.items()}

    def _measure(
        self, where: tuple[int, str], count: int, M: Tensor, decay: Tensor | None, width: int | None, residual: Tensor
    ) -> None:
        """Appends one row of FIELDS for each of the first ``count`` images and each head of M (B, heads, L, L)."""
        direction = where[1]
        values = singular_values(M)
        ranks, effective, decays = [], [], [torch.zeros_like(residual)]
        exceeded = torch.zeros_like(residual, dtype=torch.bool)
        masks = partition(M if decay is None else decay, min(self.chunk, M.shape[-1]))
        for cell, mask in zip(partition(M, min(self.chunk, M.shape[-1])), masks, strict=True):
            side = cell.row - cell.column
            if side == 0 or (direction == "forward" and side < 0) or (direction == "backward" and side > 0):
                continue
            inner = singular_values(cell.matrix)
            rank = numerical_rank(inner, self.tolerance)
            ranks.append(rank)
            effective.append(effective_rank(inner))
            exceeded |= rank > rank_bound((cell.matrix.shape[-2], cell.matrix.shape[-1]), width)
            if decay is not None:
                decays.append(numerical_rank(singular_values(mask.matrix), self.tolerance))
        nothing = [torch.zeros_like(residual)]  # a single chunk has no block off the diagonal
        row = (
            residual, numerical_rank(values, self.tolerance), effective_rank(values),
            torch.stack(ranks or nothing).amax(0), torch.stack(effective or nothing).mean(0),
            torch.stack(decays).amax(0), exceeded,
        )  # fmt: skip
        self._found.setdefault(where, []).append(torch.stack([t.double() for t in row], -1)[:count].flatten(0, 1))
        share = values / values[..., :1].clamp(min=torch.finfo(values.dtype).tiny)
        self._spectra.setdefault(where, []).append(share[:count].mean(1))
        self._widths[where] = M.shape[-1], width, decay is not None

    def on_validation_epoch_end(self) -> None:
        self._rows = []
        for (block, direction), rows in self._found.items():
            table = gather_rows(torch.cat(rows))
            spectrum = gather_rows(torch.cat(self._spectra[block, direction])).mean(0)
            self._arrays[f"spectrum/block{block}/{direction}"] = spectrum.cpu()
            tokens, width, masked = self._widths[block, direction]
            column = dict(zip(FIELDS, table.unbind(-1), strict=True))
            # a scan's M as a whole is not bounded by its state
            whole = rank_bound((tokens, tokens), width if direction == "attention" else None)
            chunk = min(self.chunk, tokens)
            self._rows.append(
                {
                    "block": block, "direction": direction, "tokens": tokens, "chunk": chunk, "inner_size": width,
                    "matrices": len(table), "residual_max": column["residual"].max().item(),
                    "rank_mean": column["rank"].mean().item(), "rank_max": int(column["rank"].max()),
                    "rank_bound": whole,
                    "effective_rank_mean": column["effective_rank"].mean().item(),
                    "effective_rank_std": column["effective_rank"].std(correction=0).item(),
                    "block_rank_max": int(column["block_rank_max"].max()),
                    "block_rank_bound": rank_bound((chunk, chunk), width),
                    "block_effective_rank_mean": column["block_effective_rank"].mean().item(),
                    "decay_block_rank_max": int(column["decay_rank_max"].max()) if masked else None,
                    "bound_holds": not bool(column["bound_exceeded"].any()) and int(column["rank"].max()) <= whole,
                }
            )  # fmt: skip
        self._found, self._spectra = {}, {}
        mean = sum(row["effective_rank_mean"] for row in self._rows) / max(1, len(self._rows))
        self.log("val/effective_rank", mean, prog_bar=True)

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def rows(self) -> list[dict[str, Any]]:
        """Per block and direction: ranks measured, and the bounds of algebra beside them."""
        return self._rows

    def complete(self) -> bool:
        """A few validation batches are what is asked for, not a run cut short."""
        return self._over_all_of("train", "test")

    def arrays(self) -> dict[str, Any]:
        """``matrix/blockN/DIRECTION`` of the first image (up to 4 heads, L, L); ``spectrum/...``, mean σ/σ_max (L)."""
        return {name: value.numpy() for name, value in self._arrays.items()}
