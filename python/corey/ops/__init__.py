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

import operator
from typing import Any, Callable, Optional, Tuple

from ._build import causal_conv as _causal_conv
from ._build import chunk_scan as _chunk_scan
from ._build import conv_update as _conv_update
from ._build import hadamard as _hadamard
from ._build import mamba_inner as _mamba_inner
from ._build import selective_scan as _selective_scan
from ._build import state_update as _state_update
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

_NO_LIMIT = (0.0, float("inf"))

#: corey.ops.torch, once torch is there.
_torch: Any = None
#: Whether torch.compile reads what is called; torch's own function, once it is there,
#: which it takes for True.
_is_compiling: Callable[[], bool] = bool


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
    if not _is_compiling():
        launch = _selective_scan[True if delta_softplus else False, True if return_last_state else False]
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
    dt_limit: Tuple[float, float] = _NO_LIMIT,
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
    final, varlen = True if return_final_states else False, True if return_varlen_states else False
    if not _is_compiling():
        launch = _chunk_scan[True if dt_softplus else False, _limits(dt_limit), final, varlen]
        result = launch(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens)
        if result is not NotImplemented:
            return result
    out, last, states = _dispatcher().chunk_scan(
        x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, bool(dt_softplus), *_limits(dt_limit), varlen
    )
    results = [out] + ([last] if final else []) + ([states] if varlen else [])
    return tuple(results) if len(results) > 1 else out


def _limits(dt_limit: Any) -> Tuple[float, float]:
    if dt_limit is _NO_LIMIT:
        return dt_limit
    low, high = dt_limit
    return float(low), float(high)


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
    if not _is_compiling():
        launch = _state_update[(True if dt_softplus else False,)]
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
    silu = activation is not None and _activation("causal_conv1d_fn", activation)
    if not _is_compiling():
        launch = _causal_conv[silu, True if return_final_states else False]
        result = launch(x, weight, bias, seq_idx, initial_states, final_states_out)
        if result is not NotImplemented:
            return result
    _expect_conv_options(seq_idx, initial_states, return_final_states, final_states_out)
    if final_states_out is not None:
        _no_gradient("causal_conv1d_fn", x, weight, bias, initial_states, final_states_out)
    out, final = _dispatcher().causal_conv(x, weight, bias, seq_idx, initial_states, silu)
    if final_states_out is not None:
        final_states_out.copy_(final)
        return out, final_states_out
    return (out, final) if return_final_states else out


def _expect_conv_options(seq_idx: Any, initial_states: Any, return_final_states: bool, final_states_out: Any) -> None:
    op = "causal_conv1d_fn"
    if final_states_out is not None and not return_final_states:
        raise ValueError(f"{op}: final_states_out: expected with return_final_states, got it alone")
    if seq_idx is not None:
        for name, given in (("initial_states", initial_states), ("return_final_states", return_final_states or None)):
            if given is not None:
                raise NotImplementedError(f"{op}: {name}: expected none with seq_idx, got it")


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
    silu = activation is not None and _activation(op, activation)
    if cache_seqlens is not None:
        raise NotImplementedError(f"{op}: cache_seqlens: expected None, got a tensor; states are shifted, not rings")
    if not _is_compiling():
        result = _conv_update[(silu,)](x, conv_state, weight, bias, conv_state_indices)
        if result is not NotImplemented:
            return result
        _no_gradient(op, x, conv_state, weight, bias)
    return _dispatcher().conv_update(x, conv_state, weight, bias, silu, conv_state_indices)


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
    if not _is_compiling():
        result = _mamba_inner[True if delta_softplus else False, float(b_c_dt_rms_eps)](*tensors)
        if result is not NotImplemented:
            return result
    return _dispatcher().mamba_inner(*tensors, bool(delta_softplus), float(b_c_dt_rms_eps))


def hadamard_transform(x: Any, scale: float = 1.0) -> Any:
    """x (..., dim) times the Sylvester Hadamard matrix and `scale`. A dim that is
    not a power of two is padded with zeros to one, and the result cut to it."""
    if not _is_compiling():
        result = _hadamard[(float(scale),)](x)
        if result is not NotImplemented:
            return result
    return _dispatcher().hadamard(x, float(scale))


def _start() -> None:
    import sys

    if "torch" in sys.modules:
        _dispatcher()


_start()
