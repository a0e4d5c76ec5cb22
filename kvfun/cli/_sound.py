"""Sound as Whisper hears it: 16,000 samples a second, 80 mel bands, 100 frames a second."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from kvfun.errors import StorageError

RATE = 16_000
SECONDS = 30
WINDOW, HOP, BANDS = 400, 160, 80
_TAPS = 32  # zero crossings of the resampling filter on each side
_BLOCK = 1 << 14


def read_wave(path: Path) -> np.ndarray:
    """The samples of a WAV file, one channel at `RATE`, in [-1, 1].

    Raises:
        StorageError: it cannot be read, or holds something else than integer samples.
    """
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise StorageError(f"cannot read {path} as a WAV file: {error}") from error
    samples = _integers(raw, width) / float(1 << (8 * width - 1))
    return resampled(samples.reshape(-1, channels).mean(axis=1), rate)


def _integers(raw: bytes, width: int) -> np.ndarray:
    """Samples of 1 to 4 bytes as float32; those of 1 byte are unsigned."""
    if width == 1:
        return np.frombuffer(raw, np.uint8).astype(np.float32) - 128
    columns = np.frombuffer(raw[: len(raw) // width * width], np.uint8).reshape(-1, width)
    wide = np.zeros((len(columns), 4), np.uint8)
    wide[:, 4 - width :] = columns
    return wide.view("<i4")[:, 0].astype(np.float32) / float(1 << (8 * (4 - width)))


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """The samples at `RATE`, by a windowed sinc below the lower of the two Nyquist frequencies."""
    if rate == RATE:
        return samples.astype(np.float32)
    step, cutoff = rate / RATE, min(1.0, RATE / rate)
    reach = int(np.ceil(_TAPS / cutoff))
    padded = np.pad(samples, reach + 1)
    count = round(len(samples) / step)
    out = np.empty(count, np.float32)
    offsets = np.arange(-reach, reach + 1)
    for start in range(0, count, _BLOCK):
        times = np.arange(start, min(start + _BLOCK, count)) * step
        nearest = np.floor(times).astype(int)
        away = offsets - (times - nearest)[:, None]
        window = np.cos(np.pi / 2 * np.clip(away / (reach + 1), -1, 1)) ** 2
        kernel = cutoff * np.sinc(cutoff * away) * window
        picked = padded[nearest[:, None] + offsets + reach + 1]
        out[start : start + len(times)] = (picked * kernel).sum(axis=1)
    return out


def mel_filters() -> np.ndarray:
    """Weights from the bins of a spectrum to mel bands of equal area (Slaney's), ``[80, 201]``."""

    def mel(hertz):
        hertz = np.asarray(hertz, float)
        above = 15 + np.log(np.maximum(hertz, 1000) / 1000) * 27 / np.log(6.4)
        return np.where(hertz < 1000, hertz * 3 / 200, above)

    def hertz(mels):
        above = 1000 * np.exp((np.maximum(mels, 15) - 15) * np.log(6.4) / 27)
        return np.where(mels < 15, mels * 200 / 3, above)

    edges = hertz(np.linspace(mel(0), mel(RATE / 2), BANDS + 2))[:, None]
    bins = np.arange(WINDOW // 2 + 1) * RATE / WINDOW
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])


def log_mel(samples: np.ndarray, seconds: int = SECONDS) -> np.ndarray:
    """The log-mel spectrogram of so many seconds, ``[100 * seconds, 80]`` in float32.

    Args:
        samples: at `RATE`; silence is added behind them, and what is too long is cut.
        seconds: that the result is for.
    """
    wanted = seconds * RATE
    samples = np.pad(samples[:wanted], (0, max(0, wanted - len(samples))))
    samples = np.pad(samples, WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP][: wanted // HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(frames * hann, axis=-1)) ** 2
    logs = np.log10(np.maximum(power @ mel_filters().T, 1e-10))
    return ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)
