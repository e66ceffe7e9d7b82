"""How much memory there is."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx


def memory_limit_bytes(wanted: int | None = None) -> int:
    """What MLX may hold in this process, what it holds already included.

    wanted: the user's own limit. Else on a GPU what Metal recommends, which the system leaves for it; on Linux what is
    free now, in the machine and in the control group that the process is in.
    """
    if wanted is not None:
        return wanted
    info = mx.device_info() if mx.default_device().type == mx.gpu else {}
    if "max_recommended_working_set_size" in info:
        return int(info["max_recommended_working_set_size"])
    free = [size for size in (_machine(), _group()) if size is not None]
    return min(free) + mx.get_active_memory() + mx.get_cache_memory() if free else _total()


def _machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None


def _group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Of a container (control groups, version 2)."""
    try:
        limit, used = ((root / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return None
    return max(int(limit) - int(used), 0) if limit.isdigit() else None


def _total() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
