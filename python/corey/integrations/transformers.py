"""Models of transformers on COREY's ops.

    from corey.integrations.transformers import patch, stats, unpatch
    patch(model)        # mamba, mamba2, falcon_mamba
    model.generate(...)
    print(stats())      # what ran where
    unpatch(model)

The functions that the mixers of a model call for their convolutions and scans are
those of `corey.ops` from then on; other models keep theirs. A call that COREY
refuses goes to transformers' own function, with a warning and a count. The whole
model as one program, which is faster, is `corey.load(model)`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import warnings
import weakref
from typing import Any, Callable, Dict, List, Optional

import torch

import corey.ops.torch  # noqa: F401  Registers the ops.

from .. import ops
from .._table import Table


class Refused(Warning):
    """A call that transformers' own function had to do."""


def _update(x, conv_state, weight, bias=None, activation=None):
    return ops.causal_conv1d_update(x, conv_state, weight, bias, activation)


def _conv(x, weight, bias=None, activation=None, seq_idx=None):
    return ops.causal_conv1d_fn(x, weight, bias, seq_idx=seq_idx, activation=activation)


def _scan(u, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    return ops.selective_scan_fn(u, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


def _step(state, x, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None):
    return ops.selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus)


def _chunk_scan(x, dt, A, B, C, chunk_size, **options):
    return ops.mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **options)


#: What stands for a function of transformers, which names the first arguments, given
#: in order, otherwise; and what it may be given that has no effect on the result.
_FUNCTIONS: Dict[str, Callable] = {
    "causal_conv1d_update": _update,
    "causal_conv1d_fn": _conv,
    "mamba_selective_scan": _scan,
    "mamba_selective_state_update": _step,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba2_selective_state_update": _step,
}
_WITHOUT_EFFECT = {"use_mambapy", "use_associative_scan"}
_MODELS = {
    "mamba": ["causal_conv1d_update", "causal_conv1d_fn", "mamba_selective_scan", "mamba_selective_state_update"],
    "falcon_mamba": ["causal_conv1d_update", "causal_conv1d_fn", "mamba_selective_scan", "mamba_selective_state_update"],
    "mamba2": ["causal_conv1d_update", "causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_selective_state_update"],
}
_MIXERS = {"mamba": "MambaMixer", "falcon_mamba": "FalconMambaMixer", "mamba2": "Mamba2Mixer"}


class _Active(threading.local):
    """Of the mixer that runs on this thread, if it is of a patched model."""

    def __init__(self) -> None:
        self.depth = 0
        self.counts: Optional[dict] = None


_active = _Active()
_lock = threading.Lock()
#: Functions of transformers by module and name, while ours stand for them.
_originals: Dict[tuple, Callable] = {}
_patched: "weakref.WeakKeyDictionary[Any, _Patch]" = weakref.WeakKeyDictionary()
_warned: set = set()


class _Patch:
    def __init__(self, kind: str):
        self.kind = kind
        self.counts: Dict[str, List[int]] = {name: [0, 0] for name in _MODELS[kind]}
        self.hooks: list = []


def _refuse(name: str, reason: str) -> None:
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(f"corey: {name} goes to transformers' own function: {reason}", Refused, stacklevel=4)


def _stand_in(name: str, original: Callable) -> Callable:
    ours = _FUNCTIONS[name]
    known = inspect.signature(original).parameters
    accepted = inspect.signature(ours).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        counts = _active.counts
        if counts is None:
            return original(*arguments, **options)
        count = counts[name]
        given = {
            key: value
            for key, value in options.items()
            if key not in _WITHOUT_EFFECT and value is not None and (key in known or key in accepted)
        }
        unknown = [key for key in given if key not in accepted]
        if unknown and not takes_all:
            count[1] += 1
            _refuse(name, f"expected no {', '.join(unknown)}, got it")
            return original(*arguments, **options)
        try:
            result = ours(*arguments, **given)
        except (NotImplementedError, TypeError, ValueError) as failure:
            count[1] += 1
            _refuse(name, str(failure))
            return original(*arguments, **options)
        count[0] += 1
        return result

    return call


def _module(kind: str) -> Any:
    """transformers' module of a model, with the names that are needed."""
    import transformers

    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    missing = [name for name in _MODELS[kind] + [_MIXERS[kind]] if not hasattr(module, name)]
    if missing:
        raise NotImplementedError(
            f"transformers {transformers.__version__}: expected {', '.join(missing)} in {module.__name__}, as from 5.5 on, "
            "got none; corey.load(model) compiles the whole model with any version"
        )
    return module


def _enter(mixer: Any, inputs: Any, patch: _Patch) -> None:
    _active.depth += 1
    _active.counts = patch.counts


def _leave(mixer: Any, inputs: Any, output: Any) -> None:
    _active.depth -= 1
    if _active.depth <= 0:
        _active.depth, _active.counts = 0, None


def patch(model: Any) -> Any:
    """Has the mixers of a model call COREY's ops. Returns the model."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _MODELS:
        raise TypeError(f"model: expected one of type {', '.join(_MODELS)}, got {kind or type(model).__name__}")
    with _lock:
        if model in _patched:
            return model
        module = _module(kind)
        for name in _MODELS[kind]:
            key = (module.__name__, name)
            if key not in _originals:
                _originals[key] = getattr(module, name)
                setattr(module, name, _stand_in(name, _originals[key]))
        made = _Patch(kind)
        mixer_type = getattr(module, _MIXERS[kind])
        for mixer in model.modules():
            if isinstance(mixer, mixer_type):
                made.hooks.append(mixer.register_forward_pre_hook(functools.partial(_enter, patch=made)))
                made.hooks.append(mixer.register_forward_hook(_leave, always_call=True))
        _patched[model] = made
    return model


def unpatch(model: Any) -> Any:
    """Undoes patch(). Returns the model."""
    with _lock:
        made = _patched.pop(model, None)
        if made is None:
            return model
        for hook in made.hooks:
            hook.remove()
        if not any(other.kind == made.kind for other in _patched.values()):
            module = _module(made.kind)
            for name in _MODELS[made.kind]:
                setattr(module, name, _originals.pop((module.__name__, name)))
    return model


def stats(model: Any = None) -> Table:
    """Calls by function of a patched model, or of all: how many COREY did, and
    how many transformers. A graph of torch.compile counts when it is made."""
    with _lock:
        patches = list(_patched.values()) if model is None else [_patched[model]] if model in _patched else []
    sums: Dict[tuple, List[int]] = {}
    for made in patches:
        for name, (done, refused) in made.counts.items():
            row = sums.setdefault((made.kind, name), [0, 0])
            row[0] += done
            row[1] += refused
    return Table(["model", "function", "corey", "transformers"], [[*key, *row] for key, row in sums.items()])
