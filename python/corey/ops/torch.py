"""The ops as torch knows them: torch.ops.corey.*, with fake kernels for
torch.compile and torch.export, and gradients.

A backward pass computes the op again in plain torch, a token at a time, in
float32, and has torch differentiate that: right, and meant for training at a
small scale. Gradients of gradients are refused."""

from __future__ import annotations

import sys
import threading
from typing import Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

import corey.ops as _ops

from . import _build

def _like(x: Tensor, shape: Sequence[int], channel_last: bool) -> Tensor:
    batch, channels, length = shape
    strides = (length * channels, 1, channels) if channel_last else (channels * length, length, 1)
    return torch.empty_strided(tuple(shape), strides, dtype=x.dtype, device=x.device)


def _is_channel_last(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.shape[1] > 1 and x.stride(2) != 1


# ===-- References ---------------------------------------------------------=== #
# What is differentiated. Each takes the tensors of its op and its options.


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _step(dt: Tensor, bias: Optional[Tensor], softplus: bool) -> Tensor:
    dt = dt.float()
    if bias is not None:
        dt = dt + bias.float()
    return torch.nn.functional.softplus(dt) if softplus else dt


def _matrix(m: Tensor, batch: int, channels: int, length: int) -> Tensor:
    """B or C as (batch, channels, dstate, seqlen)."""
    m = m.float()
    if m.dim() == 2:
        return m[None, :, :, None].expand(batch, channels, m.shape[1], length)
    if m.dim() == 3:
        m = m[:, None]
    return m.repeat_interleave(channels // m.shape[1], 1)


def _selective_scan_reference(u, delta, A, B, C, D, z, delta_bias, softplus):
    batch, channels, length = u.shape
    dt = _step(delta, None if delta_bias is None else delta_bias[:, None], softplus)
    b, c = (_matrix(m, batch, channels, length) for m in (B, C))
    decay, value = A.float(), u.float()
    h = torch.zeros(batch, channels, A.shape[1], device=u.device)
    outputs = []
    for t in range(length):
        step = dt[:, :, t, None]
        h = torch.exp(step * decay) * h + step * b[..., t] * value[:, :, t, None]
        outputs.append((h * c[..., t]).sum(-1))
    y = torch.stack(outputs, -1) if outputs else torch.zeros_like(value)
    if D is not None:
        y = y + D.float()[:, None] * value
    if z is not None:
        y = y * _silu(z.float())
    return y.to(u.dtype), h


def _chunk_scan_reference(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, softplus, low, high, varlen):
    batch, length, heads, width = x.shape
    step = _step(dt, dt_bias, softplus).clamp(low, high)
    repeat = heads // B.shape[2]
    b, c = (m.float().repeat_interleave(repeat, 2) for m in (B, C))
    value, decay = x.float(), A.float()
    h = torch.zeros(batch, heads, width, B.shape[3], device=x.device)
    if initial_states is not None:
        h = initial_states.float()
    outputs, states = [], []
    for t in range(length):
        if seq_idx is not None and t > 0:
            h = h * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        s = step[:, t]
        h = torch.exp(s * decay)[..., None, None] * h + (s[..., None] * value[:, t])[..., None] * b[:, t, :, None]
        outputs.append((h * c[:, t, :, None]).sum(-1))
        states.append(h)
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(value)
    if D is not None:
        y = y + (D.float() if D.dim() == 2 else D.float()[:, None]) * value
    if z is not None:
        y = y * _silu(z.float())
    ends = []
    if varlen:
        ends = [torch.cat(states)[cu_seqlens[1:].long() - 1]]
    return (y.to(x.dtype), h, *ends)


def _conv_reference(x, weight, bias, seq_idx, initial_states, silu):
    batch, channels, length = x.shape
    width = weight.shape[1]
    before = torch.zeros(batch, channels, width - 1, device=x.device) if initial_states is None else initial_states.float()
    padded = torch.cat([before, x.float()], -1)
    y = torch.zeros(batch, channels, length, device=x.device)
    for k in range(width):
        term = padded[:, :, k : k + length] * weight[:, k].float()[:, None]
        back = width - 1 - k
        if seq_idx is not None and back:
            same = torch.zeros(batch, length, dtype=torch.bool, device=x.device)
            same[:, back:] = seq_idx[:, back:] == seq_idx[:, : length - back] if length > back else False
            term = term * same[:, None]
        y = y + term
    if bias is not None:
        y = y + bias.float()[:, None]
    return (_silu(y) if silu else y).to(x.dtype), padded[:, :, length:].to(x.dtype)


def _hadamard_reference(x, scale):
    size = x.shape[-1]
    y = x.float()
    full = 1 << max(size - 1, 0).bit_length()
    y = torch.nn.functional.pad(y, (0, full - size))
    step = 1
    while step < full:
        pairs = y.reshape(*x.shape[:-1], full // (2 * step), 2, step)
        y = torch.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2)
        y = y.reshape(*x.shape[:-1], full)
        step *= 2
    return ((y[..., :size] * scale).to(x.dtype),)


def _rms(x: Tensor, weight: Optional[Tensor], eps: float) -> Tensor:
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _mamba_inner_reference(
    xz, conv_weight, conv_bias, x_proj, delta_proj, out_proj, out_bias, A, B, C, D, delta_bias, b_bias, c_bias, b_rms,
    c_rms, dt_rms, softplus, eps,
):  # fmt: skip
    x, z = xz.chunk(2, 1)
    u, _ = _conv_reference(x, conv_weight.reshape(x.shape[1], -1), conv_bias, None, None, True)
    states, rank = A.shape[1], delta_proj.shape[1]
    both = u.float().transpose(1, 2) @ x_proj.float().T
    low, both = both[..., :rank], both[..., rank:]
    if B is None:
        b, both = both[..., :states], both[..., states:]
        B = _rms(b if b_bias is None else b + b_bias.float(), b_rms, eps).transpose(1, 2)
    if C is None:
        C = _rms(both if c_bias is None else both + c_bias.float(), c_rms, eps).transpose(1, 2)
    delta = (_rms(low, dt_rms, eps) @ delta_proj.float().T).transpose(1, 2)
    y, _ = _selective_scan_reference(u, delta, A, B, C, D, z, delta_bias, softplus)
    out = y.float().transpose(1, 2) @ out_proj.float().T
    return ((out if out_bias is None else out + out_bias.float()).to(xz.dtype),)


# ===-- Backward -----------------------------------------------------------=== #

#: The reference of each op that has gradients, and how many of its options, which
#: come last, are booleans; others are floats.
_REFERENCES = {
    "selective_scan": (_selective_scan_reference, (bool,)),
    "chunk_scan": (_chunk_scan_reference, (bool, float, float, bool)),
    "causal_conv": (_conv_reference, (bool,)),
    "hadamard": (_hadamard_reference, (float,)),
    "mamba_inner": (_mamba_inner_reference, (bool, float)),
}


def _recording(device: torch.device, function: Callable[[], List[Tensor]]) -> List[Tensor]:
    """What a function returns that records gradients. An op is run where torch's
    dispatcher has put recording off, for the thread; another thread has it on."""
    results: list = []

    def run() -> None:
        try:
            if device.type == "cuda":
                with torch.cuda.stream(stream):
                    results.append(function())
            else:
                results.append(function())
        except BaseException as failure:
            results.append(failure)

    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    thread = threading.Thread(target=run, name="corey-backward")
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@torch.library.custom_op("corey::backward", mutates_args=())
def _backward(
    op: str, tensors: Sequence[Optional[Tensor]], gradients: Sequence[Optional[Tensor]], options: Sequence[float]
) -> List[Tensor]:
    reference, kinds = _REFERENCES[op]

    def differentiate() -> List[Tensor]:
        inputs = [t if t is None else t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        outputs = reference(*inputs, *(kind(option) for kind, option in zip(kinds, options)))
        pairs = [(o, g) for o, g in zip(outputs, gradients) if g is not None]
        if not all(o.requires_grad for o, _ in pairs):
            raise RuntimeError(f"corey::{op}: expected results whose gradients are recorded, got one without")
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        found = iter(
            torch.autograd.grad([o for o, _ in pairs], wanted, [g.to(o.dtype) for o, g in pairs], allow_unused=True)
        )
        results = []
        for t in inputs:
            if t is not None:
                gradient = next(found) if t.requires_grad else None
                results.append(torch.zeros_like(t) if gradient is None else gradient.to(t.dtype).clone())
        return [r.detach() for r in results]

    return _recording(next(t for t in tensors if t is not None).device, differentiate)


@_backward.register_fake
def _(op, tensors, gradients, options):
    return [torch.empty_like(t) for t in tensors if t is not None]


def _differentiate(op: torch.library.CustomOpDef, name: str, count: int) -> None:
    """Gives an op of `count` tensors, options after them, its gradient."""

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:count])
        ctx.options = [float(option) for option in inputs[count:]]

    def backward(ctx, *gradients):
        tensors = list(ctx.saved_tensors)
        found = iter(torch.ops.corey.backward(name, tensors, list(gradients), ctx.options))
        by_input = [None if t is None else next(found) for t in tensors]
        by_input = [
            g if t is not None and t.is_floating_point() else None for t, g in zip(tensors, by_input)
        ]
        return (*by_input, *(None for _ in ctx.options))

    op.register_autograd(backward, setup_context=setup_context)


# ===-- Ops ----------------------------------------------------------------=== #


@torch.library.custom_op("corey::selective_scan", mutates_args=())
def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor],
    delta_bias: Optional[Tensor], delta_softplus: bool,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    return _build.selective_scan.direct[delta_softplus, True](u, delta, A, B, C, D, z, delta_bias)


@selective_scan.register_fake
def _(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
    state = torch.empty(u.shape[0], u.shape[1], A.shape[1], dtype=torch.float32, device=u.device)
    return _like(u, u.shape, _is_channel_last(delta)), state


_differentiate(selective_scan, "selective_scan", 8)


@torch.library.custom_op("corey::chunk_scan", mutates_args=())
def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor],
    dt_bias: Optional[Tensor], initial_states: Optional[Tensor], seq_idx: Optional[Tensor], cu_seqlens: Optional[Tensor],
    dt_softplus: bool, dt_low: float, dt_high: float, with_varlen: bool,
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    launch = _build.chunk_scan.direct[dt_softplus, (dt_low, dt_high), True, with_varlen]
    results = launch(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens)
    if not with_varlen:
        return (*results, results[1].new_empty(0))
    out, final, varlen = results
    if varlen.untyped_storage().data_ptr() == final.untyped_storage().data_ptr():
        final = final.clone()
    return out, final, varlen


@chunk_scan.register_fake
def _(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_low, dt_high, with_varlen):
    batch, _, heads, width = x.shape
    states = (heads, width, B.shape[3])
    final = torch.empty(batch, *states, dtype=torch.float32, device=x.device)
    varlen = final.new_empty(cu_seqlens.shape[0] - 1, *states) if with_varlen else final.new_empty(0)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), final, varlen


_differentiate(chunk_scan, "chunk_scan", 11)


@torch.library.custom_op("corey::selective_state_update", mutates_args=("state",))
def state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor],
    dt_bias: Optional[Tensor], dt_softplus: bool, state_batch_indices: Optional[Tensor],
) -> Tensor:  # fmt: skip
    return _build.state_update.direct[(dt_softplus,)](state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)


@state_update.register_fake
def _(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("corey::causal_conv1d", mutates_args=())
def causal_conv(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], seq_idx: Optional[Tensor], initial_states: Optional[Tensor], silu: bool
) -> Tuple[Tensor, Tensor]:
    if seq_idx is None:
        return _build.causal_conv.direct[silu, True](x, weight, bias, None, initial_states, None)
    out = _build.causal_conv.direct[silu, False](x, weight, bias, seq_idx, None, None)
    return out, _final_of_conv(x, weight)


def _final_of_conv(x: Tensor, weight: Tensor) -> Tensor:
    width = weight.shape[1]
    final = _like(x, (x.shape[0], x.shape[1], width - 1), True).zero_()
    kept = min(width - 1, x.shape[2])
    final[:, :, width - 1 - kept :] = x[:, :, x.shape[2] - kept :]
    return final


@causal_conv.register_fake
def _(x, weight, bias, seq_idx, initial_states, silu):
    final = _like(x, (x.shape[0], x.shape[1], weight.shape[1] - 1), True)
    # Sequences are packed: channel-last.
    return _like(x, x.shape, seq_idx is not None or _is_channel_last(x)), final


_differentiate(causal_conv, "causal_conv", 5)


@torch.library.custom_op("corey::causal_conv1d_update", mutates_args=("conv_state",))
def conv_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Optional[Tensor], silu: bool, conv_state_indices: Optional[Tensor]
) -> Tensor:
    with torch.no_grad():
        return _build.conv_update.direct[(silu,)](x, conv_state, weight, bias, conv_state_indices).contiguous()


@conv_update.register_fake
def _(x, conv_state, weight, bias, silu, conv_state_indices):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("corey::mamba_inner", mutates_args=())
def mamba_inner(
    xz: Tensor, conv1d_weight: Tensor, conv1d_bias: Optional[Tensor], x_proj_weight: Tensor, delta_proj_weight: Tensor,
    out_proj_weight: Tensor, out_proj_bias: Optional[Tensor], A: Tensor, B: Optional[Tensor], C: Optional[Tensor],
    D: Optional[Tensor], delta_bias: Optional[Tensor], B_proj_bias: Optional[Tensor], C_proj_bias: Optional[Tensor],
    b_rms_weight: Optional[Tensor], c_rms_weight: Optional[Tensor], dt_rms_weight: Optional[Tensor], delta_softplus: bool,
    eps: float,
) -> Tensor:  # fmt: skip
    return _build.mamba_inner.direct[delta_softplus, eps](
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, D,
        delta_bias, B_proj_bias, C_proj_bias, b_rms_weight, c_rms_weight, dt_rms_weight,
    )  # fmt: skip


@mamba_inner.register_fake
def _(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, *rest):
    return torch.empty(xz.shape[0], xz.shape[2], out_proj_weight.shape[0], dtype=xz.dtype, device=xz.device)


_differentiate(mamba_inner, "mamba_inner", 17)


@torch.library.custom_op("corey::hadamard", mutates_args=())
def hadamard(x: Tensor, scale: float) -> Tensor:
    return _build.hadamard.direct[(scale,)](x).contiguous()


@hadamard.register_fake
def _(x, scale):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_differentiate(hadamard, "hadamard", 1)

_ops._torch = sys.modules[__name__]
_ops._is_compiling = torch.compiler.is_dynamo_compiling
