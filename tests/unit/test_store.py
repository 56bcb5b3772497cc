"""The store of what was found earlier: exact, atomic, a hint that is checked, never in the way."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from forging import forge
from waiting import until

import dpmf
from dpmf import progress, store, strategies


class Counter:
    """A computation that says how often it ran."""

    def __init__(self, value: float = 0.1) -> None:
        self.calls, self.value = 0, value

    def __call__(self) -> store.Values:
        self.calls += 1
        return {"a": np.array([self.value, 1 / 3, 5e-324]), "b": np.zeros(0)}


def remember(compute: Callable[[], store.Values], kind: str = "k", **parameters: Any) -> Any:
    return store.remember(kind, parameters, "Work for N=1", compute, lambda values: len(values["a"]) == 3)["a"].tolist()


def entries(directory: Path) -> list[Path]:
    """The files of the store, without the empty ones that locks are taken on."""
    files = set(directory.iterdir()) if directory.exists() else set()
    assert {path.suffix for path in files} <= {".json", ".lock"}
    return sorted(path for path in files if path.suffix == ".json")


def test_cache_keeps_values_bit_for_bit(cache_dir: Path) -> None:
    compute = Counter()
    first = remember(compute, n=1)
    assert remember(compute, n=1) == first  # from memory
    store.forget()
    assert remember(compute, n=1) == first  # from disk
    assert compute.calls == 1
    assert first == [0.1, 1 / 3, 5e-324]
    with pytest.raises(ValueError, match="read-only"):
        store.remember("k", {"n": 1}, "", compute, bool)["a"][0] = 2
    (path,) = entries(cache_dir)
    assert set(json.loads(path.read_text())) == {"question", "hint"}
    assert {file.stat().st_mode & 0o777 for file in cache_dir.iterdir()} == {0o600}


def test_cache_entries_do_not_collide(cache_dir: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"n": 1},
        {"n": 2},
        {"n": "1"},
        {"n": None},
        {"n": 1, "b": 2},
        {"b": 1},
        {"n": 1, "kind": "j"},
    ]
    for number, parameters in enumerate(asked):
        assert remember(Counter(number), **parameters)[0] == number
    store.forget()
    for number, parameters in enumerate(asked):
        assert remember(Counter(-1), **parameters)[0] == number
    assert len(entries(cache_dir)) == len(asked)


def test_every_parameter_of_a_strategy_is_in_its_key(cache_dir: Path) -> None:
    made = [
        strategies.bandinvmf(2, iterations=12, min_sep=4),
        strategies.bandinvmf(3, iterations=12, min_sep=4),
        strategies.bandinvmf(2, iterations=13, min_sep=4),
        strategies.bandinvmf(2, iterations=12, min_sep=5),
        strategies.bandinvmf(2, iterations=12, min_sep=4, max_participations=2),
        strategies.bandinvmf(2, "max", iterations=12, min_sep=4),
    ]
    for strategy in made:
        strategy.strategy_coef(12)
    assert len(entries(cache_dir)) == len(made)


def _edit(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("null"),
        lambda path: path.write_text("[" * 100_000),
        _edit(lambda entry: entry["hint"].update(a=["0x1p0"])),
        _edit(lambda entry: entry["hint"].update(a="x")),
        _edit(lambda entry: entry["hint"].update(a=["0x1p99999"])),
        _edit(lambda entry: entry["hint"].update(a=[1.0, 2.0, 3.0])),
        _edit(lambda entry: entry.update(hint=["a"])),
        _edit(lambda entry: entry["question"].update(kind="j")),
        _edit(lambda entry: entry.pop("question")),
        _edit(lambda entry: entry.pop("hint")),
    ],
)
def test_a_damaged_or_foreign_file_is_replaced(cache_dir: Path, damage: Callable[[Path], object]) -> None:
    remember(Counter(), n=1)
    (path,) = entries(cache_dir)
    good = path.read_bytes()
    damage(path)
    store.forget()
    compute = Counter()
    assert remember(compute, n=1)[0] == 0.1
    assert compute.calls == 1
    assert path.read_bytes() == good


def test_what_was_read_is_used_only_if_it_holds(cache_dir: Path) -> None:
    asked: list[float] = []

    def remembered(compute: Counter, answer: bool) -> float:
        def holds(values: store.Values) -> bool:
            asked.append(float(values["a"][0]))
            return answer

        store.forget()
        return float(store.remember("k", {"n": 1}, None, compute, holds)["a"][0])

    assert remembered(Counter(1.0), True) == 1.0  # computed here, so nobody needs to ask
    assert remembered(Counter(2.0), True) == 1.0
    assert remembered(Counter(2.0), False) == 2.0
    assert asked == [1.0, 1.0]  # what did not hold is not asked about again
    assert remembered(Counter(3.0), True) == 2.0


@pytest.mark.parametrize("values", [{}, {"b": [1.0]}, {"a": []}, {"a": [float("inf")]}, {"a": [float("nan")]}])
def test_values_of_other_shapes_are_computed_anew(cache_dir: Path, values: dict[str, list[float]]) -> None:
    remember(Counter(), n=1)
    (path,) = entries(cache_dir)
    forge(path, lambda _: values)
    store.forget()
    found = store.remember("k", {"n": 1}, None, Counter(0.7), lambda values: int(values["a"][0]) >= 0)
    assert found["a"][0] == 0.7


def _optimised(**options: object) -> strategies.base.ToeplitzStrategy:
    return strategies.optimised(dpmf.BallsInBins(1, 6), dpmf.workloads.prefix(), (4.0, 1e-4), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: strategies.bandinvmf(3), {"noising_coef": [1.0, 0.5, -0.1]}),
        (lambda: strategies.bandinvmf(3), {"noising_coef": [1.0, -0.9, -0.9]}),
        (lambda: strategies.bandinvmf(3), {"noising_coef": [0.9, -0.5, -0.1]}),
        (lambda: strategies.bandinvmf(3), {"noising_coef": [1.0, float("nan"), 0.0]}),
        (lambda: strategies.bandinvmf(3), {"noising_coef": [1.0, -0.5, -0.1, -0.1]}),
        (lambda: strategies.bandinvmf(3), {"strategy_coef": [1.0]}),
        (lambda: strategies.bandinvmf(3), {"noising_coef": []}),
        (lambda: strategies.bandmf(3), {"strategy_coef": [1.0, -0.5, 0.1]}),
        (lambda: strategies.bandmf(3), {"strategy_coef": [0.0, 0.5, 0.1]}),
        (lambda: strategies.bandmf(3), {"strategy_coef": []}),
        (lambda: strategies.bandmf(3), {"noising_coef": [1.0, -0.5, -0.1]}),
        (lambda: strategies.bandmf(3), {"strategy_coef": [1.0, 0.5, 0.1, 0.1]}),
        (lambda: strategies.blt(1), {"buf_decay": [float("inf")], "output_scale": [0.5]}),
        (lambda: strategies.blt(1), {"strategy_coef": [1.0]}),
        (lambda: strategies.blt(1), {"buf_decay": [0.5], "output_scale": [-0.5]}),
        (lambda: strategies.blt(1), {"buf_decay": [0.5], "output_scale": [0.5, 0.5]}),
        (lambda: _optimised(bandwidth=2), {"strategy_coef": [1.0, -0.5]}),
        (lambda: _optimised(bandwidth=2), {"strategy_coef": [1.0, 0.5, 0.5]}),
        (lambda: _optimised(bandwidth=2), {"estimate": [0.0, 1.0]}),
        (lambda: _optimised(bandwidth=2), {"estimate": [1.0]}),
        (lambda: _optimised(family="inverse", bandwidth=2), {"noising_coef": [1.0, 0.5]}),
        (lambda: _optimised(buffers=1), {"buf_decay": [float("nan")]}),
    ],
)
def test_coefficients_that_accounting_cannot_use_are_found_anew(
    cache_dir: Path, make: Callable[[], strategies.base.ToeplitzStrategy], change: dict[str, list[float]]
) -> None:
    found = make().strategy_coef(6).tolist()
    (path,) = entries(cache_dir)
    good = path.read_bytes()
    store.forget()
    assert make().strategy_coef(6).tolist() == found
    forge(path, lambda values: {**(values if set(change) <= set(values) else {}), **change})
    store.forget()
    assert make().strategy_coef(6).tolist() == found
    assert path.read_bytes() == good


def test_an_unwritable_cache_warns_once_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DPMF_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(store.CacheWarning, match="not cached on disk: .*Not a directory") as caught:
        values = [remember(Counter(), n=n)[0] for n in (1, 2)]
    assert values == [0.1, 0.1]
    assert len(caught) == 1
    shown = warnings.formatwarning(caught[0].message, caught[0].category, caught[0].filename, caught[0].lineno)
    assert shown.count("\n") == 1
    compute = Counter()
    remember(compute, n=1)
    assert compute.calls == 0  # still remembered by this process


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.warns(store.CacheWarning, match="No space left"):
            assert remember(Counter(), n=1)[0] == 0.1
    assert entries(cache_dir) == []


def test_an_interrupted_write_keeps_the_old_file(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(Counter(), n=1)
    (path,) = entries(cache_dir)
    path.write_text("damaged")
    store.forget()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            remember(Counter(), n=1)
    assert [(p, p.read_text()) for p in entries(cache_dir)] == [(path, "damaged")]


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DPMF_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert store.directory() == Path("/somewhere/.cache/dpmf")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert store.directory() == Path("/somewhere/.cache/dpmf")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert store.directory() == Path("/xdg/dpmf")
    monkeypatch.setenv("DPMF_CACHE_DIR", "/own")
    assert store.directory() == Path("/own")


def test_no_home_directory_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(store, "directory", homeless)
    with pytest.warns(store.CacheWarning, match="set DPMF_CACHE_DIR"):
        assert remember(Counter(), n=1)[0] == 0.1


def test_memory_is_bounded(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MEMO_SIZE", 3)
    for n in range(9):
        remember(Counter(n), n=n)
    assert len(store._memo) == 3


def test_progress_line(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategies.bandinvmf(2).strategy_coef(10)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"dpmf: optimising BandInvMF\(p=2\) for N=10 \.\.\. \d+\.\d s\n", shown.err)
    store.forget()
    strategies.bandinvmf(2).strategy_coef(10)
    assert capsys.readouterr() == ("", "")


def test_a_listener_is_told_instead(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    with progress.listening(told.append):
        strategies.bandinvmf(2).strategy_coef(10)
    assert told == ["optimising BandInvMF(p=2) for N=10"]
    assert capsys.readouterr() == ("", "")


def test_progress_line_on_failure(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> store.Values:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        remember(fail)
    assert capsys.readouterr().err == "dpmf: optimising Work for N=1 ... failed\n"
    assert entries(cache_dir) == []


def test_progress_on_a_terminal(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    remember(Counter())
    last = terminal.getvalue().removesuffix("\n").rsplit("\x1b[2K", 1)[-1]
    assert re.fullmatch(r"dpmf: optimising Work for N=1 \.\.\. \d+\.\d s", last)


def test_progress_without_stderr(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert remember(Counter())[0] == 0.1


# --- several processes ---------------------------------------------------------------------------------------------

# Notes that it begins, computes until the file `go` is there, and prints what it has in the end.
WORK = """
import sys, time
from pathlib import Path
import numpy as np
from dpmf import store

place = Path(sys.argv[1])

def compute():
    with open(place / "begun", "a") as notes:
        notes.write(sys.argv[2] + "\\n")
    while not (place / "go").exists():
        time.sleep(0.01)
    return {"a": np.array([float(sys.argv[2])])}

print(store.remember("k", {"n": 1}, "Work", compute, bool)["a"].tolist())
"""


def start(place: Path, name: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "DPMF_CACHE_DIR": str(place / "cache")}
    return subprocess.Popen(
        [sys.executable, "-c", WORK, str(place), name],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def begun(place: Path) -> list[str]:
    return (place / "begun").read_text().split() if (place / "begun").exists() else []


def test_two_processes_compute_once(tmp_path: Path) -> None:
    first = start(tmp_path, "1")
    until(lambda: begun(tmp_path) == ["1"])
    second = start(tmp_path, "2")
    # It has said that it waits, so it is past looking on disk.
    assert "waiting for another process that is optimising Work" in second.stderr.readline()
    (tmp_path / "go").touch()
    assert first.communicate(timeout=60)[0] == second.communicate(timeout=60)[0] == "[1.0]\n"
    assert begun(tmp_path) == ["1"]
    assert len(entries(tmp_path / "cache")) == 1


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    first = start(tmp_path, "1")
    until(lambda: begun(tmp_path) == ["1"])
    second = start(tmp_path, "2")
    assert "waiting" in second.stderr.readline()
    first.kill()
    first.communicate()
    until(lambda: begun(tmp_path) == ["1", "2"])
    (tmp_path / "go").touch()
    assert second.communicate(timeout=60)[0] == "[2.0]\n"
    third = start(tmp_path, "3")
    assert third.communicate(timeout=60)[0] == "[2.0]\n"
    assert len(entries(tmp_path / "cache")) == 1


def test_threads_compute_once(cache_dir: Path) -> None:
    compute = Counter()
    slow = threading.Event()

    def work() -> store.Values:
        slow.wait(0.2)
        return compute()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: remember(work, n=1), range(8)))
    assert compute.calls == 1
    assert len({tuple(one) for one in found}) == 1


def test_one_does_not_wait_for_ever(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """For a process that holds the lock and is stopped."""
    remember(Counter(), n=1)
    (path,) = entries(cache_dir)
    path.unlink()
    store.forget()
    capsys.readouterr()
    monkeypatch.setattr(store, "_PATIENCE", 0.2)
    compute = Counter()
    with FileLock(path.with_name(f".{path.name}.lock")):
        assert remember(compute, n=2)[0] == 0.1  # has a lock of its own
        assert "waiting" not in capsys.readouterr().err
        assert remember(compute, n=1)[0] == 0.1
    assert "waiting for another process that is optimising Work for N=1\n" in capsys.readouterr().err
    assert compute.calls == 2
    assert len(entries(cache_dir)) == 2


@pytest.mark.parametrize("trouble", [OSError(errno.ENOLCK, "No locks available"), PermissionError(13, "no"), None])
def test_without_locks_the_work_goes_on(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, trouble: OSError | None
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError if trouble is None else trouble

    monkeypatch.setattr(FileLock, "acquire", refuse)
    compute = Counter()
    for _ in range(2):
        assert remember(compute, n=1) == [0.1, 1 / 3, 5e-324]
        store.forget()
    assert compute.calls == 1
