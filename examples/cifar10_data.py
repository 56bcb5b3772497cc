"""CIFAR-10 from a path the user gives: folders or a tar of JPEG or PNG images, or the original Python batches.

Understood layouts, each as a directory or as a .tar, .tar.gz, .tgz, .tar.xz file:

    train/<class>/*.jpg, test/<class>/*.jpg        any image format Pillow reads; classes in alphabetical order
    [...]/data_batch_1..5, [...]/test_batch        the archive of the University of Toronto

The original batches are pickles; only the few types they need are allowed, so a file made to run code is refused.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

SIDE, CHANNELS, CLASSES = 32, 3, 10
MEAN = np.array([0.4914, 0.4822, 0.4465], dtype=np.float32)
STD = np.array([0.2470, 0.2435, 0.2616], dtype=np.float32)
_IMAGES = (".jpg", ".jpeg", ".png")


class Cifar10(NamedTuple):
    """Images as uint8 of shape (n, 3, 32, 32), labels as int64."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(source: str | Path) -> Cifar10:
    """Read either layout; ValueError in one line where the path holds neither."""
    path = Path(source)
    if not path.exists():
        raise ValueError(f"data must be a directory or tar file with CIFAR-10, there is no {path}")
    images: dict[str, list[tuple[str, str, np.ndarray]]] = {"train": [], "test": []}
    batches: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, content in _files(path):
        parts = PurePosixPath(name).parts
        if name.lower().endswith(_IMAGES) and len(parts) >= 3 and parts[-3] in images:
            images[parts[-3]].append((parts[-2], parts[-1], _decode(content, name)))
        elif parts[-1].startswith("data_batch_") or parts[-1] == "test_batch":
            batches[parts[-1]] = _unpickle(content, name)
    if images["train"] and images["test"]:
        return Cifar10(*_stacked(images["train"]), *_stacked(images["test"]))
    train = sorted(name for name in batches if name != "test_batch")
    if train and "test_batch" in batches:
        pixels = np.concatenate([batches[name][0] for name in train])
        labels = np.concatenate([batches[name][1] for name in train])
        return Cifar10(pixels, labels, *batches["test_batch"])
    raise ValueError(f"data must hold train/<class>/*.jpg and test/<class>/*.jpg, or CIFAR-10 batches; {path} does not")


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            if file.suffix.lower() in _IMAGES or "_batch" in file.name:
                yield file.relative_to(path).as_posix(), file.read_bytes()
        return
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and (stream := archive.extractfile(member)) is not None:
                    yield member.name, stream.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"data must be a readable tar file, {path} is not: {str(error).splitlines()[0]}") from None


def _decode(content: bytes, name: str) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"data must hold readable images, {name} is not: {error}") from None
    if pixels.shape != (SIDE, SIDE, CHANNELS):
        raise ValueError(f"data must hold {SIDE} × {SIDE} images, {name} is {pixels.shape[1]} × {pixels.shape[0]}")
    return pixels.transpose(2, 0, 1)


def _stacked(items: list[tuple[str, str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    items.sort(key=lambda item: item[:2])
    classes = sorted({item[0] for item in items})
    labels = np.array([classes.index(item[0]) for item in items], dtype=np.int64)
    return np.stack([item[2] for item in items]), labels


class _OnlyArrays(pickle.Unpickler):
    """Loads what numpy arrays and plain containers need, and nothing that could run code."""

    _ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def _unpickle(content: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        record = _OnlyArrays(io.BytesIO(content), encoding="bytes").load()
        pixels = np.asarray(record[b"data"], dtype=np.uint8).reshape(-1, CHANNELS, SIDE, SIDE)
        return pixels, np.asarray(record[b"labels"], dtype=np.int64)
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"data must hold CIFAR-10 batches, {name} is not one: {error}") from None
