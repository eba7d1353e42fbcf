"""Binary-AUC of a frozen backbone's maps against foreground masks.

Shapes: B images, K maps an image, R registers, h x w patch grid.
"""

import logging
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from backbones import Backbone, BlockView, MixingBackbone, SequenceBackbone, Stream
from common.collectives import gather_objects
from common.pictures import pictures
from lightning_modules.hparams import record_hyperparameters
from lightning_modules.map_scores import GridScores, Way, check_ways
from lightning_modules.maps import (
    CONTROLS,
    MAP_KINDS,
    POSITION,
    SCORES,
    SHUFFLED,
    TOKEN,
    MapName,
    as_text,
    block_maps,
    grid_name,
    shuffled,
    token_maps,
)
from lightning_modules.readings import Readings, ReadsBoth
from metrics import position_map

logger = logging.getLogger(__name__)


class BinaryAUCEvaluation(ReadsBoth):
    """Scores several maps of several blocks in one pass over images with masks.

    Batches hold ``image``, ``mask`` and ``key``. Beside the maps asked for stand two controls: ``shuffled``, the last
    block's first map with its pixels permuted, is what a map without any relation to the mask gets; ``position``, minus
    the distance to the centre, is what one gets that knows nothing of the image. Blocks may have grids of their own;
    each map is scored on its own. Intervals are those of 95 % by the bootstrap over images.

    Args:
        backbone: frozen.
        maps: kinds of maps; those that the backbone does not have are left out, with a warning:
            ``similarity`` cosine of the CLS feature with each patch's,
            ``register_similarity`` the same of each register,
            ``token_similarity`` the same of each of ``tokens``,
            ``mixing`` the CLS row of the token-mixing matrix, mean over heads,
            ``mixing_heads`` the same head by head,
            ``register_mixing`` the row of each register, mean over heads.
        blocks: block (or stage) numbers (negative ones count from the end), or ``all``.
        ignore_index: id in the masks that takes no part.
        pictures: this many of the first images are kept with their maps and the last block's patch features, for
            analysis; in a prediction, of each device's, in its files.
        backbone_weights, weights_key: see FrozenBackboneModule.
        stream: which stream the similarities read (FrozenBackboneModule); ``both`` scores the published one and, as
            maps of their own, the other.
        tokens: which tokens ``token_similarity`` reads: ``cls``, the one that is read out; ``first``, Vim's class token
            at index 0, with position; ``registerN``; ``patchN``, in raster order. None for ``cls``, ``first`` where
            there is one, and five patches spread evenly.
        compare: ways of scoring, each of the same maps: ``grid``, the paper's, ``area`` and ``mask`` are the mean over
            images of :func:`metrics.binary_auc` so compared; ``pooled`` is the AUC of all images' cells at once, as on
            the grid, with one threshold. The first, which has a score of each image, is what is logged and what tables
            and figures show; the others' rows come after its rows, with their paired differences from it.

    Raises:
        ValueError: for unknown kinds or tokens, or where the backbone has none of them.
    """

    headline = "val/auc_of_mean_normalized"

    def __init__(
        self,
        backbone: Backbone,
        maps: list[str] = ["similarity"],  # noqa: B006  # never changed
        blocks: list[int] | Literal["all"] = [-1],  # noqa: B006
        ignore_index: int = 1000,
        pictures: int = 0,
        backbone_weights: str | None = None,
        weights_key: str = "teacher",
        stream: Readings = "published",
        tokens: list[str] | None = None,
        compare: list[Way] = ["grid"],  # noqa: B006
    ) -> None:
        super().__init__(backbone, backbone_weights, weights_key, stream)
        record_hyperparameters(self, "backbone")
        check_ways(compare)
        if not maps or any(kind not in MAP_KINDS for kind in maps):
            raise ValueError(f"model.init_args.maps={maps}; allowed: {', '.join(MAP_KINDS)}")
        if unknown := [name for name in tokens or [] if not TOKEN.fullmatch(name)]:
            raise ValueError(f"model.init_args.tokens={unknown[0]}; allowed: cls, first, registerN, patchN")
        if tokens == []:
            raise ValueError("model.init_args.tokens is empty; name at least one token, or leave it out")
        self.tokens = tokens
        self._mixes = isinstance(backbone, MixingBackbone) and backbone.mixes_tokens() and backbone.reads_tokens
        self.maps = [kind for kind in maps if self._mixes or "mixing" not in kind]
        if left_out := [kind for kind in maps if kind not in self.maps]:
            text = f"{type(backbone).__name__} has no rows of a token-mixing matrix: maps={', '.join(left_out)}"
            if not self.maps:
                raise ValueError(
                    f"model.init_args.backbone={text}; allowed: similarity, register_similarity, token_similarity"
                )
            logger.warning("%s are left out", text)
        self.blocks = backbone.block_indices(backbone.depth if blocks == "all" else blocks)
        if not self.blocks:
            raise ValueError("model.init_args.blocks is empty; name at least one block, or all")
        self.ignore_index, self.pictures, self.compare = ignore_index, pictures, list(compare)
        self._pictures: list[dict[str, Any]] = []
        self.names: list[MapName] = []
        self._grids: dict[tuple[int, int], list[MapName]] = {}
        self.scores: nn.ModuleDict | None = None
        self._kept: list[dict[str, Any]] = []
        self._predicted = 0  # images of this device
        self._rows: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._per_image: dict[str, np.ndarray] = {}

    def named_maps(self, images: Tensor) -> dict[MapName, Tensor]:
        """All maps (B, h, w) asked for, by name, oldest block first."""
        backbone = self.backbone
        if any("mixing" in kind for kind in self.maps):
            views = backbone.inspect(images, self.blocks, stream=self.stream)
        else:
            views = [BlockView(f) for f in backbone.forward_intermediates(images, self.blocks, self.stream)]
        named: dict[MapName, Tensor] = {}
        for block, view in zip(self.blocks, views, strict=True):
            named |= block_maps(block, view, self.maps)
        if "token_similarity" in self.maps:
            named |= self._token_maps(images, self.stream)
        named |= self.read_other(lambda stream: self._similarities(images, stream)) or {}
        if not named:
            raise ValueError(f"model.init_args.maps={self.maps}: {type(backbone).__name__} has none of these maps")
        return named

    def _similarities(self, images: Tensor, stream: Stream) -> dict[MapName, Tensor]:
        """The maps asked for that read a stream, in the one beside the published."""
        others: dict[MapName, Tensor] = {}
        if kinds := [kind for kind in self.maps if "similarity" in kind]:
            features = self.backbone.forward_intermediates(images, self.blocks, stream)
            for block, found in zip(self.blocks, features, strict=True):
                others |= block_maps(block, BlockView(found), kinds)
            if "token_similarity" in kinds:
                others |= self._token_maps(images, stream)
        return {name._replace(stream=stream): scores for name, scores in others.items()}

    def _token_maps(self, images: Tensor, stream: Stream) -> dict[MapName, Tensor]:
        """Maps of ``tokens`` in a stream, in a pass of its own."""
        backbone, twins = self.backbone, None
        if isinstance(backbone, SequenceBackbone):
            sequences, layout = backbone.forward_sequences(images, self.blocks, stream)
            features = [layout.split(tokens) for tokens in sequences]
            if layout.twin is not None:
                twins = [tokens[:, layout.twin[0]] for tokens in sequences]
        else:
            features = backbone.forward_intermediates(images, self.blocks, stream)
        named: dict[MapName, Tensor] = {}
        for i, (block, found) in enumerate(zip(self.blocks, features, strict=True)):
            named |= token_maps(block, found, None if twins is None else twins[i], self.tokens)
        return named

    @property
    def _shuffled_from(self) -> MapName:
        """The map that is shuffled: the last block's first."""
        return next(name for name in self.names if name.block == self.blocks[-1])

    def _start(self, images: Tensor) -> None:
        """Learns the maps' names and grids from a blank image, so that a rank without images has them too."""
        named = self.named_maps(images.new_zeros(1, *images.shape[1:]))
        self.names = list(named)
        for name, scores in named.items():
            self._grids.setdefault((scores.shape[-2], scores.shape[-1]), []).append(name)
        shuffled_grid = next(grid for grid, names in self._grids.items() if self._shuffled_from in names)
        self._grids[shuffled_grid] += CONTROLS
        self.scores = nn.ModuleDict(
            {
                grid_name(grid): GridScores(grid, len(names), self.ignore_index, self.compare)
                for grid, names in self._grids.items()
            }
        ).to(images.device)

    def _shown(self, images: Tensor) -> np.ndarray:
        """Normalised images (B, C, H, W) as they look: (B, H, W, 3) uint8."""
        return (pictures(images, self.trainer.datamodule) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        images = batch["image"]
        if self.scores is None:
            self._start(images)
        assert self.scores is not None
        if not len(images):
            return
        named = self.named_maps(images)
        first = named[self._shuffled_from]
        named[SHUFFLED] = shuffled(first, batch["key"])
        named[POSITION] = position_map((first.shape[-2], first.shape[-1])).to(first).expand_as(first)
        self._keys += batch["key"]
        for grid, names in self._grids.items():
            self.scores[grid_name(grid)].update(torch.stack([named[name] for name in names], 1), batch["mask"])
        if (missing := self.pictures - sum(len(part["keys"]) for part in self._pictures)) > 0:
            self._pictures.append(self._keep(batch, named, missing))

    def _keep(self, batch: dict[str, Any], named: dict[MapName, Tensor], count: int) -> dict[str, Any]:
        """The first ``count`` images of a batch with what figures show of them."""
        images = batch["image"][:count]
        streams = {"patches": self.stream} | ({} if self.other_stream is None else {"patches_other": self.other_stream})
        return (
            {
                "keys": batch["key"][:count],
                "images": self._shown(images),
                "masks": batch["mask"][:count].cpu().numpy(),
            }
            | {
                name: self.backbone.forward_intermediates(images, 1, stream)[0].patches.float().cpu().numpy()
                for name, stream in streams.items()
            }
            | {f"maps/{as_text(name)}": scores[:count].float().cpu().numpy() for name, scores in named.items()}
        )

    def on_validation_epoch_end(self) -> None:
        assert self.scores is not None
        keys = [key for rank in gather_objects(self._keys) for key in rank]
        # by their keys, so that neither batches nor processes change a bit
        order = np.argsort(np.array(keys, dtype=np.str_), kind="stable")
        found: dict[Way, dict[MapName, dict[str, Any]]] = {way: {} for way in self.compare}
        images: dict[Way, list[np.ndarray]] = {}
        for grid, names in self._grids.items():
            of_grid, aucs = self.scores[grid_name(grid)].compute(order)
            for way, scores in of_grid.items():
                found[way] |= dict(zip(names, scores, strict=True))
            for way, values in aucs.items():
                images.setdefault(way, []).append(values)
        self._per_image = {
            "image_keys": np.array(keys, dtype=np.str_)[order],
            "image_auc_names": np.array([as_text(name) for names in self._grids.values() for name in names]),
        } | {
            "image_auc" if way == self.compare[0] else f"image_auc/{way}": np.concatenate(parts, 1).astype(np.float32)
            for way, parts in images.items()
        }
        self._keys = []
        self._kept = self._first_pictures()
        if self.trainer.sanity_checking:
            return
        self._rows = [
            self._fields(name) | found[way][name] for way in self.compare for name in (*self.names, *CONTROLS)
        ]
        for row in self._rows[: len(self.names) + len(CONTROLS)]:
            self.log_dict({f"maps/{row['map']}/{kind}": row[kind] for kind in SCORES})
        headline = found[self.compare[0]][self._shuffled_from]["auc_of_mean_normalized"]
        self.log("val/auc_of_mean_normalized", headline, prog_bar=True)

    def _fields(self, name: MapName) -> dict[str, Any]:
        """Columns that say which map it is, and of which stream."""
        read = {"stream": self.stream, "reading": "published"}  # rows of M and the controls read none
        if name.kind == "similarity":
            read = self.read_stream(name.stream)
        block = self.blocks[-1] if name in CONTROLS else name.block
        return {
            "map": as_text(name), "block": block, "part": name.part, "index": name.index, "kind": name.kind,
        } | read  # fmt: skip

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

    def rows(self) -> list[dict[str, Any]]:
        """Per way of scoring and map: which it is, the forms of the score, and the images scored and skipped."""
        return self._rows

    def arrays(self) -> dict[str, Any]:
        """Of every image, by its key: ``image_keys`` (n), ``image_auc`` (n, K) and ``image_auc_names`` (K), NaN where
        skipped; ``image_auc/WAY`` by each other way that has one. Of the pictures kept: ``keys``, ``images``
        (P, H, W, 3) uint8, ``masks`` (P, H, W), ``map_names`` (K), ``maps/NAME`` (P, h, w) of each, ``patches``
        (P, D, h, w) of the last block; ``patches_other`` in the other stream, where both are read."""
        if not self._kept:
            return self._per_image
        joined = {k: np.concatenate([np.asarray(part[k]) for part in self._kept]) for k in self._kept[0]}
        names = np.array([as_text(name) for name in (*self.names, *CONTROLS)])
        return self._per_image | joined | {"map_names": names, "ignore_index": np.array(self.ignore_index)}

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Keys, labels, embeddings, ``maps/NAME`` (B, h, w) of each map; ``images``, the first ``pictures`` of them."""
        named = self.named_maps(batch["image"])
        found = super().predict_step(batch, batch_idx) | {f"maps/{name}": scores for name, scores in named.items()}
        shown, self._predicted = self._predicted, self._predicted + len(batch["image"])
        if shown < self.pictures:
            found["images"] = self._shown(batch["image"][: self.pictures - shown])
        return found
