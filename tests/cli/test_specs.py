import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfun
from kvfun.cli import _rows, _specs
from kvfun.cli._specs import CacheSpec
from kvfun.codecs import Codec
from kvfun.errors import SpecError


def the_same(one, other):
    return (one.codec.spec, one.options) == (other.codec.spec, other.options)


@pytest.mark.parametrize(
    ("text", "canonical", "label"),
    [
        ("kv4", "kv4", "kv4"),
        ("kv4:residual=64", "kv4:residual=64", "kv4 r64"),
        ("kv4:raw_sinks=4:residual=64", "kv4:residual=64:raw_sinks=4", "kv4 r64 s4"),
        ("k8v4-g32:residual=8:block=32", "k8v4-g32:residual=8:block=32", "k8v4-g32 r8 b32"),
        ("kv4:residual=64:block=64", "kv4:residual=64", "kv4 r64"),
        ("kv4:residual=0:raw_sinks=0", "kv4", "kv4"),
        ("kv4:block=32:raw_sinks=4", "kv4:raw_sinks=4", "kv4 s4"),
        ("plain:residual=64", "plain", "plain"),
        ("bf16+kv4:residual=1", "bf16+kv4:residual=1", "bf16+kv4 r1"),
    ],
)
def test_the_canonical_form(text, canonical, label):
    cache = _specs.parse(text)
    assert (cache.spec, cache.label) == (canonical, label)
    assert the_same(_specs.parse(canonical), cache)
    assert (_rows.row(text).spec, _rows.row(text).label) == (canonical, f"kvfun {label}")


@given(
    codec=st.sampled_from(["bf16", "kv4", "k8v4-g32", "mxfp8", "kv4-g32-pad", "bf16+kv4"]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "residual": st.integers(0, 300),
            "block": st.integers(1, 300),
            "raw_sinks": st.integers(0, 20),
        },
    ),
    order=st.permutations(["residual", "block", "raw_sinks"]),
)
def test_parse_and_format_are_inverse(codec, options, order):
    written = [f"{name}={options[name]}" for name in order if name in options]
    cache = _specs.parse(":".join([codec, *written]))
    assert the_same(_specs.parse(cache.spec), cache)
    assert cache.codec.spec == codec
    residual, sinks = options.get("residual", 0), options.get("raw_sinks", 0)
    assert (cache.residual, cache.raw_sinks) == (residual, sinks)
    if residual:
        assert cache.block == options.get("block", 64)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv4:window=3", "unknown option 'window'"),
        ("kv4:", "unknown option ''"),
        ("kv4:64", "unknown option '64'"),
        ("kv4: residual=64", "unknown option ' residual'"),
        ("kv4:residual", "residual is an integer >= 0, not ''"),
        ("kv4:residual=", "residual is an integer >= 0, not ''"),
        ("kv4:residual=many", "residual is an integer >= 0, not 'many'"),
        ("kv4:residual=6.4", "residual is an integer >= 0, not '6.4'"),
        ("kv4:residual=-1", "residual is an integer >= 0, not '-1'"),
        ("kv4:residual=1=2", "residual is an integer >= 0, not '1=2'"),
        ("kv4:raw_sinks=\u0664", "raw_sinks is an integer >= 0, not '\u0664'"),
        ("kv4:residual=8:block=0", "block is an integer >= 1, not '0'"),
        ("kv4:residual=8:residual=8", "residual is given twice"),
    ],
)
def test_an_error_names_the_row_and_the_options(text, said):
    with pytest.raises(SpecError) as raised:
        _rows.row(text)
    message = str(raised.value)
    assert message.startswith(f"{text!r}: {said}; ")
    assert all(option in message for option in ("residual", "block", "raw_sinks"))


def test_an_unknown_codec_names_the_row():
    with pytest.raises(SpecError, match=r"^'kv99:residual=4': .*not 99"):
        _rows.row("kv99:residual=4")


@pytest.mark.parametrize("text", ["mlx-lm:residual=64", "mlx-lm-kv4:raw_sinks=4"])
def test_mlx_lm_takes_no_options(text):
    with pytest.raises(SpecError, match="without options"):
        _rows.row(text)


def test_the_defaults_are_those_of_kvfun():
    cache = kvfun.empty("kv4", residual=1)
    assert cache.ageing.block == CacheSpec(Codec.of("kv4")).block


def test_the_options_are_those_of_kvfun():
    cache = kvfun.empty("kv4", **_specs.parse("kv4:residual=3:block=5:raw_sinks=2").options)
    assert (cache.ageing.residual, cache.ageing.block, cache.front) == (3, 5, 2)
