"""What the geometry says, by example: errors, ends, masks and the edges of each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from kvfun.errors import GeometryError, RollbackError
from kvfun.geometry import (
    STEP,
    Geometry,
    MaskArray,
    Plan,
    Policy,
    Row,
    concat_layout,
    mask_array,
    stride,
)

from .oracle import Oracle, seen_from, steps


def grown(policy: Policy, *lengths: int, paddings=None) -> Oracle:
    batch = Oracle.empty(policy, paddings)
    for length in lengths:
        batch = batch.append(length)
    return batch


# -- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers",
    [
        {"window": 0},
        {"window": -1},
        {"window": True},
        {"window": 2.0},
        {"sinks": -1},
        {"sinks": None},
        {"chunk": 0},
        {"reserve": -1},
        {"reserve": "2"},
    ],
    ids=str,
)
def test_a_policy_out_of_range(numbers):
    (name,) = numbers
    with pytest.raises(GeometryError, match=name):
        Policy(**numbers)


@pytest.mark.parametrize("paddings", [(), (-1,), (0, True), (1.0,), ("1",)], ids=str)
def test_a_left_padding_out_of_range(paddings):
    with pytest.raises(GeometryError, match="left_padding"):
        Geometry.empty(Policy(), paddings)


def test_another_number_of_rows():
    geometry = Geometry.empty(Policy(), (0, 1))
    assert len(Geometry.empty(Policy()).expanded(5)) == 5
    with pytest.raises(GeometryError, match="2 rows, not 3"):
        geometry.expanded(3)


def test_policies_that_differ_do_not_batch():
    with pytest.raises(GeometryError, match="cannot batch"):
        concat_layout([Geometry.empty(Policy(4)), Geometry.empty(Policy(5))], [1, 1])


@pytest.mark.parametrize("counts", [(6,), (-1,), (True,), (1.0,), (None,)], ids=str)
def test_a_rollback_that_cannot_be(counts):
    geometry = grown(Policy(), 5).geometry
    with pytest.raises(RollbackError, match="row 0 at offset 5 can give back 0 to 5"):
        geometry.rolled_back(counts)


def test_a_rollback_names_the_row():
    geometry = grown(Policy(), 5, paddings=(0, 3)).geometry
    assert geometry.max_rollback() == (5, 2)
    with pytest.raises(RollbackError, match="row 1 at offset 2"):
        geometry.rolled_back((1, 3))


def test_dropped_positions_are_not_read():
    geometry = grown(Policy(window=4), 600, 1).geometry
    assert geometry.spans(1)
    with pytest.raises(GeometryError, match="have been dropped"):
        geometry.spans(3)


# -- ends and capacity ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 255, 256, 257, 1000])
def test_capacities_are_multiples_of_256(length):
    assert STEP == 256
    geometry = grown(Policy(), length, 1).geometry
    assert geometry.capacity == -(-(length + 1) // 256) * 256
    assert grown(Policy(sinks=3), length, 1, paddings=(0, 7)).geometry.capacity % 256 == 0


def test_a_window_slides_in_a_bounded_buffer():
    window, oracle = 100, grown(Policy(window=100, sinks=4), 1)
    for _ in range(10 * window):
        oracle = oracle.append(1)
        assert oracle.geometry.capacity <= 512
    oracle.check()
    assert oracle.geometry.size == 104
    assert stride(oracle.geometry.spans(1)) == 104


def test_between_compactions_a_token_is_one_write():
    oracle = grown(Policy(window=16), 300)
    moves = 0
    for _ in range(1000):
        plan, _ = oracle.geometry.advance(1)
        moves += plan.relayout is not None
        assert len(plan.writes) == 1
        oracle = oracle.append(1)
    assert moves <= 5


@pytest.mark.parametrize("paddings", [None, (0,), (3,), (0, 2), (4, 5)], ids=str)
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_a_block_of_nothing(window, sinks, paddings):
    policy = Policy(window, sinks)
    empty = Oracle.empty(policy, paddings)
    made = empty.append(0).check()
    assert made.geometry.capacity == STEP
    assert made.geometry.rows == empty.geometry.rows
    assert made.geometry.advance(0) == (Plan(None, ()), made.geometry)
    assert made.geometry.spans(1) == ()
    assert made.geometry.cover(1) == ((0, 1),)
    assert empty.geometry.cover(1) == ()
    filled = made.append(900).check((1, 900))
    assert filled.append(0).geometry == filled.geometry, "the block just written can still be read"


def test_a_block_longer_than_the_window_is_kept_until_the_next():
    oracle = grown(Policy(window=8, reserve=2), 5, 700).check((1, 2, 700))
    assert oracle.geometry.max_rollback()[0] >= 700
    after = oracle.append(1).check()
    assert after.geometry.capacity == 512


# -- rows ----------------------------------------------------------------------------------------


def test_one_row_stands_for_rows_that_are_alike():
    assert Geometry.empty(Policy(), (2, 2, 2)).rows == (Row(-2, 2, 0),)
    batch = grown(Policy(), 6, paddings=(0, 2))
    assert len(batch.geometry.rows) == 2
    assert len(batch.take(1, 1).check().geometry.rows) == 1


def test_full_windows_of_unequal_offsets_need_no_mask():
    batch = grown(Policy(window=4), 20, 1, paddings=(0, 3)).check()
    assert [row.offset for row in batch.geometry.rows] == [21, 18]
    assert batch.geometry.mask(1) is None
    batch = batch.append(2).check()
    assert isinstance(batch.geometry.mask(2), MaskArray)


def test_full_chunks_of_unequal_offsets_do():
    batch = grown(Policy(chunk=4), 20, 1, paddings=(0, 3)).check()
    assert isinstance(batch.geometry.mask(1), MaskArray)


@pytest.mark.parametrize("sinks", [0, 2, 5])
@pytest.mark.parametrize("window", [None, 3])
def test_a_row_of_padding_while_the_buffer_compacts(window, sinks):
    with steps(4, 4):
        batch = grown(Policy(window, sinks), 6, 6, 6, paddings=(0, 16)).check()
        assert [row.offset for row in batch.geometry.rows] == [18, 2]
        still = grown(Policy(window, sinks), 6, 6, 6, paddings=(0, 40)).check()
        assert [row.offset for row in still.geometry.rows] == [18, -22]
        for _ in range(6):
            batch, still = batch.append(5).check(), still.append(5).check()
        still.take(1).check().append(3).check()


def test_a_row_that_stays_shorter_than_the_sinks():
    with steps(4, 4):
        batch = grown(Policy(window=2, sinks=4), 9, paddings=(0, 6)).check()
        for _ in range(5):
            batch = batch.append(3).check().rollback(0, 3).check()
        assert [row.offset for row in batch.geometry.rows] == [24, 3]
        batch = batch.rollback(0, 3).check()
        assert [row.offset for row in batch.geometry.rows] == [24, 0]
        for _ in range(5):
            batch = batch.append(2).check()


def test_rollback_below_the_sinks():
    policy = Policy(window=3, sinks=4)
    with steps(4, 4):
        policy = Policy(window=3, sinks=4)
        fresh = grown(policy, 6)
        assert fresh.geometry.max_rollback() == (6,)
        fresh.rollback(4).check().append(5).check()
        slid = grown(policy, 6, 6, 6, 1)
        assert slid.geometry.max_rollback()[0] < slid.geometry.rows[0].offset - policy.sinks


def test_an_empty_row_joins_a_long_one():
    with steps(4, 4):
        for sinks in (0, 2):
            policy = Policy(window=3, sinks=sinks)
            parts = [grown(policy, 7, 7), Oracle.empty(policy, (2,)), Oracle.empty(policy)]
            batch = Oracle.concat(parts).check()
            assert [row.offset for row in batch.geometry.rows] == [14, -2, 0]
            batch.append(1).check().append(4).check().append(9).check()


def test_equal_geometries_join_as_they_are():
    part = grown(Policy(8), 5)
    assert concat_layout([part.geometry, part.geometry], [1, 3]) == ((None, None), part.geometry)


# -- rolled back = never seen ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", [(None, 0, None, 0), (5, 2, None, 3), (None, 1, 4, 2)], ids=str)
def test_what_was_rolled_back_was_never_there(policy):
    with steps(4, 4):
        policy = Policy(*policy)
        for more in range(1, 8):
            kept = grown(policy, 11)
            again = kept.append(more).rollback(more).check()
            for length in (1, 3, 1, 8):
                kept, again = kept.append(length).check(), again.append(length).check()
                assert again.geometry.size == kept.geometry.size
                assert again.geometry.mask(1) == kept.geometry.mask(1)
                assert stride(again.geometry.spans(length)) == stride(kept.geometry.spans(length))


# -- masks ----------------------------------------------------------------------------------------


def test_words_for_masks():
    assert mask_array(None) is None
    assert np.array_equal(np.array(mask_array("causal", queries=2, columns=4)), np.tri(2, 4, 2))
    assert grown(Policy(), 5).geometry.mask(1) is None
    assert grown(Policy(), 5).geometry.mask(3) == "causal"
    assert grown(Policy(window=9), 5).geometry.mask(3) == "causal"


def test_padding_sees_one_column():
    with steps(4, 4):
        for sinks in (0, 2):
            for paddings in ((3,), (3, 4), (1, 9)):
                geometry = grown(Policy(sinks=sinks), 4, paddings=paddings).geometry
                array = np.array(mask_array(geometry.mask(4, geometry.cover(4))))
                assert array.any(-1).all(), "no softmax over nothing"


def test_a_mask_over_no_columns():
    geometry = grown(Policy(), 2, paddings=(3,)).geometry
    assert geometry.spans(2) == ()
    array = mask_array(geometry.mask(2))
    assert array is not None
    assert array.shape == (2, 0)


def test_the_layers_of_a_model_share_one_array():
    masks = [grown(Policy(window=3), 9).geometry.mask(4) for _ in range(2)]
    assert masks[0] == masks[1]
    assert mask_array(masks[0]) is mask_array(masks[1])


def test_every_thread_makes_its_own_array():
    mask = grown(Policy(window=3), 9).geometry.mask(4)
    mine = mask_array(mask)
    assert mine is not None
    start = threading.Barrier(4)

    def ask(_):
        start.wait()
        with mx.stream(mx.new_stream(mx.default_device())):
            array = mask_array(mask)
            assert array is not None
            return array is mine, array.tolist()

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    assert all(not same and numbers == mine.tolist() for same, numbers in answers)


def test_gaps_between_sinks_and_window_are_masked():
    geometry = grown(Policy(window=3, sinks=2), 12).geometry
    assert geometry.spans(1) == ((0, 2), (9, 12))
    assert geometry.cover(1) == ((0, 12),)
    assert geometry.mask(1) is None
    array = np.array(mask_array(geometry.mask(1, geometry.cover(1))))
    assert np.flatnonzero(array[0]).tolist() == list(seen_from(geometry.policy, 11))


def test_rows_shorter_than_the_sinks_are_not_alike():
    """A geometry made by hand: equal columns behind the sinks, but not as many sinks."""
    geometry = Geometry(Policy(sinks=3), 256, (Row(1, 4, 3), Row(2, 4, 3)))
    array = np.array(mask_array(geometry.mask(1)))
    assert array.tolist() == [[[[True, False]]], [[[True, True]]]]
