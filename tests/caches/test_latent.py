"""Latent attention against float64, and the selection of sparse attention against lists."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kvfun
from kvfun import rounds, tree
from kvfun.errors import (
    CodecError,
    DTypeError,
    PhaseError,
    RollbackError,
    ShapeError,
    UnsupportedError,
)
from kvfun.geometry import mask_array
from kvfun.testing import digest

RANK, ROPE, HEADS, DIM, VALUE, INDEX = 128, 64, 4, 32, 24, 32
SPECS = ("plain", "plain", "bf16", "kv8", "kv4-g32", "kv8+plain", "mxfp8", "rot4+rot4")


def normal(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def block(seed, batch, tokens, rank=RANK):
    return [normal(seed + i, batch, 1, tokens, dim) for i, dim in enumerate((rank, ROPE, INDEX))]


WEIGHTS = [normal(71, HEADS, DIM, RANK) * DIM**-0.5, normal(72, HEADS, RANK, VALUE) * RANK**-0.5]


def asked(seed, batch, length, heads=HEADS):
    return [normal(seed + i, batch, heads, length, dim) for i, dim in enumerate((DIM, ROPE))]


def f64(x):
    return np.array(x.astype(mx.float32)).astype(np.float64)


def visible(cache, length):
    """Bool ``[batch, length, columns]`` over the columns of ``fetch(cache, queries=length)``."""
    columns = kvfun.fetch(cache, queries=length)[0].shape[2]
    mask = mask_array(kvfun.mask(cache, length), queries=length, columns=columns)
    shape = (kvfun.batch_size(cache), length, columns)
    if mask is None:
        return np.ones(shape, bool)
    seen = np.array(mask)
    return np.broadcast_to(seen[:, 0] if seen.ndim == 4 else seen, shape)


def dense(cache, queries, rotated, length, seen=None, weights=WEIGHTS):
    """Every head's keys and values written out, in float64."""
    latents, turned = [f64(x)[:, 0] for x in kvfun.fetch(cache, queries=length)]
    up_keys, up_values = map(f64, weights)
    keys = np.einsum("btr,hdr->bhtd", latents, up_keys)
    values = np.einsum("btr,hrv->bhtv", latents, up_values)
    scores = f64(queries) @ keys.swapaxes(-1, -2)
    scores = scores + f64(rotated) @ turned[:, None].swapaxes(-1, -2)
    scores = scores * (DIM + ROPE) ** -0.5
    seen = visible(cache, length) if seen is None else seen
    scores = np.where(seen[:, None], scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True) @ values


def close(out, oracle, cache, length, bound=3e-5):
    """Where a row's token is no padding."""
    offsets = kvfun.offsets(cache)
    for row, offset in enumerate(offsets):
        first = max(0, length - offset)
        scale = max(1.0, np.abs(oracle[row][:, first:]).max(initial=0))
        difference = np.abs(f64(out)[row][:, first:] - oracle[row][:, first:])
        assert difference.max(initial=0) <= bound * scale


@st.composite
def filled(draw, spec=None, index=None):
    """A cache of ragged rows, its last block, and that block's length."""
    batch, seed = draw(st.integers(1, 3)), draw(st.integers(0, 10**6))
    options = draw(
        st.sampled_from(
            ({}, {}, {"window": 5}, {"window": 6, "sinks": 2}, {"chunk": 4}, {"left_padding": True})
        )
    )
    if options.get("left_padding"):
        options = {
            "left_padding": draw(st.lists(st.integers(0, 3), min_size=batch, max_size=batch))
        }
    spec = draw(st.sampled_from(SPECS) if spec is None else spec)
    cache = kvfun.latent(spec, index=None if index is None else draw(index), **options)
    has_index = cache.index is not None
    tokens = draw(st.integers(1, 9))
    first = block(seed, batch, tokens)
    cache = kvfun.append(cache, *first[: 2 + has_index])
    if draw(st.booleans()):
        most = [min(n, 4) for n in kvfun.max_rollback(cache)]
        cache = kvfun.rollback(cache, [draw(st.integers(0, max(n, 0))) for n in most])
    length = draw(st.integers(1, 5))
    cache = kvfun.append(cache, *block(seed + 7, batch, length)[: 2 + has_index])
    assume(max(kvfun.offsets(cache)) > 0)
    return cache, length, seed


# -- attention ------------------------------------------------------------------------------------


@given(made=filled(), phase=st.sampled_from(("window", "committed")))
def test_windows_and_decided_tokens_in_float64(made, phase):
    cache, length, seed = made
    queries = asked(seed + 11, kvfun.batch_size(cache), length)
    out = kvfun.attend_latent(cache, *queries, *WEIGHTS, phase=phase)
    close(out, dense(cache, *queries, length), cache, length)


@given(made=filled())
def test_one_query_in_float64(made):
    cache, _, seed = made
    queries = asked(seed + 11, kvfun.batch_size(cache), 1)
    out = kvfun.attend_latent(cache, *queries, *WEIGHTS)
    close(out, dense(cache, *queries, 1), cache, 1)


@pytest.mark.parametrize("spec", ["plain", "kv8"])
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_long_windows_are_expanded_tile_by_tile(spec, tokens):
    """Long enough that expanding costs less than absorbing, with a context before it."""
    cache = kvfun.append(kvfun.latent(spec), *block(1, 2, tokens)[:2])
    length = 200
    cache = kvfun.append(cache, *block(5, 2, length)[:2])
    queries = asked(9, 2, length)
    from kvfun.caches._latent import _absorbing_costs_less

    assert not _absorbing_costs_less(*WEIGHTS, queries[1])
    out = kvfun.attend_latent(cache, *queries, *WEIGHTS, phase="window")
    close(out, dense(cache, *queries, length), cache, length)


def test_absorbed_and_expanded_are_one_thing():
    cache = kvfun.append(kvfun.latent(), *block(1, 2, 300)[:2])
    queries = asked(9, 2, 150)
    window = kvfun.attend_latent(cache, *queries, *WEIGHTS, phase="window")
    decided = kvfun.attend_latent(cache, *queries, *WEIGHTS, phase="committed")
    assert mx.max(mx.abs(window - decided)).item() < 3e-5


@given(made=filled(spec=st.sampled_from(("plain", "kv8"))))
def test_decided_tokens_are_bit_for_bit_those_read_alone(made):
    cache, length, seed = made
    queries = asked(seed + 11, kvfun.batch_size(cache), length)
    out = kvfun.attend_latent(cache, *queries, *WEIGHTS, phase="committed")
    for i in range(length):
        most = min(kvfun.max_rollback(cache))
        if most < length - 1 - i:
            continue
        then = kvfun.rollback(cache, length - 1 - i)
        alone = [x[:, :, i : i + 1] for x in queries]
        one = kvfun.attend_latent(then, *alone, *WEIGHTS)
        for row, offset in enumerate(kvfun.offsets(then)):
            if offset > 0:
                assert mx.array_equal(out[row, :, i : i + 1], one[row]).item()


def test_parts_are_merged():
    tokens = block(1, 1, 300)[:2]
    cache = kvfun.append(kvfun.latent(), *tokens)
    queries = asked(9, 1, 1)
    out, lse = kvfun.attend_latent(cache, *queries, *WEIGHTS, phase="partial")
    close(out, dense(cache, *queries, 1), cache, 1)
    halves = [
        kvfun.append(kvfun.latent(), *[x[:, :, a:b] for x in tokens])
        for a, b in ((0, 90), (90, 300))
    ]
    parts = [kvfun.attend_latent(h, *queries, *WEIGHTS, phase="partial") for h in halves]
    merged = kvfun.kernels.merge(parts)
    assert mx.max(mx.abs(merged.out - out)).item() < 1e-5
    assert mx.max(mx.abs(merged.lse - lse)).item() < 1e-5


def test_16_bit_queries_come_back_as_such():
    cache = kvfun.append(
        kvfun.latent("bf16"), *[x.astype(mx.bfloat16) for x in block(1, 1, 50)[:2]]
    )
    queries = [x.astype(mx.bfloat16) for x in asked(9, 1, 1)]
    weights = [w.astype(mx.bfloat16) for w in WEIGHTS]
    out = kvfun.attend_latent(cache, *queries, *weights)
    assert out.dtype == mx.bfloat16
    oracle = dense(cache, *queries, 1, weights=weights)
    assert np.abs(f64(out) - oracle).max() < 0.03


@pytest.mark.parametrize(("stale", "back"), [(float("nan"), [4, 4]), (1e4, [4, 2])])
def test_what_is_stale_is_never_seen(stale, back):
    dirty = [mx.full(x.shape, stale) for x in block(0, 2, 4)]
    cache = kvfun.append(kvfun.latent(index="plain"), *block(1, 2, 5))
    clean = kvfun.append(cache, *block(2, 2, 2))
    cache = kvfun.append(kvfun.rollback(kvfun.append(cache, *dirty), back), *block(2, 2, 2))
    queries = asked(3, 2, 2)
    for phase in ("window", "committed"):
        got = kvfun.attend_latent(cache, *queries, *WEIGHTS, phase=phase)
        wanted = kvfun.attend_latent(clean, *queries, *WEIGHTS, phase=phase)
        assert mx.allclose(got[0], wanted[0], rtol=1e-5, atol=1e-5).item()


def peak(tokens, read):
    """Bytes that a read takes beside what was there, over so many tokens."""
    cache = kvfun.latent("bf16", index="bf16")
    cache = kvfun.append(cache, *[x.astype(mx.bfloat16) for x in block(1, 1, tokens)])
    mx.eval(tree.leaves(cache))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(read(cache))
    return mx.get_peak_memory() - before


def test_a_window_takes_as_much_over_any_context():
    weights = [normal(1, 16, 64, RANK), normal(2, 16, RANK, 64)]
    queries = [normal(3, 1, 16, 256, 64), normal(4, 1, 16, 256, ROPE)]
    mx.eval(weights, queries)

    def read(cache):
        return kvfun.attend_latent(cache, *queries, *weights, phase="window")

    short, long = [peak(tokens, read) for tokens in (4096, 16_384)]
    assert long <= short * 1.05
    assert long < 16 * 16_384 * (64 + ROPE + 64) * 4 / 3  # all heads' keys and values


# -- the verbs ------------------------------------------------------------------------------------


@given(
    spec=st.sampled_from(SPECS),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    index=st.sampled_from((None, "plain", "kv8-g32")),
)
def test_splits_change_no_byte(spec, cuts, seed, index):
    tokens = block(seed, 2, sum(cuts))[: 2 + (index is not None)]
    whole = kvfun.append(kvfun.latent(spec, index=index), *tokens)
    pieces, done = kvfun.latent(spec, index=index), 0
    for cut in cuts:
        pieces = kvfun.append(pieces, *[x[:, :, done : done + cut] for x in tokens])
        done += cut
    assert digest(whole) == digest(pieces)


@given(made=filled(index=st.sampled_from((None, "plain"))), count=st.integers(0, 3))
def test_what_was_rolled_back_was_never_there(made, count):
    cache, _, seed = made
    has_index = cache.index is not None
    more = block(seed + 31, kvfun.batch_size(cache), count + 1)[: 2 + has_index]
    back = kvfun.rollback(kvfun.append(cache, *more), count + 1)
    assert kvfun.offsets(back) == kvfun.offsets(cache)
    queries = asked(seed, kvfun.batch_size(cache), 1)
    one, other = [kvfun.attend_latent(c, *queries, *WEIGHTS) for c in (cache, back)]
    for row, offset in enumerate(kvfun.offsets(cache)):
        if offset > 0:
            assert mx.array_equal(one[row], other[row]).item()
    turn = kvfun.append(rounds.begin(cache, count), *more)
    kept = rounds.rollback(turn, 0)
    assert kvfun.offsets(kept) == kvfun.offsets(cache)
    if has_index:
        assert kvfun.offsets(back.index) == kvfun.offsets(back.inner)


@given(data=st.data(), seed=st.integers(0, 1000), index=st.sampled_from((None, "plain")))
def test_a_row_of_a_batch_is_the_row_alone(data, seed, index):
    def one(row):
        cache = kvfun.latent("kv8", index=index)
        tokens = data.draw(st.integers(1, 6))
        return kvfun.append(cache, *block(seed + 10 * row, 1, tokens)[: 2 + (index is not None)])

    rows = [one(row) for row in range(3)]
    batch = kvfun.stack(rows)
    order = data.draw(st.permutations(range(3)))
    batch, rows = kvfun.take(batch, order), [rows[i] for i in order]
    for alone, own in zip(rows, kvfun.unstack(batch), strict=True):
        assert kvfun.offsets(alone) == kvfun.offsets(own)
        for x, y in zip(kvfun.fetch(alone), kvfun.fetch(own), strict=True):
            assert mx.array_equal(x, y).item()
        if index:
            assert mx.array_equal(*[kvfun.fetch(c.index)[0] for c in (alone, own)]).item()


def test_conversion_is_appending_to_another():
    tokens = block(1, 2, 30)
    cache = kvfun.append(kvfun.latent(index="plain"), *tokens)
    converted = kvfun.convert(cache, "kv8")
    assert digest(converted.inner) == digest(kvfun.append(kvfun.latent("kv8"), *tokens[:2]).inner)
    assert converted.index is cache.index
    assert kvfun.nbytes(converted.inner) < kvfun.nbytes(cache.inner) / 3
    for spec in ("rot-k4v4", "kv4-c"):
        with pytest.raises(UnsupportedError, match="as they come"):
            kvfun.convert(cache, spec)
        with pytest.raises(UnsupportedError, match="as they come"):
            kvfun.latent(spec)
    with pytest.raises(UnsupportedError, match="as they come"):
        kvfun.latent("kv8", start=100)


def test_it_is_saved_and_copied_like_any_other():
    cache = kvfun.append(kvfun.latent("kv8", index="plain", window=9), *block(1, 2, 30))
    again = kvfun.storage.load(*kvfun.storage.dump(cache))
    queries = asked(9, 2, 1)
    out = kvfun.attend_latent(cache, *queries, *WEIGHTS)
    for other in (again, kvfun.snapshot(cache)):
        assert isinstance(other, kvfun.Latent)
        assert mx.array_equal(kvfun.attend_latent(other, *queries, *WEIGHTS), out).item()
        assert kvfun.offsets(other.index) == (30, 30)


def test_what_fails_leaves_the_cache_as_it_was():
    cache = kvfun.append(kvfun.latent(index="plain"), *block(1, 2, 5))
    was = digest(cache)
    latents, turned, index = block(2, 2, 3)
    for wrong, error in (
        ((latents, turned), ShapeError),
        ((latents, turned, index[:, :, :2]), ShapeError),
        ((latents, turned, index[:1]), ShapeError),
        ((latents, turned, index[..., :16]), ShapeError),
        ((latents, turned, index.astype(mx.bfloat16)), DTypeError),
        ((latents, turned[..., :8], index), ShapeError),
        ((latents[:, :, :2], turned, index), ShapeError),
        ((latents.astype(mx.float16), turned, index), DTypeError),
    ):
        with pytest.raises(error):
            kvfun.append(cache, *wrong)
    assert digest(cache) == was
    assert kvfun.offsets(cache.inner) == kvfun.offsets(cache.index) == (5, 5)
    with pytest.raises(ShapeError, match="no index"):
        kvfun.append(kvfun.latent(), latents, turned, index)
    with pytest.raises(ShapeError, match="batch, 1"):
        kvfun.append(kvfun.latent(), mx.zeros((1, 2, 3, RANK)), mx.zeros((1, 2, 3, ROPE)))
    with pytest.raises(ShapeError, match="with an index"):
        kvfun.concat([cache, kvfun.append(kvfun.latent(), latents, turned)])
    with pytest.raises(CodecError):
        kvfun.append(kvfun.latent("kv4-g128"), latents, turned)
    with pytest.raises(RollbackError):
        kvfun.rollback(cache, 6)


def test_queries_that_do_not_fit():
    cache = kvfun.append(kvfun.latent(), *block(1, 2, 5)[:2])
    queries, rotated = asked(1, 2, 1)
    up_keys, up_values = WEIGHTS
    for wrong in (
        (queries[:1], rotated, up_keys, up_values),
        (queries, rotated[..., :5], up_keys, up_values),
        (queries, rotated[:, :2], up_keys, up_values),
        (queries, rotated, up_keys[:2], up_values),
        (queries, rotated, up_keys, up_values[:, :9]),
        (queries[0], rotated, up_keys, up_values),
    ):
        with pytest.raises(ShapeError, match="do not fit"):
            kvfun.attend_latent(cache, *wrong)
    with pytest.raises(PhaseError, match="one query"):
        kvfun.attend_latent(cache, *asked(1, 2, 3), *WEIGHTS)
    with pytest.raises(PhaseError, match="phase"):
        kvfun.attend_latent(cache, queries, rotated, *WEIGHTS, phase="guess")
    with pytest.raises(ShapeError, match="empty"):
        kvfun.attend_latent(kvfun.latent(), queries, rotated, *WEIGHTS)
    with pytest.raises(TypeError, match="attend knows no Latent"):
        kvfun.attend(cache, queries)


# -- selection ------------------------------------------------------------------------------------


def picked(scores, seen, top_k):
    """The highest, of equal ones the earlier: a list sorted by hand."""
    order = sorted((i for i in range(len(scores)) if seen[i]), key=lambda i: (-scores[i], i))
    return sorted(order[:top_k])


def whole_numbers(seed, *shape):
    """So small that many scores are equal, and exact."""
    return mx.random.randint(-1, 2, shape, key=mx.random.key(seed)).astype(mx.float32)


@given(
    data=st.data(),
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 30),
    length=st.integers(1, 4),
    top_k=st.integers(1, 12),
)
def test_exactly_the_best_and_of_equal_ones_the_earlier(data, seed, batch, tokens, length, top_k):
    latents, turned, _ = block(seed, batch, tokens)
    cache = kvfun.latent(index="plain")
    keys = whole_numbers(seed, batch, 1, tokens, 4)
    cache = kvfun.append(cache, latents, turned, keys)
    counts = [data.draw(st.integers(0, min(tokens, 5))) for _ in range(batch)]
    cache = kvfun.rollback(cache, counts)
    latents, turned, _ = block(seed + 3, batch, length)
    last = whole_numbers(seed + 1, batch, 1, length, 4)
    cache = kvfun.append(cache, latents, turned, last)
    queries = whole_numbers(seed + 2, batch, 2, length, 4)
    weights = whole_numbers(seed + 4, batch, length, 2)
    scores = np.array(kvfun.index_scores(cache, queries, weights))
    seen = visible(cache, length)
    own = f64(kvfun.fetch(cache.index, queries=length)[0])[:, 0]
    products = np.maximum(np.einsum("bhld,btd->bhlt", f64(queries), own) * 4**-0.5, 0)
    wanted = np.einsum("bhlt,blh->blt", products, f64(weights)) * 2**-0.5
    np.testing.assert_allclose(np.where(seen, scores, 0), np.where(seen, wanted, 0), atol=1e-6)
    assert np.isneginf(scores[~seen]).all()
    chosen = kvfun.select(cache, queries, weights, top_k)
    assert chosen.contexts == kvfun.offsets(cache)
    if chosen.chosen is None:
        assert max(kvfun.offsets(cache)) <= top_k or own.shape[1] <= top_k
        return
    found = np.array(chosen.chosen)
    for row in range(batch):
        for i in range(length):
            mine = picked(scores[row, i].tolist(), seen[row, i], top_k)
            assert np.flatnonzero(found[row, i]).tolist() == mine


@given(made=filled(index=st.just("plain")), top_k=st.integers(1, 8))
def test_attention_over_the_selected_in_float64(made, top_k):
    cache, length, seed = made
    batch = kvfun.batch_size(cache)
    queries = asked(seed, batch, length)
    wanting = normal(seed + 5, batch, 2, length, INDEX), normal(seed + 6, batch, length, 2)
    chosen = kvfun.select(cache, *wanting, top_k)
    for phase in ("window", "committed", *(["decode"] if length == 1 else [])):
        out = kvfun.attend_latent(cache, *queries, *WEIGHTS, phase=phase, selection=chosen)
        seen = visible(cache, length)
        seen = seen if chosen.chosen is None else seen & np.array(chosen.chosen)
        close(out, dense(cache, *queries, length, seen), cache, length)


@pytest.mark.parametrize(("top_k", "dense"), [(20, True), (21, True), (19, False), (1, False)])
def test_all_as_long_as_there_are_no_more_than_that(top_k, dense):
    cache = kvfun.append(kvfun.latent(index="plain"), *block(1, 1, 20))
    wanting = normal(5, 1, 2, 1, INDEX), normal(6, 1, 1, 2)
    chosen = kvfun.select(cache, *wanting, top_k)
    assert (chosen.chosen is None) == dense
    if not dense:
        assert np.array(chosen.chosen).sum() == top_k


def test_a_long_selected_window_is_expanded_under_its_mask():
    cache = kvfun.append(kvfun.latent(index="plain"), *block(1, 1, 260))
    queries = asked(3, 1, 130)
    wanting = normal(5, 1, 2, 130, INDEX), normal(6, 1, 130, 2)
    chosen = kvfun.select(cache, *wanting, 40)
    out = kvfun.attend_latent(cache, *queries, *WEIGHTS, phase="window", selection=chosen)
    seen = visible(cache, 130) & np.array(chosen.chosen)
    assert seen.sum(-1).max() == 40
    close(out, dense(cache, *queries, 130, seen), cache, 130)


def test_a_choice_is_shared_by_layers_of_the_same_rows_and_context_only():
    tokens = block(1, 2, 30)
    full = kvfun.append(kvfun.latent(index="plain"), *tokens)
    other = kvfun.append(kvfun.latent("kv8"), *block(4, 2, 30)[:2])
    wanting = normal(5, 2, 2, 1, INDEX), normal(6, 2, 1, 2)
    chosen = kvfun.select(full, *wanting, 10)
    queries = asked(3, 2, 1)
    out = kvfun.attend_latent(other, *queries, *WEIGHTS, selection=chosen)
    seen = np.array(chosen.chosen)
    close(out, dense(other, *queries, 1, seen), other, 1)
    longer = kvfun.append(other, *block(9, 2, 1)[:2])
    shorter = kvfun.rollback(other, [0, 1])
    one_row = kvfun.take(other, [0])
    for cache, batch in ((longer, 2), (shorter, 2), (one_row, 1)):
        with pytest.raises(ShapeError, match="selected for 1 queries of contexts"):
            kvfun.attend_latent(cache, *asked(3, batch, 1), *WEIGHTS, selection=chosen)
    with pytest.raises(ShapeError, match="selected for 1 queries"):
        kvfun.attend_latent(other, *asked(3, 2, 2), *WEIGHTS, phase="window", selection=chosen)
    dense_choice = kvfun.select(full, *wanting, 30)
    with pytest.raises(ShapeError, match="selected for"):
        kvfun.attend_latent(longer, *queries, *WEIGHTS, selection=dense_choice)
    with pytest.raises(PhaseError, match="partial"):
        kvfun.attend_latent(other, *queries, *WEIGHTS, phase="partial", selection=chosen)


def test_what_selection_refuses():
    cache = kvfun.append(kvfun.latent(index="plain"), *block(1, 2, 30))
    queries, weights = normal(5, 2, 2, 1, INDEX), normal(6, 2, 1, 2)
    for top_k in (0, True, 2.0):
        with pytest.raises(ShapeError, match="top_k"):
            kvfun.select(cache, queries, weights, top_k)
    for wrong in (
        (queries[:1], weights),
        (queries[..., :5], weights),
        (queries, weights[:, :, :1]),
    ):
        with pytest.raises(ShapeError):
            kvfun.index_scores(cache, *wrong)
    plain = kvfun.append(kvfun.latent(), *block(1, 2, 30)[:2])
    for top_k in (10, 50):
        with pytest.raises(ShapeError, match="no index"):
            kvfun.select(plain, queries, weights, top_k)


def test_scores_of_the_index_are_never_whole():
    length, heads = 64, 16
    queries, weights = normal(5, 1, heads, length, INDEX), normal(6, 1, length, heads)
    mx.eval(queries, weights)
    taken = peak(16_384, lambda cache: kvfun.index_scores(cache, queries, weights))
    assert taken < heads * length * 16_384 * 4 / 2
