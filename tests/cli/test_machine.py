import pytest

from kvfun.cli import _machine

NUMPY = "7f00-7f01 r-xp 0 0 1 /site-packages/numpy.libs/libscipy_openblas64_-ff651d7f.so"
REFERENCE = "7f00-7f01 r-xp 0 0 1 /usr/lib/x86_64-linux-gnu/blas/libblas.so.3.11.0"
OPENBLAS = "7f00-7f01 r-xp 0 0 1 /usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so"


@pytest.fixture
def slow_linux(monkeypatch, tmp_path):
    (tmp_path / "maps").write_text(REFERENCE)
    monkeypatch.setattr(_machine, "on_cpu", lambda: True)
    monkeypatch.setattr(_machine, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(_machine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(_machine.glob, "glob", lambda pattern: [])
    return tmp_path / "maps"


@pytest.mark.parametrize(
    ("maps", "fast"), [(NUMPY, False), (REFERENCE, False), (OPENBLAS, True), ("7f00 [heap]", False)]
)
def test_fast_blas_is_recognised(maps, fast):
    assert _machine.has_fast_blas(f"{NUMPY}\n{maps}\n") is fast


def test_slow_products_give_a_hint(slow_linux):
    assert _machine.has_slow_blas(4.5)
    hint = _machine.blas_hint(4.5)
    assert "4.5 GFLOP/s" in hint
    assert "libopenblas0-pthread" in hint
    assert "LD_PRELOAD=/usr/lib/" in hint


def test_an_installed_openblas_is_named(slow_linux, monkeypatch):
    monkeypatch.setattr(_machine.glob, "glob", lambda pattern: ["/usr/lib/arm/libopenblas.so.0"])
    hint = _machine.blas_hint(4.5)
    assert "LD_PRELOAD=/usr/lib/arm/libopenblas.so.0" in hint
    assert "install" not in hint


def test_only_the_reference_blas_is_slow(slow_linux, monkeypatch):
    assert not _machine.has_slow_blas(60.0)
    slow_linux.write_text(OPENBLAS)
    assert not _machine.has_slow_blas(4.5)
    slow_linux.write_text(REFERENCE)
    monkeypatch.setattr(_machine.platform, "system", lambda: "Darwin")
    assert not _machine.has_slow_blas(4.5)


def test_the_speed_is_a_speed():
    assert _machine.matmul_gflops(64, 2) > 0


def test_a_missing_distribution_is_said():
    assert _machine.version("no-such-distribution") == "not installed"
