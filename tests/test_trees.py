"""Trees of drafts: every node is the end of a sequence of its own."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun import rounds
from kvfun.codecs import Codec, Rope, with_rope
from kvfun.errors import CodecError, DTypeError, RoundError, ShapeError
from kvfun.kernels import UNFUSED, merge, sink_part
from kvfun.rounds import begin_tree, select

from .test_rounds import DIM, block, policies, same

SPECS = ("plain", "bf16", "kv4", "turbo-k8v3", "rot-k4v4", "rot-k3v3-log", "kv8-f16-c", "kv4-pad")
ROPE = Rope.of(DIM)


@st.composite
def trees(draw):
    parents = [-1]
    for index in range(1, draw(st.integers(1, 9))):
        parents.append(draw(st.integers(-1, index - 1)))
    return parents


def path_to(parents, node):
    path = [node]
    while parents[path[0]] != -1:
        path.insert(0, parents[path[0]])
    return path


def pick(pair, path, row=slice(None)):
    return [x[row][:, :, mx.array(path)] for x in pair]


@st.composite
def caches(draw):
    """A cache with tokens in it, one row or a batch of different lengths."""
    spec, policy = draw(st.sampled_from(SPECS)), draw(policies())
    codec = Codec.of(spec)
    if draw(st.booleans()) and spec.startswith(("rot", "kv8-f16-c")):
        codec = with_rope(codec, ROPE)
    raw = draw(
        st.sampled_from(({"raw_sinks": 0}, {"raw_sinks": 3}, {"residual": 20, "raw_sinks": 2}))
    )
    raw = {"raw_sinks": 0} if spec == "plain" else raw
    lengths = draw(st.lists(st.integers(5, 30), min_size=1, max_size=3))
    made = [
        kvfun.append(kvfun.empty(codec, **policy, **raw), *block(i, n))
        for i, n in enumerate(lengths)
    ]
    return made


@given(made=caches(), parents=trees(), data=st.data())
def test_every_token_of_a_tree_sees_what_it_would_at_the_end_of_its_own_path(made, parents, data):
    batch, count = len(made), len(parents)
    cache = kvfun.stack(made) if batch > 1 else made[0]
    pair = block(99, count, batch)
    turn = kvfun.append(begin_tree(cache, parents), *pair)
    q = mx.random.normal((batch, 4, count, DIM), key=mx.random.key(5))
    sinks = data.draw(st.sampled_from((None, mx.array([0.5, -1.0, 0.0, 2.0]))))
    out = kvfun.attend(turn, q, phase="window", sinks=sinks)
    positions = turn.positions.tolist()
    for node in range(count):
        path = path_to(parents, node)
        for row, alone in enumerate(made):
            longer = kvfun.append(alone, *pick(pair, path, slice(row, row + 1)))
            assert positions[row][node] == kvfun.offsets(longer)[0] - 1
            one = kvfun.attend(longer, q[row : row + 1, :, node : node + 1], sinks=sinks)
            mine = out[row : row + 1, :, node : node + 1]
            assert mx.allclose(mine, one, atol=3e-5).item()
    # one path stays, encoded as if nothing else had been there
    ends = [data.draw(st.integers(-1, count - 1)) for _ in made]
    paths = [path_to(parents, end) if end >= 0 else [] for end in ends]
    kept = select(turn, paths if batch > 1 or data.draw(st.booleans()) else paths[0])
    for row, after in enumerate(kvfun.unstack(kept)):
        expected = made[row]
        if paths[row]:
            expected = kvfun.append(expected, *pick(pair, paths[row], slice(row, row + 1)))
        assert kvfun.offsets(after) == kvfun.offsets(expected)
        assert same(kvfun.fetch(after), kvfun.fetch(expected))
        assert kvfun.max_rollback(after)[0] >= len(paths[row])


@given(made=caches(), parents=trees())
def test_what_is_fetched_under_the_mask_is_what_attention_reads(made, parents):
    """Dense attention over the fetched columns, for those who attend by themselves."""
    cache = kvfun.stack(made) if len(made) > 1 else made[0]
    turn = kvfun.append(begin_tree(cache, parents), *block(9, len(parents), len(made)))
    q = mx.random.normal((len(made), 4, len(parents), DIM), key=mx.random.key(1))
    keys, values = kvfun.fetch(turn)
    mask = kvfun.mask(turn)
    assert mask.shape[-2:] == (len(parents), keys.shape[2])
    k, v = [mx.repeat(x.astype(mx.float32), 2, axis=1) for x in (keys, values)]
    scores = mx.where(mask, q @ k.swapaxes(-1, -2) * DIM**-0.5, -mx.inf)
    dense = mx.softmax(scores, axis=-1) @ v
    # TurboQuant's numbers are rounded to float16 when they are fetched
    rounded = made[0].codec.spec.startswith("turbo")
    out = kvfun.attend(turn, q, phase="window")
    assert mx.allclose(out, dense, atol=1e-2 if rounded else 3e-5).item()


def test_a_chain_of_drafts_is_a_tree():
    cache = kvfun.append(kvfun.empty("kv4", window=6), *block(0, 20))
    pair = block(1, 4)
    q = mx.random.normal((1, 4, 4, DIM))
    tree = kvfun.append(begin_tree(cache, [-1, 0, 1, 2]), *pair)
    line = kvfun.append(rounds.begin(cache, 3), *pair)
    one, other = [kvfun.attend(turn, q, phase="window") for turn in (tree, line)]
    assert mx.allclose(one, other, atol=2e-5).item()
    assert same(kvfun.fetch(select(tree, [0, 1])), kvfun.fetch(rounds.rollback(line, 2)))


def test_a_tree_may_come_first():
    pair = block(1, 3)
    turn = kvfun.append(begin_tree(kvfun.empty("kv4"), [-1, -1, 0]), *pair)
    q = mx.random.normal((1, 4, 3, DIM))
    out = kvfun.attend(turn, q, phase="window")
    alone = kvfun.append(kvfun.empty("kv4"), *pick(pair, [0, 2]))
    assert mx.allclose(out[:, :, 2:], kvfun.attend(alone, q[:, :, 2:]), atol=2e-5).item()
    assert kvfun.offsets(select(turn, [0, 2])) == (2,)
    assert select(turn, []).layout is None
    both = block(2, 3, batch=2)
    turn = kvfun.append(begin_tree(kvfun.empty("kv4"), [-1, -1, 0]), *both)
    rows = kvfun.unstack(select(turn, [[1], [0, 2]]))
    for index, (row, path) in enumerate(zip(rows, ([1], [0, 2]), strict=True)):
        alone = kvfun.append(kvfun.empty("kv4"), *pick(both, path, slice(index, index + 1)))
        assert same(kvfun.fetch(row), kvfun.fetch(alone))


def test_partial_results_and_kernels():
    cache = kvfun.append(kvfun.empty("kv4"), *block(0, 9))
    turn = kvfun.append(begin_tree(cache, [-1, 0, 0]), *block(1, 3))
    q = mx.random.normal((1, 4, 3, DIM))
    whole = kvfun.attend(turn, q, phase="window", sinks=mx.ones(4))
    part = kvfun.attend(turn, q, phase="partial")
    merged = merge([part, sink_part(mx.ones(4), part)])
    assert mx.allclose(whole, merged.out, atol=1e-5).item()
    counted = []

    def partial(*args, **kwargs):
        counted.append(1)
        return UNFUSED["partial"](*args, **kwargs)

    again = kvfun.attend(turn, q, phase="window", sinks=mx.ones(4), kernels={"partial": partial})
    assert len(counted) == 2
    assert mx.allclose(whole, again, atol=1e-5).item()


def test_delayed_caches_are_settled_first():
    waits = kvfun.append(kvfun.empty("kv4", start=5), *block(0, 5))
    assert begin_tree(waits, [-1]).cache.codec.spec == "kv4"
    with pytest.raises(RoundError, match="Delayed"):
        begin_tree(kvfun.append(kvfun.empty("kv4", start=50), *block(0, 5)), [-1])


def test_a_models_caches_take_one_path_together():
    made = [kvfun.append(kvfun.empty(spec), *block(0, 5)) for spec in ("kv4", "bf16")]
    turn = begin_tree(tuple(made), [-1, 0, 0])
    turn = tuple(kvfun.append(each, *block(1, 3)) for each in turn)
    assert [kvfun.offsets(c) for c in select(turn, [0, 2])] == [(7,), (7,)]


@pytest.mark.parametrize("parents", [[], "ab", 3, None, [0], [-1, 1], [-1, -2], [-1, True], [1.0]])
def test_what_is_no_tree(parents):
    with pytest.raises(RoundError):
        begin_tree(kvfun.empty("plain"), parents)


@pytest.mark.parametrize(
    "path",
    [[1], [0, 3], [0, 0], [0, 2, 1], [-1], [True], ["0"], "0", 3, None, [[0], [0]], [[0, 9]]],
)
def test_what_is_no_path(path):
    cache = kvfun.append(kvfun.empty("plain"), *block(0, 5))
    turn = begin_tree(cache, [-1, 0, 0, 1])
    with pytest.raises(RoundError, match="block was appended"):
        select(turn, [0])
    turn = kvfun.append(turn, *block(1, 4))
    with pytest.raises(RoundError):
        select(turn, path)


def test_bad_blocks_and_reads():
    turn = begin_tree(kvfun.append(kvfun.empty("kv4"), *block(0, 5)), [-1, 0, 0])
    q = mx.random.normal((1, 4, 3, DIM))
    with pytest.raises(ShapeError, match="nothing was appended"):
        kvfun.attend(turn, q, phase="window")
    k, v = block(1, 3)
    with pytest.raises(RoundError, match="2 tokens for a tree of 3"):
        kvfun.append(turn, k[:, :, :2], v[:, :, :2])
    with pytest.raises(ShapeError):
        kvfun.append(turn, k[..., :32], v)
    with pytest.raises(DTypeError):
        kvfun.append(turn, k.astype(mx.float16), v)
    turn = kvfun.append(turn, k, v)
    for call, error in (
        (lambda: kvfun.append(turn, k, v), RoundError),
        (lambda: kvfun.attend(turn, q[:, :, :2], phase="window"), ShapeError),
        (lambda: kvfun.attend(turn, q, phase="decode"), RoundError),
        (lambda: kvfun.attend(turn, q, phase="window", mask="causal"), RoundError),
        (lambda: kvfun.rollback(turn, 1), RoundError),
        (lambda: kvfun.convert(turn, "kv8"), RoundError),
        (lambda: begin_tree(turn, [-1]), RoundError),
    ):
        with pytest.raises(error):
            call()
    with pytest.raises(CodecError):
        kvfun.append(begin_tree(kvfun.empty("kv4"), [-1]), k[:, :, :1, :40], v[:, :, :1, :40])


def test_a_tree_does_not_reach_across_the_raw_first_tokens():
    made = kvfun.empty("rot-k4v4", raw_sinks=6)
    assert begin_tree(made, [-1, 0]).depths == (0, 1)
    with pytest.raises(RoundError, match="6 raw first tokens"):
        begin_tree(kvfun.append(made, *block(0, 5)), [-1, 0])
    assert begin_tree(kvfun.append(made, *block(0, 6)), [-1, 0]).depths == (0, 1)
    rows = [kvfun.append(made, *block(0, n)) for n in (9, 3)]
    with pytest.raises(RoundError, match="6 raw first tokens"):
        begin_tree(kvfun.stack(rows), [-1])
