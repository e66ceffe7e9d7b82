"""The one exception tree. Every message is one line: key path, rule, value, what to do.

    MlxgenError
      ConfigError        a key, value or combination of the configuration       exit 2
      RequestError       a request that this model cannot serve                 exit 2
      ModelError         a checkpoint, tokenizer or template missing or broken  exit 3
        WeightsError     tensors: missing, extra, wrong shape, unreadable
        TokenizerError   vocabulary or chat template
        DownloadError    a file that could not be fetched or fails its checksum
      DataError          training data: missing, empty, or rows that cannot be learned from         exit 3
      RunError           a training run that cannot start or go on: its folder, its disk, its loss   exit 3
      FitError           does not fit in memory                                 exit 4
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK, EXIT_USAGE, EXIT_MODEL, EXIT_MEMORY, EXIT_INTERRUPTED = 0, 2, 3, 4, 130


class MlxgenError(Exception):
    """Everything mlxgen raises on purpose."""

    exit_code = 1


class ConfigError(MlxgenError):
    exit_code = EXIT_USAGE


class RequestError(MlxgenError):
    exit_code = EXIT_USAGE


class ModelError(MlxgenError):
    exit_code = EXIT_MODEL


class WeightsError(ModelError):
    pass


class TokenizerError(ModelError):
    pass


class DownloadError(ModelError):
    pass


class DataError(ModelError):
    pass


class RunError(ModelError):
    pass


class FitError(MlxgenError):
    exit_code = EXIT_MEMORY


def require(ok: bool, key: str, rule: str, value: object) -> None:
    """Raise ConfigError "`key` must be <rule>, but is <value>." unless ok."""
    if not ok:
        raise ConfigError(f"`{key}` must be {rule}, but is {value!r}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean `x`?' for the nearest of the known names, else ''."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean `{near[0]}`?" if near else ""
