"""KV-cache policies: from a decoder's spec to one cache for each layer.

Layers with a window of their own never keep more than that window, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxgen.blueprint.mixers import attention_of
from mlxgen.blueprint.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, MixerSpec, ParallelSpec
from mlxgen.cache.buffer import Buffer, DenseBuffer, NoBuffer, QuantizedBuffer
from mlxgen.cache.layer_cache import FullCache, WindowCache
from mlxgen.cache.recurrent import HybridCache, RecurrentCache
from mlxgen.errors import ConfigError, require

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)

Cache = FullCache | RecurrentCache | HybridCache


@dataclass(frozen=True, kw_only=True)
class Full:
    """Keep every token."""

    def __call__(self, spec: DecoderSpec) -> list[Cache]:
        return [layer_cache(layer.mixer, DenseBuffer, DenseBuffer) for layer in spec.layers]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Keep the first `sinks` tokens and the newest ones, `size` tokens in all (arXiv:2309.17453).

    Memory stays the same however long the text gets; what falls out is forgotten.
    """

    size: int = 4096
    sinks: int = 4

    def __post_init__(self) -> None:
        require(self.size >= 2, "cache.size", "at least 2", self.size)
        require(0 <= self.sinks < self.size, "cache.sinks", f"from 0 to size - 1 ({self.size - 1})", self.sinks)

    def __call__(self, spec: DecoderSpec) -> list[Cache]:
        return [self._layer(layer.mixer) for layer in spec.layers]

    def _layer(self, mixer: MixerSpec | None) -> Cache:
        attention = _with_keys(mixer)
        own = None if attention is None else attention.window or attention.chunk
        if attention is None or (own is not None and own <= self.size):
            return layer_cache(mixer, DenseBuffer, DenseBuffer)
        if isinstance(attention, AttentionSpec) and attention.alibi:
            raise ConfigError(
                "`cache` must keep every token for a model with ALiBi, whose scores need all distances; use cache=full."
            )
        buffers = _buffers(attention, DenseBuffer, DenseBuffer)
        return _beside(mixer, WindowCache(self.size - self.sinks, self.sinks, *buffers))


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Store keys and values with fewer bits, in groups along the head; tokens before `start` stay as they are.

    In layers with a window of their own every token is quantized.
    """

    k_bits: int = 8
    v_bits: int = 8
    group_size: int = 64
    start: int = 0

    def __post_init__(self) -> None:
        for name in ("k_bits", "v_bits"):
            require(getattr(self, name) in BITS, f"cache.{name}", f"one of {BITS}", getattr(self, name))
        require(self.group_size in GROUP_SIZES, "cache.group_size", f"one of {GROUP_SIZES}", self.group_size)
        require(self.start >= 0, "cache.start", "at least 0", self.start)

    def __call__(self, spec: DecoderSpec) -> list[Cache]:
        for i, layer in enumerate(spec.layers):
            for dims in _widths(layer.mixer):
                self._check_width(i, dims)
        return [
            layer_cache(layer.mixer, *(self._buffers(b, layer.mixer) for b in (self.k_bits, self.v_bits)))
            for layer in spec.layers
        ]

    def _check_width(self, layer: int, dims: int) -> None:
        if dims % self.group_size:
            fits = [g for g in GROUP_SIZES if dims % g == 0]
            raise ConfigError(
                f"`cache.group_size` must divide the head size of layer {layer} ({dims}), but is {self.group_size}; "
                + (f"{fits[-1]} does." if fits else "this model's keys can't be quantized.")
            )

    def _buffers(self, bits: int, mixer: MixerSpec | None) -> Callable[[], Buffer]:
        attention = _with_keys(mixer)
        windowed = attention is not None and (attention.window or attention.chunk) is not None
        return lambda: QuantizedBuffer(bits, self.group_size, 0 if windowed else self.start)


def layer_cache(mixer: MixerSpec | None, keys: Callable[[], Buffer], values: Callable[[], Buffer]) -> Cache:
    """The cache that a layer itself asks for, over buffers of the policy's kind. A recurrent memory is as it is."""
    attention = _with_keys(mixer)
    if attention is None:
        return RecurrentCache()
    buffers = _buffers(attention, keys, values)
    if attention.window is not None:
        return _beside(mixer, WindowCache(attention.window, 0, *buffers))
    if attention.chunk is not None:
        return _beside(mixer, WindowCache(attention.chunk, 0, *buffers, chunked=True))
    return _beside(mixer, FullCache(*buffers))


def _with_keys(mixer: MixerSpec | None) -> AttentionSpec | LatentAttentionSpec | None:
    """The attention of a layer that has keys to keep: some read those of another."""
    attention = attention_of(mixer)
    shares = isinstance(attention, AttentionSpec) and attention.keys_of is not None
    return None if shares else attention


def _beside(mixer: MixerSpec | None, cache: FullCache) -> Cache:
    return HybridCache(cache) if isinstance(mixer, ParallelSpec) else cache


def _buffers(
    attention: AttentionSpec | LatentAttentionSpec, keys: Callable[[], Buffer], values: Callable[[], Buffer]
) -> tuple[Buffer, Buffer]:
    return keys(), NoBuffer() if isinstance(attention, LatentAttentionSpec) else values()


def _widths(mixer: MixerSpec | None) -> list[int]:
    """How many numbers a head's keys, and its values, have."""
    attention = _with_keys(mixer)
    if isinstance(attention, AttentionSpec):
        return [attention.head_dim, attention.value_dim]
    return [attention.key_width] if attention is not None else []
