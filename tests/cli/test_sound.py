"""Sound: what a WAV file holds, other rates, and spectrograms against plain formulas."""

from __future__ import annotations

import wave

import numpy as np
import pytest

from kvfun.cli import _sound
from kvfun.errors import StorageError


def write(path, samples, rate=16_000, width=2, channels=1):
    """Samples in [-1, 1) as a WAV file."""
    numbers = np.round(np.asarray(samples) * (1 << (8 * width - 1))).astype(np.int64)
    if width == 1:
        raw = (numbers + 128).astype(np.uint8).tobytes()
    else:
        raw = b"".join(int(n).to_bytes(width, "little", signed=True) for n in numbers)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)
    return path


def tone(hertz, seconds=0.25, rate=16_000):
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_any_width(tmp_path, width):
    samples = tone(440)[:100]
    heard = _sound.read_wave(write(tmp_path / "a.wav", samples, width=width))
    assert np.abs(heard - samples).max() <= 1 / (1 << (8 * width - 1)) + 1e-6


def test_channels_are_mixed(tmp_path):
    left, right = tone(440)[:50], tone(660)[:50]
    both = np.stack([left, right], axis=1).reshape(-1)
    heard = _sound.read_wave(write(tmp_path / "a.wav", both, channels=2))
    assert np.abs(heard - (left + right) / 2).max() < 1e-4


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_tone_stays_the_tone_at_another_rate(rate):
    heard = _sound.resampled(tone(1_000, rate=rate), rate)
    wanted = tone(1_000)
    assert len(heard) == len(wanted)
    middle = slice(800, -800)
    assert np.abs(heard[middle] - wanted[middle]).max() < 2e-3


def test_what_is_too_high_is_not_heard_as_something_else():
    heard = _sound.resampled(tone(11_000, rate=48_000), 48_000)
    assert np.abs(heard[800:-800]).max() < 5e-3


def test_what_is_no_wave_is_refused(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF no sound")
    for path in (tmp_path / "a.wav", tmp_path / "none.wav"):
        with pytest.raises(StorageError, match="WAV"):
            _sound.read_wave(path)


def test_mel_bands_have_one_area_and_grow_by_equal_ratios_above_1000_hertz():
    filters = _sound.mel_filters()
    assert filters.shape == (80, 201)
    assert (filters >= 0).all()
    centres = filters.argmax(axis=1) * 40.0
    assert (np.diff(centres) >= 0).all()
    wide = filters[40:]  # narrow ones lie between two bins
    assert np.allclose(wide.sum(axis=1) * 40, 1, atol=0.08)
    ratios = centres[60:] / centres[59:-1]
    assert np.allclose(ratios.mean(), (8_000 / 1_000) ** (1 / 54), atol=0.01)


def test_a_spectrogram_by_the_formula():
    samples = tone(1_000, 0.5)
    found = _sound.log_mel(samples, seconds=1)
    assert found.shape == (100, 80)
    padded = np.pad(np.pad(samples, (0, 8_000)), 200, mode="reflect")
    frame = padded[160 * 20 : 160 * 20 + 400] * (
        0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    )
    bins = np.arange(201)[:, None] * np.arange(400) / 400
    power = np.abs((frame * np.exp(-2j * np.pi * bins)).sum(axis=1)) ** 2
    loudest = np.log10(power @ _sound.mel_filters().T).max()
    assert found[20].max() == pytest.approx((loudest + 4) / 4, abs=1e-3)
    band = _sound.mel_filters()[found[20].argmax()]
    assert band[25] > 0  # 1,000 Hz
    silent = (found.max() * 4 - 4 - 8 + 4) / 4
    assert np.allclose(found[80], silent, atol=1e-6)
    assert np.array_equal(_sound.log_mel(np.tile(samples, 9), seconds=1).shape, (100, 80))
