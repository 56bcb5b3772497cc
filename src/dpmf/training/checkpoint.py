"""Checkpoints that are whole or refused: written atomically, checksummed, read without running any code.

A file is a line that says what it is, the SHA-256 of all that follows, a JSON description of nested dictionaries, lists
and plain values, and the bytes of the arrays. No pickle is involved. Files are readable by their owner only, because
they hold the state of the noise, with which the noise could be subtracted again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpmf.files import write_atomically

MAGIC = b"dpmf checkpoint 1\n"
_DIGEST_BYTES = 64  # hexadecimal
_HEADER = struct.Struct("<Q")


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a state so that the path holds, at every moment, either the whole old file or the whole new one.

    Values may be None, booleans, numbers, strings, bytes, lists, tuples, dictionaries with string or integer keys,
    numpy arrays and torch tensors.

    Raises:
      OSError: the file cannot be written; the message names the path, and an older file is untouched.
    """
    arrays: list[bytes | memoryview] = []
    tree = json.dumps(_encode(state, arrays, "state"), allow_nan=False, separators=(",", ":")).encode()
    digest = hashlib.sha256()
    parts = [_HEADER.pack(len(tree)), tree, *arrays]
    for part in parts:
        digest.update(part)
    try:
        write_atomically(Path(path), MAGIC + digest.hexdigest().encode(), *parts, private=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno, f"checkpoint cannot be written ({reason}), an older one is untouched", str(path)
        ) from None


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that `save` wrote.

    Raises:
      ValueError: the file is damaged, or is not a checkpoint of this version.
    """
    content = memoryview(Path(path).read_bytes())
    start = len(MAGIC) + _DIGEST_BYTES
    if bytes(content[: len(MAGIC)]) != MAGIC:
        raise ValueError(f"checkpoint must be a file written by dpmf, {path} is not")
    body = content[start:]
    if hashlib.sha256(body).hexdigest().encode() != bytes(content[len(MAGIC) : start]):
        raise ValueError(f"checkpoint must be whole, {path} is damaged: its checksum does not match")
    try:
        (length,) = _HEADER.unpack_from(body)
        tree = json.loads(bytes(body[_HEADER.size : _HEADER.size + length]))
        decoded = _decode(tree, body[_HEADER.size + length :])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"checkpoint must be one that this version reads, {path} is not: {error}") from None
    if not isinstance(decoded, dict):
        raise ValueError(f"checkpoint must hold a dictionary, {path} does not")
    return decoded


def _encode(value: Any, arrays: list[bytes | memoryview], where: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        if any(isinstance(key, bool) or not isinstance(key, str | int) for key in value):
            raise TypeError(f"a checkpoint must have strings or integers as keys, {where} has others")
        return {"dict": [[key, _encode(item, arrays, f"{where}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(item, arrays, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, np.generic):
        return _encode(value.item(), arrays, where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        flat = np.ascontiguousarray(value)
        # Little-endian on disk, whatever the machine.
        flat = flat.astype(flat.dtype.newbyteorder("<"), copy=False)
        arrays.append(flat.tobytes())
        return {"array": ["numpy", flat.dtype.str, list(value.shape), flat.nbytes]}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        arrays.append(flat.tobytes())
        return {"array": ["torch", str(value.dtype).removeprefix("torch."), list(value.shape), flat.nbytes]}
    raise TypeError(f"a checkpoint can hold plain values and arrays, {where} is a {type(value).__name__}")


def _decode(tree: Any, arrays: memoryview) -> Any:
    position = 0

    def array(kind: str, dtype: str, shape: list[int], size: int) -> Any:
        nonlocal position
        data = arrays[position : position + size]
        if len(data) != size or size < 0:
            raise ValueError("an array goes beyond the end of the file")
        position += size
        if kind == "numpy":
            numpy_dtype = np.dtype(dtype)
            if numpy_dtype.kind not in "biufc":
                raise ValueError(f"dtype {dtype!r} is not allowed")
            return np.frombuffer(data, dtype=numpy_dtype).reshape(shape).astype(numpy_dtype.newbyteorder("="))
        import torch

        torch_dtype = getattr(torch, dtype, None)
        if kind != "torch" or not isinstance(torch_dtype, torch.dtype):
            raise ValueError(f"arrays of {kind!r} with dtype {dtype!r} are not known")
        if size == 0:
            return torch.empty(shape, dtype=torch_dtype)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype).reshape(shape)

    def decode(node: Any) -> Any:
        if isinstance(node, list):
            return [decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        ((tag, value),) = node.items()
        if tag == "dict":
            return {key: decode(item) for key, item in value}
        if tag == "tuple":
            return tuple(decode(item) for item in value)
        if tag == "array":
            return array(*value)
        if tag == "bytes":
            return bytes.fromhex(value)
        if tag == "float":
            return float(value)
        raise ValueError(f"{tag!r} is not known")

    return decode(tree)
