"""Examples and bad input for the KV record; what holds for every cache is in ``test_laws.py``."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

import kvfun
from kvfun import errors, tree
from kvfun.kernels import FUSED, UNFUSED
from kvfun.testing import Shape, digest, same

SHAPE = Shape(kv_heads=2, head_dim=64, value_dim=32)


def block(tokens: int, seed: int = 5, batch: int = 2, shape: Shape = SHAPE):
    return shape.block(seed, batch, tokens)


def queries(count: int = 1, heads: int = 4, batch: int = 2, dim: int = 64):
    return mx.random.normal((batch, heads, count, dim), key=mx.random.key(0))


@pytest.fixture(params=["plain", "bf16", "kv4-g32"])
def cache(request):
    return kvfun.append(kvfun.empty(request.param, window=4, reserve=1), *block(6))


@pytest.fixture
def full():
    return kvfun.append(kvfun.empty("plain"), *block(6))


@pytest.fixture(autouse=True)
def the_cache_is_as_it_was(request):
    """Whatever a test does to the cache: its bytes stay."""
    held = [request.getfixturevalue(n) for n in ("cache", "full") if n in request.fixturenames]
    before = [digest(c) for c in held]
    yield
    assert [digest(c) for c in held] == before


def raises(error, *words):
    """The typed error, with these words in its message in this order."""
    return pytest.raises(error, match=".*".join(words) or None)


# -- append ------------------------------------------------------------------------------------


def blocks_that_do_not_fit():
    k, v = block(3)
    return {
        "rank": (errors.ShapeError, (k[0], v[0]), (r"\(2, 3, 64\)",)),
        "rank of values": (errors.ShapeError, (k, v[0]), ("values", r"\(2, 3, 32\)")),
        "heads": (errors.ShapeError, (k[:, :1], v[:, :1]), ("kv_heads 2", "1")),
        "heads differ": (errors.ShapeError, (k, v[:, :1]), (r"2, 2, 3", r"2, 1, 3")),
        "tokens differ": (errors.ShapeError, (k, v[:, :, :2]), (r"2, 2, 3", r"2, 2, 2")),
        "batch": (errors.ShapeError, (k[:1], v[:1]), ("batch 2", "1")),
        "head_dim": (errors.ShapeError, (k[..., :32], v), ("head_dim 64", "32")),
        "value_dim": (errors.ShapeError, (k, v[..., :16]), ("value_dim 32", "16")),
        "dtype": (errors.DTypeError, (k.astype(mx.float16), v), ("float32", "float16")),
        "value dtype": (errors.DTypeError, (k, v.astype(mx.bfloat16)), ("float32", "bfloat16")),
        "integers": (errors.DTypeError, (k.astype(mx.int32), v), ("keys", "int32")),
        "numpy": (errors.DTypeError, (np.array(k), np.array(v)), ("keys", "ndarray")),
        "numpy values": (errors.DTypeError, (k, np.array(v)), ("values", "ndarray")),
        "a list": (errors.DTypeError, (k.tolist(), v), ("keys", "list")),
        "None": (errors.DTypeError, (k, None), ("values", "NoneType")),
    }


@pytest.mark.parametrize("name", blocks_that_do_not_fit())
def test_a_block_that_does_not_fit(cache, name):
    error, given, words = blocks_that_do_not_fit()[name]
    with raises(error, *words):
        kvfun.append(cache, *given)
    assert kvfun.offsets(kvfun.append(cache, *block(1))) == (7, 7)


@pytest.mark.parametrize("axis", [0, 1, 3])
def test_a_first_block_with_an_empty_axis(axis):
    shape = [1, 2, 3, 64]
    shape[axis] = 0
    with raises(errors.ShapeError, "empty axes"):
        kvfun.append(kvfun.empty("plain"), mx.zeros(shape), mx.zeros(shape))


@pytest.mark.parametrize(
    ("spec", "dims", "words"),
    [
        ("kv4", (96, 64), ("kv4", "head_dim 96", "64", "kv4-pad")),
        ("kv4", (64, 32), ("kv4", "head_dim 32", "64")),
        ("kv4-g128", (64, 64), ("head_dim 64", "128")),
        ("bf16+kv8", (40, 40), ("kv8", "40")),
    ],
)
def test_a_head_dim_the_group_does_not_divide(spec, dims, words):
    shape = Shape(1, *dims)
    with raises(errors.CodecError, *words):
        kvfun.append(kvfun.empty(spec), *block(2, shape=shape))
    plain = kvfun.append(kvfun.empty("plain"), *block(2, shape=shape))
    before = digest(plain)
    with raises(errors.CodecError, *words):
        kvfun.convert(plain, spec)
    assert digest(plain) == before


@pytest.mark.parametrize("spec", ["plain", "bf16", "kv4-g32", "kv3-g32", "kv8-g32+f16", "kv4-pad"])
@pytest.mark.parametrize("window", [None, 3])
def test_no_tokens(spec, window):
    """A block of no tokens tells the shapes and nothing else."""
    empty = kvfun.empty(spec, window=window)
    none = kvfun.append(empty, *block(0))
    assert kvfun.offsets(none) == (0, 0)
    assert kvfun.size(none) == 0
    assert kvfun.max_rollback(none) == (0, 0)
    keys, values = kvfun.fetch(none)
    assert keys.shape == (2, 2, 0, 64)
    assert values.shape == (2, 2, 0, 32)
    some = kvfun.append(empty, *block(5))
    assert keys.dtype == kvfun.fetch(some)[0].dtype
    same(kvfun.append(none, *block(5)), some, "after no tokens")
    assert kvfun.append(some, *block(0)) is some
    same(
        kvfun.append(kvfun.convert(none, "kv8-g32"), *block(5)),
        kvfun.append(kvfun.empty("kv8-g32", window=window), *block(5)),
        "no tokens, converted",
    )
    again = kvfun.append(kvfun.rollback(some, 5), *block(5))
    assert kvfun.fetch(kvfun.rollback(some, 5))[0].shape == (2, 2, 0, 64)
    same(again, some, "after all was rolled back")
    batch = kvfun.concat([none, some, kvfun.take(empty, [0])])
    assert kvfun.offsets(batch) == (0, 0, 5, 5, 0)
    assert kvfun.batch_size(kvfun.append(kvfun.concat([none, empty]), *block(1, batch=3))) == 3


# -- empty -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"window": 0}, ("window", ">= 1", "0")),
        ({"window": -3}, ("window", "-3")),
        ({"window": 2.0}, ("window", "2.0")),
        ({"window": True}, ("window", "True")),
        ({"sinks": -1}, ("sinks", ">= 0", "-1")),
        ({"sinks": None}, ("sinks", "None")),
        ({"chunk": 0}, ("chunk", "0")),
        ({"reserve": -1}, ("reserve", "-1")),
        ({"left_padding": [-1]}, ("left_padding", "-1")),
        ({"left_padding": []}, ("left_padding",)),
    ],
)
def test_numbers_that_make_no_window(numbers, words):
    with raises(errors.GeometryError, *words):
        kvfun.empty("plain", **numbers)


@pytest.mark.parametrize("spec", ["kv9", "kv4-g48", "float", "", "kv4+", "k4", None, 4])
def test_specs_that_name_no_codec(spec):
    with raises(errors.SpecError, "spec|bits|group"):
        kvfun.empty(spec)


def test_padding_for_another_number_of_rows():
    with raises(errors.GeometryError, "2", "3"):
        kvfun.append(kvfun.empty("plain", left_padding=[0, 1]), *block(2, batch=3))


# -- reads -------------------------------------------------------------------------------------


def test_an_empty_cache_has_nothing_to_read():
    for verb in (kvfun.fetch, lambda c: kvfun.attend(c, queries())):
        with raises(errors.ShapeError, "empty"):
            verb(kvfun.empty("kv4"))
    with raises(errors.ShapeError, "1 queries", "0 tokens"):
        kvfun.attend(kvfun.append(kvfun.empty("kv4-g32"), *block(0)), queries())


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_a_number_of_queries_that_is_none(cache, count):
    for verb in (kvfun.mask, lambda c, n: kvfun.fetch(c, queries=n)):
        if count is True and verb is not kvfun.mask:
            continue  # True == 1 costs nothing; to tell them apart would
        with raises(errors.ShapeError, "queries", repr(count)):
            verb(cache, count)


def test_columns_that_were_dropped():
    cache = kvfun.empty("plain", window=4)
    for start in range(0, 600, 20):
        cache = kvfun.append(cache, *block(20, seed=start))
    with raises(errors.GeometryError, "dropped"):
        kvfun.fetch(cache, queries=599)


def queries_that_do_not_fit():
    q = queries(2)
    return {
        "decode of two": (errors.PhaseError, q, {}, ("decode", "2")),
        "unknown phase": (errors.PhaseError, q, {"phase": "verify"}, ("verify",)),
        "phase None": (errors.PhaseError, q, {"phase": None}, ("None",)),
        "rank": (errors.ShapeError, q[0], {"phase": "window"}, (r"\(4, 2, 64\)",)),
        "batch": (errors.ShapeError, q[:1], {"phase": "window"}, (r"1, 4, 2, 64", "batch 2")),
        "head_dim": (errors.ShapeError, q[..., :32], {"phase": "window"}, ("32", "head_dim 64")),
        "heads": (errors.ShapeError, q[:, :3], {"phase": "window"}, ("3", "2 KV heads")),
        "no heads": (errors.ShapeError, q[:, :0], {"phase": "window"}, ("0", "2 KV heads")),
        "none": (errors.ShapeError, q[:, :, :0], {"phase": "window"}, ("0",)),
        "too many": (errors.ShapeError, queries(7), {"phase": "window"}, ("7", "6 tokens")),
        "numpy": (errors.DTypeError, np.array(q), {"phase": "window"}, ("ndarray",)),
        "integers": (errors.DTypeError, q.astype(mx.int32), {"phase": "window"}, ("int32",)),
        "sinks": (errors.ShapeError, q, {"phase": "window", "sinks": mx.zeros(3)}, ("4", "3")),
        "numpy sinks": (
            errors.DTypeError,
            q,
            {"phase": "window", "sinks": np.zeros(4)},
            ("ndarray",),
        ),
        "mask": (errors.ShapeError, q, {"phase": "window", "mask": mx.zeros((2, 99))}, ("99",)),
        "mask of rank 1": (errors.ShapeError, q, {"phase": "window", "mask": mx.zeros(5)}, ("5",)),
        "unknown mask": (errors.ShapeError, q, {"phase": "window", "mask": "left"}, ("left",)),
        "numpy mask": (
            errors.ShapeError,
            q,
            {"phase": "window", "mask": np.ones((2, 5), bool)},
            ("mask", "array"),
        ),
        "kernels": (
            errors.PhaseError,
            q,
            {"phase": "window", "kernels": {"decode": FUSED["decode"]}},
            ("window", "decode"),
        ),
    }


@pytest.mark.parametrize("name", queries_that_do_not_fit())
def test_queries_that_do_not_fit(cache, name):
    error, given, options, words = queries_that_do_not_fit()[name]
    with raises(error, *words):
        kvfun.attend(cache, given, **options)
    assert kvfun.attend(cache, queries()).shape == (2, 4, 1, 32)


@pytest.mark.parametrize("spec", ["plain", "kv4-g32", "kv4-pad"])
@pytest.mark.parametrize("phase", ["decode", "window"])
def test_the_callers_arrays_are_unchanged(spec, phase):
    k, v = block(5)
    q = queries(1 if phase == "decode" else 3)
    sinks, mask = mx.zeros(4), mx.ones((1, 1, q.shape[2], 5), mx.bool_)
    before = [np.array(x) for x in (k, v, q, sinks, mask)]
    cache = kvfun.append(kvfun.empty(spec), k, v)
    mx.eval(kvfun.attend(cache, q, phase=phase, sinks=sinks, mask=mask))
    mx.eval(tree.leaves(kvfun.append(cache, k, v)))
    for x, y in zip((k, v, q, sinks, mask), before, strict=True):
        assert np.array_equal(np.array(x), y)


def test_a_kernel_set_of_ones_own(full):
    expected = kvfun.attend(full, queries(3), phase="window")
    out = kvfun.attend(full, queries(3), phase="window", kernels=UNFUSED)
    assert mx.allclose(out, expected, atol=1e-5)


def test_full_and_causal_masks_of_ones_own(full):
    q = queries(6)
    causal = kvfun.attend(full, q, phase="window", mask="causal")
    assert mx.array_equal(causal, kvfun.attend(full, q, phase="window"))
    alike = kvfun.attend(full, q, phase="window", mask="full")
    everything = kvfun.attend(full, q, phase="window", mask=mx.ones((6, 6), mx.bool_))
    assert mx.allclose(alike, everything, atol=1e-6)


def test_rows_that_are_all_padding_can_be_read():
    cache = kvfun.append(kvfun.empty("plain", left_padding=[4, 2]), *block(2))
    assert kvfun.offsets(cache) == (-2, 0)
    assert not mx.any(mx.isnan(kvfun.attend(cache, queries(2), phase="window")))


# -- rollback ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [7, 100, -1, [7, 0], [0, -1]])
def test_rolling_back_too_far(cache, count):
    with raises(errors.RollbackError, "offset 6 can give back 0 to"):
        kvfun.rollback(cache, count)
    assert kvfun.offsets(cache) == (6, 6)


def test_max_rollback_is_the_limit(full):
    assert kvfun.max_rollback(full) == (6, 6)
    assert kvfun.offsets(kvfun.rollback(full, 6)) == (0, 0)
    with raises(errors.RollbackError, "row 1", "offset 6", "6", "7", "max_rollback"):
        kvfun.rollback(full, [6, 7])


@pytest.mark.parametrize("count", [[1], [1, 2, 3], [], 1.5, "12", None, np.int64(1)])
def test_counts_that_are_none(full, count):
    with raises(errors.ShapeError):
        kvfun.rollback(full, count)


@pytest.mark.parametrize("count", [True, [True, False], [1.0, 1]])
def test_counts_that_are_no_integers(full, count):
    with raises(errors.RollbackError, "not"):
        kvfun.rollback(full, count)


# -- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[2], [-3], [], [0.0], [True], 1, None, ["0"]])
def test_rows_that_are_not_there(full, rows):
    with raises(errors.ShapeError):
        kvfun.take(full, rows)


def test_caches_that_cannot_be_one_batch(full):
    one = kvfun.take(full, [0])
    other = kvfun.append(kvfun.empty("plain"), *block(2, batch=1, shape=Shape(3, 64, 32)))
    half = kvfun.append(kvfun.empty("plain"), *[x.astype(mx.float16) for x in block(2, batch=1)])
    for error, parts, words in (
        (errors.CodecError, [one, kvfun.convert(one, "kv4-g32")], ("plain", "kv4-g32", "convert")),
        (errors.GeometryError, [one, kvfun.empty("plain", window=3)], ("None", "window=3")),
        (errors.ShapeError, [one, other], ("kv_heads 2", "3")),
        (errors.DTypeError, [one, half], ("float32", "float16")),
        (errors.ShapeError, [one, "cache"], ("str", "KV")),
        (errors.ShapeError, [], ("at least one",)),
    ):
        with raises(error, *words):
            kvfun.concat(parts)
    with raises(errors.ShapeError, "number 1 has 2", "concat"):
        kvfun.stack([one, full])
    assert kvfun.batch_size(kvfun.concat([one, full])) == 3


def test_an_empty_batch_keeps_its_rows():
    batch = kvfun.take(kvfun.empty("plain"), [0, 0])
    assert kvfun.batch_size(kvfun.rollback(batch, 0)) == 2
    assert kvfun.batch_size(kvfun.concat([batch, kvfun.empty("plain")])) == 3


@pytest.mark.parametrize("branches", [0, -1])
def test_fewer_branches_than_one(full, branches):
    with raises(errors.ShapeError, str(branches)):
        kvfun.fork(full, branches)


def test_a_row_does_not_keep_its_batch_alive():
    big = kvfun.append(kvfun.empty("plain"), *block(256, batch=8, shape=Shape(4, 128, 128)))
    ragged = kvfun.rollback(big, list(range(8)))
    for batch in (big, ragged):
        tree.evaluate(batch)
    del batch
    row = kvfun.take(ragged, [3])
    tree.evaluate(row)
    held = mx.get_active_memory()
    del big, ragged
    gc.collect()
    freed = held - mx.get_active_memory()
    assert freed >= 8 * 4 * 256 * 128 * 4 * 2, f"only {freed} bytes were freed"
    assert kvfun.nbytes(row) == 4 * 256 * 128 * 4 * 2


# -- conversion --------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["kv9", "", None, 8])
def test_converting_to_no_codec(full, spec):
    with raises(errors.SpecError):
        kvfun.convert(full, spec)


@pytest.mark.parametrize("spec", ["bf16", "kv8-g32", "kv4-g32", "kv3-g32", "kv8-g32+f16"])
def test_conversion_is_an_append_to_the_packed_byte(full, spec):
    """Not only what is decoded: the planes themselves."""
    keys, values = kvfun.fetch(full)
    expected = kvfun.append(kvfun.empty(spec), keys, values)
    assert tree.equal(kvfun.convert(full, spec), expected)


def test_a_side_whose_codec_stays_is_not_touched(full):
    cache = kvfun.convert(full, "kv8-g32+kv4-g32")
    after = kvfun.convert(cache, "kv8-g32+f16")
    assert all(x is y for x, y in zip(after.keys, cache.keys, strict=True))
    assert kvfun.convert(cache, cache.codec).values is cache.values


# -- unknown records ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb",
    [
        lambda c: kvfun.append(c, *block(1)),
        kvfun.fetch,
        lambda c: kvfun.attend(c, queries()),
        lambda c: kvfun.rollback(c, 1),
        kvfun.max_rollback,
        lambda c: kvfun.convert(c, "kv4"),
        kvfun.batch_size,
        lambda c: kvfun.take(c, [0]),
        kvfun.offsets,
        kvfun.size,
        kvfun.mask,
    ],
)
def test_verbs_say_what_they_do_not_know(verb):
    with pytest.raises(TypeError, match="knows no int"):
        verb(3)
