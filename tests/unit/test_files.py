"""The atomic writer: whole or nothing, and who may read the result."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dpmf.files import write_atomically


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("raised", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_keeps_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, raised: BaseException
) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise raised

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(type(raised)):
            write_atomically(path, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x.json", b"old")]


def test_parts_and_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "shared", b"one", memoryview(b" two"))
        write_atomically(tmp_path / "private", b"secret", private=True)
    finally:
        os.umask(before)
    assert (tmp_path / "shared").read_bytes() == b"one two"
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert modes == {"shared": 0o640, "private": 0o600}
