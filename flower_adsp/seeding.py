"""Random streams: every draw in the project comes from one of these.

A stream is named by the run's seed and a key such as ``(partition, "epoch", 3)``, so that a draw
depends neither on the order of events nor on the process in which it happens.
"""

from zlib import crc32

import numpy as np


def _sequence(seed: int, key: tuple[int | str, ...]) -> np.random.SeedSequence:
    words = [crc32(part.encode()) if isinstance(part, str) else part for part in key]
    return np.random.SeedSequence([seed, *words])


def stream(seed: int, *key: int | str) -> np.random.Generator:
    """Return the generator of the stream that `seed` and `key` name."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, key)))


def integer_seed(seed: int, *key: int | str) -> int:
    """Return a 32-bit seed, for libraries with generators of their own."""
    return int(_sequence(seed, key).generate_state(1)[0])
