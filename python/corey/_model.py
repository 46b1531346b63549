"""Language models."""

from __future__ import annotations

import os
import tempfile
from typing import Any, Iterator, List, Optional, Sequence, Union

from . import _core
from ._compile import Executable, context
from ._table import Table

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

Tokens = Sequence[int]
Prompt = Union[str, bytes, Tokens]


def dtype_name(dtype: Any) -> Optional[str]:
    """COREY's name of a dtype of numpy or torch, or given by name."""
    if dtype is None:
        return None
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = name.rpartition(".")[2]
    return _DTYPES.get(name, name)


def load(
    folder: Any,
    device: Optional[str] = None,
    dtype: Any = None,
    policy: Any = "measured",
    *,
    state_dtype: Any = "f32",
    segment: int = 8192,
    fusion: str = "dp",
) -> "Model":
    """Loads and compiles the checkpoint in a folder as transformers writes it, of
    type mamba, mamba2 or falcon_mamba; or a model of transformers itself, whose
    weights are copied through a temporary folder.

    device       "cpu", "cuda" or "cuda:<number>"; None is the CPU, and of a model
                 of transformers where it lies
    dtype        of activations: f32, f16 or bf16; None takes f32 on the CPU and
                 the checkpoint's on a GPU
    state_dtype  of the scans' states
    segment      tokens of a prompt that are read at a time
    policy, fusion  as for corey.compile()
    """
    if hasattr(folder, "save_pretrained"):
        groups = getattr(folder.config, "n_groups", 1) if folder.config.model_type == "mamba2" else 1
        for part in folder.modules() if groups > 1 else ():
            # Older versions of transformers norm all groups together.
            if type(part).__name__.endswith("RMSNormGated") and not hasattr(part, "group_size"):
                raise NotImplementedError(
                    f"{type(part).__name__}: expected a norm over each of {groups} groups of channels, got one over "
                    "all, as this version of transformers has it"
                )
        with tempfile.TemporaryDirectory(prefix="corey-") as saved:
            folder.save_pretrained(saved)
            place = str(folder.device) if device is None else device
            model = load(saved, place, dtype, policy, state_dtype=state_dtype, segment=segment, fusion=fusion)
        model._name = type(folder).__name__
        return model
    core = _core.Model.load(
        context(device or "cpu"), os.fspath(folder), dtype_name(dtype), dtype_name(state_dtype), segment, str(policy), fusion
    )
    return Model(core, os.fspath(folder))


class Model:
    """A language model on a device. Calls of several threads take turns."""

    def __init__(self, core: _core.Model, name: str):
        self._core = core
        self._name = name
        self.info: dict = core.info()
        self._is_bytes = self.info["vocab_size"] == 256

    @property
    def executable(self) -> Executable:
        """The program, for chunks, policies and explanations."""
        return Executable(self._core.executable(), self._name)

    def make_states(self, sequences: int = 1) -> _core.StateCache:
        """Empty states of a number of sequences."""
        return self._core.make_states(sequences)

    def load_states(self, path: Union[str, os.PathLike]) -> _core.StateCache:
        """States that StateCache.save() wrote."""
        return self._core.load_states(os.fspath(path))

    def encode(self, prompt: Prompt) -> List[int]:
        """Tokens of a prompt: numbers as they are; text, for models whose tokens
        are bytes."""
        if isinstance(prompt, (str, bytes)):
            if not self._is_bytes:
                raise TypeError(
                    "prompt: expected numbers of tokens, got text; this model has "
                    f"{self.info['vocab_size']} tokens, and a tokenizer of its own"
                )
            return list(prompt.encode() if isinstance(prompt, str) else prompt)
        return [int(token) for token in prompt]

    def _sequences(self, prompts: Any) -> tuple:
        """The sequences of one prompt or several, and whether it is one."""
        if isinstance(prompts, (str, bytes)) or (len(prompts) > 0 and not hasattr(prompts[0], "__len__")):
            return [self.encode(prompts)], True
        return [self.encode(prompt) for prompt in prompts], False

    def prefill(self, tokens: Any, states: _core.StateCache, slots: Sequence[int] = ()) -> _core.Tensor:
        """Reads more tokens, of one sequence or of several, into the slots of
        `states` (0, 1, ... if none are named), and returns the logits of what
        follows each: [sequences, vocabulary] f32 on the model's device."""
        return self._core.prefill(self._sequences(tokens)[0], states, list(slots))

    def decode(self, tokens: Sequence[int], states: _core.StateCache, slots: Sequence[int] = ()) -> _core.Tensor:
        """Reads one more token of each sequence, as prefill() does."""
        return self._core.decode([int(token) for token in tokens], states, list(slots))

    def logits(self, tokens: Prompt, count: Optional[int] = None) -> _core.Tensor:
        """The logits after each of the last `count` tokens of a text, all of them
        by default."""
        tokens = self.encode(tokens)
        return self._core.logits(tokens, len(tokens) if count is None else count)

    def negative_log_likelihoods(self, tokens: Prompt, window: int = 0, stride: int = 0) -> List[float]:
        """-ln p of every token but the first, in nats; with a `window`, from no
        more than window - 1 others, moved on by `stride`."""
        return self._core.negative_log_likelihoods(self.encode(tokens), window, stride)

    def generate(
        self,
        prompts: Union[Prompt, Sequence[Prompt]],
        max_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_tokens: Optional[Sequence[int]] = None,
        states: Optional[_core.StateCache] = None,
        stream: bool = False,
    ) -> Any:
        """Continues a prompt, or several at a time.

        Returns new tokens, one list per prompt; bytes for a prompt of text. With
        `stream`, an iterator: of tokens of one prompt, of (number, token) of
        several, as soon as each is known; closing it ends the generation.

        temperature 0 takes the likeliest token; top_k of 0 and top_p of 1 are
        off. A sequence ends with the first of `stop_tokens`, None being the
        checkpoint's. With `states`, prompts continue what is in slots 0, 1, ...
        """
        sequences, single = self._sequences(prompts)
        arguments = (
            sequences,
            max_tokens,
            temperature,
            top_k,
            top_p,
            seed,
            None if stop_tokens is None else [int(token) for token in stop_tokens],
            states,
        )
        text = [isinstance(prompt, (str, bytes)) for prompt in ([prompts] if single else prompts)]
        if stream:
            return _stream(self._core.stream(*arguments), text, single)
        tokens = self._core.generate(*arguments)
        results = [bytes(new) if is_text else new for new, is_text in zip(tokens, text)]
        return results[0] if single else results

    def explain(self) -> Table:
        return self.executable.explain()

    def __repr__(self) -> str:
        info = self.info
        return (
            f"corey.Model({self._name}: {info['type']}, {info['num_layers']} layers, "
            f"{info['parameters'] / 1e6:.1f} M parameters, {info['dtype']})"
        )

    def _repr_html_(self) -> str:
        return Table(["property", "value"], list(self.info.items()), self._name)._repr_html_()


class _stream:
    """Iterates over the tokens of a generation that runs beside it."""

    def __init__(self, core: _core.TokenStream, text: List[bool], single: bool):
        self._core = core
        self._text = text
        self._single = single

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        sequence, token = next(self._core)
        value = bytes([token]) if self._text[sequence] else token
        return value if self._single else (sequence, value)

    def close(self) -> None:
        self._core.close()
