"""The benchmarks' page, fits, and what is said when a peer cannot be had. Nothing is timed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import _page, batchings, beside, growth, peers
from benchmarks._journal import Journal

DATA = _page.load()


def test_the_page_is_made_from_the_data() -> None:
    assert _page.page(DATA) == _page.PAGE.read_text()
    assert _page.PICTURE.exists()
    assert _page.GROWTH_PICTURE.exists()


def test_the_page_says_what_made_it() -> None:
    found = {"machine": "a machine", "load": 0.5, "minutes": 3.0, "code": "0.1.0+abc"}
    made = _page.page(
        {"beside": DATA["beside"] | found | {"peers": {"other": "2.0"}}, "growth": DATA["growth"] | found}
    )
    assert "a machine, load average 0.5 when it began, 3 minutes, code `0.1.0+abc`" in made
    assert "Peers: other 2.0." in made
    assert _page.COMMAND in made


def test_exponents_are_those_of_the_upper_half() -> None:
    """A fixed cost of 1 and a power law that is far below it in the lower half."""
    points = [(10.0**i, 1 + 1e-6 * 10.0 ** (2 * i)) for i in range(9)]
    exponent, _ = _page.fitted(points)
    assert _page.upper_half(points)[0][0] == 1e4
    assert exponent == pytest.approx(2, abs=0.02)
    short = [(1.0, 3.0), (2.0, 9.0), (3.0, 27.0), (100.0, 3.0**100)]
    assert len(_page.upper_half(short)) == 3
    assert _page.fitted([(float(p), 2.5**p) for p in range(2, 8)])[1] == pytest.approx(2.5)


def test_sweeps_are_wide() -> None:
    """A decade and a half, except for Rényi in the bandwidth, which is exponential."""
    found = growth.sweeps()
    assert {grows for _, grows in found} == {"N", "b", "k", "p", "τ", "α", "1/δ"}
    for (name, grows), sweep in found.items():
        xs = [x for x, _ in sweep]
        assert xs == sorted(xs)
        assert xs[-1] >= 30 * xs[0] or (name.startswith("renyi") and grows == "p"), (name, grows)
        assert len(_page.upper_half([(float(x), 1.0) for x in xs])) >= 3


def test_everybody_is_asked() -> None:
    titles = beside.mechanisms()
    for title, mechanism in titles.items():
        names = " ".join(beside.questions(mechanism, [1.0, 1.0]))
        wanted = ["best", "auto", "cascade", "renyi", "conditional", "monte-carlo", "jax-privacy Monte Carlo"]
        wanted += ["lattice", "PLD-accounting", "random-allocation", "Poisson"] if "DP-SGD" in title else ["chain"]
        assert all(name in names for name in wanted), title


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise ValueError('no such thing')", "random-allocation does not work .*: ValueError"),
        ("print('no number')", "random-allocation does not work"),
        ("pass", "random-allocation does not work"),
    ],
)
def test_a_peer_that_does_not_work_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    monkeypatch.setattr(peers, "_python", lambda peer: Path(sys.executable))
    with pytest.raises(peers.PeerMissingError, match=message) as raised:
        peers.run("random-allocation", program, {})
    assert "\n" not in str(raised.value)


def test_a_peer_that_cannot_be_installed_is_one_line_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "REQUIREMENTS", {"other": [str(tmp_path / "there-is-no-such-file")]})
    asked: list[str] = []
    honest = subprocess.run

    def run(command: list[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
        """An environment takes seconds to make: the second time it is there."""
        asked.append(str(command[2]))
        if asked == ["venv", "pip", "venv"]:
            return subprocess.CompletedProcess([str(word) for word in command], 0)
        return honest(command, **options)

    monkeypatch.setattr(peers.subprocess, "run", run)
    for _ in range(2):
        with pytest.raises(peers.PeerMissingError, match=r"other cannot be installed into \.venv-other: ") as raised:
            peers.run("other", "", {})
        assert "\n" not in str(raised.value)
    assert asked == ["venv", "pip", "venv", "pip"]
    assert not (tmp_path / ".venv-other" / ".ready").exists()


def test_a_peer_without_its_python_or_its_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PYTHONS", {"other": (3, 99)})
    with pytest.raises(peers.PeerMissingError, match=r"other needs Python 3\.99, which is not installed"):
        peers.run("other", "", {})
    monkeypatch.setattr(peers, "_python", lambda peer: Path(sys.executable))
    with pytest.raises(peers.PeerMissingError, match=r"other has no answer within 0\.1 s"):
        peers.run("other", "import time; time.sleep(9)", {}, 0.1)


def test_a_peer_has_a_limit_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_python", lambda peer: Path(sys.executable))
    with pytest.raises(peers.NoAnswerError, match=r"other has no answer within 1 s"):
        peers.run("other", "while True: pass", {}, 1.0)
    assert peers.run("other", "import time; time.sleep(1.5); print(3)", {}, 1.0) == 3  # waiting is no work


def test_every_batching_is_asked_and_shown() -> None:
    found = [question for epsilon in batchings.BANDWIDTHS for question in batchings.questions(epsilon)]
    asked = {(question.batching, question.who.partition(",")[0]) for question in found}
    both = {(batching, who) for batching in ("fixed", "reshuffled", "cyclic Poisson") for who in ("dpmf", "opake")}
    assert both | {("b-min-sep", "opake"), ("cyclic Poisson", "dp_accounting"), ("any", "dpmf")} == asked
    assert len([question for question in found if question.limit]) == 15
    assert len({(str(question.asked), question.by) for question in found}) == len(found)
    assert batchings.error([1.0], 2.0) == pytest.approx(2 * 500.5**0.5)
    row = {"batching": "fixed", "who": "opake, BSR(p=4)", "epsilon": 1.0, "sigma": 3.911, "error": 30.12,
           "guarantee": "fails with probability 1e-06", "seconds": 200.0, "machine": "some machine"}  # fmt: skip
    none = {"batching": "b-min-sep", "who": "opake, X", "epsilon": 1.0, "guarantee": "no answer within 600 s"}
    kept = {"machine": "a machine", "load": 0.5, "minutes": 3.0, "code": "0.1.0+abc", "rows": [row, none]}
    made = _page.page({**DATA, "batchings": kept | {"peers": {"opake": "0.16.1"}}})
    assert "| fixed | opake, BSR(p=4) | 3.911 | 30.12 | fails with probability 1e-06 | 200 |" in made
    assert "| b-min-sep | opake, X |  |  | no answer within 600 s |  |" in made
    assert "they were measured on some machine." in made
    assert "opake 0.16.1" in made
    records = _page.records("batchings", kept | {"peers": {}}, "code")
    assert records[1].cell.parameters == {"batching": "fixed", "who": "opake, BSR(p=4)", "epsilon": 1.0}


class FakePeer:
    """Answers with σ = 1, 2, 3, ..., except when it is stopped or out of time; counts what it is asked."""

    def __init__(self, *fails: BaseException | None) -> None:
        self.fails, self.times = list(fails), 0

    def __call__(self) -> dict[str, object]:
        fail = self.fails.pop(0) if self.fails else None
        if fail is not None:
            raise fail
        self.times += 1
        return {"sigma": float(self.times), "seconds": 1.0, "guarantee": "proved", "column": [1.0]}


def asked_of(peer: FakePeer, by: str = "opake 1.0", limit: float | None = 600.0) -> list[batchings.Question]:
    who = by.partition(" ")[0]
    return [batchings.Question("fixed", f"{who}, C{i}", 1.0, peer, {"C": i}, by, limit) for i in range(3)]


def test_answers_are_kept_as_they_come_and_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "batchings.jsonl"
    theirs, mine = FakePeer(None, None, KeyboardInterrupt()), FakePeer()
    monkeypatch.setattr(batchings, "BANDWIDTHS", {1.0: 4})
    monkeypatch.setattr(batchings, "questions", lambda _: asked_of(mine, "dpmf 1", None) + asked_of(theirs))
    with pytest.raises(KeyboardInterrupt):
        batchings.measure(Journal(path))
    assert (theirs.times, mine.times) == (2, 0)  # the slow ones come first
    path.write_bytes(path.read_bytes() + b'{"question": {"C"')  # as a kill may leave it
    rows = batchings.measure(Journal(path))
    assert (theirs.times, mine.times) == (3, 3)
    assert [row["who"] for row in rows] == [f"{who}, C{i}" for who in ("dpmf", "opake") for i in range(3)]
    assert batchings.measure(Journal(path)) == rows
    assert (theirs.times, mine.times) == (3, 3)
    # When our own code changes, theirs are kept; another version of theirs is asked anew.
    monkeypatch.setattr(batchings, "questions", lambda _: asked_of(mine, "dpmf 2", None) + asked_of(theirs))
    batchings.measure(Journal(path))
    assert (theirs.times, mine.times) == (3, 6)
    monkeypatch.setattr(batchings, "questions", lambda _: asked_of(theirs, "opake 1.1"))
    batchings.measure(Journal(path))
    assert theirs.times == 6


def test_an_answer_that_took_too_long_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "batchings.jsonl")
    slow = FakePeer(peers.NoAnswerError("too slow"))
    monkeypatch.setattr(batchings, "BANDWIDTHS", {1.0: 4})
    monkeypatch.setattr(batchings, "questions", lambda _: asked_of(slow))
    rows = batchings.measure(journal)
    assert rows[0]["guarantee"] == "no answer within 600 s"
    assert "sigma" not in rows[0]
    assert batchings.measure(journal) == rows
    monkeypatch.setattr(batchings, "questions", lambda _: asked_of(slow, limit=900.0))
    assert batchings.measure(journal)[0]["sigma"] == 3.0  # with more time, it is asked again


def test_opake_can_be_asked_alone_or_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "batchings.jsonl")
    theirs, mine = FakePeer(), FakePeer()
    monkeypatch.setattr(batchings, "BANDWIDTHS", {1.0: 4})
    monkeypatch.setattr(batchings, "questions", lambda _: asked_of(mine, "dpmf 1", None) + asked_of(theirs))
    rows = batchings.measure(journal, whom="ours")
    assert (theirs.times, mine.times) == (0, 3)
    assert rows[3] == {"batching": "fixed", "who": "opake, C0", "epsilon": 1.0, "guarantee": "not asked yet"}
    assert [row["who"] for row in batchings.measure(journal, whom="opake")] == [f"opake, C{i}" for i in range(3)]
    assert (theirs.times, mine.times) == (3, 3)
    assert "sigma" in batchings.measure(journal, whom="ours")[3]


def test_what_a_peer_answered_is_known_from_the_data_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = FakePeer()
    monkeypatch.setattr(batchings, "BANDWIDTHS", {1.0: 4})
    monkeypatch.setattr(batchings, "questions", lambda _: asked_of(theirs))
    rows = batchings.measure(Journal(tmp_path / "one.jsonl"))
    kept = {"machine": "a machine", "load": 0.5, "minutes": 3.0, "rows": rows}
    monkeypatch.setattr(_page, "DATA", tmp_path / "benchmarks.json")
    _page.keep(_page.records("batchings", kept, "code"))
    monkeypatch.setattr(batchings, "JOURNAL", tmp_path / "two.jsonl")
    assert batchings.measure(batchings.known()) == rows
    assert theirs.times == 3


def test_an_unknown_name_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nonsense"], capture_output=True, text=True, cwd=peers.ROOT, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("benchmarks: unknown nonsense; there are batchings, beside, ")
    assert done.stderr.count("\n") == 1
