"""What every backbone offers to the rest of the project.

Shapes: B images, D num_features, D_i width of block or stage i, h x w patch grid, L tokens, R registers among them,
T read-out tokens (the one CLS, or Mamba-Reg's registers).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from timm.layers import trunc_normal_
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backbones.ops import is_traced
from backbones.pixels import Pixels

Stream = Literal["published", "branch", "residual"]
STREAMS: tuple[Stream, ...] = ("published", "branch", "residual")
CLASSIFIER_PREFIXES = ("head.", "head_dist.", "neck.", "norm_neck.")
"""What published files call the parts behind the backbone."""
PRETRAINING_PREFIXES = ("mask_token", "decoder_", "decoder.", "predictor.", "projector.")
"""Of published states: what masked and contrastive pretraining had beside the encoder."""


class Features(NamedTuple):
    """A block's or a stage's output, sorted by what its tokens are."""

    cls: Tensor
    """(B, D_i) what the image embedding is read from: the CLS token, or the mean of registers or of the patches."""
    patches: Tensor
    """(B, D_i, h, w)."""
    registers: Tensor | None = None
    """(B, R, D_i), or None where the family has none."""


class BlockView(NamedTuple):
    """One block seen by :meth:`MixingBackbone.inspect`."""

    features: Features
    mixing: Tensor | None = None
    """(B, T, heads, h, w): rows of the token-mixing matrix at the T read-out tokens, over the patches."""
    register_mixing: Tensor | None = None
    """(B, R, heads, h, w): its rows at the registers, or None where the family has none."""


class Backbone(nn.Module, ABC):
    """An image encoder with a map of features after each of its blocks or stages.

    A family sets ``num_features``, ``feature_info`` and ``patch_size`` and gives :meth:`pooled_features`,
    :meth:`forward_features` and :meth:`forward_intermediates`; the rest follows. Most families do so through
    :class:`~backbones.SequenceBackbone` or :class:`~backbones.HierarchicalBackbone`.
    """

    num_features: int
    """D, the width of the embedding."""
    feature_info: list[dict[str, Any]]
    """Of each block or stage, in timm's terms: ``num_chs`` D_i, ``reduction`` (pixels a side of a cell), ``module``."""
    patch_size: int
    """Pixels that a side of the image must be a multiple of."""
    num_registers = 0
    """R, registers that ``Features.registers`` holds."""
    in_chans: int | None = None
    """Channels of the images; None where a family does not say."""
    input_conv: str | None = "patch_embed.proj.weight"
    """Name of the parameter (D, C, p, p) that meets the images first."""
    published_stream: Stream = "residual"
    """What ``published`` means for the family."""
    pools: tuple[str, ...] = ("token", "avg", "")
    """What ``global_pool`` may be: the read-out token, the mean of the patches, or no pooling."""
    global_pool = "token"
    num_classes = 0
    weights_source = "random initialisation"
    pixels: Pixels | None = None
    """How images were fed to the weights; None where nothing says so."""
    free_on_resume: tuple[str, ...] = (
        "drop_path", "backend", "chunk_size", "pretrained", "dt_min", "dt_max", "A_init_range",
    )  # fmt: skip
    """Arguments with which a trained backbone is still the same model; the others stay when a run is resumed."""
    grad_checkpointing = False
    embedding_is_cls = True
    """Whether the last block's ``cls``, as heads read it, is what the embedding is read from."""

    @property
    def embed_dim(self) -> int:
        """``num_features`` by its other name."""
        return self.num_features

    @property
    def depth(self) -> int:
        """Blocks, or stages of a pyramid."""
        return len(self.feature_info)

    # ---- forward ------------------------------------------------------------------------------------------

    @abstractmethod
    def pooled_features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) to what a family reads off its last features: (B, D), or unpooled for ``global_pool=""``."""

    @abstractmethod
    def forward_features(self, images: Tensor) -> Features:
        """(B, C, H, W) to what the embedding is read from: the last block's features behind the final norm."""

    @abstractmethod
    def forward_intermediates(
        self, images: Tensor, n: int | Sequence[int] = 1, stream: Stream = "published", norm: bool = True
    ) -> list[Features]:
        """Features of several blocks or stages, each behind the family's final norm; the oldest first.

        Args:
            images: (B, C, H, W).
            n: how many last blocks, or the numbers of the blocks (negative ones count from the end).
            stream: ``branch`` is what the block's token mixer adds (after its projection, before the residual sum),
                ``residual`` the stream after the block, ``published`` whichever of them the family's published
                results read.
            norm: as timm's: without it they are as the blocks leave them.

        Raises:
            ValueError: for blocks that are not there, an unknown stream, or one that the model does not have.
        """

    @property
    def mixer_heads(self) -> list[tuple[int, int]]:
        """Heads of each block's token mixer and the channels of one, where :meth:`MixingBackbone.head_outputs` gives
        them; else nothing."""
        return []

    @property
    def cls_widths(self) -> list[int]:
        """Width of each block's ``cls`` as :meth:`forward_readouts` gives it."""
        return [info["num_chs"] for info in self.feature_info]

    def forward_readouts(
        self, images: Tensor, n: int | Sequence[int] = 1, stream: Stream = "published"
    ) -> list[Features]:
        """What heads read: :meth:`forward_intermediates`, with the embedding for the last block's ``cls`` where that is
        only the mean of patches of which a family makes its embedding; of ``cls_widths`` then."""
        return self.forward_intermediates(images, n, stream)

    def pre_logits(self, images: Tensor) -> Tensor:
        """(B, C, H, W) to the classifier's input: the embedding, unless a family narrows it first."""
        return self.pooled_features(images)

    def logits(self, images: Tensor) -> Tensor:
        """(B, C, H, W) to (B, num_classes). ValueError where there is no classifier."""
        if not self.num_classes:
            raise ValueError(f"{type(self).__name__} has no classifier: build it with num_classes, or reset_classifier")
        return self.head(self.pre_logits(images))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) to the image embedding (B, D); with a classifier, as timm's models, to (B, num_classes)."""
        return self.logits(images) if self.num_classes else self.pooled_features(images)

    def embedding(self, images: Tensor) -> Tensor:
        """(B, C, H, W) to the image embedding (B, D), whether or not there is a classifier.

        A call of the module itself where that gives it, so that hooks and compilation of the module act.
        """
        return self.pooled_features(images) if self.num_classes else self(images)

    def check_size(self, height: int, width: int) -> None:
        """ValueError for images of a size that the model does not take: here, no multiples of the patch."""
        for name, side in (("height", height), ("width", width)):
            if side < self.patch_size or side % self.patch_size:
                raise ValueError(
                    f"image {name} {side} is not a multiple of patch_size {self.patch_size}: set img_size or crop"
                )

    # ---- classifier, in timm's terms ----------------------------------------------------------------------

    def get_classifier(self) -> nn.Module:
        """The last linear layer; an identity where there is none."""
        return getattr(self, "head", nn.Identity())

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier, or none for 0.

        Args:
            num_classes: of the classifier.
            global_pool: one of ``pools``, or None for what there is. "" returns unpooled features and has no
                classifier.

        Raises:
            ValueError: for another pooling, naming those allowed.
        """
        pool = self.global_pool if global_pool is None else global_pool
        if pool not in self.pools:
            allowed = ", ".join(map(repr, self.pools))
            raise ValueError(f"global_pool={pool!r}; {type(self).__name__} allows {allowed}")
        if num_classes < 0 or (num_classes and not pool):
            raise ValueError(f"num_classes={num_classes} with global_pool={pool!r}: a classifier reads pooled features")
        self.num_classes, self.global_pool = num_classes, pool
        self._build_classifier()

    def _build_classifier(self) -> None:
        """Makes ``head``, and what a family has before it."""
        self.head = self._linear_head(self.num_features)

    def _linear_head(self, width: int) -> nn.Module:
        """(B, width) to (B, num_classes), weights N(0, 0.02) and bias 0; an identity for no class."""
        if not self.num_classes:
            return nn.Identity()
        head = nn.Linear(width, self.num_classes)
        trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    def __prepare_scriptable__(self) -> Any:
        """What torch.jit.script asks first."""
        raise RuntimeError(
            f"{type(self).__name__} cannot be scripted: its sequence is laid out by Python. Use torch.jit.trace, "
            "torch.export.export or torch.onnx.export, which hold for any batch, or torch.compile"
        )

    # ---- training -----------------------------------------------------------------------------------------

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps each block's input only and computes the rest again in the backward pass; the gradients stay."""
        self.grad_checkpointing = enable

    def _run(self, block: nn.Module, x: Tensor) -> Any:
        """``block(x)``, checkpointed where that is on; a block drops the same paths when it is run again."""
        if self.grad_checkpointing and torch.is_grad_enabled() and not is_traced():
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    def no_weight_decay(self) -> set[str]:
        """Names of tokens and positions, which fine-tuning recipes leave out of weight decay."""
        return {name for name, _ in self.named_parameters(recurse=False)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's patterns of parameter names by depth: what comes before the blocks, and the blocks.

        The final norm goes with the last block, and a classifier is a group of its own, as in timm's models.
        """
        blocks = [re.escape(info["module"]) for info in self.feature_info]
        with_last = (99999,)  # timm's mark of what goes with the group before it
        return {
            "stem": rf"^(?!(?:{'|'.join(blocks)})\.|norm|neck|head)",
            "blocks": [(rf"^{block}\.", (i,)) for i, block in enumerate(blocks)] + [(r"^norm(?!_neck)", with_last)],
        }

    def param_groups(self, weight_decay: float, layer_decay: float | None = None) -> list[dict[str, Any]]:
        """Parameter groups for fine-tuning, by timm: no decay on vectors, tokens and positions.

        Args:
            weight_decay: on the others.
            layer_decay: factor of the learning rate from a block to the one before it (``lr_scale`` in the groups);
                None for one rate.
        """
        spared = self.no_weight_decay()
        if layer_decay is None:
            return param_groups_weight_decay(self, weight_decay, no_weight_decay_list=spared)
        return param_groups_layer_decay(self, weight_decay, no_weight_decay_list=spared, layer_decay=layer_decay)

    # ---- checkpoints --------------------------------------------------------------------------------------

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A published state made to fit: without a classifier or a decoder that this model has no place for.

        Families add what theirs need: positions of another grid, prefixes. ValueError for what cannot be made to fit.
        """
        own = self.state_dict()
        return {
            k: v for k, v in state.items() if k in own or not k.startswith(CLASSIFIER_PREFIXES + PRETRAINING_PREFIXES)
        }

    def pixels_of(self, state: dict[str, Tensor]) -> Pixels | None:
        """How images were fed to a published state of this model whose file does not say; None where it is unknown."""
        return None

    # ---- blocks by number ---------------------------------------------------------------------------------

    def block_index(self, block: int) -> int:
        """A block's number from 0. ValueError where there is no such block."""
        if not -self.depth <= block < self.depth:
            raise ValueError(f"block={block}: this backbone has blocks 0..{self.depth - 1} (or -{self.depth}..-1)")
        return block % self.depth

    def block_indices(self, n: int | Sequence[int]) -> list[int]:
        """The last ``n`` blocks, or those named, from the first to the last. ValueError for others."""
        if not isinstance(n, int):
            return sorted({self.block_index(int(block)) for block in n})
        if not 1 <= n <= self.depth:
            raise ValueError(f"n={n}: this backbone has {self.depth} blocks, allowed are 1..{self.depth}")
        return list(range(self.depth - n, self.depth))

    def resolve_stream(self, stream: Stream) -> Stream:
        """``branch`` or ``residual``. ValueError for an unknown name."""
        if stream not in STREAMS:
            raise ValueError(f"stream={stream!r}; allowed: {', '.join(STREAMS)}")
        return self.published_stream if stream == "published" else stream


class MixingBackbone(Backbone):
    """A backbone whose blocks mix tokens by matrices that can be looked at: Y = MX."""

    decomposes = True
    """Whether :meth:`decompose` works."""
    reads_tokens = True
    """Whether the embedding is read from tokens that have rows in M."""

    @abstractmethod
    def inspect(
        self, images: Tensor, blocks: Sequence[int] = (-1,), mixing: bool = True, stream: Stream = "published"
    ) -> list[BlockView]:
        """Features, and rows of the mixing matrix if ``mixing``, of several blocks in one pass, in the order asked."""

    @abstractmethod
    def token_mixing(self, images: Tensor, block: int = -1) -> Tensor:
        """(B, heads, L, L): the token-mixing matrix M of Y = MX in that block, all tokens in sequence order.

        For bidirectional scans it is the mean of both directions, as their outputs are averaged. ValueError where
        the model has no such matrix.
        """

    @abstractmethod
    def mixings(self, images: Tensor, blocks: Sequence[int]) -> Iterator[tuple[Tensor, Any]]:
        """:meth:`token_mixing` of several blocks in one pass, from the first to the last, one held at a time, each with
        the :class:`~backbones.tokens.Layout` that says where its tokens stand."""

    @abstractmethod
    def decompose(self, images: Tensor, blocks: Sequence[int] = (-1,), max_heads: int | None = None) -> list[list[Any]]:
        """Y = MX of each direction of several blocks' mixers, in one pass; see :class:`~backbones.mixers.Mixing`.

        Matrices are large, 8 MiB a head at 1,026 tokens in float64: ``max_heads`` takes at most so many of each mixer,
        spread evenly over all.
        """

    def head_outputs(self, images: Tensor, blocks: Sequence[int] = (-1,)) -> list[Tensor]:
        """What each head of several blocks' mixers gives the class token, in one pass, in the order asked.

        (B, heads, channels) of each block as ``mixer_heads`` says: what the output projection takes, after gates and
        norms and over both directions of scans; with registers the mean over them, as the embedding is. Side by side
        and projected they are the mixer's branch at that token. ValueError where the mixers have no heads.
        """
        raise ValueError(f"{type(self).__name__} does not give the outputs of its mixers' heads")

    def mixes_tokens(self) -> bool:
        """Whether this model has such matrices; where it has not, the methods above raise ValueError."""
        return True

    def cls_mixing(self, images: Tensor, block: int = -1) -> Tensor:
        """(B, heads, h, w): the CLS row of that block's mixing matrix over the patches.

        With registers it is the mean of their rows, since the embedding is the mean of their outputs.
        """
        rows = self.inspect(images, (block,))[0].mixing
        assert rows is not None
        return rows.mean(1)
