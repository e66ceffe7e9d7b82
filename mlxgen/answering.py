"""Answers in the making: the tokens of requests, as they come, become pieces of text, and in the end a completion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.completion import Chunk, Clock, Completion, FinishReason, TokenLogprob
from mlxgen.engine import Engine, Generation, Request, TextAssembler, Token, TokenSequence
from mlxgen.protocols import Tokenizer
from mlxgen.sampler.draw import derived_seed
from mlxgen.speculating import speculation_stats


@dataclass(frozen=True, kw_only=True)
class Texts:
    """How tokens become text. continues: it goes on in the middle of one, so its first space counts."""

    tokenizer: Tokenizer
    stop: Sequence[str] = ()
    continues: bool = False

    def assembler(self) -> TextAssembler:
        return TextAssembler(self.tokenizer.stream(continues=self.continues), self.stop)

    def logprob(self, token: Token) -> TokenLogprob:
        assert token.logprob is not None
        piece = self.tokenizer.piece
        top = tuple((i, piece(i), value) for i, value in token.top_logprobs)
        return TokenLogprob(token=token.id, piece=piece(token.id), logprob=token.logprob, top=top)


def several(request: Request, n: int) -> list[Request]:
    """The requests for `n` answers: the same but for the random numbers; the first one is what it would be alone."""
    seed = request.sampler.seed
    more = [replace(request.sampler, seed=derived_seed(seed, index)) for index in range(1, n)]
    return [request, *(replace(request, sampler=sampler, prompt_logprobs=-1) for sampler in more)]


class Answers:
    """The answers to one prompt: one, or as many as were asked for.

    While the engine steps, `chunks()` gives what has come since; once all have ended there is a `completion`.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], sequences: Sequence[TokenSequence], texts: Texts):
        """Submit a request for each. Raises FitError or RequestError; then nothing of it stays in the engine."""
        self._engine, self._texts = engine, texts
        self._all: list[_Answering] = []
        self.completion: Completion | None = None
        try:
            for request, sequence in zip(requests, sequences, strict=True):
                self._all.append(_Answering(engine.submit(request, sequence), texts))
        except BaseException:
            self.cancel()
            raise

    def chunks(self) -> Iterator[Chunk]:
        """The pieces that have come since the last call; the very last one has the completion.

        Raises what a request failed with.
        """
        for index, one in enumerate(self._all):  # beams give the others when the first has ended: the list grows
            for chunk in one.chunks():
                if chunk.finish_reason is not None:
                    self._engine.cancel(one.generation)
                    for other in one.generation.others:
                        self._all.append(_Answering(other, self._texts, one.clock.again(), further=True))
                yield self._numbered(chunk, index)

    def interrupt(self) -> Iterator[Chunk]:
        """End all with what there is."""
        self.cancel()
        for index, one in enumerate(self._all):
            if one.completion is None:
                yield self._numbered(one.end("interrupted"), index)

    def cancel(self) -> None:
        """Free at once what the engine still holds for it."""
        for one in self._all:
            self._engine.cancel(one.generation)

    def _numbered(self, chunk: Chunk, index: int) -> Chunk:
        """With its index, and the completion if nothing is to come any more."""
        chunk = replace(chunk, index=index)
        done = [one.completion for one in self._all if one.completion is not None]
        if chunk.finish_reason is None or len(done) < len(self._all):
            return chunk
        self.completion = replace(done[0], others=tuple(done[1:]))
        return replace(chunk, completion=self.completion)


class _Answering:
    """One of them."""

    def __init__(self, generation: Generation, texts: Texts, clock: Clock | None = None, *, further: bool = False):
        self.generation, self.clock, self._texts, self._further = generation, clock or Clock(), texts, further
        self.completion: Completion | None = None
        self._assembler = texts.assembler()
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def chunks(self) -> Iterator[Chunk]:
        """The pieces that have come since. The last one has the finish reason, and the rest of the text."""
        if self.completion is not None:
            return
        if self.generation.search is not None:
            self.clock.start()
        for token in self.generation.take():
            self.clock.tick()
            if token.ends:
                yield self.end("stop")
                return
            yield self._chunk(token)
            if self._assembler.stopped:
                yield self.end("stop")
                return
        if self.generation.done:
            if self.generation.error is not None:
                raise self.generation.error
            # An answer that nothing can follow has stopped, too.
            yield self.end("stop" if self.generation.finish == "stop" else "length")

    def _chunk(self, token: Token) -> Chunk:
        text = self._assembler.push(token.id)
        self._tokens.append(token.id)
        self._pieces.append(text)
        entries = () if token.logprob is None else (self._texts.logprob(token),)
        self._logprobs += entries
        return Chunk(text=text, tokens=(token.id,), logprobs=entries)

    def end(self, reason: FinishReason) -> Chunk:
        """The last piece: what of the text had to wait."""
        generation, request = self.generation, self.generation.request
        rest = self._assembler.finish()
        if self._assembler.stopped and reason == "length":  # a stop text that showed only at the end
            reason = "stop"
        self._pieces.append(rest)
        text = "".join(self._pieces)
        self.completion = Completion(
            text=text,
            tokens=self._tokens,
            finish_reason=reason,
            prompt_tokens=len(request.prompt),
            completion_tokens=len(self._tokens),
            seed=request.sampler.seed,
            stats=self.clock.stats(
                len(request.prompt), generation.cached_tokens, len(self._tokens), speculation_stats(generation)
            ),
            logprobs=tuple(self._logprobs) if request.top_logprobs >= 0 else None,
            prompt_logprobs=self._of_prompt(),
            complete=self._complete(text, cut=self._assembler.stopped or reason == "interrupted"),
            score=generation.score,
        )
        return Chunk(text=rest, finish_reason=reason)

    def _of_prompt(self) -> tuple[TokenLogprob, ...] | None:
        """With the first answer, as all have the same prompt."""
        if self.generation.request.prompt_logprobs < 0 or self._further:
            return None
        return tuple(self._texts.logprob(token) for token in self.generation.prompt_scores)

    def _complete(self, text: str, *, cut: bool) -> bool | None:
        """Whether an answer is whole by its rule. One that was cut may end anywhere in what the guide has seen."""
        guide = self.generation.guide
        if guide is None:
            return None
        return self.generation.request.guide.accepts(text) if cut else guide.complete
