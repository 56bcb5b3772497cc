"""Peers whose dependencies conflict with ours run in virtual environments of their own, made on first use."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# random-allocation caps numpy below what we use, and does not declare its need of pandas. opake cannot be imported on
# Python 3.11 and 3.12, and brings a torch of its own, of several gigabytes.
OPAKE_VERSION = "0.16.1"
REQUIREMENTS = {"random-allocation": ["random-allocation", "pandas"], "opake": [f"opake[dpftrl]=={OPAKE_VERSION}"]}
PYTHONS = {"opake": (3, 13)}


class PeerMissingError(ImportError):
    """A peer's environment cannot be made or does not work; the message is one line."""


class NoAnswerError(PeerMissingError):
    """A peer works, but has not answered within its time."""


def _last_line(error: subprocess.CalledProcessError) -> str:
    said = [line for line in (error.stderr or "").splitlines() if line.strip()]
    return said[-1].strip() if said else f"exit status {error.returncode}"


def _interpreter(peer: str) -> str:
    """A Python of the version that the peer needs."""
    version = PYTHONS.get(peer, sys.version_info[:2])
    if version == sys.version_info[:2]:
        return sys.executable
    name = "python{}.{}".format(*version)
    # A shim of pyenv may be on the path for a version that is installed but not chosen.
    managed = (Path.home() / ".pyenv" / "versions").glob("{}.{}.*/bin/".format(*version) + name)
    for candidate in (shutil.which(name), *map(str, sorted(managed, reverse=True))):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    raise PeerMissingError(f"{peer} needs Python {'{}.{}'.format(*version)}, which is not installed")


def _python(peer: str) -> Path:
    """The interpreter of the peer's environment, which is made if it is not there."""
    home = ROOT / f".venv-{peer}"
    python = home / "bin" / "python"
    if (home / ".ready").exists():
        return python
    interpreter = _interpreter(peer)
    print(f"installing {peer} into {home.name} ...", file=sys.stderr)
    try:
        subprocess.run([interpreter, "-m", "venv", "--clear", home], check=True, capture_output=True, text=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS[peer]]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise PeerMissingError(f"{peer} cannot be installed into {home.name}: {_last_line(error)}") from None
    except OSError as error:
        raise PeerMissingError(f"{peer} cannot be installed into {home.name}: {error}") from None
    (home / ".ready").touch()
    return python


# A process that waits uses no processor: this many times its seconds by the clock, and it is stopped all the same.
PATIENCE = 6
_LIMITED = "import resource as _r; _r.setrlimit(_r.RLIMIT_CPU, ({0}, {0} + 5))\n"


def run(peer: str, program: str, argument: Any, seconds: float | None = None) -> Any:
    """What `program` prints as JSON, given `argument` as JSON, in the peer's own environment.

    `seconds` are those of the processor, so that other work on the machine takes nothing from the peer.
    """
    if seconds is not None:
        program = _LIMITED.format(math.ceil(seconds)) + program
    command = [_python(peer), "-c", program, json.dumps(argument)]
    clock = None if seconds is None else PATIENCE * seconds
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=clock)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{peer} has no answer within {seconds:g} s") from None
    except subprocess.CalledProcessError as error:
        if seconds is not None and error.returncode == -signal.SIGXCPU:
            raise NoAnswerError(f"{peer} has no answer within {seconds:g} s") from None
        raise PeerMissingError(f"{peer} does not work in .venv-{peer}: {_last_line(error)}") from None
    except (OSError, ValueError, IndexError) as error:
        raise PeerMissingError(f"{peer} does not work in .venv-{peer}: {error}") from None


def version(peer: str) -> str:
    """Which version of the peer is in its environment."""
    program = (
        "import json, sys; from importlib.metadata import version; print(json.dumps(version(json.loads(sys.argv[1]))))"
    )
    return str(run(peer, program, peer))
