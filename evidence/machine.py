"""The machine that seconds were measured on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """The processor, how many cores of it, and the interpreter: ``AMD EPYC, 2 cores, Python 3.11.7``."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"
