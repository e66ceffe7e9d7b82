"""`--info`: Hydra's own report on a configuration."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from mlxgen.config.folders import conf_dir, config_dirs
from mlxgen.config.words import read_overrides
from mlxgen.errors import EXIT_OK


def show_info(topic: str, words: Sequence[str], config_dir: Path | None) -> int:
    """Where Hydra searches, what it found, what it composed; `topic` is one of Hydra's, or all.

    Hydra's application reads sys.argv, sets up logging, and ends the process itself if something is wrong.
    """
    import hydra

    overrides = read_overrides(words, config_dir)
    dirs = config_dirs(config_dir)
    own = ["--config-dir", str(dirs[0])] if len(dirs) > 1 else []
    root = logging.getLogger()
    before = sys.argv, root.handlers, root.level
    sys.argv, root.handlers = ["mlxgen", *overrides.hydra_words, "--info", topic, *own], []
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(lambda cfg: None)()
    finally:
        sys.argv, root.handlers, root.level = before
    return EXIT_OK
