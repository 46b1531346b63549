"""The ops of mamba_ssm, causal-conv1d and fast-hadamard-transform.

Names, arguments, layouts, defaults and results are theirs; tensors are of numpy,
torch or CuPy, on the CPU or a GPU. Each is a program that is compiled when it is
first called with its types and channels, and serves every batch and length.
Inputs of any strides are read where they lie, or by libcorey copied where its
kernels cannot: those that are not channel-last. What is not implemented is
refused by message.

With torch, gradients go through torch itself, which computes the op again
(`corey.ops.torch`): right, and slow. Updates in place have none.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Optional, Tuple

from . import _build
from ._program import cache_clear, cache_info

__all__ = [
    "cache_clear",
    "cache_info",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "hadamard_transform",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "selective_scan_fn",
    "selective_state_update",
]

#: corey.ops.torch, once torch is there.
_torch: Any = None


def _dispatcher() -> Any:
    """Calls that only torch's dispatcher can make go through its ops."""
    if _torch is not None:
        return _torch
    import importlib

    return importlib.import_module("corey.ops.torch")


def _no_gradient(op: str, *tensors: Any) -> None:
    for tensor in tensors:
        if getattr(tensor, "requires_grad", False):
            raise NotImplementedError(
                f"{op}: expected tensors without gradients, got one that requires it; "
                "it updates its state in place: call it under torch.no_grad()"
            )


def _activation(op: str, activation: Optional[str]) -> bool:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"{op}: activation: expected None, silu or swish, got {activation}")
    return activation is not None


def selective_scan_fn(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Mamba-1's scan: u, delta, z (batch, dim, seqlen), A (dim, dstate), B and C
    (dim, dstate), (batch, dstate, seqlen) or (batch, ngroups, dstate, seqlen), D
    and delta_bias (dim). Returns out, as u, and the last state (batch, dim,
    dstate) in float32 if that is asked for."""
    if _torch is None or not _torch.is_compiling():
        launch = _build.selective_scan[bool(delta_softplus), bool(return_last_state)]
        result = launch(u, delta, A, B, C, D, z, delta_bias)
        if result is not NotImplemented:
            return result
    out, state = _dispatcher().selective_scan(u, delta, A, B, C, D, z, delta_bias, bool(delta_softplus))
    return (out, state) if return_last_state else out


def mamba_chunk_scan_combined(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    seq_idx: Any = None,
    cu_seqlens: Any = None,
    dt_softplus: bool = False,
    dt_limit: Tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """Mamba-2's scan: x and z (batch, seqlen, nheads, headdim), dt (batch, seqlen,
    nheads), A (nheads), B and C (batch, seqlen, ngroups, dstate), D (nheads,
    headdim) or (nheads), dt_bias (nheads), initial_states (batch, nheads,
    headdim, dstate), seq_idx (batch, seqlen), cu_seqlens (sequences + 1).

    Returns out, as x; with return_final_states the states after the last token;
    with return_varlen_states those of every sequence of cu_seqlens. States are
    float32. `chunk_size` has no effect on the result: the scheduler chooses how
    the work is cut. To find where sequences start, seq_idx without cu_seqlens is
    read by the host."""
    if operator.index(chunk_size) < 1:
        raise ValueError(f"mamba_chunk_scan_combined: chunk_size: expected at least 1, got {chunk_size}")
    low, high = float(dt_limit[0]), float(dt_limit[1])
    _expect_sequences(x, initial_states, seq_idx, cu_seqlens, return_varlen_states)
    if _torch is None or not _torch.is_compiling():
        result = _chunk_scan(
            x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, bool(dt_softplus), low, high,
            bool(return_final_states), bool(return_varlen_states), False,
        )  # fmt: skip
        if result is not NotImplemented:
            out, final, varlen = result
            return _chosen(out, final, varlen, return_final_states, return_varlen_states)
    out, final, varlen = _dispatcher().chunk_scan(
        x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, bool(dt_softplus), low, high,
        bool(return_varlen_states),
    )  # fmt: skip
    return _chosen(out, final, varlen, return_final_states, return_varlen_states)


def _chosen(out: Any, final: Any, varlen: Any, with_final: bool, with_varlen: bool) -> Any:
    results = [out] + ([final] if with_final else []) + ([varlen] if with_varlen else [])
    return tuple(results) if len(results) > 1 else out


def _expect_sequences(x: Any, initial_states: Any, seq_idx: Any, cu_seqlens: Any, varlen: bool) -> None:
    op = "mamba_chunk_scan_combined"
    if varlen and cu_seqlens is None:
        raise ValueError(f"{op}: cu_seqlens: expected with return_varlen_states, got None")
    if cu_seqlens is not None:
        if seq_idx is None:
            raise ValueError(f"{op}: seq_idx: expected with cu_seqlens, got None")
        if x.shape[0] != 1:
            raise ValueError(f"{op}: x: expected a batch of 1 with cu_seqlens, got {x.shape[0]}")
        if initial_states is not None:
            raise NotImplementedError(f"{op}: initial_states: expected None with cu_seqlens, got a tensor")
    if seq_idx is not None and tuple(seq_idx.shape) != tuple(x.shape[:2]):
        raise ValueError(f"{op}: seq_idx: expected shape {tuple(x.shape[:2])} (batch, seqlen), got {tuple(seq_idx.shape)}")


def _chunk_scan(
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, softplus, low, high, with_final, with_varlen, direct
):
    """(out, final states or None, states of sequences or None)."""
    launch = _build.chunk_scan[softplus, (low, high), with_final or with_varlen]
    launch = launch.direct if direct else launch
    if seq_idx is None:
        result = launch(x, dt, A, B, C, D, z, dt_bias, initial_states, None)
        if result is NotImplemented:
            return result
        return (*result, None) if with_final else (result, None, None)
    if not direct and any(_needs_dispatch(t) for t in (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)):
        return NotImplemented
    batch, length = x.shape[:2]
    rows = _Rows(seq_idx, cu_seqlens)
    if initial_states is not None:
        # The first sequence of each batch element goes on from it.
        start = _zeros_like(initial_states, (rows.count, *initial_states.shape[1:]))
        start[rows.first] = initial_states
        initial_states = start
    packed = [t if t is None else _pack(t) for t in (x, dt, B, C, z)]
    result = launch(packed[0], packed[1], A, packed[2], packed[3], D, packed[4], dt_bias, initial_states, rows.starts)
    if result is NotImplemented:
        return result
    out, states = result if with_final or with_varlen else (result, None)
    return out.reshape(x.shape), states[rows.last] if with_final else None, states if with_varlen else None


class _Rows:
    """Where the sequences of a batch start when its elements lie one after another."""

    def __init__(self, seq_idx: Any, cu_seqlens: Any = None):
        batch, length = seq_idx.shape
        if cu_seqlens is not None:
            self.starts = _as_int32(cu_seqlens[:-1])
            self.count = self.starts.shape[0]
            self.first, self.last = slice(0, 1), slice(self.count - 1, self.count)
            return
        module = _module(seq_idx)
        begins = module.ones_like(seq_idx, dtype=module.bool if module.__name__ == "torch" else bool)
        begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        self.starts = _as_int32(begins.reshape(-1).nonzero()[0] if module.__name__ != "torch" else begins.reshape(-1).nonzero()[:, 0])
        self.count = self.starts.shape[0]
        ends = begins.sum(1).cumsum(0)
        self.last = ends - 1
        self.first = ends - begins.sum(1)


def _module(tensor: Any) -> Any:
    import sys

    return sys.modules[type(tensor).__module__.partition(".")[0]]


def _as_int32(tensor: Any) -> Any:
    module = _module(tensor)
    return tensor.to(module.int32) if module.__name__ == "torch" else tensor.astype("int32")


def _zeros_like(tensor: Any, shape: tuple) -> Any:
    module = _module(tensor)
    if module.__name__ == "torch":
        return module.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    return module.zeros(shape, dtype=tensor.dtype)


def _pack(tensor: Any) -> Any:
    """(batch, seqlen, ...) as (1, batch seqlen, ...), copied where it must be."""
    return tensor.reshape((1, tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]))


def _needs_dispatch(tensor: Any) -> bool:
    return _torch is not None and tensor is not None and _torch.needs_dispatch(tensor)


def selective_state_update(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    state_batch_indices: Any = None,
) -> Any:
    """One token of either scan: state (batch, dim, dstate) or (batch, nheads, dim,
    dstate), updated in place; x, dt, z (batch, dim) or (batch, nheads, dim); A
    (dim, dstate) or (nheads, dim, dstate); B and C (batch, dstate) or (batch,
    ngroups, dstate); D and dt_bias (dim) or (nheads, dim). state_batch_indices
    (batch) names each sequence's state, -1 none. Returns out, as x."""
    if _torch is None or not _torch.is_compiling():
        launch = _build.state_update[(bool(dt_softplus),)]
        result = launch(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
        if result is not NotImplemented:
            return result
        _no_gradient("selective_state_update", state, x, dt, A, B, C, D, z, dt_bias)
    return _dispatcher().state_update(state, x, dt, A, B, C, D, z, dt_bias, bool(dt_softplus), state_batch_indices)


def causal_conv1d_fn(
    x: Any,
    weight: Any,
    bias: Any = None,
    seq_idx: Any = None,
    initial_states: Any = None,
    return_final_states: bool = False,
    final_states_out: Any = None,
    activation: Optional[str] = None,
) -> Any:
    """Causal depthwise convolution: x (batch, dim, seqlen), weight (dim, width),
    bias (dim), seq_idx (batch, seqlen), initial_states and final_states_out
    (batch, dim, width - 1), activation None, "silu" or "swish". Returns out, as
    x, and the last width - 1 inputs if those are asked for. seq_idx is read by
    the host."""
    op = "causal_conv1d_fn"
    silu = _activation(op, activation)
    if final_states_out is not None and not return_final_states:
        raise ValueError(f"{op}: final_states_out: expected with return_final_states, got it alone")
    if seq_idx is not None:
        for name, given in (("initial_states", initial_states), ("return_final_states", return_final_states or None)):
            if given is not None:
                raise NotImplementedError(f"{op}: {name}: expected none with seq_idx, got it")
        if tuple(seq_idx.shape) != (x.shape[0], x.shape[2]):
            raise ValueError(
                f"{op}: seq_idx: expected shape {(x.shape[0], x.shape[2])} (batch, seqlen), got {tuple(seq_idx.shape)}"
            )
    if _torch is None or not _torch.is_compiling():
        result = _conv(x, weight, bias, seq_idx, initial_states, final_states_out, silu, bool(return_final_states), False)
        if result is not NotImplemented:
            return result
    if final_states_out is not None:
        _no_gradient(op, x, weight, bias, initial_states, final_states_out)
        out, final = _dispatcher().causal_conv(x, weight, bias, seq_idx, initial_states, silu)
        final_states_out.copy_(final)
        return out, final_states_out
    out, final = _dispatcher().causal_conv(x, weight, bias, seq_idx, initial_states, silu)
    return (out, final) if return_final_states else out


def _conv(x, weight, bias, seq_idx, initial_states, final_states_out, silu, with_state, direct):
    launch = _build.causal_conv[silu, with_state]
    launch = launch.direct if direct else launch
    if seq_idx is None:
        return launch(x, weight, bias, initial_states, final_states_out, None)
    if not direct and any(_needs_dispatch(t) for t in (x, weight, bias, seq_idx)):
        return NotImplemented
    if seq_idx.shape[1] and bool((seq_idx < 0).any()):
        raise NotImplementedError("causal_conv1d_fn: seq_idx: expected numbers of 0 and more, got negative ones")
    batch, channels, length = x.shape
    tokens = _pack(x.swapaxes(1, 2))
    result = launch(tokens.swapaxes(1, 2), weight, bias, None, None, _Rows(seq_idx).starts)
    if result is NotImplemented:
        return result
    return result.swapaxes(1, 2).reshape((batch, length, channels)).swapaxes(1, 2)


def causal_conv1d_update(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any = None,
    activation: Optional[str] = None,
    cache_seqlens: Any = None,
    conv_state_indices: Any = None,
) -> Any:
    """More tokens of the convolution: x (batch, dim) or (batch, dim, seqlen),
    conv_state (batch, dim, at least width - 1), updated in place, weight (dim,
    width), bias (dim). conv_state_indices (batch) names each sequence's state, -1
    none. Returns out, as x. A state of width - 1 tokens that is channel-last is
    updated where it lies, any other by copies of it."""
    op = "causal_conv1d_update"
    silu = _activation(op, activation)
    if cache_seqlens is not None:
        raise NotImplementedError(f"{op}: cache_seqlens: expected None, got a tensor; states are shifted, not rings")
    if _torch is None or not _torch.is_compiling():
        if not any(_needs_dispatch(t) for t in (x, conv_state, weight, bias)):
            result = _conv_update(x, conv_state, weight, bias, silu, conv_state_indices)
            if result is not NotImplemented:
                return result
        _no_gradient(op, x, conv_state, weight, bias)
    return _dispatcher().conv_update(x, conv_state, weight, bias, silu, conv_state_indices)


def _conv_update(x, conv_state, weight, bias, silu, indices):
    op = "causal_conv1d_update"
    width, held = weight.shape[-1], conv_state.shape[-1]
    if held < width - 1:
        raise ValueError(f"{op}: conv_state: expected at least {width - 1} tokens, got {held}")
    channels = conv_state.shape[1]
    if held == width - 1 and _is_channel_last(conv_state):
        launch = _build.conv_update[(silu,)]
        return launch(x, conv_state, weight, bias, indices)
    if indices is not None and bool((indices < 0).any()):
        # Padding reads and writes no state.
        raise NotImplementedError(
            f"{op}: conv_state_indices: expected 0 and more for a state that is not (batch, dim, width - 1) channel-last, got -1"
        )
    flat = len(x.shape) == 2
    tokens = x[:, :, None] if flat else x
    before = conv_state if indices is None else conv_state[_as_int64(indices)]
    launch = _build.causal_conv[silu, False]
    out = launch(tokens, weight, bias, before[:, :, held - (width - 1) :], None, None)
    if out is NotImplemented:
        return out
    module = _module(x)
    after = (module.cat if module.__name__ == "torch" else module.concatenate)([before, tokens], -1)[:, :, -held:]
    conv_state[... if indices is None else _as_int64(indices)] = after
    return out[:, :, 0] if flat else out


def _as_int64(tensor: Any) -> Any:
    module = _module(tensor)
    return tensor.to(module.int64) if module.__name__ == "torch" else tensor.astype("int64")


def _is_channel_last(tensor: Any) -> bool:
    batch, channels, length = tensor.shape
    if hasattr(tensor, "stride"):
        strides = tensor.stride()
    else:
        strides = [stride // tensor.itemsize for stride in tensor.strides]
    return (
        (channels == 1 or strides[1] == 1)
        and (length == 1 or strides[2] == channels)
        and (batch == 1 or strides[0] == channels * length)
    )


def mamba_inner_fn(
    xz: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    x_proj_weight: Any,
    delta_proj_weight: Any,
    out_proj_weight: Any,
    out_proj_bias: Any,
    A: Any,
    B: Any = None,
    C: Any = None,
    D: Any = None,
    delta_bias: Any = None,
    B_proj_bias: Any = None,
    C_proj_bias: Any = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Any = None,
    c_rms_weight: Any = None,
    dt_rms_weight: Any = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Any:
    """What a Mamba-1 block does between its projections and the second of these:
    xz (batch, 2 dim, seqlen), conv1d_weight (dim, 1, width), x_proj_weight
    (dt_rank + 2 dstate, dim), delta_proj_weight (dim, dt_rank), out_proj_weight
    (d_model, dim). Returns (batch, seqlen, d_model). `checkpoint_lvl` is of
    mamba_ssm's backward pass and has no effect here."""
    tensors = (
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, D,
        delta_bias, B_proj_bias, C_proj_bias, b_rms_weight, c_rms_weight, dt_rms_weight,
    )  # fmt: skip
    if _torch is None or not _torch.is_compiling():
        result = _build.mamba_inner[bool(delta_softplus), float(b_c_dt_rms_eps)](*tensors)
        if result is not NotImplemented:
            return result
    return _dispatcher().mamba_inner(*tensors, bool(delta_softplus), float(b_c_dt_rms_eps))


def hadamard_transform(x: Any, scale: float = 1.0) -> Any:
    """x (..., dim) times the Sylvester Hadamard matrix and `scale`. A dim that is
    not a power of two is padded with zeros to one, and the result cut to it."""
    if _torch is None or not _torch.is_compiling():
        result = _hadamard(x, float(scale), False)
        if result is not NotImplemented:
            return result
    return _dispatcher().hadamard(x, float(scale))


def _hadamard(x, scale, direct):
    launch = _build.hadamard[(scale,)]
    launch = launch.direct if direct else launch
    size = x.shape[-1] if len(x.shape) else 0
    if size & (size - 1) == 0:
        return launch(x)
    padded = _zeros_like(x, (*x.shape[:-1], 1 << (size - 1).bit_length()))
    if not direct and _needs_dispatch(x):
        return NotImplemented
    padded[..., :size] = x
    return launch(padded)[..., :size]


def _start() -> None:
    import sys

    if "torch" in sys.modules:
        _dispatcher()


_start()
