"""Masks that are built block by block: which blocks the kernels ask for."""

import mlx.core as mx
import numpy as np
import pytest

from kvfun.errors import DTypeError, ShapeError
from kvfun.kernels import PHASES, UNFUSED

from .cases import SETS, Case, peak

SHAPE = {"length": 12, "columns": 30}


class Recorded:
    """A mask that remembers what was asked of it."""

    def __init__(self, mask: mx.array):
        self.mask, self.asked = mask, []

    def __call__(self, first: int, last: int, start: int, stop: int) -> mx.array:
        self.asked.append((first, last, start, stop))
        return self.mask[..., first:last, start:stop]


def recorded(name: str, phase: str, spec: str) -> list[tuple[int, int, int, int]]:
    case = Case(spec, mask="rank 4, by row", **SHAPE)
    case.mask = Recorded(case.mask)
    mx.eval(case.run(SETS[name][phase]))
    return case.mask.asked


@pytest.mark.parametrize("phase", ["window", "masked_window", "partial"])
@pytest.mark.parametrize(
    ("name", "spec"),
    [("tiled", "kv4"), ("all tiled", "kv4"), ("composed", "kv4"), ("fused", "bf16")],
)
def test_tiles_ask_for_every_entry_once_and_for_no_more_than_a_tile(name, spec, phase, small_tiles):
    asked = recorded(name, phase, spec)
    entries = np.zeros((12, 30), int)
    for first, last, start, stop in asked:
        assert (last - first, stop - start) <= (5, 7)
        entries[first:last, start:stop] += 1
    assert (entries == 1).all()


def test_the_fused_kernel_asks_for_blocks_of_queries(small_tiles):
    asked = recorded("fused", "window", "f32")
    assert asked == [(0, 5, 0, 30), (5, 10, 0, 30), (10, 12, 0, 30)]


def test_unfused_kernels_ask_for_all_of_it(small_tiles):
    for phase in ("window", "masked_window", "partial"):
        assert recorded("unfused", phase, "kv4") == [(0, 12, 0, 30)]
    assert recorded("tiled causal", "masked_window", "kv4") == [(0, 12, 0, 30)]


def test_committed_tokens_ask_for_their_own_row(small_tiles):
    for name in SETS:
        asked = recorded(name, "committed", "kv4")
        assert {(first, last) for first, last, _, _ in asked} == {(i, i + 1) for i in range(12)}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", SETS)
def test_blocks_that_do_not_fit_are_refused(name, phase, small_tiles):
    length = 1 if phase == "decode" else 12
    case = Case("kv4", batch=2, length=length, columns=30)
    wrong = {
        "heads": lambda a, b, c, d: mx.ones((2, 3, b - a, d - c), mx.bool_),
        "batch": lambda a, b, c, d: mx.ones((3, 1, b - a, d - c), mx.bool_),
        "queries": lambda a, b, c, d: mx.ones((b - a + 1, d - c), mx.bool_),
        "columns": lambda a, b, c, d: mx.ones((b - a, d - c + 1), mx.bool_),
        "rank": lambda a, b, c, d: mx.ones((1, 1, 1, 1, b - a, d - c), mx.bool_),
        "numpy": lambda a, b, c, d: np.ones((b - a, d - c), bool),
    }
    for what, mask in wrong.items():
        case.mask = mask
        with pytest.raises(ShapeError, match="mask") as raised:
            case.run(SETS[name][phase])
        assert what != "numpy" or "mlx array" in str(raised.value)
    case.mask = lambda a, b, c, d: mx.ones((b - a, d - c), mx.int32)
    with pytest.raises(DTypeError, match="int32"):
        case.run(SETS[name][phase])


# -- memory ---------------------------------------------------------------------------------------


def causal(length: int, columns: int):
    """The causal mask, always as an array: the largest that a kernel may be given."""

    def block(first, last, start, stop):
        seen = mx.arange(columns - length + first, columns - length + last)[:, None]
        return mx.arange(start, stop)[None] <= seen

    return block


@pytest.mark.parametrize("phase", ["window", "partial"])
@pytest.mark.parametrize("spec", ["kv4-g32", "bf16"])
@pytest.mark.parametrize("name", ["tiled", "composed"])
def test_the_memory_of_a_window_grows_neither_with_its_mask_nor_the_cache(name, spec, phase):
    """A mask over 24576 more columns and 64 queries would be 1.5 MiB in bool, 6 in float32."""
    taken = []
    for columns in (8192, 32768):
        case = Case(
            spec, kv_heads=1, group=4, length=64, columns=columns, dims=(32, 32), dtype=mx.bfloat16,
            stored=mx.bfloat16,
        )  # fmt: skip
        for mask in (causal(64, columns), "causal", None):
            case.mask = mask
            taken.append(peak(case, SETS[name][phase]))
    for short, long in zip(taken[:3], taken[3:], strict=True):
        assert long < 1.25 * short
    assert taken[3] < 1.25 * taken[5] + 2 * 64 * 2048


def test_a_whole_mask_takes_the_memory_of_all_scores():
    """What the tiles avoid, so that the test above measures something."""
    case = Case("kv4-g32", kv_heads=1, group=4, length=64, columns=8192, dims=(32, 32))
    case.mask = causal(64, 8192)
    assert peak(case, UNFUSED["window"]) > 4 * 64 * 8192 * 4
