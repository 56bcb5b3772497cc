"""Checkpoints: what goes in comes out, damage is noticed, and no moment of a kill or a full disk loses the run."""

from __future__ import annotations

import errno
import hashlib
import random
import resource
import signal
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpmf.training import checkpoint

STATE: dict[str, Any] = {
    "none": None,
    "numbers": [1, -2.5, 10**30, 1e-300, float("inf"), True, np.float64(0.1), np.int32(4)],
    "text": "σ\n",
    "bytes": b"\x00\xff",
    "nested": {0: {"a": (1, [2, ()])}, "b": {}},
    "arrays": [
        np.arange(6.0).reshape(2, 3),
        np.array(3, dtype=np.uint8),
        np.zeros((0, 4), dtype=np.float32),
        np.eye(3).T,
    ],
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", STATE)
    assert same(STATE, checkpoint.load(tmp_path / "c"))
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64", "bool", "uint8"])
def test_tensors(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for shape in ((2, 3), (), (0, 5)):
        tensor = (
            torch.ones(shape).to(getattr(torch, dtype)).t()
            if len(shape) == 2
            else torch.tensor(1).to(getattr(torch, dtype))
        )
        checkpoint.save(tmp_path / "c", {"t": tensor})
        again = checkpoint.load(tmp_path / "c")["t"]
        assert again.dtype == tensor.dtype
        assert again.shape == tensor.shape
        assert torch.equal(again, tensor)


@pytest.mark.parametrize("value", [object(), {1.5: 2}, np.array(["a"]), np.array([object()]), {True: 1}, lambda: 0])
def test_what_cannot_be_kept_is_refused_and_nothing_written(value: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a checkpoint"):
        checkpoint.save(tmp_path / "c", {"value": value})
    assert not list(tmp_path.iterdir())


def test_every_kind_of_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, STATE)
    whole = path.read_bytes()
    rng = random.Random(0)
    damaged = [whole[:cut] for cut in (0, 1, 17, 18, 60, 82, 90, len(whole) - 1)] + [whole + b"x", b"", b"PK\x03\x04"]
    for _ in range(300):
        at = rng.randrange(len(whole))
        damaged.append(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="checkpoint must be") as caught:
            checkpoint.load(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tree",
    [
        b"{",
        b"[]",
        b"3",
        b'{"dict":[["a",{"array":["numpy","<f8",[1000000000],8000000000]}]]}',
        b'{"dict":[["a",{"array":["numpy","|O",[1],8]}]]}',
        b'{"dict":[["a",{"array":["numpy","<f8",[-1],-8]}]]}',
        b'{"dict":[["a",{"array":["os","system",[1],0]}]]}',
        b'{"dict":[["a",{"exec":"x"}]]}',
        b'{"dict":[["a",{"bytes":"xyz"}]]}',
        b'{"dict":[[["a"],1]]}',
        b"[" * 100_000,
    ],
)
def test_a_forged_file_with_a_right_checksum_is_refused(tree: bytes, tmp_path: Path) -> None:
    body = len(tree).to_bytes(8, "little") + tree
    (tmp_path / "c").write_bytes(checkpoint.MAGIC + hashlib.sha256(body).hexdigest().encode() + body)
    with pytest.raises(ValueError, match="checkpoint must"):
        checkpoint.load(tmp_path / "c")


def test_a_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none")
    with pytest.raises(OSError, match="cannot be written"):
        checkpoint.save(tmp_path / "no" / "such" / "c", {})


def _full(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.getsignal(signal.SIGXFSZ)
    try:
        _full(4096)
        with pytest.raises(OSError, match="cannot be written") as caught:
            checkpoint.save(path, {"step": 2, "a": np.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert checkpoint.load(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
