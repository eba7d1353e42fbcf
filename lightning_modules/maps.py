"""Maps of one block of a backbone, by name: what Binary-AUC scores.

Shapes: B images, K maps an image, R registers, L tokens, h x w patch grid.
"""

import re
import zlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones import BlockView, Features, Stream

MAP_KINDS = ("similarity", "register_similarity", "token_similarity", "mixing", "mixing_heads", "register_mixing")
TOKEN = re.compile(r"(cls|first)|(register|patch)(\d+)")
EVEN_PATCHES = 5


def similarity_map(token: Tensor, patches: Tensor) -> Tensor:
    """Cosine of tokens (B, R, D) and patches (B, D, h, w); (B, R, h, w)."""
    return torch.einsum("brd,bdhw->brhw", F.normalize(token.float(), dim=-1), F.normalize(patches.float(), dim=1))


class MapName(NamedTuple):
    """Which map of a backbone it is; as text ``block3/head2/mixing``."""

    block: int
    kind: str
    """``similarity`` or ``mixing``."""
    part: str | None = None
    """``head``, ``register`` or ``patch``, where the map is of one of several; ``first``, a class token at index 0."""
    index: int | None = None
    stream: Stream | None = None
    """The stream that is read, where it is the one beside the published."""

    def __str__(self) -> str:
        part = "" if self.part is None else f"{self.part}{'' if self.index is None else self.index}/"
        stream = "" if self.stream is None else f"/{self.stream}"
        return f"block{self.block}/{part}{self.kind}{stream}"


SHUFFLED = MapName(-1, "shuffled")
"""A control beside the maps of a backbone: the last block's first map with its pixels permuted."""
POSITION = MapName(-1, "position")
"""Another: minus the distance to the image's centre, which knows nothing of what is there."""
CONTROLS = (SHUFFLED, POSITION)
SCORES = ("auc", "auc_normalized", "auc_of_mean_normalized")


def as_text(name: MapName) -> str:
    """A map's name in tables and files."""
    return name.kind if name in CONTROLS else str(name)


def grid_name(grid: tuple[int, int]) -> str:
    """What the metric of all maps on a grid is called."""
    return f"{grid[0]}x{grid[1]}"


def block_maps(block: int, view: BlockView, kinds: list[str]) -> dict[MapName, Tensor]:
    """Maps (B, h, w) of one block, those of ``kinds`` that it has."""
    features, mixing, register_mixing = view
    maps: dict[MapName, Tensor] = {}
    if "similarity" in kinds:
        maps[MapName(block, "similarity")] = similarity_map(features.cls[:, None], features.patches)[:, 0]
    if "register_similarity" in kinds and features.registers is not None:
        each = similarity_map(features.registers, features.patches)
        maps |= {MapName(block, "similarity", "register", r): each[:, r] for r in range(each.shape[1])}
    if mixing is not None:
        if "mixing" in kinds:
            maps[MapName(block, "mixing")] = mixing.mean((1, 2))
        if "mixing_heads" in kinds:
            maps |= {MapName(block, "mixing", "head", h): mixing[:, :, h].mean(1) for h in range(mixing.shape[2])}
    if "register_mixing" in kinds and register_mixing is not None:
        count = register_mixing.shape[1]
        maps |= {MapName(block, "mixing", "register", r): register_mixing[:, r].mean(1) for r in range(count)}
    return maps


def even_tokens(cells: int, twin: bool) -> list[str]:
    """Names of the tokens that ``token_similarity`` reads unless told: class tokens, and patches spread evenly."""
    count = min(EVEN_PATCHES, cells)
    patches = [f"patch{(2 * i + 1) * cells // (2 * count)}" for i in range(count)]
    return ["cls", *(["first"] if twin else []), *patches]


def token_maps(block: int, features: Features, twin: Tensor | None, names: list[str] | None) -> dict[MapName, Tensor]:
    """Maps (B, h, w): the cosine of a token's feature with each patch's, of each token named.

    Args:
        block: the block's number.
        features: its output.
        twin: (B, D) the class token at index 0, where the family has one there too.
        names: ``cls``, the one read out; ``first``, its twin; ``registerN``; ``patchN``, in raster order. None for
            those of :func:`even_tokens`.

    Raises:
        ValueError: for a token that the backbone does not have, saying which it has.
    """
    patches = features.patches.flatten(2)
    registers = 0 if features.registers is None else features.registers.shape[1]
    found: dict[MapName, Tensor] = {}
    for name in names or even_tokens(patches.shape[2], twin is not None):
        match = TOKEN.fullmatch(name)
        assert match is not None, name  # the constructor asked
        whole, part, number = match.group(1), match.group(2), int(match.group(3) or 0)
        has = {
            "cls": True,
            "first": twin is not None,
            "register": number < registers,
            "patch": number < patches.shape[2],
        }
        if not has[whole or part]:
            first = ", first" if twin is not None else ""
            registers_too = f", register0..{registers - 1}" if registers else ""
            raise ValueError(
                f"model.init_args.tokens={name}: this backbone has none; it has cls{first}{registers_too}, "
                f"patch0..{patches.shape[2] - 1}"
            )
        if whole == "cls":
            token, key = features.cls, MapName(block, "similarity")
        elif whole == "first":
            assert twin is not None
            token, key = twin, MapName(block, "similarity", "first")
        elif part == "patch":
            token, key = patches[:, :, number], MapName(block, "similarity", "patch", number)
        else:
            assert features.registers is not None
            token, key = features.registers[:, number], MapName(block, "similarity", "register", number)
        found[key] = similarity_map(token[:, None], features.patches)[:, 0]
    return found


def shuffled(scores: Tensor, keys: list[str]) -> Tensor:
    """Each map (B, h, w) with its pixels permuted by a permutation drawn from the image's key."""
    flat = scores.flatten(1)
    orders = []
    for key in keys:
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        orders.append(torch.randperm(flat.shape[1], generator=generator))
    return flat.gather(1, torch.stack(orders).to(flat.device)).view_as(scores)
