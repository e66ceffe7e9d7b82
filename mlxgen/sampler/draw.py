"""Random numbers without a generator: a hash of what they are for.

They depend on the request's seed and on the position alone: not on the device, not on who shares the batch.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b


def uniform(seed: int, step: int, label: str, count: int = 1) -> list[float]:
    """`count` numbers in [0, 1), each a multiple of 2**-24: exact in float32, so never rounded up to 1."""
    digest = blake2b(f"{seed}/{step}/{label}".encode(), digest_size=4 * count).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 3], "little") / 2**24 for i in range(count)]


def fresh_seed() -> int:
    """A seed that nobody has used: from the operating system's entropy."""
    return secrets.randbits(64)


def derived_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th copy of a request."""
    return int.from_bytes(blake2b(f"{seed}#{index}".encode(), digest_size=8).digest(), "little")
