"""The programs of the ops, from the shapes, strides and types of a call."""

from __future__ import annotations

import functools
import math
from typing import Any, Optional, Tuple

from .. import _core
from . import _arrays
from ._program import Op, Program, View, contiguous_strides

Value = Tuple[str, str]


def _layout(view: View) -> Tuple[int, ...]:
    """Strides of a result that has the shape of a (batch, channels, length)
    argument: channel-last where that is, else row-major."""
    batch, channels, length = view.shape
    if view.strides[1] == 1 and channels > 1 and view.strides[2] != 1:
        return (length * channels, 1, channels)
    return contiguous_strides(view.shape)


def _channel_last(view: View) -> View:
    return view.permute(0, 2, 1)


def _option(keyword: str, value: Optional[Value]) -> str:
    return f" {keyword}({value[0]} : {value[1]})" if value else ""


def _vector(p: Program, view: Optional[View]) -> Optional[Value]:
    return None if view is None else p.input(view, view.shape)


def _scan_matrix(p: Program, view: View, batch: int, channels: int, states: int, length: int) -> Tuple[View, int]:
    """B or C as [B, L, G, N], and G."""
    if view.rank == 2:
        # The same at every token, of every channel its own.
        p.expect_shape(view, (channels, states), "dim, dstate")
        return view.unsqueeze(0).unsqueeze(0).expand(0, batch).expand(1, length), channels
    if view.rank == 3:
        p.expect_shape(view, (batch, states, length), "batch, dstate, seqlen")
        return view.permute(0, 2, 1).unsqueeze(2), 1
    p.expect(view.rank == 4, f"{view.name}: expected 2, 3 or 4 axes, got {view.rank}")
    groups = view.shape[1]
    p.expect_shape(view, (batch, groups, states, length), "batch, ngroups, dstate, seqlen")
    p.expect(groups > 0 and channels % groups == 0, f"{view.name}: expected groups that divide {channels} channels, got {groups}")
    return view.permute(0, 3, 1, 2), groups


def _same_groups(p: Program, view: View, groups: int, wanted: int) -> View:
    """As many groups as the other matrix has."""
    if groups == wanted:
        return view
    p.expect(groups == 1, f"{view.name}: expected {wanted} groups or 1, got {groups}")
    return view.expand(2, wanted)


def _scan(
    p: Program, u: Value, delta: Value, A: Value, B: Value, C: Value, D: Optional[Value], z: Optional[Value],
    bias: Optional[Value], softplus: bool, state_kind: Optional[str], extra: str = "",
) -> list:
    result = p.value()
    count = ":2" if state_kind else ""
    chunk = "chunk = #ssm.chunk<runtime = @scan>"
    p.lines.append(
        f"{result}{count} = ssm.selective_scan {u[0]}, {delta[0]}, {A[0]}, {B[0]}, {C[0]}"
        f"{_option('D', D)}{_option('z', z)}{_option('delta_bias', bias)}{extra} "
        f"{{{'delta_softplus, ' if softplus else ''}{chunk}}}"
        f" : {u[1]}, {delta[1]}, {A[1]}, {B[1]}, {C[1]} -> {u[1]}{', ' + state_kind if state_kind else ''}"
    )
    return [(result + "#0", u[1]), (result + "#1", state_kind)] if state_kind else [(result, u[1])]


def _selective_scan(p, u, delta, A, B, C, D, z, delta_bias, softplus, with_state):
    p.expect_float(u, delta, A, B, C, D, z, delta_bias)
    p.expect(u.rank == 3, f"u: expected 3 axes (batch, dim, seqlen), got {u.rank}")
    batch, channels, length = u.shape
    p.expect_shape(delta, u.shape, "batch, dim, seqlen")
    p.expect(A.rank == 2 and A.shape[0] == channels, f"A: expected shape ({channels}, dstate), got {A.shape}")
    states = A.shape[1]
    p.expect_shape(D, (channels,), "dim")
    p.expect_shape(z, u.shape, "batch, dim, seqlen")
    p.expect_shape(delta_bias, (channels,), "dim")
    (B, groups_b), (C, groups_c) = (_scan_matrix(p, m, batch, channels, states, length) for m in (B, C))
    groups = max(groups_b, groups_c)
    B, C = _same_groups(p, B, groups_b, groups), _same_groups(p, C, groups_c, groups)

    tokens = [None, None, channels]
    values = [p.input(_channel_last(v), tokens, in_place=True) for v in (u, delta)]
    values.append(p.cast(p.input(A, (channels, states)), "f32"))
    values += [p.input(m, [None, None, groups, states], in_place=True) for m in (B, C)]
    values += [_vector(p, D), p.input(_channel_last(z), tokens, in_place=True) if z else None, _vector(p, delta_bias)]
    kind = f"tensor<?x{channels}x{states}xf32>" if with_state else None
    results = _scan(p, *values, softplus, kind)
    numbers = [p.output(results[0], u.dtype, u.shape, _layout(delta), _channel_last, in_place=True)]
    if with_state:
        shape = (batch, channels, states)
        numbers.append(p.output(results[1], "f32", shape, contiguous_strides(shape), lambda v: v))
    return p.plan(*numbers)


selective_scan = Op("selective_scan_fn", "u delta A B C D z delta_bias", _selective_scan)


def _ssd(p, x, dt, A, B, C, D, z, dt_bias, initial, starts, slots_text, softplus, limit, state_kind):
    attributes = []
    if softplus:
        attributes.append("dt_softplus")
    # A softplus is never negative.
    if limit is not None and not (softplus and limit[0] <= 0 and limit[1] == math.inf):
        attributes.append(f"dt_limit = array<f64: {_float(limit[0])}, {_float(limit[1])}>")
    attributes.append("chunk = #ssm.chunk<runtime = @scan>")
    result = p.value()
    p.lines.append(
        f"{result}{':2' if state_kind else ''} = ssm.ssd {x[0]}{_option('dt', dt)}{_option('A', A)} B({B[0]}) C({C[0]})"
        f"{_option('D', D)}{_option('z', z)}{_option('dt_bias', dt_bias)}{_option('initial_states', initial)}"
        f"{slots_text}{_option('seq_starts', starts)} {{{', '.join(attributes)}}}"
        f" : {x[1]}, {B[1]}, {C[1]} -> {x[1]}{', ' + state_kind if state_kind else ''}"
    )
    return [(result + "#0", x[1]), (result + "#1", state_kind)] if state_kind else [(result, x[1])]


def _float(value: float) -> str:
    """As MLIR reads it, infinity by its bits."""
    if math.isinf(value):
        return "0x7FF0000000000000" if value > 0 else "0xFFF0000000000000"
    text = repr(float(value))
    mantissa, e, exponent = text.partition("e")
    return (mantissa if "." in mantissa else mantissa + ".0") + e + exponent


def _ssd_of_tensors(p, x, dt, A, B, C, D, z, dt_bias, initial_states, starts, softplus, limit, with_state):
    """With `starts` the batch is 1, and states are those of every sequence."""
    p.expect_float(x, dt, A, B, C, D, z, dt_bias, initial_states)
    p.expect_int32(starts)
    p.expect(x.rank == 4, f"x: expected 4 axes (batch, seqlen, nheads, headdim), got {x.rank}")
    batch, length, heads, width = x.shape
    p.expect_shape(dt, (batch, length, heads), "batch, seqlen, nheads")
    p.expect_shape(A, (heads,), "nheads")
    p.expect(B.rank == 4, f"B: expected 4 axes (batch, seqlen, ngroups, dstate), got {B.rank}")
    groups, states = B.shape[2:]
    p.expect_shape(B, (batch, length, groups, states), "batch, seqlen, ngroups, dstate")
    p.expect_shape(C, B.shape, "batch, seqlen, ngroups, dstate")
    p.expect(groups > 0 and heads % groups == 0, f"B: expected groups that divide {heads} heads, got {groups}")
    if D is not None and D.rank != 1:
        p.expect_shape(D, (heads, width), "nheads, headdim")
    else:
        p.expect_shape(D, (heads,), "nheads")
    p.expect_shape(z, x.shape, "batch, seqlen, nheads, headdim")
    p.expect_shape(dt_bias, (heads,), "nheads")
    sequences = starts.shape[0] if starts else batch
    p.expect_shape(initial_states, (sequences, heads, width, states), "batch, nheads, headdim, dstate")

    tokens, matrix = [None, None, heads, width], [None, None, groups, states]
    value = p.input(x, tokens)
    step = p.input(dt, tokens[:3])
    decay = p.cast(p.input(A, (heads,)), "f32")
    b, c = p.input(B, matrix), p.input(C, matrix)
    skip, gate = _vector(p, D), p.input(z, tokens) if z else None
    bias = _vector(p, dt_bias)
    start = p.cast(p.input(initial_states, [None, heads, width, states]), "f32") if initial_states else None
    packed = p.input(starts, [None]) if starts else None
    kind = f"tensor<?x{heads}x{width}x{states}xf32>" if with_state else None
    results = _ssd(p, value, step, decay, b, c, skip, gate, bias, start, packed, "", softplus, limit, kind)
    numbers = [p.output(results[0], x.dtype, x.shape, contiguous_strides(x.shape), lambda v: v)]
    if with_state:
        shape = (sequences, heads, width, states)
        numbers.append(p.output(results[1], "f32", shape, contiguous_strides(shape), lambda v: v))
    return p.plan(*numbers)


#: Of one row of sequences.
ssd_of_sequences = Op("mamba_chunk_scan_combined", "x dt A B C D z dt_bias initial_states seq_starts", _ssd_of_tensors)


def _chunk_scan(p, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, softplus, limit, final, varlen):
    p.expect(not varlen or cu_seqlens is not None, "cu_seqlens: expected with return_varlen_states, got None")
    if cu_seqlens is not None:
        p.expect_integers(cu_seqlens)
        p.expect(seq_idx is not None, "seq_idx: expected with cu_seqlens, got None")
        p.expect(x.shape[0] == 1, f"x: expected a batch of 1 with cu_seqlens, got {x.shape[0]}")
        p.expect(cu_seqlens.rank == 1 and cu_seqlens.shape[0] > 1,
                 f"cu_seqlens: expected shape (sequences + 1), got {cu_seqlens.shape}")
        p.support(initial_states is None, "initial_states: expected None with cu_seqlens, got a tensor")
    if seq_idx is None:
        return _ssd_of_tensors(p, x, dt, A, B, C, D, z, dt_bias, initial_states, None, softplus, limit, final)
    p.expect(x.rank == 4, f"x: expected 4 axes (batch, seqlen, nheads, headdim), got {x.rank}")
    p.expect_integers(seq_idx)
    p.expect_shape(seq_idx, x.shape[:2], "batch, seqlen")
    if initial_states is not None:
        p.expect_shape(initial_states, (x.shape[0], *x.shape[2:], B.shape[-1]), "batch, nheads, headdim, dstate")
    return functools.partial(_chunk_scan_of_sequences, softplus, limit, final, varlen)


def _chunk_scan_of_sequences(softplus, limit, final, varlen, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens):
    rows = _arrays.Sequences(seq_idx, cu_seqlens)
    start = None
    if initial_states is not None:
        # The first sequence of each batch element goes on from it.
        start = _arrays.zeros_like(initial_states, (rows.count, *initial_states.shape[1:]))
        start = _arrays.with_rows(start, rows.first, initial_states)
    x_row, dt, B, C, z = (t if t is None else _arrays.one_row(t) for t in (x, dt, B, C, z))
    result = ssd_of_sequences.direct[softplus, limit, final or varlen](x_row, dt, A, B, C, D, z, dt_bias, start, rows.starts)
    if not final and not varlen:
        return result.reshape(x.shape)
    out, states = result
    return (out.reshape(x.shape), *([states[rows.last]] if final else []), *([states] if varlen else []))


chunk_scan = Op("mamba_chunk_scan_combined", "x dt A B C D z dt_bias initial_states seq_idx cu_seqlens", _chunk_scan)


def _tied(A: View, dt: View, dt_bias: Optional[View], D: Optional[View]) -> bool:
    """Whether a head has one decay and one step: Mamba-2's form."""
    return (
        A.strides[1:] == (0, 0) and dt.strides[2] == 0
        and (dt_bias is None or dt_bias.strides[1] == 0)
    )


_ranges: dict = {}


def _range(count: int, device: str) -> _core.Tensor:
    """0, 1, ..., shared by the plans of a device."""
    found = _ranges.get((count, device))
    if found is None:
        found = _ranges[count, device] = _core.range_tensor(count, device)
    return found


def _expect_slots(p: Program, state: View, indices: Optional[View], batch: int) -> None:
    p.expect_int32(indices)
    p.expect_shape(indices, (batch,), "batch")
    p.expect(indices is not None or state.shape[0] == batch, f"{state.name}: expected {batch} states, got {state.shape[0]}")


def _slots(p: Program, state: View, indices: Optional[View], batch: int) -> Value:
    """Which state of the pool is whose."""
    _expect_slots(p, state, indices, batch)
    return p.input(_range(batch, p.device), [None], "i32") if indices is None else p.input(indices, [None])


def _state_update(p, state, x, dt, A, B, C, D, z, dt_bias, indices, softplus):
    p.expect_float(state, x, dt, A, B, C, D, z, dt_bias)
    heads = state.rank == 4
    p.expect(state.rank in (3, 4), f"state: expected 3 axes (batch, dim, dstate) or 4 (batch, nheads, dim, dstate), got {state.rank}")
    if not heads:
        # One head.
        state, x, dt = state.unsqueeze(1), x.unsqueeze(1), dt.unsqueeze(1)
        A, B, C = A.unsqueeze(0), B.unsqueeze(1), C.unsqueeze(1)
        D, z, dt_bias = D and D.unsqueeze(0), z and z.unsqueeze(1), dt_bias and dt_bias.unsqueeze(0)
    pool, count, width, states = state.shape
    p.expect(x.rank == 3, f"x: expected {3 if heads else 2} axes, got {x.rank - (not heads)}")
    batch = x.shape[0]
    p.expect_shape(x, (batch, count, width), "batch, nheads, dim")
    p.expect_shape(dt, x.shape, "batch, nheads, dim")
    p.expect_shape(A, (count, width, states), "nheads, dim, dstate")
    p.expect(B.rank == 3, f"B: expected {3 if heads else 2} axes, got {B.rank - (not heads)}")
    groups = B.shape[1]
    p.expect_shape(B, (batch, groups, states), "batch, ngroups, dstate")
    p.expect_shape(C, B.shape, "batch, ngroups, dstate")
    p.expect(groups > 0 and count % groups == 0, f"B: expected groups that divide {count} heads, got {groups}")
    p.expect_shape(D, (count, width), "nheads, dim")
    p.expect_shape(z, x.shape, "batch, nheads, dim")
    p.expect_shape(dt_bias, (count, width), "nheads, dim")
    p.expect(state.contiguous, f"state: expected a contiguous tensor, got strides {list(state.strides)}")

    matrix = [None, None, groups, states]
    tied = heads and _tied(A, dt, dt_bias, D)
    if tied:
        # [B, 1, H, P].
        tokens = [None, None, count, width]
        value = p.input(x.unsqueeze(1), tokens)
        step = p.input(dt.slice(2, 0, 1).squeeze(2).unsqueeze(1), tokens[:3])
        decay = p.cast(p.input(A.slice(1, 0, 1).slice(2, 0, 1).squeeze(2).squeeze(1), (count,)), "f32")
        b, c = (p.input(m.unsqueeze(1), matrix) for m in (B, C))
        skip = p.input(D, (count, width)) if D else None
        gate = p.input(z.unsqueeze(1), tokens) if z else None
        bias = p.input(dt_bias.slice(1, 0, 1).squeeze(1), (count,)) if dt_bias else None
        memory, shape = state, [None, count, width, states]
    else:
        # [B, 1, D] of all heads' channels.
        channels = count * width
        tokens = [None, None, channels]
        value = p.input(x.merge(1).unsqueeze(1), tokens)
        step = p.input(dt.merge(1).unsqueeze(1), tokens)
        decay = p.cast(p.input(A.merge(0), (channels, states)), "f32")
        b, c = (p.input(m.unsqueeze(1), matrix) for m in (B, C))
        skip = p.input(D.merge(0), (channels,)) if D else None
        gate = p.input(z.merge(1).unsqueeze(1), tokens) if z else None
        bias = p.input(dt_bias.merge(0), (channels,)) if dt_bias else None
        memory, shape = state.merge(1), [None, channels, states]
    before = p.input(memory, shape)
    slots = _slots(p, state, indices, batch)
    if tied:
        results = _ssd(p, value, step, decay, b, c, skip, gate, bias, before, None, _option("slots", slots), softplus,
                       None, before[1])
    else:
        extra = _option("initial_state", before) + _option("slots", slots)
        results = _scan(p, value, step, decay, b, c, skip, gate, bias, softplus, before[1], extra)
    shape = (batch, count, width) if heads else (batch, width)
    view = (lambda v: v) if heads else (lambda v: v.unsqueeze(1))
    last = (lambda v: v.unsqueeze(1)) if tied else (lambda v: v.merge(1).unsqueeze(1))
    number = p.output(results[0], x.dtype, shape, contiguous_strides(shape), lambda v: last(view(v)))
    p.update(results[1], memory)
    return p.plan(number)


state_update = Op(
    "selective_state_update", "state x dt A B C D z dt_bias state_batch_indices", _state_update
)


def _conv(p: Program, x: Value, weight: Value, bias: Optional[Value], initial: Optional[Value], slots: Optional[Value],
          starts: Optional[Value], silu: bool, state_kind: Optional[str]) -> list:
    result = p.value()
    p.lines.append(
        f"{result}{':2' if state_kind else ''} = ssm.causal_conv {x[0]}, {weight[0]}{_option('bias', bias)}"
        f"{_option('initial_state', initial)}{_option('slots', slots)}{_option('seq_starts', starts)}"
        f"{' {silu}' if silu else ''} : {x[1]}, {weight[1]} -> {x[1]}{', ' + state_kind if state_kind else ''}"
    )
    return [(result + "#0", x[1]), (result + "#1", state_kind)] if state_kind else [(result, x[1])]


def _expect_conv(p: Program, x: View, weight: View, bias: Optional[View]) -> Tuple[int, int]:
    channels = x.shape[1]
    p.expect(weight.rank == 2 and weight.shape[0] == channels, f"weight: expected shape ({channels}, width), got {weight.shape}")
    width = weight.shape[1]
    p.expect(2 <= width <= 4, f"weight: expected a width of 2 to 4, got {width}")
    p.expect_shape(bias, (channels,), "dim")
    return channels, width


def _conv_of_tensors(p, x, weight, bias, initial_states, final_states_out, starts, silu, with_state):
    p.expect_float(x, weight, bias, initial_states)
    p.expect_int32(starts)
    p.expect(x.rank == 3, f"x: expected 3 axes (batch, dim, seqlen), got {x.rank}")
    batch, length = x.shape[0], x.shape[2]
    channels, width = _expect_conv(p, x, weight, bias)
    states = (batch, channels, width - 1)
    p.expect_shape(initial_states, states, "batch, dim, width - 1")
    p.expect_shape(final_states_out, states, "batch, dim, width - 1")
    tokens, before = [None, None, channels], [None, width - 1, channels]
    value = p.input(_channel_last(x), tokens, in_place=True)
    taps, shift = p.input(weight, (channels, width)), _vector(p, bias)
    start = p.cast(p.input(_channel_last(initial_states), before), x.dtype) if initial_states else None
    packed = p.input(starts, [None]) if starts else None
    kind = f"tensor<?x{width - 1}x{channels}x{x.dtype}>" if with_state else None
    results = _conv(p, value, taps, shift, start, None, packed, silu, kind)
    numbers = [p.output(results[0], x.dtype, x.shape, _layout(x), _channel_last, in_place=True)]
    if with_state and final_states_out is not None:
        p.expect(final_states_out.dtype == x.dtype, f"final_states_out: expected {x.dtype}, got {final_states_out.dtype}")
        p.update(results[1], _channel_last(final_states_out))
        numbers.append(-1 - final_states_out.argument)
    elif with_state:
        numbers.append(p.output(results[1], x.dtype, states, (channels * (width - 1), 1, channels), _channel_last))
    return p.plan(*numbers)


#: Of one row of sequences.
conv_of_sequences = Op("causal_conv1d_fn", "x weight bias initial_states final_states_out seq_starts", _conv_of_tensors)


def _causal_conv(p, x, weight, bias, seq_idx, initial_states, final_states_out, silu, with_state):
    p.expect(x.rank == 3, f"x: expected 3 axes (batch, dim, seqlen), got {x.rank}")
    p.expect(with_state or final_states_out is None, "final_states_out: expected with return_final_states, got it alone")
    if seq_idx is None:
        return _conv_of_tensors(p, x, weight, bias, initial_states, final_states_out, None, silu, with_state)
    p.support(initial_states is None, "initial_states: expected none with seq_idx, got it")
    p.support(not with_state, "return_final_states: expected none with seq_idx, got it")
    p.expect_integers(seq_idx)
    p.expect_shape(seq_idx, (x.shape[0], x.shape[2]), "batch, seqlen")
    return functools.partial(_causal_conv_of_sequences, silu)


def _causal_conv_of_sequences(silu, x, weight, bias, seq_idx, initial_states, final_states_out):
    if seq_idx.shape[1] and bool((seq_idx < 0).any()):
        raise NotImplementedError("causal_conv1d_fn: seq_idx: expected numbers of 0 and more, got negative ones")
    batch, channels, length = x.shape
    row = _arrays.one_row(x.swapaxes(1, 2)).swapaxes(1, 2)
    starts = _arrays.Sequences(seq_idx).starts
    result = conv_of_sequences.direct[silu, False](row, weight, bias, None, None, starts)
    return result.swapaxes(1, 2).reshape((batch, length, channels)).swapaxes(1, 2)


causal_conv = Op("causal_conv1d_fn", "x weight bias seq_idx initial_states final_states_out", _causal_conv)


def _conv_update(p, x, conv_state, weight, bias, indices, silu):
    p.expect_float(x, conv_state, weight, bias)
    flat = x.rank == 2
    p.expect(x.rank in (2, 3), f"x: expected 2 axes (batch, dim) or 3 (batch, dim, seqlen), got {x.rank}")
    full = x.unsqueeze(2) if flat else x
    batch, channels, length = full.shape
    channels, width = _expect_conv(p, full, weight, bias)
    p.expect(conv_state.rank == 3 and conv_state.shape[1] == channels,
             f"conv_state: expected shape (batch, {channels}, at least {width - 1}), got {conv_state.shape}")
    held = conv_state.shape[2]
    p.expect(held >= width - 1, f"conv_state: expected at least {width - 1} tokens, got {held}")
    memory = _channel_last(conv_state)
    if held != width - 1 or not memory.contiguous or conv_state.dtype != x.dtype:
        _expect_slots(p, conv_state, indices, batch)
        return functools.partial(_conv_update_by_copies, silu)
    value = p.input(_channel_last(full), [None, None, channels], in_place=True)
    taps, shift = p.input(weight, (channels, width)), _vector(p, bias)
    before = p.input(memory, [None, width - 1, channels])
    slots = _slots(p, conv_state, indices, batch)
    results = _conv(p, value, taps, shift, before, slots, None, silu, before[1])
    strides = contiguous_strides(x.shape) if flat else _layout(x)
    number = p.output(
        results[0], x.dtype, x.shape, strides, lambda v: _channel_last(v.unsqueeze(2) if flat else v), in_place=True
    )
    p.update(results[1], memory)
    return p.plan(number)


def _conv_update_by_copies(silu, x, conv_state, weight, bias, indices):
    """Of a state that no kernel updates where it lies."""
    _arrays.expect_writable(conv_state, "conv_state")
    if indices is not None and bool((indices < 0).any()):
        # Padding reads and writes no state.
        raise NotImplementedError(
            "causal_conv1d_update: conv_state_indices: expected 0 and more for a state that is not (batch, dim, width - 1) "
            "channel-last of the type of x, got -1"
        )
    width, held = weight.shape[-1], conv_state.shape[-1]
    where = ... if indices is None else _arrays.as_type(indices, "int64")
    tokens = x[:, :, None] if len(x.shape) == 2 else x
    before = conv_state[where]
    out = causal_conv.direct[silu, False](tokens, weight, bias, None, before[:, :, held - (width - 1) :], None)
    conv_state[where] = _arrays.concatenate([before, tokens], -1)[:, :, -held:]
    return out[:, :, 0] if len(x.shape) == 2 else out


conv_update = Op("causal_conv1d_update", "x conv_state weight bias conv_state_indices", _conv_update)


def _hadamard(p, x, scale):
    p.expect_float(x)
    p.expect(x.rank > 0, "x: expected at least 1 axis, got 0")
    size = x.shape[-1]
    p.expect(size > 0, "x: expected at least 1 along the last axis, got 0")
    if size & (size - 1):
        return functools.partial(_hadamard_of_padded, scale)
    shape = x.shape
    while x.rank < 2:
        x = x.unsqueeze(0)
    sizes = [None] * (x.rank - 1) + [size]
    # In f32 to the end, so that there is one rounding.
    value, kind = p.cast(p.input(x, sizes), "f32")
    value, _ = p.emit(f"ssm.hadamard {value} {{block = {size} : i64}} : {kind} -> {kind}", kind)
    value, _ = p.emit(f"ssm.scale {value} by {_float(scale * math.sqrt(size))} : {kind}", kind)
    result = p.cast((value, kind), x.dtype)

    def view(v: View) -> View:
        while v.rank < 2:
            v = v.unsqueeze(0)
        return v

    return p.plan(p.output(result, x.dtype, shape, contiguous_strides(shape), view))


def _hadamard_of_padded(scale, x):
    size = x.shape[-1]
    rest = _arrays.zeros_like(x, (*x.shape[:-1], (1 << (size - 1).bit_length()) - size))
    return hadamard.direct[(scale,)](_arrays.concatenate([x, rest], -1))[..., :size]


hadamard = Op("hadamard_transform", "x", _hadamard)


def _mamba_inner(p, xz, conv_weight, conv_bias, x_proj, delta_proj, out_proj, out_bias, A, B, C, D, delta_bias, b_bias,
                 c_bias, b_rms, c_rms, dt_rms, softplus, eps):
    p.expect_float(xz, conv_weight, conv_bias, x_proj, delta_proj, out_proj, out_bias, A, B, C, D, delta_bias, b_bias,
                   c_bias, b_rms, c_rms, dt_rms)
    p.expect(xz.rank == 3 and xz.shape[1] % 2 == 0, f"xz: expected shape (batch, 2 dim, seqlen), got {xz.shape}")
    batch, channels, length = xz.shape[0], xz.shape[1] // 2, xz.shape[2]
    if conv_weight.rank == 3:
        p.expect_shape(conv_weight, (channels, 1, conv_weight.shape[2]), "dim, 1, width")
        conv_weight = conv_weight.squeeze(1)
    inner = xz.slice(1, 0, channels)
    _, width = _expect_conv(p, inner, conv_weight, conv_bias)
    p.expect(A.rank == 2 and A.shape[0] == channels, f"A: expected shape ({channels}, dstate), got {A.shape}")
    states = A.shape[1]
    p.expect(delta_proj.rank == 2 and delta_proj.shape[0] == channels,
             f"delta_proj_weight: expected shape ({channels}, dt_rank), got {delta_proj.shape}")
    rank = delta_proj.shape[1]
    selected = rank + states * ((B is None) + (C is None))
    p.expect_shape(x_proj, (selected, channels), "dt_rank + dstate for each of B and C that is not given, dim")
    p.expect(out_proj.rank == 2 and out_proj.shape[1] == channels,
             f"out_proj_weight: expected shape (d_model, {channels}), got {out_proj.shape}")
    p.expect_shape(out_bias, out_proj.shape[:1], "d_model")
    for vector, size, axis in ((D, channels, "dim"), (delta_bias, channels, "dim"), (b_bias, states, "dstate"),
                               (c_bias, states, "dstate"), (b_rms, states, "dstate"), (c_rms, states, "dstate"),
                               (dt_rms, rank, "dt_rank")):
        p.expect_shape(vector, (size,), axis)
    for name, given, vectors in (("B", B, (b_bias, b_rms)), ("C", C, (c_bias, c_rms))):
        for vector in vectors:
            if given is not None and vector is not None:
                p.expect(False, f"{vector.name}: expected none where {name} is given, got it")

    dtype = xz.dtype
    x = p.input(_channel_last(inner), [None, None, channels])
    z = p.input(_channel_last(xz.slice(1, channels, 2 * channels)), [None, None, channels])
    u = _conv(p, x, p.input(conv_weight, (channels, width)), _vector(p, conv_bias), None, None, None, True, None)[0]
    p.lines.append("%c0 = arith.constant 0 : index")
    p.lines.append("%c1 = arith.constant 1 : index")
    p.lines.append(f"%batch = tensor.dim {x[0]}, %c0 : {x[1]}")
    p.lines.append(f"%length = tensor.dim {x[0]}, %c1 : {x[1]}")

    def project(value: Value, weight: View, bias: Optional[Value] = None) -> Value:
        matrix = p.input(weight, weight.shape)
        kind = f"tensor<?x?x{weight.shape[0]}x{dtype}>"
        return p.emit(f"ssm.projection {value[0]}, {matrix[0]}{_option('bias', bias)} : {value[1]}, {matrix[1]} -> {kind}", kind)

    both = project(u, x_proj)
    offset = 0

    def part(size: int, rms: Optional[View], bias: Optional[View]) -> Value:
        nonlocal offset
        kind = f"tensor<?x?x{size}x{dtype}>"
        value = p.emit(
            f"tensor.extract_slice {both[0]}[0, 0, {offset}] [%batch, %length, {size}] [1, 1, 1] : {both[1]} to {kind}", kind
        )
        offset += size
        if bias is not None:
            vector = p.input(bias, (size,))
            value = p.emit(f"ssm.add {value[0]}, {vector[0]} : {kind}, {vector[1]}", kind)
        if rms is not None:
            vector = p.input(rms, (size,))
            value = p.emit(
                f"ssm.rms_norm {value[0]}, {vector[0]} {{eps = {_float(eps)} : f32}} : {kind}, {vector[1]} -> {kind}", kind
            )
        return value

    low = part(rank, dt_rms, None)

    def matrix(given: Optional[View], rms: Optional[View], bias: Optional[View]) -> Tuple[object, int]:
        if given is not None:
            return _scan_matrix(p, given, batch, channels, states, length)
        value, kind = part(states, rms, bias)
        wide = f"tensor<?x?x1x{states}x{dtype}>"
        return p.emit(
            f"tensor.expand_shape {value} [[0], [1], [2, 3]] output_shape [%batch, %length, 1, {states}] : {kind} into {wide}",
            wide,
        ), 1

    (b, groups_b), (c, groups_c) = matrix(B, b_rms, b_bias), matrix(C, c_rms, c_bias)
    groups = max(groups_b, groups_c)
    for name, one, own in (("B", b, groups_b), ("C", c, groups_c)):
        p.expect(own == groups or isinstance(one, View),
                 f"{name}: expected as many groups as the other's {groups}, got a projected one of 1; pass it as a tensor")
    b, c = (
        p.input(_same_groups(p, one, own, groups), [None, None, groups, states]) if isinstance(one, View) else one
        for one, own in ((b, groups_b), (c, groups_c))
    )
    delta = project(low, delta_proj)
    decay = p.cast(p.input(A, (channels, states)), "f32")
    y = _scan(p, u, delta, decay, b, c, _vector(p, D), z, _vector(p, delta_bias), softplus, None)[0]
    result = project(y, out_proj, _vector(p, out_bias))
    shape = (batch, length, out_proj.shape[0])
    return p.plan(p.output(result, dtype, shape, contiguous_strides(shape), lambda v: v))


mamba_inner = Op(
    "mamba_inner_fn",
    "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A B C D delta_bias"
    " B_proj_bias C_proj_bias b_rms_weight c_rms_weight dt_rms_weight",
    _mamba_inner,
)
