"""Peers whose dependencies conflict with ours run in virtual environments of their own, made on first use."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# random-allocation caps numpy below what we use, and does not declare its need of pandas.
REQUIREMENTS = {"random-allocation": ["random-allocation", "pandas"]}


class PeerMissingError(ImportError):
    """A peer's environment cannot be made or does not work; the message is one line."""


def _last_line(error: subprocess.CalledProcessError) -> str:
    said = [line for line in (error.stderr or "").splitlines() if line.strip()]
    return said[-1].strip() if said else f"exit status {error.returncode}"


def _python(peer: str) -> Path:
    """The interpreter of the peer's environment, which is made if it is not there."""
    home = ROOT / f".venv-{peer}"
    python = home / "bin" / "python"
    if (home / ".ready").exists():
        return python
    print(f"installing {peer} into {home.name} ...", file=sys.stderr)
    try:
        venv.create(home, with_pip=True, clear=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS[peer]]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise PeerMissingError(f"{peer} cannot be installed into {home.name}: {_last_line(error)}") from None
    except OSError as error:
        raise PeerMissingError(f"{peer} cannot be installed into {home.name}: {error}") from None
    (home / ".ready").touch()
    return python


def run(peer: str, program: str, argument: Any) -> Any:
    """What `program` prints as JSON, given `argument` as JSON, in the peer's own environment."""
    command = [_python(peer), "-c", program, json.dumps(argument)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        raise PeerMissingError(f"{peer} does not work in .venv-{peer}: {_last_line(error)}") from None
    except (OSError, ValueError, IndexError) as error:
        raise PeerMissingError(f"{peer} does not work in .venv-{peer}: {error}") from None


def version(peer: str) -> str:
    """Which version of the peer is in its environment."""
    program = (
        "import json, sys; from importlib.metadata import version; print(json.dumps(version(json.loads(sys.argv[1]))))"
    )
    return str(run(peer, program, peer))
