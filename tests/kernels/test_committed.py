"""Committed tokens: the same bits as decoding them one at a time."""

from itertools import product

import mlx.core as mx
import pytest

from kvfun.errors import ShapeError
from kvfun.kernels import GROUPED_HEADS, UNFUSED, committed

from . import dense
from .cases import FLOATS, SETS, Case, raw


def copy(planes, columns: int):
    return tuple(mx.contiguous(plane[:, :, :columns]) for plane in planes)


def one_by_one(case: Case, decode) -> mx.array:
    """Every query over what the cache held then, in arrays of their own."""
    length, columns = case.queries.shape[2], case.k.shape[2]
    outs = []
    for i in range(length):
        then = columns - length + i + 1
        query = mx.contiguous(case.queries[:, :, i : i + 1])
        keys, values = copy(case.keys, then), copy(case.values, then)
        mx.eval(query, keys, values)
        outs.append(
            decode(
                query, keys, values, case.codec, scale=case.scale, mask=None, sinks=case.sinks
            )
        )  # fmt: skip
    return mx.concatenate(outs, axis=2)


@pytest.mark.parametrize("prefix", [128, 1021])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SETS)
def test_the_bits_of_sequential_decoding(name, dtype, prefix):
    kernels = SETS[name]
    for bits, group, batch, length in product((4, 8), (32, 64, 128), (1, 2), (1, 4)):
        case = Case(
            f"kv{bits}-g{group}" if group != 64 else f"kv{bits}", batch=batch, kv_heads=1,
            length=length, columns=prefix + length, dims=(128, 128), dtype=dtype, stored=dtype,
            mask="causal",
        )  # fmt: skip
        assert raw(case.run(kernels["committed"])) == raw(one_by_one(case, kernels["decode"]))


@pytest.mark.parametrize("spec", ["plain", "f32", "bf16", "kv3", "kv5", "k8v4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", SETS)
def test_other_codecs_sinks_and_tiles(name, spec, small_tiles):
    for dtype, sinks in ((mx.float32, True), (mx.bfloat16, False)):
        case = Case(
            spec, batch=2, length=5, columns=33, dtype=dtype, stored=dtype, sinks=sinks,
            mask="causal",
        )  # fmt: skip
        kernels = SETS[name]
        assert raw(case.run(kernels["committed"])) == raw(one_by_one(case, kernels["decode"]))


def test_one_query_without_a_mask_is_a_decode():
    case = Case("kv4", columns=40)
    assert raw(case.run(UNFUSED["committed"])) == raw(case.run(UNFUSED["decode"]))


@pytest.mark.parametrize("mask", [name for name in dense.MASKS if name not in ("none", "causal")])
def test_an_array_is_read_row_by_row(mask):
    """All columns under the query's own row of the mask, with one-query arithmetic."""
    given = []

    def decode(queries, keys, values, codec, *, scale, mask, sinks):
        given.append((queries.shape, keys[0].shape[2], mask))
        return UNFUSED["decode"](
            queries, keys, values, codec, scale=scale, mask=mask, sinks=sinks
        )  # fmt: skip

    case = Case("kv4", batch=2, length=4, columns=20, mask=mask)
    case.check(committed(decode))
    assert [(shape, columns) for shape, columns, _ in given] == [((2, 4, 1, 64), 20)] * 4


def test_no_mask_hides_nothing():
    Case("kv4", length=3, columns=9).check(UNFUSED["committed"])


def test_more_committed_queries_than_columns():
    case = Case("kv4", length=4, columns=3, mask="causal")
    with pytest.raises(ShapeError, match="4 committed queries, but only 3 columns"):
        case.run(UNFUSED["committed"])


def test_grouped_heads_commit_as_the_unfused_set_does():
    assert GROUPED_HEADS["committed"] is UNFUSED["committed"]
