"""Knows all the parts: assembles tokenizer, decoder, cache policy and sampler into one graph."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.adapting import check_adapter, choose_adapter, open_selection
from mlxgen.answering import Answers, Texts, several
from mlxgen.batching import answer_all
from mlxgen.blueprint import DecoderSpec
from mlxgen.build import build
from mlxgen.cache import Rows, load_caches, merge, save_caches
from mlxgen.completion import Chunk, Completion
from mlxgen.config import RULES, Config, load_config, read_file
from mlxgen.engine import Engine, Parts, Request, TokenSequence
from mlxgen.errors import ConfigError, RequestError, did_you_mean
from mlxgen.fit import Estimate, check_fits, open_scheduler
from mlxgen.guiding import Guides, rule_of
from mlxgen.loading import Described, load
from mlxgen.prompting import Prompt, encode_prompt, goes_on
from mlxgen.protocols import Tokenizer
from mlxgen.reusing import STRIDE, open_store
from mlxgen.sampler import Effective, Sampler, candidates, effective, known_stages, logprobs, sample, sample_ahead
from mlxgen.schema import parse
from mlxgen.speculating import check_speculation, open_speculation
from mlxgen.tokenizer import open_tokenizer

_PER_REQUEST = (
    "system", "prefill", "raw", "max_tokens", "stop", "seed", "logprobs", "top_logprobs", "prompt_logprobs",
    "n", "beams", "length_penalty", "prefill_chunk", *RULES,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One request: the run's configuration with the request's own values in it."""

    config: Config
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    adapter: Any = None  # mlxgen.adapting.Choice
    template_args: Mapping[str, Any] = field(default_factory=dict)


class Pipeline:
    """One model with its tokenizer, cache policy and sampler, ready to generate. Build it with `mlxgen.load`."""

    def __init__(self, config: Config):
        """Load what `config` names. Raises MlxgenError with exit code 2, 3 or 4."""
        self.config = config
        self._policy = build(config.cache, "cache", config.trust)
        self._kind = json.dumps(config.cache, sort_keys=True, default=str)  # caches of equal kinds may share prompts
        self._generation_config: Mapping[str, Any] = {}
        self._eos_ids: frozenset[int] = frozenset()
        self._vocab_size: int | None = None
        check_adapter(config.adapter)
        self.sampler(Settings(config=config))  # a wrong setting must not wait for the weights
        check_speculation(config)
        if (rule := rule_of(config)) is not None:
            rule.check()
        self._planned: Estimate | None = None
        self._loaded = loaded = load(
            config.model, config.architecture, config.config_dirs, config.adapter, check=self._check_fits
        )
        self.decoder = loaded.decoder
        self.tokenizer: Tokenizer = open_tokenizer(loaded.checkpoint, config.tokenizer)
        self._generation_config = loaded.checkpoint.generation_config
        self._vocab_size = self.spec.vocab_size
        self._eos_ids = loaded.eos_ids | self.tokenizer.eos_ids | self._own_eos_ids()
        self._store = open_store(config.prefix, loaded.fingerprint)
        self.new_sequence()  # a policy that can't serve this model says so now
        self._guides = Guides(self.tokenizer, self.spec.vocab_size, self._eos_ids)
        self._speculation = open_speculation(config, self.spec, self.tokenizer)
        parts = Parts(
            sample=sample,
            logprobs=logprobs,
            merge=merge,
            rows=Rows,
            sample_ahead=sample_ahead,
            candidates=candidates,
            select=open_selection(loaded),
        )
        scheduler = open_scheduler(config, self.decoder, self._policy, self._planned)
        self.engine = Engine(self.decoder, parts, scheduler, store=self._store)

    def _check_fits(self, described: Described) -> None:
        sampler = self.sampler(Settings(config=self.config)).seeded()
        self._planned = check_fits(described, self.config, self._policy, sampler)

    @property
    def spec(self) -> DecoderSpec:
        return self.decoder.spec

    def generate(self, prompt: Prompt | None = None, **overrides: Any) -> Completion:
        """Answer a text, a conversation (a list of messages), or a list of token ids.

        overrides: `system`, `prefill`, `raw`, `max_tokens`, `stop`, `seed`, `logprobs`, `top_logprobs`,
        `prompt_logprobs`, `tools`, `template_args`, any sampler value (`temperature=0.7`, `top_p=0.9`), and one rule
        for the answer: `json_schema` (a mapping, JSON text or a Path), `regex`, `grammar` (a text or a Path), or
        `choice` (a list of texts). With `n=4` there are four answers, three of them in the first one's `others`;
        `beams=8` searches for the likeliest answer, or the `n` likeliest. `adapter` names one of the loaded adapters,
        several with their weights, or none.
        Raises ConfigError for these, RequestError for a prompt that is empty or longer than the model's context.
        """
        *_, last = self.stream(prompt, **overrides)
        assert last.completion is not None
        return last.completion

    def generate_batch(self, prompts: Iterable[Prompt], **overrides: Any) -> list[Completion]:
        """Answer several prompts together, each as `generate` does. Raises what the first to fail has failed with.

        mlxgen.batching.answer_all takes any number, each with values of its own, and goes on where one fails.
        """
        completions: dict[int, Completion] = {}
        for place, result in answer_all(self, ((prompt, overrides) for prompt in prompts)):
            if isinstance(result, Exception):
                raise result
            completions[place] = result
        return [completions[place] for place in sorted(completions)]

    def stream(self, prompt: Prompt | None = None, **overrides: Any) -> Generator[Chunk, None, None]:
        """Like `generate`, piece by piece. The last chunk holds the completion."""
        settings = self.settings(**overrides)
        prompt = self.config.prompt if prompt is None else prompt
        return self.answer(self.encode(prompt, settings), settings, continues=self._continues(prompt, settings))

    def start(self, prompt: Prompt, **overrides: Any) -> Answers:
        """Queue a prompt: while `engine.step()` is called, its answers' `chunks()` come. Raises as `generate` does."""
        settings = self.settings(**overrides)
        return self.submit(self.encode(prompt, settings), settings, continues=self._continues(prompt, settings))

    def _continues(self, prompt: Prompt | None, settings: Settings) -> bool:
        return prompt is not None and goes_on(self.tokenizer, prompt, settings.config)

    def chat(self, **overrides: Any) -> Any:
        """A mlxgen.conversation.Conversation: call it with what the user says; it keeps its cache."""
        from mlxgen.conversation import Conversation

        return Conversation(self, self.settings(**overrides))

    def new_sequence(self, settings: Settings | None = None) -> TokenSequence:
        """Empty caches by this pipeline's policy, for requests of the same adapter as that of `settings`."""
        stride = STRIDE if self._store is not None else 0
        choice = settings.adapter if settings is not None else None
        kind = self._kind if choice is None else f"{self._kind} {choice}"
        return TokenSequence(lambda: self._policy(self.spec), kind=kind, stride=stride, variant=choice)

    def save_sequence(self, sequence: TokenSequence, path: Path) -> None:
        """Keep what a sequence has computed in a file."""
        save_caches(path, sequence.caches, sequence.tokens, self._cache_fingerprint())

    def load_sequence(self, path: Path) -> TokenSequence:
        """A sequence from a file. Raises ModelError if this pipeline could not have written it."""
        sequence = self.new_sequence()
        sequence.tokens = load_caches(path, sequence.caches, self._cache_fingerprint())
        return sequence

    def _cache_fingerprint(self) -> str:
        """Everything that keys and values depend on."""
        return f"{self._loaded.fingerprint()} {self._kind}"

    def settings(self, **overrides: Any) -> Settings:
        """Sort a request's values: root keys, template, and what belongs to the sampler. Raises ConfigError."""
        own = {k: overrides.pop(k) for k in _PER_REQUEST if k in overrides}
        tools, template_args = overrides.pop("tools", None), overrides.pop("template_args", {})
        adapter = choose_adapter(self._loaded, overrides.pop("adapter", None))
        for key in overrides:
            if key not in known_stages() and key != "order":
                known = [*_PER_REQUEST, "adapter", "tools", "template_args", *known_stages()]
                raise ConfigError(f"`{key}` is not a key of a request.{did_you_mean(key, known)}")
        own = {k: read_file(k, v) if isinstance(v, Path) else v for k, v in own.items() if v is not None}
        if not own.keys().isdisjoint(RULES):  # instead of the configuration's
            own = {**dict.fromkeys(RULES), **own}
        usual = {f: getattr(self.config, f) for f in self.config.__dataclass_fields__}
        config = parse(Config, {**usual, **own}, "")
        return Settings(config=config, sampling=overrides, tools=tools, template_args=template_args, adapter=adapter)

    def encode(self, prompt: Prompt | None, settings: Settings) -> list[int]:
        """The token ids that the model sees for a text, a conversation or token ids."""
        return self._check_ids(
            encode_prompt(
                self.tokenizer,
                prompt,
                settings.config,
                tools=settings.tools,
                template_args=settings.template_args,
            )
        )

    def effective_sampling(self, settings: Settings) -> Effective:
        """The sampler values in force, and where each comes from."""
        model = self.config.model.sampling
        return effective(settings.sampling, settings.config.sampler, self._generation_config, model)

    def sampler(self, settings: Settings) -> Sampler:
        """The chain of stages for a request. Raises ConfigError for values out of range."""
        values = self.effective_sampling(settings).values
        if settings.config.seed is not None:
            values["seed"] = settings.config.seed
        return Sampler.from_config(
            values,
            vocab_size=self._vocab_size,
            eos_ids=sorted(self._eos_ids),
            build=lambda node, path: build(node, path, self.config.trust),
            token_of=self._token_of if self._vocab_size is not None else None,
        )

    def _own_eos_ids(self) -> set[int]:
        """What the configuration adds to the tokens that end an answer."""
        ids = set()
        for end in self.config.eos:
            found = self.tokenizer.encode(end, add_special=False, parse_special=True) if isinstance(end, str) else [end]
            if len(found) != 1 or not 0 <= found[0] < self.spec.vocab_size:
                raise ConfigError(
                    f"`eos` must name tokens of the vocabulary, but {end!r} is {len(found)} tokens: {found}."
                )
            ids |= set(found)
        return ids

    def _token_of(self, text: str) -> int | None:
        """The token that ends with a text, as it stands after another character."""
        tokens = self.tokenizer.encode(f"a{text}", add_special=False)
        return tokens[-1] if tokens else None

    def answer(
        self, ids: Sequence[int], settings: Settings, sequence: TokenSequence | None = None, *, continues: bool = False
    ) -> Generator[Chunk, None, None]:
        """Generate from token ids, perhaps on caches that hold a beginning of them already."""
        answers = self.submit(ids, settings, sequence, continues=continues)
        try:
            while answers.completion is None:
                yield from answers.chunks()
                self.engine.step()
        except KeyboardInterrupt:
            if answers.completion is not None:
                raise
            yield from answers.interrupt()
        finally:
            answers.cancel()

    def submit(
        self, ids: Sequence[int], settings: Settings, sequence: TokenSequence | None = None, *, continues: bool = False
    ) -> Answers:
        """Queue the answers to a prompt: they come while `engine.step()` is called. Raises RequestError or FitError.

        continues: the answer goes on in the middle of a text, so its first space counts.
        """
        config = settings.config
        stop = (config.stop,) if isinstance(config.stop, str) else config.stop or ()
        first = self._request(ids, settings)
        # A rule says itself whether the text begins with a space.
        texts = Texts(tokenizer=self.tokenizer, stop=stop, continues=continues or first.guide is not None)
        requests = [first] if first.beams > 1 else several(first, config.n)
        sequences = [sequence or self.new_sequence(settings), *(self.new_sequence(settings) for _ in requests[1:])]
        for own in sequences[sequence is not None :]:
            own.disposable = self._store is None and first.beams == 1
        return Answers(self.engine, requests, sequences, texts)

    def _request(self, ids: Sequence[int], settings: Settings) -> Request:
        config = settings.config
        context = min(filter(None, (self.spec.context, config.context)), default=None)
        room = config.max_tokens
        if context is not None:
            if len(ids) > context:
                raise RequestError(
                    f"`prompt` must fit into a context of {context} tokens, but has {len(ids)}; shorten it."
                )
            room = min(room, context - len(ids))
        wanted, top = config.logprobs or config.top_logprobs > 0, min(config.top_logprobs, self.spec.vocab_size)
        return Request(
            prompt=tuple(ids),
            sampler=self.sampler(settings).seeded(),
            max_tokens=room,
            eos_ids=self._eos_ids,
            top_logprobs=top if wanted else -1,
            prompt_logprobs=top if config.prompt_logprobs else -1,
            prefill_chunk=config.prefill_chunk,
            guide=self._guides.grammar(config),
            speculation=self._speculation,
            beams=config.beams,
            best=config.n,
            length_penalty=config.length_penalty,
        )

    def _check_ids(self, ids: Sequence[Any]) -> list[int]:
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < self.spec.vocab_size:
                raise RequestError(
                    f"`prompt` must hold token ids from 0 to {self.spec.vocab_size - 1}, but has {token!r}."
                )
        return list(ids)


def load_pipeline(*overrides: str, trust: Sequence[str] = (), config_dir: Path | None = None) -> Pipeline:
    """Compose the overrides, as on the command line, and load what they name.

    trust: packages of yours that `_target_` may name. config_dir: a folder of yours, laid out like conf/.
    Raises MlxgenError with exit code 2, 3 or 4.
    """
    return Pipeline(load_config(overrides, trust=trust, config_dir=config_dir))
