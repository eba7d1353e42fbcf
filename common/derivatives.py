"""Derivatives of derivatives, for autograd functions whose ``backward`` writes its gradients down by hand.

``once_differentiable`` is no guard against a second derivative: what it hangs its error on stands beside the graph, and
``torch.autograd.grad`` with ``inputs`` does not get there. It returns what the rest of the graph gives, silently.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiated_again(grad: Tensor) -> bool:
    """Within ``backward``: whether its result will be differentiated (``create_graph``) or ``grad`` is many at once.

    The latter is vmap around the backward pass (``is_grads_batched``), which sees PyTorch's operations alone.
    torch.compile takes first derivatives only, and says so itself.
    """
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    return (
        torch.is_grad_enabled()
        or functorch.peek_interpreter_stack() is not None
        or functorch.is_legacy_batchedtensor(grad)
    )


def gradients(function: Callable[..., Tensor], tensors: Sequence[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    """Gradients of ``function(*tensors)`` by autograd, as parts of the graph that ``tensors`` and ``grad`` are in.

    Args:
        function: the same as the autograd function, in PyTorch's operations or functions that use this in their turn.
        tensors: its arguments as ``ctx.saved_tensors`` has them.
        grad: of its result.

    Returns:
        one for each of ``tensors``, None for those that need none.
    """
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        # aliases: where one argument was made of another, the way from that one is not this function's
        inner = [t.view_as(t) if t is not None and t.requires_grad else t for t in tensors]
        y = function(*inner)
    wanted = [t for t in inner if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=torch.is_grad_enabled(), allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inner]
