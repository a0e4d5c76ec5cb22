import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from kvfun.cli import _matmul


class Pair(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=bias)
        self.embedding = nn.Embedding(32, 16)

    def __call__(self, tokens):
        return self.embedding.as_linear(self.linear(self.embedding(tokens)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 20), (2, 9)])
def test_numpy_gives_the_same_products(bias, shape):
    model = Pair(bias)
    tokens = mx.random.randint(0, 32, shape)
    expected = np.array(model(tokens))
    with _matmul.by_numpy(model):
        found = np.array(model(tokens))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_only_long_float32_products_are_numpys(monkeypatch):
    calls = []
    product = _matmul._product
    monkeypatch.setattr(_matmul, "_product", lambda *a: calls.append(a) or product(*a))
    model = Pair(bias=False)
    with _matmul.by_numpy(model):
        model(mx.zeros((1, 1), mx.int32))
        assert not calls
        model(mx.zeros((1, 8), mx.int32))
        assert len(calls) == 2
        model.set_dtype(mx.bfloat16)
        model(mx.zeros((1, 8), mx.int32))
        assert len(calls) == 2


def test_the_model_is_as_before_even_after_an_error():
    model = Pair(bias=True)

    def fail_within():
        with _matmul.by_numpy(model):
            assert type(model.linear) is not nn.Linear
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert type(model.linear) is nn.Linear
    assert type(model.embedding) is nn.Embedding
