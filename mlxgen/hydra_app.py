"""What is left to Hydra's own application: sweeps (`--multirun`), `--info` and shell completion."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence

from mlxgen.cli import run_task
from mlxgen.config import checked, config_dirs, conf_dir, plain, read_overrides, refuse_shadowing


def run_hydra(words: Sequence[str]) -> int:
    """Run Hydra's application with our spellings; returns the largest exit code of the jobs."""
    import hydra
    from omegaconf import DictConfig

    flags = [w for w in words if w.startswith("-") and not w.startswith("--config-dir")]
    overrides = read_overrides([w for w in words if w not in flags])
    dirs = config_dirs(overrides.config_dir)
    refuse_shadowing(dirs)
    codes: list[int] = []

    def job(cfg: DictConfig) -> None:
        codes.append(run_task(checked(overrides, {**plain(cfg), **overrides.literal})))

    with tempfile.TemporaryDirectory() as scratch:  # a sweep of answers leaves nothing behind
        extra = [f"hydra.sweep.dir={scratch}"]
        if len(dirs) > 1:
            extra.append(f"hydra.searchpath=['file://{dirs[0]}']")
        arguments, sys.argv = sys.argv, ["mlxgen", *flags, *overrides.hydra, *extra]
        try:
            hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)()
        finally:
            sys.argv = arguments
    return max(codes, default=0)
