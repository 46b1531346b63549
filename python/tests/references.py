"""The ops in float64, a token at a time: what results are compared with."""

import numpy as np


def silu(x):
    x = np.asarray(x, np.float64)
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def as64(x):
    if x is None:
        return None
    return (x.detach().cpu().double().numpy() if hasattr(x, "detach") else np.asarray(x)).astype(np.float64)


def error(got, wanted):
    """Relative L2 error."""
    got, wanted = as64(got), as64(wanted)
    assert got.shape == wanted.shape, f"expected shape {wanted.shape}, got {got.shape}"
    scale = np.linalg.norm(wanted)
    return np.linalg.norm(got - wanted) / (scale if scale else 1.0)


def selective_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, state=None):
    u, dt, A, B, C, D, z, bias = map(as64, (u, delta, A, B, C, D, z, delta_bias))
    batch, dim, length = u.shape
    n = A.shape[1]
    y, h = np.zeros(u.shape), np.zeros((batch, dim, n)) if state is None else as64(state).copy()

    def at(m, b, d, t):
        if m.ndim == 2:
            return m[d]
        return m[b, :, t] if m.ndim == 3 else m[b, d // (dim // m.shape[1]), :, t]

    for b in range(batch):
        for d in range(dim):
            for t in range(length):
                s = dt[b, d, t] + (bias[d] if bias is not None else 0)
                s = softplus(s) if delta_softplus else s
                h[b, d] = np.exp(s * A[d]) * h[b, d] + s * at(B, b, d, t) * u[b, d, t]
                y[b, d, t] = at(C, b, d, t) @ h[b, d] + (D[d] * u[b, d, t] if D is not None else 0)
    return (y if z is None else y * silu(z)), h


def chunk_scan(x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, dt_softplus=False,
               dt_limit=(0.0, np.inf)):
    """y, and the state after every token."""
    x, dt, A, B, C, D, z, bias = map(as64, (x, dt, A, B, C, D, z, dt_bias))
    batch, length, heads, width = x.shape
    groups, n = B.shape[2:]
    y, states = np.zeros(x.shape), np.zeros((batch, length, heads, width, n))
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            state = np.zeros((width, n)) if initial_states is None else as64(initial_states)[b, h].copy()
            for t in range(length):
                if seq_idx is not None and t and seq_idx[b, t] != seq_idx[b, t - 1]:
                    state = np.zeros((width, n))
                s = dt[b, t, h] + (bias[h] if bias is not None else 0)
                s = np.clip(softplus(s) if dt_softplus else s, *dt_limit)
                state = np.exp(s * A[h]) * state + np.outer(s * x[b, t, h], B[b, t, g])
                y[b, t, h] = state @ C[b, t, g]
                if D is not None:
                    y[b, t, h] += D[h] * x[b, t, h]
                states[b, t, h] = state
    return (y if z is None else y * silu(z)), states


def conv(x, weight, bias=None, initial=None, seq_idx=None, activation=None):
    """y, and the last width - 1 inputs."""
    x, weight, bias, initial = map(as64, (x, weight, bias, initial))
    batch, dim, length = x.shape
    width = weight.shape[1]
    before = np.zeros((batch, dim, width - 1)) if initial is None else initial
    padded = np.concatenate([before, x], -1)
    y = np.zeros(x.shape)
    for t in range(length):
        for k in range(width):
            back = width - 1 - k
            for b in range(batch):
                if seq_idx is not None and (t < back or len(set(seq_idx[b, t - back : t + 1])) > 1):
                    continue
                y[b, :, t] += weight[:, k] * padded[b, :, t + k]
    if bias is not None:
        y += bias[:, None]
    return (silu(y) if activation else y), padded[:, :, length:]


def hadamard(x, scale):
    x = as64(x)
    size = x.shape[-1]
    full = 1
    matrix = np.ones((1, 1))
    while full < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        full *= 2
    return scale * (x @ matrix[:size, :size])
