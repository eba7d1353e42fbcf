"""Any timm model with patch tokens or a feature map, behind the Backbone interface."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from backbones import pixels
from backbones.base import CLASSIFIER_PREFIXES, BlockView, Features, MixingBackbone, Stream
from backbones.timm_attention import AttentionWatch, tells_its_branch, token_attention
from backbones.timm_create import REFUSALS, create, feature_info, own_size, reason, size_refused
from backbones.tokens import Layout


class TimmModel(MixingBackbone):
    """A timm model; its blocks are the blocks or stages that ``forward_intermediates`` of timm lists.

    The embedding is what timm's ``forward_head(pre_logits=True)`` gives: what a classifier of timm's would read. Where
    the blocks have no class token, ``Features.cls`` is the mean over the patches; families that widen, normalise or
    attend behind their last stage (MobileNet, ConvNeXt, CaiT) make another embedding of it, which is what heads read as
    the last block's ``cls`` (:meth:`forward_readouts`). Where they have one, it is ``cls``, whether or not timm pools
    the patches in its place (BEiT, DINOv3): see ``embedding_is_cls``.

    Families that cannot be built for several sizes take images of one; a ValueError says which.

    Mixing matrices are read from timm's own attention modules, where each block has exactly one that sees all tokens;
    other models (convolutions, windows, several blocks a stage) have none, and asking for them is an error.

    Args:
        name: name in timm's registry.
        img_size: side, or (height, width); None keeps the model's own. Only for models that take it.
        pretrained: load timm's published weights.
        drop_path: stochastic depth rate.
        in_chans: channels of the images; timm's weights of another number are adapted as timm does.

    Raises:
        ValueError: where timm does not know the name or the model offers no intermediate features.
    """

    decomposes = False

    def __init__(
        self,
        name: str,
        img_size: int | tuple[int, int] | None = None,
        pretrained: bool = False,
        drop_path: float = 0.0,
        in_chans: int = 3,
    ) -> None:
        super().__init__()
        model = create(name, img_size, pretrained, drop_path, in_chans)
        if not hasattr(model, "forward_intermediates"):
            raise ValueError(f"timm's {name} offers no forward_intermediates, so it has no feature maps to probe")
        self.model, self.name, self.in_chans = model, name, in_chans
        first = model.default_cfg.get("first_conv")
        self.input_conv = f"model.{first}.weight" if isinstance(first, str) else None
        self.weights_source = f"timm's {name}" if pretrained else "random initialisation"
        if pretrained and in_chans == 3:
            self.pixels = pixels.of_record(model.pretrained_cfg, f"timm's configuration of {name}")
        self.num_features = self._unpooled = getattr(model, "head_hidden_size", None) or model.num_features
        self.feature_info = feature_info(model)
        # some models put their class token in behind the blocks, whose features then have none
        prefixes = "return_prefix_tokens" in inspect.signature(model.forward_intermediates).parameters
        self.num_prefix = getattr(model, "num_prefix_tokens", 0) if prefixes else 0
        self.has_cls = self.reads_tokens = self.num_prefix > 0 and getattr(model, "cls_token", None) is not None
        self.num_registers = self.num_prefix - int(self.has_cls)
        embed = getattr(model, "patch_embed", None)
        patch = getattr(embed, "patch_size", None)
        reduction = self.feature_info[-1]["reduction"]
        self.patch_size = patch[0] if isinstance(patch, tuple) and len({reduction, patch[0]}) == 1 else reduction
        # blocks of one width and grid share the final norm; stages of a pyramid come as they are
        self.pyramid = len({(info["num_chs"], info["reduction"]) for info in self.feature_info}) > 1
        self._normed = not self.pyramid and isinstance(getattr(model, "norm", None), nn.Module)

    @property
    def embedding_is_cls(self) -> bool:  # type: ignore[override]
        model = self.model
        token = getattr(model, "global_pool", "token") == "token" and getattr(model, "dist_token", None) is None
        return token if self.has_cls else True

    def check_size(self, height: int, width: int) -> None:
        """Runs the model on a blank image; timm's families know their sizes only by refusing others."""
        self._of_blank_image(height, width)

    @torch.no_grad()
    def _of_blank_image(self, height: int, width: int) -> Tensor:
        modes = {module: module.training for module in self.modules()}
        try:
            self.eval()
            return self.pooled_features(next(self.parameters()).new_zeros(1, self.in_chans, height, width))
        finally:
            for module, training in modes.items():
                module.training = training

    # ---- forward ------------------------------------------------------------------------------------------

    def _sized(self, run: Callable[[Tensor], Any], images: Tensor) -> Any:
        """``run(images)``. ValueError for a size that the model does not take."""
        if torch.compiler.is_compiling():
            return run(images)
        try:
            return run(images)
        except REFUSALS as error:
            if (refusal := size_refused(self.model, self.name, self.patch_size, images, error)) is None:
                raise
            raise ValueError(refusal) from error

    def pooled_features(self, images: Tensor) -> Tensor:
        return self._sized(self._embed, images)

    def _embed(self, images: Tensor) -> Tensor:
        if not self.num_classes:
            return self.model(images)
        return self.model.forward_head(self.model.forward_features(images), pre_logits=True)

    def logits(self, images: Tensor) -> Tensor:
        return self._sized(self.model, images)

    def forward_features(self, images: Tensor) -> Features:
        return self.forward_intermediates(images, 1, "residual")[0]

    def get_classifier(self) -> nn.Module:
        return self.model.get_classifier()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """timm's own, of its poolings; the width of the embedding follows.

        Raises:
            ValueError: for a pooling that the family does not have, or a classifier of features that are not pooled.
        """
        pool = self.global_pool if global_pool is None else global_pool
        if num_classes < 0 or (num_classes and not pool):
            raise ValueError(f"num_classes={num_classes} with global_pool={pool!r}: a classifier reads pooled features")
        try:
            self.model.reset_classifier(num_classes, *([] if global_pool is None else [global_pool]))
            self.num_classes, self.global_pool = num_classes, pool
            if global_pool is not None:  # some families pool to twice their width, or hold a head that this one breaks
                pooled = self._of_blank_image(*own_size(self.model))
                self.num_features = pooled.shape[-1] if pool else self._unpooled
        except (TypeError, *REFUSALS) as error:
            raise ValueError(
                f"global_pool={global_pool!r}: timm's {self.name} does not take it ({reason(error)}); timm's are avg, "
                "max and avgmax, catavgmax of most convolutional families, token and map of those with such tokens, "
                "and '' for none"
            ) from None

    def _features(self, images: Tensor, wanted: Sequence[int], norm: bool = True) -> dict[int, Features]:
        """The residual stream after each of those blocks."""
        order = sorted(set(wanted))
        return self._by_block(order, self._run_blocks(images, order, intermediates_only=True, norm=norm))

    def _run_blocks(self, images: Tensor, order: list[int], intermediates_only: bool, norm: bool = True) -> Any:
        """timm's own answer."""
        options = {"return_prefix_tokens": True} if self.num_prefix else {}

        def run(images: Tensor) -> Any:
            return self.model.forward_intermediates(
                images,
                indices=order,
                norm=self._normed and norm,
                output_fmt="NCHW",
                intermediates_only=intermediates_only,
                **options,
            )

        return self._sized(run, images)

    def _by_block(self, order: list[int], outputs: Any) -> dict[int, Features]:
        found = {}
        for i, output in zip(order, outputs, strict=True):
            if not self.num_prefix:
                found[i] = Features(output.mean((2, 3)), output)
            else:
                patches, prefix = output
                found[i] = self._sorted(prefix, patches)
        return found

    @property
    def cls_widths(self) -> list[int]:
        widths = super().cls_widths
        return widths if self.has_cls or not self.global_pool else [*widths[:-1], self.num_features]

    def forward_readouts(
        self, images: Tensor, n: int | Sequence[int] = 1, stream: Stream = "published"
    ) -> list[Features]:
        wanted, last = self.block_indices(n), self.depth - 1
        if self.has_cls or not self.global_pool or last not in wanted or self.resolve_stream(stream) != "residual":
            return self.forward_intermediates(images, n, stream)
        final, outputs = self._run_blocks(images, wanted, intermediates_only=False)
        found = self._by_block(wanted, outputs)
        found[last] = found[last]._replace(cls=self.model.forward_head(final, pre_logits=True))
        return [found[i] for i in wanted]

    def _sorted(self, prefix: Tensor, patches: Tensor) -> Features:
        """Prefix tokens (B, P, D) and patches (B, D, h, w) by what they are."""
        first = int(self.has_cls)
        cls = prefix[:, 0] if first else patches.mean((2, 3))
        return Features(cls, patches, prefix[:, first:] if self.num_prefix > first else None)

    def _branches(self, images: Tensor, wanted: Sequence[int], norm: bool = True) -> dict[int, Features]:
        """What the attention of each of those blocks adds to the stream, behind the final norm."""
        modules = self._attention_modules("stream='branch'")
        blocks = {i: (self._block(i), modules[i]) for i in set(wanted)}
        if not self._normed or not all(tells_its_branch(block) for block, _ in blocks.values()):
            raise ValueError(
                f"stream='branch': timm's {type(self.model).__name__} does not tell what its attention adds"
            )
        with AttentionWatch(added=blocks) as watch:
            h, w = self._features(images, [self.depth - 1])[self.depth - 1].patches.shape[-2:]
        found = {}
        for i in set(wanted):
            tokens = self.model.norm(watch.added[i]) if norm else watch.added[i]
            prefix, patches = tokens[:, : self.num_prefix], tokens[:, self.num_prefix :]
            found[i] = self._sorted(prefix, patches.transpose(1, 2).unflatten(-1, (h, w)))
        return found

    def forward_intermediates(
        self, images: Tensor, n: int | Sequence[int] = 1, stream: Stream = "published", norm: bool = True
    ) -> list[Features]:
        wanted = self.block_indices(n)
        read = self._features if self.resolve_stream(stream) == "residual" else self._branches
        features = read(images, wanted, norm)
        return [features[i] for i in wanted]

    # ---- mixing -------------------------------------------------------------------------------------------

    @cached_property
    def _attention(self) -> list[str] | None:
        """Names of the blocks' attention modules, found out when first asked for; None where there are no such."""
        if self.pyramid:
            return None
        height, width = own_size(self.model)
        parameter = next(self.model.parameters())
        images = parameter.new_zeros(1, self.in_chans, height, width)
        reduction = self.feature_info[0]["reduction"]
        tokens = self.num_prefix + (height // reduction) * (width // reduction)
        return token_attention(self.model, [info["module"] for info in self.feature_info], images, tokens)

    def mixes_tokens(self) -> bool:
        """Runs the model on a blank image when first asked."""
        return self._attention is not None

    def _block(self, block: int) -> nn.Module:
        return self.model.get_submodule(self.feature_info[block]["module"])

    def _attention_modules(self, what: str) -> list[nn.Module]:
        if self._attention is None:
            raise ValueError(
                f"{what}: timm's {type(self.model).__name__} has no attention over all tokens in each of its "
                f"{self.depth} {'stages' if self.pyramid else 'blocks'}, so no token-mixing matrix or branch of its own"
            )
        return [self.model.get_submodule(name) for name in self._attention]

    def inspect(
        self, images: Tensor, blocks: Sequence[int] = (-1,), mixing: bool = True, stream: Stream = "published"
    ) -> list[BlockView]:
        wanted, read = [self.block_index(b) for b in blocks], self.resolve_stream(stream)
        get = self._features if read == "residual" else self._branches
        if not mixing:
            features = get(images, wanted)
            return [BlockView(features[i]) for i in wanted]
        modules = self._attention_modules("mixing")
        if not self.has_cls:
            raise ValueError(f"{type(self.model).__name__} has no class token, so no CLS row of a mixing matrix")
        with AttentionWatch({i: modules[i] for i in wanted}) as watch:
            features = get(images, wanted)
        h, w = features[wanted[0]].patches.shape[-2:]
        views = []
        for i in wanted:
            rows = watch.maps[i][:, :, : self.num_prefix, self.num_prefix :].transpose(1, 2).unflatten(-1, (h, w))
            views.append(BlockView(features[i], rows[:, :1], rows[:, 1:] if self.num_prefix > 1 else None))
        return views

    def token_mixing(self, images: Tensor, block: int = -1) -> Tensor:
        wanted = self.block_index(block)
        with AttentionWatch({wanted: self._attention_modules("token_mixing")[wanted]}) as watch:
            self.logits(images)
        return watch.maps[wanted]

    def mixings(self, images: Tensor, blocks: Sequence[int]) -> Iterator[tuple[Tensor, Layout]]:
        wanted, modules = self.block_indices(blocks), self._attention_modules("mixings")
        with AttentionWatch({i: modules[i] for i in wanted}) as watch:
            features = self._features(images, wanted)
        h, w = features[wanted[0]].patches.shape[-2:]
        index = torch.arange(self.num_prefix + h * w, device=images.device)
        cls, registers, patches = index.split([int(self.has_cls), self.num_registers, h * w])
        layout = Layout((h, w), patches, cls, registers if len(registers) else None)
        return ((watch.maps.pop(i), layout) for i in wanted)

    def decompose(self, images: Tensor, blocks: Sequence[int] = (-1,), max_heads: int | None = None) -> list[list[Any]]:
        """Always a ValueError: timm's attention does not give its values away."""
        raise ValueError(f"timm's {type(self.model).__name__} does not take its attention apart into Y = MX")

    # ---- training and checkpoints -------------------------------------------------------------------------

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Through timm's own switch. ValueError for models that have none."""
        try:
            self.model.set_grad_checkpointing(enable)
        except (AttributeError, AssertionError):
            if enable:
                raise ValueError(f"timm's {type(self.model).__name__} has no gradient checkpointing") from None
        super().set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        names = self.model.no_weight_decay() if hasattr(self.model, "no_weight_decay") else set()
        return {f"model.{name}" for name in names}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's own, of names within ``model``. ValueError for models without one."""
        if not hasattr(self.model, "group_matcher"):
            raise ValueError(f"timm's {type(self.model).__name__} does not group its parameters by depth")
        return {key: _within_model(patterns) for key, patterns in self.model.group_matcher(coarse).items()}

    def pixels_of(self, state: dict[str, Tensor]) -> pixels.Pixels | None:
        """timm's configuration of the model, for a state by timm's own names; one by ours was trained by somebody."""
        return None if any(k.startswith("model.") for k in state) else pixels.of_timm(self.name)

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Names of a timm model's own file get our prefix; positions of another grid are resampled as timm does."""
        if not any(k.startswith("model.") for k in state):
            state = {f"model.{k}": v for k, v in state.items()}
        own = self.state_dict()
        named = self.model.default_cfg.get("classifier") or ()
        named = (named,) if isinstance(named, str) else tuple(named)
        classifiers = tuple(f"model.{prefix}" for prefix in (*CLASSIFIER_PREFIXES, *(f"{name}." for name in named)))
        state = {k: v for k, v in state.items() if k in own or not k.startswith(classifiers)}
        pos, wanted = state.get("model.pos_embed"), own.get("model.pos_embed")
        grid = getattr(getattr(self.model, "patch_embed", None), "grid_size", None)
        if pos is None or wanted is None or grid is None or pos.ndim != 3:
            return state
        if pos.shape[1] != wanted.shape[1] and pos.shape[2] == wanted.shape[2]:
            extra = wanted.shape[1] - grid[0] * grid[1]
            state["model.pos_embed"] = resample_abs_pos_embed(pos, list(grid), num_prefix_tokens=extra)
        return state


def _within_model(patterns: Any) -> Any:
    """timm's patterns of parameter names, for the same names behind ``model.``."""
    if isinstance(patterns, str):
        without_anchors = re.sub(r"(?<!\[)\^", "", patterns)
        return rf"^model\.(?:{without_anchors})"
    if isinstance(patterns, tuple):
        return (_within_model(patterns[0]), *patterns[1:])
    if isinstance(patterns, list):
        return [_within_model(pattern) for pattern in patterns]
    return patterns
