"""Samples to a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def collate(samples: Sequence[dict[str, Any]], declared: Mapping[str, Any], who: str) -> dict[str, Any]:
    """The entries that all samples have, in the first one's order.

    Where a tensor is declared, numbers and arrays are stacked to its dtype and shape; where a list is declared, a batch
    has a list of one element a sample, arrays as tensors. Undeclared numbers and arrays of one shape are stacked,
    anything else becomes a list.

    Args:
        samples: what a transform returned for each, at least one.
        declared: an empty batch's entries.
        who: the transform's name, for messages.

    Raises:
        ValueError: if a sample lacks what is declared, or differs from a declared tensor, naming the entry.
    """
    for name in declared:
        if lacking := sum(name not in sample for sample in samples):
            raise ValueError(
                f"{who}: {lacking} of {len(samples)} samples of a batch have no {name!r}, which empty() declares; "
                "return it for each, empty where there is nothing, or leave it out of empty()"
            )
    batch: dict[str, Any] = {}
    for name in samples[0]:
        if all(name in sample for sample in samples):
            values = [sample[name] for sample in samples]
            if isinstance(wanted := declared.get(name), Tensor):
                batch[name] = _stacked(name, values, wanted, who)
            elif name in declared:
                batch[name] = _tensors(values)
            else:
                batch[name] = _guessed(values)
    return batch


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic, Tensor))


def _stacked(name: str, values: list[Any], declared: Tensor, who: str) -> Tensor:
    if not _is_array(values[0]):
        try:
            return torch.tensor(values, dtype=declared.dtype)
        except (TypeError, ValueError):
            wrong = next(v for v in values if not isinstance(v, (int, float)))
            raise ValueError(
                f"{who}: a sample's {name!r} is {wrong!r}, but empty() declares {declared.dtype}"
            ) from None
    tensors = _tensors(values)
    for one in tensors:
        if one.shape != declared.shape[1:] or one.dtype != declared.dtype:
            raise ValueError(
                f"{who}: a sample's {name!r} is {tuple(one.shape)} {one.dtype}, but empty() declares "
                f"{tuple(declared.shape[1:])} {declared.dtype}; make it so, or declare a list, which keeps arrays of "
                "unequal shape apart"
            )
    return torch.stack(tensors)


def _tensors(values: list[Any]) -> list[Any]:
    """Arrays as tensors; copied, since some are read-only or run backwards."""
    return [torch.from_numpy(np.array(v, order="C")) if isinstance(v, (np.ndarray, np.generic)) else v for v in values]


def _guessed(values: list[Any]) -> Tensor | list[Any]:
    first = values[0]
    if _is_array(first):
        tensors = _tensors(values)
        return torch.stack(tensors) if all(one.shape == tensors[0].shape for one in tensors) else tensors
    if isinstance(first, float):
        return torch.tensor(values, dtype=torch.float32)
    return torch.tensor(values) if isinstance(first, int) else values
