"""Looking into the attention of timm's models: which blocks have one over all tokens, its maps, and what it adds.

Shapes: B images, L tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def token_attention(model: nn.Module, blocks: list[str], images: Tensor, tokens: int) -> list[str] | None:
    """The name of each block's attention module, where each has exactly one that mixes all tokens by one matrix a head.

    Found out by names first, then by running the model once: windows, channels and differences of maps give matrices
    of another shape or number.

    Args:
        model: timm's.
        blocks: names of its blocks.
        images: (1, C, H, W) that the model takes.
        tokens: L of that image.
    """
    names = _one_a_block(model, blocks)
    if names is None:
        return None
    modules = {i: model.get_submodule(name) for i, name in enumerate(names)}
    seen: dict[int, list[tuple[int, ...]]] = {i: [] for i in modules}
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _explicit(modules, lambda i, attention: seen[i].append(tuple(attention.shape))):
            model.forward_features(images)
    finally:
        model.train(training)
    wanted = {i: [(1, getattr(module, "num_heads", -1), tokens, tokens)] for i, module in modules.items()}
    return names if seen == wanted else None


def _one_a_block(model: nn.Module, blocks: list[str]) -> list[str] | None:
    found, known = [], {name for name, _ in model.named_modules()}
    for block in blocks:
        if block not in known:
            return None
        inside = [
            f"{block}.{name}"
            for name, module in model.get_submodule(block).named_modules()
            # a block that is its own attention (parallel ones) has no branch to tell from its MLP's
            if name and hasattr(module, "fused_attn") and isinstance(getattr(module, "attn_drop", None), nn.Module)
        ]
        if len(inside) != 1:
            return None
        found += inside
    return found


@contextmanager
def _explicit(modules: dict[int, nn.Module], keep: Callable[[int, Tensor], None]) -> Any:
    """While open, these attention modules take their explicit path and each map goes to ``keep`` with its number."""

    def keeper(number: int) -> Callable[..., None]:
        return lambda _, inputs: keep(number, inputs[0])

    fused = {i: module.fused_attn for i, module in modules.items()}
    hooks = [module.attn_drop.register_forward_pre_hook(keeper(i)) for i, module in modules.items()]
    for module in modules.values():
        module.fused_attn = False
    try:
        yield
    finally:
        for i, module in modules.items():
            module.fused_attn = fused[i]
        for hook in hooks:
            hook.remove()


class AttentionWatch(AbstractContextManager["AttentionWatch"]):
    """While open, keeps the maps of some attention modules, or what they add to the residual stream, by block number.

    Args:
        maps: attention modules whose maps are kept.
        added: blocks and their attention modules, whose additions are kept.
    """

    def __init__(
        self, maps: dict[int, nn.Module] | None = None, added: dict[int, tuple[nn.Module, nn.Module]] | None = None
    ) -> None:
        self.maps: dict[int, Tensor] = {}
        """(B, heads, L, L)."""
        self.added: dict[int, Tensor] = {}
        """(B, L, D)."""
        self._maps, self._added = maps or {}, added or {}
        self._open = ExitStack()

    def __enter__(self) -> "AttentionWatch":
        self._open.enter_context(_explicit(self._maps, self.maps.__setitem__))
        for number, (block, attention) in self._added.items():
            self._open.callback(self._hook(number, block, attention).remove)
        return self

    def _hook(self, number: int, block: nn.Module, attention: nn.Module) -> Any:
        """On what enters the residual sum: behind scales and norms of the branch, before stochastic depth."""
        sum_of = getattr(block, "drop_path1", None)
        if isinstance(sum_of, nn.Module):
            return sum_of.register_forward_pre_hook(lambda _, inputs: self.added.__setitem__(number, inputs[0]))
        return attention.register_forward_hook(lambda _, inputs, output: self.added.__setitem__(number, output))

    def __exit__(self, *_: object) -> None:
        self._open.close()


def tells_its_branch(block: nn.Module) -> bool:
    """Whether what the attention adds can be told: by its stochastic depth, or where nothing scales it."""
    scaled = any(name.startswith(("gamma", "ls", "layer_scale")) for name, _ in block.named_parameters())
    return isinstance(getattr(block, "drop_path1", None), nn.Module) or not scaled
