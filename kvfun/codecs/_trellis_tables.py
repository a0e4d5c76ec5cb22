"""The tables of the trellis code, as ``python -m bench.trellis_tables`` finds them."""

import random as _random
from statistics import NormalDist as _N

_HALVES = {
    bits: [
        n * _random.Random(i + 1).choice((-1, 1))
        for i, n in enumerate(
            _random.Random(bits).sample(
                [round(_N().inv_cdf((i + 0.5) / 256) * 8192) for i in range(128)], 128
            )
        )
    ]
    for bits in (1, 2, 3, 4)
}
TABLES = {bits: half + [-n for n in half] for bits, half in _HALVES.items()}
