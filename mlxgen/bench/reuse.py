"""What need not be computed: prompts that begin as others did, and tokens that are guessed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.bench.compare import Row, row
from mlxgen.bench.serving import Ours, some_tokens
from mlxgen.cache import storage
from mlxgen.engine import Engine, Lookup, PrefixStore, Request
from mlxgen.engine.shelf import Shelf

_FILE = '''\
def read_settings(path):
    """Read a file of settings: one `name = value` on each line."""
    settings = {}
    with open(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, found, value = line.partition("=")
            if not found:
                raise ValueError(f"{path}, line {number}: there is no equals sign in {line!r}")
            settings[name.strip()] = value.strip()
    return settings


def write_settings(path, settings):
    """Write settings as `read_settings` reads them."""
    with open(path, "w") as file:
        for name, value in sorted(settings.items()):
            file.write(f"{name} = {value}\\n")
'''
_ARTICLE = """\
The lighthouse on the northern cape was built in 1871 from grey granite that was quarried on the island itself. For
ninety years three keepers lived there with their families, and each of them kept a diary. "The light must never go
out," wrote the first keeper, Johan Berg, on the day the lamp was lit. In the winter storm of 1903 the sea broke the
windows of the lower rooms, and the keepers carried the oil up the stairs by hand for eleven nights. Since 1961 the
light has been automatic. The diaries are kept in the museum of the village, where visitors may read them on request.
"""
COPIES = (
    f"Rewrite this file with the name `settings` changed to `options`, and nothing else:\n\n```python\n{_FILE}```",
    f"Summarize this text with long quotes from it:\n\n{_ARTICLE}",
)
FREE = ("Tell me a story about a robot who wants to learn to paint.", "Explain to a child why the sky is blue.")


def shared_prefix(ours: Ours, repeats: int, tokens: int = 1000) -> list[Row]:
    """Seconds to the first token of a prompt that begins with `tokens` others: cold, and found in memory or a file."""
    cold, memory, disk = [], [], []
    for turn in range(repeats):
        prefix = some_tokens(tokens, turn)
        prompts = [[*prefix, *some_tokens(16, 1000 + i)] for i in range(3)]
        with tempfile.TemporaryDirectory() as folder:
            engine, shelf = _with_shelf(ours, Path(folder))
            cold.append(_first_token(engine, ours, prompts[0]))
            memory.append(_first_token(engine, ours, prompts[1]))
            shelf.wait()
            engine, shelf = _with_shelf(ours, Path(folder))  # all that a new process has
            disk.append(_first_token(engine, ours, prompts[2]))
            shelf.wait()
    what = f"a shared prefix of {tokens:,}: time to first token, found"
    return [
        row(f"{what} in memory", "s", memory, cold, "<= 0.111", "cold"),
        row(f"{what} in a file after a restart", "s", disk, cold, "<= 0.2", "cold"),
    ]


def _with_shelf(ours: Ours, folder: Path) -> tuple[Engine, Shelf]:
    shelf = Shelf(folder, 2**30, lambda: "", storage)
    return Engine(ours.pipeline.decoder, ours.engine.parts, store=PrefixStore(2**30, shelf)), shelf


def _first_token(engine: Engine, ours: Ours, prompt: list[int]) -> float:
    request = Request(prompt=tuple(prompt), sampler=ours.sampler, max_tokens=1)
    start = ours.clock()
    generation = engine.submit(request, ours.pipeline.new_sequence())
    while not generation.produced:
        engine.step()
    seconds = ours.clock() - start
    while engine.step():
        pass
    return seconds


def lookups(ours: Ours, repeats: int, new_tokens: int = 200) -> list[Row]:
    """Tokens per second of decode with prompt lookup, against without, where much is copied and where little is.

    The tokens are the same.
    """
    lookup = Lookup()
    return [
        _lookup(ours, repeats, new_tokens, lookup, "a file is edited, a text is quoted", COPIES, ">= 1.6"),
        *(
            _lookup(ours, repeats, new_tokens, lookup, what, [text], ">= 0.95")
            for what, text in zip(("a story", "an explanation"), FREE, strict=True)
        ),
    ]


def _lookup(
    ours: Ours, repeats: int, new_tokens: int, lookup: Lookup, what: str, texts: Sequence[str], bar: str
) -> Row:
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        tokens = []
        for speculation, out in zip((lookup, None), rates, strict=True):
            answers = [_answer(ours, text, new_tokens, speculation) for text in texts]
            out.append(sum(len(produced) for produced, _ in answers) / sum(seconds for _, seconds in answers))
            tokens.append([produced for produced, _ in answers])
        assert tokens[0] == tokens[1]
    return row(f"decode with prompt lookup: {what}", "tok/s", *rates, bar, "without")


def _answer(ours: Ours, text: str, new_tokens: int, speculation: Lookup | None) -> tuple[list[int], float]:
    """The tokens behind the first one, and the seconds that they took."""
    pipeline = ours.pipeline
    request = Request(
        prompt=tuple(pipeline.encode(text, pipeline.settings())),
        sampler=ours.sampler,
        max_tokens=new_tokens,
        eos_ids=pipeline._eos_ids,
        speculation=speculation,
    )
    generation = ours.engine.submit(request, pipeline.new_sequence())
    while not generation.produced:
        ours.engine.step()
    count, start = len(generation.produced), ours.clock()
    ours.finish()
    return generation.produced[count:], ours.clock() - start
