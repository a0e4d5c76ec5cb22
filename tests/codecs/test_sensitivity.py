"""Bits by layer: what is measured, and how a budget is shared out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfun.codecs import Codec, Sensitivity, sensitivity
from kvfun.codecs._sensitivity import DISTORTION
from kvfun.errors import CodecError

losses = st.lists(st.floats(0, 1), min_size=1, max_size=2)


@given(st.data(), st.floats(2, 5), st.integers(1, 2))
def test_no_choice_within_the_same_bits_is_expected_to_be_better(data, budget, layers):
    numbers = st.lists(st.floats(1e-6, 1), min_size=layers, max_size=layers)
    known = Sensitivity(data.draw(numbers), data.draw(numbers))
    chosen = known.bits_for(budget)
    used = sum(k + v for k, v in chosen)
    assert used <= budget * 2 * layers + 1e-6
    every = itertools.product(DISTORTION, repeat=2 * layers)
    best = min(
        known.loss(list(zip(bits[::2], bits[1::2], strict=True)))
        for bits in every
        if sum(bits) <= used
    )
    assert known.loss(chosen) <= best * (1 + 1e-9)


def test_all_of_a_budget_is_used():
    known = Sensitivity((1.0, 0.5, 0.1), (0.2, 0.3, 0.01))
    for budget in (2, 2.5, 3, 3.5, 4, 5):
        assert sum(k + v for k, v in known.bits_for(budget)) == budget * 6
    assert known.bits_for(9) == [(5, 5)] * 3
    assert known.bits_for(3, allowed=[3]) == [(3, 3)] * 3
    assert {b for pair in known.bits_for(3.5, allowed=(2, 4)) for b in pair} == {2, 4}


def test_the_sensitive_places_have_more_bits():
    chosen = Sensitivity((1.0, 0.001), (0.001, 0.5)).bits_for(3.5)
    assert chosen == [(5, 2), (2, 5)]


def test_specs_are_specs():
    known = Sensitivity((1.0, 0.001), (0.001, 0.5))
    for options in ("", "-log", "-tcq-log", "-tcq", "-bal-log", "-tcq-bal-log"):
        for budget in (2.0, 2.5, 3.5, 5.0):
            for spec in known.specs(budget, options):
                assert Codec.of(spec).spec == spec
    assert known.specs(5.0, "-tcq-log") == ["rot-k5v5-log"] * 2
    assert known.specs(3.5, "-tcq-log") == ["rot-k5v2-tcq-log", "rot-k2v5-tcq-log"]


def test_each_side_of_each_layer_is_measured_alone():
    asked = []

    def measure(specs):
        asked.append(list(specs))
        return len(asked) / 10

    known = sensitivity(measure, 2, bits=4, options="")
    assert asked == [
        ["rot4-c+plain", "plain"],
        ["plain", "rot4-c+plain"],
        ["plain+rot4", "plain"],
        ["plain", "plain+rot4"],
    ]
    assert known == Sensitivity((0.1, 0.2), (0.3, 0.4), 4)
    assert known.loss([(4, 4), (4, 4)]) == pytest.approx(1.0)
    for specs in asked:
        assert [Codec.of(spec).spec for spec in specs] == specs


def test_it_is_kept_as_text():
    known = Sensitivity((0.1, 0.2), (0.3, 0.4), 4)
    assert Sensitivity.from_json(known.to_json()) == known
    for text in ("", "{}", "[1]", '{"keys": [1], "values": [2], "bits": 7}', '{"keys": 3}'):
        with pytest.raises(CodecError):
            Sensitivity.from_json(text)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Sensitivity((), ()),
        lambda: Sensitivity((1.0,), (1.0, 2.0)),
        lambda: Sensitivity((-1.0,), (1.0,)),
        lambda: Sensitivity((float("nan"),), (1.0,)),
        lambda: Sensitivity((1.0,), (1.0,)).bits_for(1.9),
        lambda: Sensitivity((1.0,), (1.0,)).bits_for(3, allowed=()),
        lambda: Sensitivity((1.0,), (1.0,)).bits_for(3, allowed=(3, 6)),
        lambda: sensitivity(lambda specs: 0.0, 0),
        lambda: sensitivity(lambda specs: 0.0, True),
        lambda: sensitivity(lambda specs: 0.0, 2, bits=7),
        lambda: sensitivity(lambda specs: float("nan"), 1),
    ],
)
def test_what_cannot_be_is_refused(call):
    with pytest.raises(CodecError):
        call()
