"""The chunk scheduler by itself: who chooses the chunk of a scan, and why."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

from ._core import Estimator, Site, chunk_of_rule
from ._model import dtype_name

__all__ = ["Decision", "Estimator", "Policy", "Scheduler", "chunk_of_rule"]


class Policy:
    """Who chooses chunks, as text: "measured", "cost-model", "unsplit",
    "static:256", "entropy:rule=unified", "guarded:inner=[sampled]", ..."""

    def __init__(self, spec: Union[str, "Policy"] = "measured", **options: Any):
        text = str(spec)
        if options:
            items = (f"{key}=[{value}]" if isinstance(value, Policy) else f"{key}={value}" for key, value in options.items())
            text += ("," if ":" in text else ":") + ",".join(items)
        Site(text, "selective_scan", "f32", 0, 1, 0, 1, "cpu", 1, "policy")  # Says what is wrong with it.
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"corey.Policy({self._text!r})"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Policy) and str(other) == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class Decision(NamedTuple):
    """Tokens of a chunk; the milliseconds predicted, if any; whether statistics
    of data had a part in it; and the reason in words."""

    chunk: int
    predicted_ms: Optional[float]
    used_data: bool
    reason: str


class Scheduler:
    """A policy at one scan. decide() takes no statistics of its own: a policy
    that decides on data uses those of the last observe()."""

    def __init__(
        self,
        policy: Union[str, Policy] = "measured",
        *,
        op: str = "selective_scan",
        dtype: Any = "f32",
        channels: int = 0,
        head_dim: int = 1,
        states: int = 0,
        groups: int = 1,
        device: str = "cpu",
        units: int = 1,
        name: str = "scan",
    ):
        self.policy = policy if isinstance(policy, Policy) else Policy(policy)
        self._site = Site(
            str(self.policy), op, dtype_name(dtype), channels, head_dim, states, groups, device, units, name
        )
        wanted = self._site.wanted()
        self.estimator: Optional[Estimator] = None if wanted is None else Estimator(**wanted)

    def decide(self, batch: int, length: int) -> Decision:
        if batch < 1 or length < 0:
            raise ValueError(f"expected a batch of at least 1 and a length of at least 0, got {batch} and {length}")
        chunk, predicted, used_data = self._site.decide(batch, length)
        return Decision(chunk, None if predicted != predicted else predicted, used_data, self._site.explain())

    def observe(self, x: Any, milliseconds: float = 0.0) -> dict:
        """Gives later decisions the statistics of a tensor on the host, gathered
        as the policy wants them."""
        if self.estimator is None:
            raise ValueError(f"policy {self.policy}: expected one that decides on statistics, got one that does not")
        return self._site.observe(self.estimator, x, milliseconds)

    def set_chunk(self, chunk: int) -> None:
        """Fixes the chunk; 0 gives it back to the policy."""
        self._site.set_chunk(chunk)
