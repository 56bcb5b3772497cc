"""Kills, full disks and directories that cannot be written: nothing is lost, and one line says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpmf import store
from soundness import faults, summary

SMALL = ["--strategy", "dpsgd", "--epochs", "1", "--batches-per-epoch", "3"]
PROFILE = ["profile", *SMALL, "--noise-multiplier", "2", "--epsilon", "1", "--accountant", "gaussian"]


@pytest.mark.parametrize("name", faults.JOBS)
def test_killed_at_random_moments(name: str) -> None:
    if not faults.available(faults.JOBS[name]):
        pytest.skip(f"{faults.JOBS[name].needs} is not there")
    found = faults.kill_and_resume(name, kills=3, seed=2)
    assert found["problems"] == []
    assert found["kills"] == 3


def test_the_committed_run_lost_nothing() -> None:
    for name, run in summary.load()["faults"]["runs"].items():
        assert run["kills"] >= 100, name
        assert run["lost"] == run["corrupt"] == 0, name


@pytest.mark.parametrize("damage", ["other answers", "twice", "lost"])
def test_the_comparison_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """A run that forgets what it kept, computes it again, or answers differently."""

    def run(place: Path) -> None:
        again = damage == "twice" or not (place / "kept").exists()
        for unit in ("a", "b") if again else ():
            faults._note(place / "begun", unit)
        faults._note(place / "answers", "wrong" if damage == "other answers" else "right")

    monkeypatch.setattr(faults, "_to_the_end", lambda job, place: job.run(place))
    job = faults.Job(run, lambda place: 2 if damage == "twice" else 0, 2, "dpmf")
    if damage == "twice":
        (tmp_path / "begun").write_text("a\nb\n")
    if damage == "lost":
        (tmp_path / "begun").write_text("a\nb\n")  # both begun, none kept
    counts = {"lost": 0, "corrupt": 0, "problems": []}
    faults._compare(job, tmp_path, ["right"], ["a", "b"], counts, "here")
    assert counts["corrupt"] == (damage == "other answers")
    assert counts["lost"] == (damage != "other answers")
    assert counts["problems"]


# --- full disks and closed doors -------------------------------------------------------------------------------------


def limited(arguments: list[str], size: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """dpmf in a process that may not write files larger than this: what a full disk looks like."""
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size})); "
        "from dpmf.cli import main; sys.argv[0] = 'dpmf'; main()"
    )
    return subprocess.run(
        [sys.executable, "-B", "-c", program, *arguments],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "NUMBA_CACHE_DIR": os.devnull} | environment,
    )  # fmt: skip


def test_a_full_disk_is_one_line_and_the_old_file_stays(tmp_path: Path) -> None:
    target = tmp_path / "profile.json"
    target.write_text("before")
    done = limited([*PROFILE, "--output", str(target)], 10)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_device_is_one_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dpmf.cli", *PROFILE, "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("dpmf: ")


@pytest.mark.parametrize("place", ["a-file/out.json", "missing/out.json", "/proc/dpmf-out.json", "/dev/null/out.json"])
def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "a-file").write_text("")
    from command_line import run

    done = run(*PROFILE, "--output", str(tmp_path / place))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file"]


@pytest.mark.parametrize("place", ["a-file/cache", "/proc/no/cache", "/dev/null"])
def test_a_cache_that_cannot_be_written_costs_a_warning_not_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("DPMF_CACHE_DIR", str(tmp_path / place))
    store.forget()
    with pytest.warns(store.CacheWarning, match="not cached on disk"):
        found = store.remember("faults", {"place": place}, "test", lambda: {"a": np.arange(3.0)}, bool)
    assert found["a"].tolist() == [0, 1, 2]
    store.forget()


def test_a_full_disk_costs_the_cache_not_the_result(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(store.CacheWarning, match="No space left on device"):
        store.remember("faults", {"n": 1}, "test", lambda: {"a": np.arange(3.0)}, bool)
    assert list(cache_dir.glob("*.json")) == []


def test_a_cache_file_cut_anywhere_is_never_read(cache_dir: Path) -> None:
    def remember(value: float) -> list[float]:
        store.forget()
        return store.remember("faults", {"n": 2}, "test", lambda: {"a": np.array([value])}, bool)["a"].tolist()

    assert remember(1.0) == [1.0]
    (file,) = cache_dir.glob("*.json")
    content = file.read_bytes()
    assert set(json.loads(content)) == {"question", "hint"}
    for length in range(0, len(content), 7):
        file.write_bytes(content[:length])
        assert remember(2.0) == [2.0]
    file.write_bytes(content)
    assert remember(2.0) == [1.0]
