"""The device: a fast BLAS for MLX on Linux, and the dtype to compute in.

MLX's Linux wheel links reference BLAS. A library with the same symbols that is loaded first, with
RTLD_GLOBAL, is the one the dynamic linker finds; so this module must run before `import mlx.core`.
Every package of mlxgen that uses mlx imports it first. On macOS it does nothing.
MLXGEN_BLAS: `auto` (default), `off`, or the path of a library.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
import warnings

_SWITCH = "MLXGEN_BLAS"
# MKL then gives the same bits on every run on one machine, whatever the alignment of the buffers (mkl_types.h).
_MKL_CBWR_AUTO_STRICT = 2 | 0x10000


def _candidates() -> list[str]:
    """Libraries worth trying, best first: Intel MKL from the package index, then the system's OpenBLAS."""
    mkl = sorted(glob.glob(os.path.join(sys.prefix, "lib", "libmkl_rt.so*")))
    return [*mkl, "libopenblas.so.0"]


def load_fast_blas() -> str | None:
    """Load a BLAS into the process before MLX; returns what was loaded, None if nothing was."""
    choice = os.environ.get(_SWITCH, "auto")
    if sys.platform != "linux" or choice == "off":
        return None
    if "mlx.core" in sys.modules:
        if len(_candidates()) > 1:
            text = "mlx came before mlxgen.device, so it computes with its slow BLAS; put `import mlxgen.device` first."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None
    for path in _candidates() if choice == "auto" else [choice]:
        try:
            library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if "mkl" in path:
            library.MKL_CBWR_Set(_MKL_CBWR_AUTO_STRICT)
        return path
    return None


def peak_memory_bytes() -> int:
    """The most memory that MLX has held at once in this process."""
    import mlx.core as mx

    return mx.get_peak_memory()


BLAS = load_fast_blas()
