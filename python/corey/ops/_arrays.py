"""What is done to tensors of any library, by their own."""

from __future__ import annotations

import sys
from typing import Any, Sequence


def module_of(tensor: Any) -> Any:
    if hasattr(tensor, "__array_namespace__"):
        return tensor.__array_namespace__()
    return sys.modules[type(tensor).__module__.partition(".")[0]]


def is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def as_type(tensor: Any, name: str) -> Any:
    return tensor.to(getattr(sys.modules["torch"], name)) if is_torch(tensor) else tensor.astype(name)


def zeros_like(tensor: Any, shape: Sequence[int]) -> Any:
    if is_torch(tensor):
        return tensor.new_zeros(tuple(shape))
    return module_of(tensor).zeros(tuple(shape), dtype=tensor.dtype)


def expect_writable(tensor: Any, name: str) -> None:
    if hasattr(tensor, "at") or not getattr(getattr(tensor, "flags", None), "writeable", True):
        raise ValueError(f"{name}: expected a tensor that may be written, got a read-only one")


def with_rows(tensor: Any, rows: Any, values: Any) -> Any:
    """The tensor with rows set, itself where its library sets them in place."""
    if hasattr(tensor, "at"):
        return tensor.at[rows].set(values)
    tensor[rows] = values
    return tensor


def concatenate(tensors: Sequence[Any], axis: int) -> Any:
    return module_of(tensors[0]).concatenate(list(tensors), axis)


def one_row(tensor: Any) -> Any:
    """(batch, seqlen, ...) as (1, batch seqlen, ...), copied where it must be."""
    return tensor.reshape((1, tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]))


class Sequences:
    """Where the sequences of a batch start when its elements lie one after another:
    `starts`, and of each element of the batch the numbers of its `first` and
    `last`."""

    def __init__(self, seq_idx: Any, cu_seqlens: Any = None):
        if cu_seqlens is not None:
            self.starts = as_type(cu_seqlens[:-1], "int32")
            self.count = self.starts.shape[0]
            self.first, self.last = slice(0, 1), slice(self.count - 1, self.count)
            return
        first = seq_idx[:, :1]
        begins = concatenate([first == first, seq_idx[:, 1:] != seq_idx[:, :-1]], 1)
        found = begins.reshape(-1).nonzero()
        self.starts = as_type(found[:, 0] if is_torch(seq_idx) else found[0], "int32")
        self.count = self.starts.shape[0]
        ends = begins.sum(1).cumsum(0)
        self.last = ends - 1
        self.first = ends - begins.sum(1)
