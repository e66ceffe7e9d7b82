"""Rotary position embedding (arXiv:2104.09864): from the settings in a config.json to angles per position.

Pure arithmetic in double precision, so the values can be checked without a model. The kinds are those that
checkpoints name in `rope_type`; each changes the frequencies 1 / theta^(2i/dims) so that longer contexts work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxgen.errors import ConfigError, did_you_mean, require

_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "ntk_alpha": ("alpha",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
_ALIASES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """The first `dims` elements of a head are rotated in pairs; pair i turns by position * inv_freq[i] radians.

    A pair is (i, i + dims/2), or (2i, 2i + 1) when `interleaved`. `context` is the length in tokens that the
    checkpoint was made for, `original_context` the one before its rope was stretched.
    """

    dims: int
    theta: float = 10000.0
    kind: str = "default"
    interleaved: bool = False
    context: int | None = None
    original_context: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.dims > 0 and self.dims % 2 == 0, "rope.dims", "even and at least 2", self.dims)
        require(self.theta > 0, "rope.theta", "above 0", self.theta)
        if self.kind not in _NEEDED:
            known = ", ".join(_NEEDED)
            hint = did_you_mean(self.kind, _NEEDED)
            raise ConfigError(f"`rope.kind` must be one of {known}, but is {self.kind!r}.{hint}")
        for key in _NEEDED[self.kind]:
            require(self.settings.get(key) is not None, f"rope.{key}", f"given for {self.kind} rope", None)
        for key in ("short_factor", "long_factor"):
            if key in _NEEDED[self.kind]:
                rule = f"a list of {self.dims // 2} numbers"
                require(len(self.settings[key]) == self.dims // 2, f"rope.{key}", rule, self.settings[key])

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], *, dims: int, interleaved: bool) -> RopeSpec:
        """From `kind`, `theta`, `context` and the kind's own keys, as `HfConfig.rope` returns them."""
        rest = dict(settings)
        kind = str(rest.pop("kind", "default"))
        if kind == "dynamic" and rest.get("alpha"):  # so named in Hunyuan's checkpoints, but of any length
            kind = "ntk_alpha"
        context = rest.pop("context", None)
        return cls(
            dims=dims,
            theta=float(rest.pop("theta", 10000.0)),
            kind=_ALIASES.get(kind, kind),
            interleaved=interleaved,
            context=context,
            original_context=rest.pop("original_max_position_embeddings", None) or context,
            settings=rest,
        )

    @property
    def changes_at(self) -> int | None:
        """Sequences longer than this are rotated by other frequencies, for all their positions."""
        get = self.settings.get
        if self.kind != "longrope":
            return None
        if get("short_factor") == get("long_factor") and get("short_mscale") == get("long_mscale"):
            return None
        return self.original_context

    def frequencies(self, length: int = 0) -> tuple[list[float], float]:
        """(inv_freq [dims/2], factor of the rotated elements) for a sequence of `length` tokens."""
        return _KINDS[self.kind](self, length)

    def _plain(self, theta: float | None = None) -> list[float]:
        base = self.theta if theta is None else theta
        return [base ** (-i / self.dims) for i in range(0, self.dims, 2)]

    def _original(self) -> int:
        require(self.original_context is not None, "rope.original_max_position_embeddings", "given", None)
        return int(self.original_context)  # type: ignore[arg-type]

    def _factor(self) -> float:
        """How much longer the context became; some checkpoints state it only through the two lengths."""
        factor = self.settings.get("factor")
        return float(factor) if factor is not None else (self.context or 1) / self._original()


def _default(rope: RopeSpec, length: int) -> tuple[list[float], float]:
    return rope._plain(), 1.0


def _linear(rope: RopeSpec, length: int) -> tuple[list[float], float]:
    """Position interpolation, arXiv:2306.15595."""
    return [f / rope._factor() for f in rope._plain()], 1.0


def _dynamic(rope: RopeSpec, length: int) -> tuple[list[float], float]:
    """NTK-aware scaling that grows with the sequence (reference: transformers, modeling_rope_utils)."""
    require(rope.context is not None, "rope.max_position_embeddings", "given", None)
    factor, context = rope._factor(), int(rope.context)  # type: ignore[arg-type]
    stretch = factor * max(length, context) / context - (factor - 1)
    return rope._plain(rope.theta * stretch ** (rope.dims / (rope.dims - 2))), 1.0


def _ntk_alpha(rope: RopeSpec, length: int) -> tuple[list[float], float]:
    """NTK-aware scaling by a fixed factor (reference: transformers, models/hunyuan_v1_dense)."""
    return rope._plain(rope.theta * float(rope.settings["alpha"]) ** (rope.dims / (rope.dims - 2))), 1.0


def _llama3(rope: RopeSpec, length: int) -> tuple[list[float], float]:
    """Long wavelengths are stretched, short ones kept, with a ramp between (Llama 3.1's reference code)."""
    factor, low, high = (float(rope.settings[k]) for k in _NEEDED["llama3"])
    original = rope._original()

    def scaled(f: float) -> float:
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            return f
        if wavelength > original / low:
            return f / factor
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * f / factor + smooth * f

    return [scaled(f) for f in rope._plain()], 1.0


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of the attention temperature, arXiv:2309.00071 eq. 22."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(rope: RopeSpec, length: int) -> tuple[list[float], float]:
    """YaRN, arXiv:2309.00071: interpolate slow pairs, keep fast ones, ramp between two rotation counts."""
    get = rope.settings.get
    factor, original, dims = rope._factor(), rope._original(), rope.dims

    def pair_with(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(get("beta_fast") or 32), pair_with(get("beta_slow") or 1)
    if get("truncate", True) is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # the reference code's guard against a division by zero
    keep = [1 - min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dims // 2)]
    freqs = [f * k + f / factor * (1 - k) for f, k in zip(rope._plain(), keep, strict=True)]

    scale = get("attention_factor")
    if scale is None and get("mscale") and get("mscale_all_dim"):
        scale = yarn_mscale(factor, get("mscale")) / yarn_mscale(factor, get("mscale_all_dim"))
    return freqs, yarn_mscale(factor) if scale is None else float(scale)


def _longrope(rope: RopeSpec, length: int) -> tuple[list[float], float]:
    """LongRoPE, arXiv:2402.13753: one list of factors up to the original context, another beyond it."""
    original = rope._original()
    which = "long" if length > original else "short"
    factors = rope.settings[f"{which}_factor"]
    scale = rope.settings.get(f"{which}_mscale") or rope.settings.get("attention_factor")
    if scale is None:
        factor = rope._factor()
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return [f / s for f, s in zip(rope._plain(), factors, strict=True)], float(scale)


def _proportional(rope: RopeSpec, length: int) -> tuple[list[float], float]:
    """A share of the pairs, the fast ones of the whole head, is rotated (Gemma 4)."""
    share, pairs = rope.settings.get("partial_rotary_factor"), rope.dims // 2
    rotated = int((1.0 if share is None else share) * rope.dims // 2)
    factor = rope.settings.get("factor") or 1.0
    return [f / factor if i < rotated else 0.0 for i, f in zip(range(pairs), rope._plain(), strict=True)], 1.0


_KINDS: dict[str, Callable[[RopeSpec, int], tuple[list[float], float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
