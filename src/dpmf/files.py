"""Writing a file so that its path never holds half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_atomically(path: Path, *parts: bytes | memoryview, private: bool = False) -> None:
    """Write a file whole or not at all.

    The bytes go into a new file in the same directory, reach the disk, and are then renamed to `path`. A crash, a full
    disk or an interrupt at any moment leaves either the old file or the new one, and no temporary file.

    Args:
      path: where the file shall be; what is there is replaced.
      parts: its content, in order.
      private: only the owner may read the file. Otherwise its permissions are those of any new file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.writelines(parts)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # the temporary file is still there only if something failed
            os.unlink(temporary)
    with contextlib.suppress(OSError):  # some file systems cannot synchronise a directory
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
