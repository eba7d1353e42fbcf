"""Ranks of a frozen backbone's token-mixing matrices, block by block and direction by direction.

Shapes: B images, L tokens, C tokens in a chunk, n inner size (a head's channels, or a scan's state).
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from backbones import Backbone, MixingBackbone
from common.collectives import gather_rows
from lightning_modules.frozen import FrozenBackboneModule
from lightning_modules.hparams import record_hyperparameters
from metrics import block_ranks, decay_block, rank_bound, rank_claims, triangle
from metrics.block_rank import FIELDS, Blocks, Side

BOTH, CAUSAL = "both", "causal"
SIDES: dict[str, Side] = {"forward": "lower", "backward": "upper", CAUSAL: "lower", "attention": "both", BOTH: "both"}
"""By direction: where M has blocks off the diagonal."""
MASKS = ("none", "causal")


class Mixed(NamedTuple):
    """A matrix that is measured, and better ways to its blocks than cutting it, where there are any."""

    matrix: Tensor
    width: int | None
    off_diagonal: Blocks | None = None
    decay: Blocks | None = None


class TokenMixingRanks(FrozenBackboneModule):
    """Measures M of Y = MX in float64 over images and heads, and checks what algebra says of its rank.

    Per block and direction: the largest error of Y = MX over the image's largest abs(Y); numerical and effective rank
    of M, of its C x C blocks on and off the diagonal, and of the decay mask's blocks; the bounds of
    :mod:`metrics.block_rank`, and whether they hold. ``both`` is the mean of the two directions, whose blocks off the
    diagonal are those of the direction that reads that way. The skip D of scans, a diagonal, is left out.

    Where C does not divide L, the last L mod C tokens make smaller blocks: they are reported by themselves.

    Args:
        backbone: frozen; any of ours.
        blocks: block numbers (negative ones count from the end), or ``all``.
        chunk: C.
        max_heads: at most so many heads, spread evenly over all, are measured.
        tolerance: singular values up to this share of a matrix's largest count as zero; None is max(R, S) · eps of
            float64 for R x S, see :func:`metrics.mixing_rank.rank_threshold`.
        mask: with ``causal`` the matrices of attention are measured a second time, as ``causal``, multiplied with the
            mask of ones at and below the diagonal, as the paper's eq. 12 has it. Softmax's rows are not brought back to
            a sum of 1: that multiplies rows by positive numbers and changes no rank, of M or a block.
        backbone_weights, weights_key: see FrozenBackboneModule.
    """

    headline = "val/effective_rank"

    def __init__(
        self,
        backbone: Backbone,
        blocks: list[int] | Literal["all"] = "all",
        chunk: int = 14,
        max_heads: int = 24,
        tolerance: float | None = None,
        mask: Literal["none", "causal"] = "none",
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
        if tolerance is not None and not 0 <= tolerance < 1:
            raise ValueError(f"model.init_args.tolerance={tolerance} must be at least 0 and below 1, or null")
        if mask not in MASKS:
            raise ValueError(f"model.init_args.mask={mask!r}; allowed: {', '.join(MASKS)}")
        wanted = range(backbone.depth) if blocks == "all" else blocks
        self.blocks = sorted({backbone.block_index(int(b)) for b in wanted})
        if not self.blocks:
            raise ValueError("model.init_args.blocks is empty; name at least one block, or all")
        self.chunk, self.max_heads, self.tolerance, self.mask = chunk, max_heads, tolerance, mask
        self._found: dict[tuple[int, str], list[Tensor]] = {}  # rows (images · heads, fields)
        self._spectra: dict[tuple[int, str], list[Tensor]] = {}
        self._widths: dict[tuple[int, str], tuple[int, int | None]] = {}
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
            every = backbone.decompose(images, self.blocks, max_heads=self.max_heads)
            for block in self.blocks:
                parts = every.pop(0)  # so that a block's matrices go when it is done
                error = torch.stack([_error(part) for part in parts])
                for at, (direction, mixed) in enumerate(self._matrices(parts).items()):
                    residual = error[at] if at < len(parts) else torch.zeros_like(error[0])
                    self._measure(block, direction, mixed, count, residual)
                    if batch_idx == 0 and count:
                        heads = 4 if mixed.matrix.shape[-1] <= 512 else 1
                        self._arrays[f"matrix/block{block}/{direction}"] = mixed.matrix[0, :heads].float().cpu()

    def _matrices(self, parts: list[Any]) -> dict[str, Mixed]:
        """A mixer's matrices by direction: first its own ones, then what is made of them."""
        found = {part.direction: _of_part(part) for part in parts}
        if len(parts) > 1:
            forward, backward = found["forward"], found["backward"]
            mean = torch.stack([forward.matrix, backward.matrix]).mean(0)
            found[BOTH] = Mixed(mean, forward.width, _either(forward, backward))
        elif self.mask == "causal":
            found[CAUSAL] = Mixed(triangle(parts[0].matrix, SIDES[CAUSAL]), parts[0].width)
        return found

    def _measure(self, block: int, direction: str, mixed: Mixed, count: int, residual: Tensor) -> None:
        """Appends one row of FIELDS and the residual for each of the first ``count`` images and each head."""
        M, where = mixed.matrix, (block, direction)
        if self.chunk > M.shape[-1]:
            raise ValueError(
                f"model.init_args.chunk={self.chunk}: block {block} mixes {M.shape[-1]} tokens; allowed are "
                f"1..{M.shape[-1]}, or give larger images (data.init_args.resize and crop)"
            )
        ranks = block_ranks(
            M, self.chunk, SIDES[direction], mixed.width, mixed.off_diagonal, mixed.decay, self.tolerance
        )
        row = torch.stack([residual.double(), *(ranks[name] for name in FIELDS)], -1)
        self._found.setdefault(where, []).append(row[:count].flatten(0, 1))
        values = ranks["values"]
        share = values / values[..., :1].clamp(min=torch.finfo(values.dtype).tiny)
        self._spectra.setdefault(where, []).append(share[:count].mean(1))
        self._widths[where] = M.shape[-1], mixed.width

    def on_validation_epoch_end(self) -> None:
        self._rows = []
        for (block, direction), rows in self._found.items():
            table = gather_rows(torch.cat(rows))
            spectrum = gather_rows(torch.cat(self._spectra[block, direction])).mean(0)
            self._arrays[f"spectrum/block{block}/{direction}"] = spectrum.cpu()
            column = dict(zip(("residual", *FIELDS), table.unbind(-1), strict=True))
            self._rows.append(self._row(block, direction, column))
        self._found, self._spectra = {}, {}
        mean = sum(row["effective_rank_mean"] for row in self._rows) / max(1, len(self._rows))
        self.log("val/effective_rank", mean, prog_bar=True)

    def _row(self, block: int, direction: str, column: dict[str, Tensor]) -> dict[str, Any]:
        """One line of the table: FIELDS over images and heads, bounds, and whether they hold."""
        tokens, width = self._widths[block, direction]
        chunk, rest = self.chunk, tokens % self.chunk
        # a scan's M as a whole, and a masked one, is not bounded by its inner size
        inner = width if direction == "attention" else None
        row = {
            "block": block, "direction": direction, "tokens": tokens, "chunk": chunk, "inner_size": width,
            "matrices": len(column["rank"]), "residual_max": column["residual"].max().item(),
            "rank_min": _least(column["rank"]), "rank_mean": column["rank"].mean().item(),
            "rank_max": _most(column["rank"]), "rank_bound": rank_bound((tokens, tokens), inner),
            "effective_rank_mean": column["effective_rank"].mean().item(),
            "effective_rank_std": column["effective_rank"].std(correction=0).item(),
            "diagonal_rank_min": _least(column["diagonal_rank_min"]),
            "diagonal_rank_max": _most(column["diagonal_rank_max"]),
            "diagonal_rank_bound": rank_bound((chunk, chunk), inner),
            "diagonal_effective_rank_mean": column["diagonal_effective_rank"].mean().item(),
            "block_rank_min": _least(column["block_rank_min"]), "block_rank_max": _most(column["block_rank_max"]),
            "block_rank_bound": rank_bound((chunk, chunk), width),
            "block_effective_rank_mean": _mean(column["block_effective_rank"]),
            "block_beyond_bound": None if column["block_beyond"].isnan().any() else column["block_beyond"].max().item(),
            "decay_block_rank_min": _least(column["decay_rank_min"]),
            "decay_block_rank_max": _most(column["decay_rank_max"]),
            "decay_diagonal_rank_min": _least(column["decay_diagonal_rank_min"]),
            "lower_bound_slack_min": _least(column["lower_bound_slack"]),
            "lower_bound_slack_max": _most(column["lower_bound_slack"]),
            "diagonal_nonzero_min": _least(column["diagonal_nonzero"]),
            "ragged_tokens": rest, "ragged_rank_max": _most(column["ragged_rank_max"]),
            "ragged_rank_bound": rank_bound((rest, chunk), width) if rest else None,
        }  # fmt: skip
        return row | {"bound_holds": all(claim.holds for claim in rank_claims(row) if claim.by == "algebra")}

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def rows(self) -> list[dict[str, Any]]:
        """Per block and direction: ranks measured, and the bounds of algebra beside them."""
        return self._rows

    def complete(self) -> bool:
        """A few validation batches are what is asked for, not a run cut short."""
        return self._over_all_of("train", "test")

    def arrays(self) -> dict[str, Any]:
        """``matrix/blockN/DIRECTION`` of the first image (up to 4 heads, one above 512 tokens, L, L) in float32;
        ``spectrum/...``, mean σ/σ_max (L)."""
        return {name: value.numpy() for name, value in self._arrays.items()}


def _error(part: Any) -> Tensor:
    """The largest error of Y = MX over the image's largest abs(Y); (B, heads), alike for all heads."""
    error = (part.matrix @ part.inputs - part.outputs).abs().amax((1, 2, 3)) / part.outputs.abs().amax((1, 2, 3))
    return error[:, None].expand(part.matrix.shape[:2])


def _of_part(part: Any) -> Mixed:
    """A mixer's own matrix; of one decay a head its blocks are scores times :func:`metrics.decay_block`."""
    if part.log_decay is None:
        return Mixed(part.matrix, part.width)
    scores, side = part.scores, SIDES[part.direction]

    def decay(rows: slice, columns: slice) -> Tensor:
        return decay_block(part.log_decay, rows, columns, side)

    return Mixed(
        part.matrix, part.width, lambda rows, columns: scores[..., rows, columns] * decay(rows, columns), decay
    )


def _either(forward: Mixed, backward: Mixed) -> Blocks:
    """Blocks off the diagonal of the directions' sum: below it the forward one's, above it the backward one's."""

    def block(rows: slice, columns: slice) -> Tensor:
        one = forward if rows.start > columns.start else backward
        return one.matrix[..., rows, columns] if one.off_diagonal is None else one.off_diagonal(rows, columns)

    return block


def _least(values: Tensor) -> int | None:
    return None if values.isnan().any() else int(values.min())


def _most(values: Tensor) -> int | None:
    return None if values.isnan().any() else int(values.max())


def _mean(values: Tensor) -> float | None:
    return None if values.isnan().any() else values.mean().item()
