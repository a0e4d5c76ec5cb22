import pytest

from .cases import tiles_of


@pytest.fixture
def small_tiles(monkeypatch):
    tiles_of(monkeypatch, 7, 5)
