"""Who else looks at a call: what writes it down or transforms it, and what counts its operations.

A kernel in C or Triton, or an autograd function of ours, is invisible to both, or is taken for a constant. So where
something traces, the ops take plain operations of PyTorch (``traceable.py``) that hold for sizes it does not know; and
a counter sees one operation for each scan and convolution, with the FLOPs of its definition whatever path computes it.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import flop_counter
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from common.derivatives import differentiated_again, gradients

_Keys = torch._C._TorchDispatchModeKey


def is_traced() -> bool:
    """Whether the call at hand is written down for other inputs, or transformed.

    By torch.export, torch.onnx, torch.jit.trace, make_fx, or torch.func (vmap, jvp, grad) and forward-mode AD.
    torch.compile is none of these: it takes our autograd functions as they are and compiles anew for another size.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return (
        torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_dispatch_mode(_Keys.PROXY) is not None
    )


def is_watched(*tensors: Tensor) -> bool:
    """Whether code outside PyTorch's operations would go unseen, or find no memory behind a tensor.

    So it is beside :func:`is_traced` while compiled, in any dispatch mode other than PyTorch's FLOP counter, and for
    tensors of another class (fake, distributed, ...).
    """
    if torch.compiler.is_compiling() or is_traced():
        return True
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
        return True
    return bool(torch._C._len_torch_dispatch_stack()) and not all(
        isinstance(mode, _COUNTERS) for mode in _get_current_dispatch_mode_stack()
    )


def is_free(*sizes: Any) -> bool:
    """Whether what is traced must hold for other values of these sizes, which then are no Python integers."""
    # inside strict export (dynamo) a free size passes for an integer
    return torch.compiler.is_dynamo_compiling() or not all(isinstance(size, int) for size in sizes)


def fixed(size: Any) -> int:
    """A size that the parameters fix, as an integer; torch.jit.trace has tensors for all sizes."""
    if isinstance(size, int):
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return int(size)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Autocast off; nothing where it is, so that a traced model holds no region for it."""
    if device == "meta":
        return nullcontext()
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return torch.autocast(device, enabled=False) if compiled or torch.is_autocast_enabled(device) else nullcontext()


# ---- FLOPs -----------------------------------------------------------------------------------------------


_COUNTERS = FlopCounterMode, getattr(flop_counter, "_FlopCounterMode", FlopCounterMode)
"""The second is what the first puts on the stack of modes."""

torch.library.define("dinomamba::flops", "(Tensor of, int count) -> Tensor")
torch.library.impl("dinomamba::flops", "default", lambda of, count: of.new_empty(0))


@register_flop_formula(torch.ops.dinomamba.flops, get_raw=True)
def _flops(of: Tensor, count: int, **_: Any) -> int:
    return count


class _Counted(torch.autograd.Function):
    """``function(*tensors)`` out of the counter's sight, announced as so many FLOPs, and twice as many backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], count: int, *tensors: Tensor | None) -> Tensor:  # type: ignore[override]
        wanted = ctx.needs_input_grad[2:]
        with _disable_current_modes(), torch.set_grad_enabled(any(wanted)):
            inner = [
                None if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, wanted, strict=True)
            ]
            y = function(*inner)
        ctx.function, ctx.inner, ctx.y, ctx.count = function, inner, y, count
        ctx.save_for_backward(*tensors)
        torch.ops.dinomamba.flops(y.detach(), count)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        torch.ops.dinomamba.flops(grad.detach(), 2 * ctx.count)
        with _disable_current_modes():
            if differentiated_again(grad):
                return None, None, *gradients(ctx.function, ctx.saved_tensors, grad)
            wanted = [t for t in ctx.inner if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(ctx.y, wanted, grad, retain_graph=True, allow_unused=True))
        return None, None, *(next(found) if t is not None and t.requires_grad else None for t in ctx.inner)


def is_counted() -> bool:
    """Whether PyTorch's FLOP counter is on."""
    return bool(torch._C._len_torch_dispatch_stack()) and any(
        isinstance(mode, _COUNTERS) for mode in _get_current_dispatch_mode_stack()
    )


def counted(function: Callable[..., Tensor], count: int, *tensors: Tensor | None) -> Tensor:
    """``function(*tensors)``; PyTorch's FLOP counter, if one is on, sees ``count`` FLOPs and none of what is inside."""
    if torch.compiler.is_compiling() or not is_counted():
        return function(*tensors)
    return _Counted.apply(function, count, *tensors)
