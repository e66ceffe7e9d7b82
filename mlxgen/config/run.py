"""What a run is: the typed form of the composed configuration. conf/config.yaml says what each key is for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlxgen.config.adapter import AdapterConfig
from mlxgen.config.data import DataConfig
from mlxgen.errors import ConfigError, require
from mlxgen.schema import Bytes

_NOTHING = Bytes(0)


@dataclass(frozen=True, kw_only=True)
class PackageConfig:
    """A checkpoint inside Python packages: the members of the wheels, joined in order, make `file`."""

    requirements: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    file: str


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which checkpoint, and how its weights are held."""

    source: str
    revision: str | None = None
    package: PackageConfig | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    dequantize: bool | Literal["auto"] = "auto"
    fuse: bool = True
    strict: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    kind: Literal["auto", "none", "bytes"] = "auto"
    chat_template: str | None = None
    template_args: dict[str, Any] = field(default_factory=dict)
    fold_system: bool = False


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Where guesses of the next tokens come from. conf/speculation says what the fields are for."""

    kind: Literal["none", "lookup", "draft"] = "none"
    tokens: int = 4
    ngram: int = 2
    model: str | None = None
    always: bool = False

    def __post_init__(self) -> None:
        require(self.tokens >= 1, "tokens", "at least 1", self.tokens)
        require(self.ngram >= 1, "ngram", "at least 1", self.ngram)


@dataclass(frozen=True, kw_only=True)
class PrefixConfig:
    """How much is kept of computed prompts, for those that begin alike. conf/prefix says what the fields are for."""

    memory: Bytes = _NOTHING
    folder: Path | None = None
    disk: Bytes = _NOTHING

    def __post_init__(self) -> None:
        if self.folder is not None:
            require(self.disk > 0, "disk", "above 0 with `prefix.folder` (prefix=disk sets both)", self.disk)


RULES = ("json_schema", "regex", "grammar", "choice")  # for an answer; one at most


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run, checked. Parts that the user may replace stay plain data until they are built."""

    model: ModelConfig
    architecture: dict[str, Any]
    tokenizer: TokenizerConfig
    cache: dict[str, Any]
    sampler: dict[str, Any]
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    speculation: SpeculationConfig
    prefix: PrefixConfig
    task: dict[str, Any]
    prompt: str | None = None
    system: str | None = None
    prefill: str | None = None
    raw: bool = False
    max_tokens: int = 512
    stop: tuple[str, ...] | str | None = ()
    eos: tuple[int | str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    n: int = 1
    beams: int = 1
    length_penalty: float = 1.0
    prefill_chunk: int = 256
    batch: int | None = None
    context: int | None = None
    memory_limit: Bytes | None = None
    out: Path | None = None
    resume: Path | None = None
    output: Literal["text", "json", "jsonl"] = "text"
    stats: bool | Literal["auto"] = "auto"
    debug: bool = False
    # What the caller gives, never YAML:
    trust: tuple[str, ...] = ()  # packages that `_target_` may name
    config_dirs: tuple[Path, ...] = ()
    variant: tuple[str, ...] = ()  # in a sweep, the words that tell this run from the others
    given: tuple[str, ...] = ()  # keys and groups that the command line names

    def __post_init__(self) -> None:
        require(self.max_tokens >= 0, "max_tokens", "at least 0", self.max_tokens)
        require(self.prefill_chunk >= 1, "prefill_chunk", "at least 1", self.prefill_chunk)
        require(self.top_logprobs >= 0, "top_logprobs", "at least 0", self.top_logprobs)
        for key in ("batch", "context", "memory_limit"):
            value = getattr(self, key)
            require(value is None or value >= 1, key, "at least 1", value)
        require(self.n >= 1, "n", "at least 1", self.n)
        require(self.beams >= 1, "beams", "at least 1", self.beams)
        if self.beams > 1:
            self._check_beams()
        given = [rule for rule in RULES if getattr(self, rule) is not None]
        if len(given) > 1:
            raise ConfigError(f"`{given[0]}` and `{given[1]}` must not be given together: an answer follows one rule.")

    def _check_beams(self) -> None:
        require(self.n <= self.beams, "n", f"at most `beams` ({self.beams}), the answers that a search finds", self.n)
        kind = self.speculation.kind
        require(kind == "none", "speculation", "none with `beams`, as guesses are for one row alone", kind)


FROM_CALLER = ("trust", "config_dirs", "variant", "given")
