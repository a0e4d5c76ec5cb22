import numpy as np
import pytest
from threadpoolctl import threadpool_info

from kvfun.cli import _threads


def threads() -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


@pytest.fixture
def usual(monkeypatch):
    """The threads as they are; the speeds of all of them, then of one, are what a test says."""
    np.ones((2, 2)) @ np.ones((2, 2))
    before = threads()
    if max(before, default=1) == 1:
        pytest.skip("NumPy multiplies in one thread here")
    return before


def speeds(monkeypatch, *numbers):
    left = list(numbers)
    monkeypatch.setattr(_threads, "products_a_second", lambda: left.pop(0))


def test_all_threads_where_they_are_faster(usual, monkeypatch):
    speeds(monkeypatch, 15, 10)
    with _threads.as_many_as_pay_off():
        assert threads() == usual
    assert threads() == usual


def test_one_thread_where_more_are_slower(usual, monkeypatch):
    speeds(monkeypatch, 3, 10)
    with _threads.as_many_as_pay_off():
        assert set(threads()) == {1}
    assert threads() == usual


def test_the_number_of_threads_comes_back_after_an_error(usual, monkeypatch):
    speeds(monkeypatch, 3, 10)
    with pytest.raises(KeyError), _threads.as_many_as_pay_off():
        raise KeyError
    assert threads() == usual


def test_products_are_counted():
    assert _threads.products_a_second(0.01) > 0
