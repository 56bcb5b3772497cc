"""``dpmf report``: one HTML file with everything in it, or one line that says what is wrong."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dpmf
from dpmf import cli, formatting
from dpmf.accountants import Best, Gaussian, Renyi
from dpmf.web.document import html
from dpmf.web.pictures import drawn
from dpmf.web.recipe import shell
from dpmf.web.request import Request
from dpmf.web.view import Row, View, views

pytestmark = pytest.mark.usefixtures("coarse_lower_bounds")

MECHANISM = ["--strategy", "bsr", "--bandwidth", "2", "--epochs", "1", "--batches-per-epoch", "12"]
TARGET = ["--epsilon", "2", "--delta", "1e-5"]


def run(*words: str) -> int:
    """The exit status of `dpmf report`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dpmf", "report", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


class Elements(HTMLParser):
    """Every tag with its attributes, and the text of the table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "td":
            self.cells.append("")
        self._inside = tag == "td"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def written(coarse_lower_bounds: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("report")
    assert run(*MECHANISM, *TARGET, "--accountant", "gaussian,renyi", "--output", str(directory / "r.html")) == 0
    assert [path.name for path in directory.iterdir()] == ["r.html"]
    return (directory / "r.html").read_text()


def test_the_numbers_are_those_of_the_api(written: str) -> None:
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.BallsInBins(1, 12))
    cells = Elements(written).cells
    for name in ("gaussian", "renyi"):
        found = dpmf.calibrate(
            mechanism, target_epsilon=2.0, target_delta=1e-5, accountant=name, with_lower=name == "renyi"
        )
        printed = cells[cells.index(name) + 1]
        assert printed == formatting.upper(found.noise_multiplier)
        assert float(printed) >= found.noise_multiplier
    assert cells[cells.index("lower bound") + 1] == formatting.lower(found.lower)
    curve = dpmf.tradeoff(
        mechanism, noise_multiplier=found.noise_multiplier, accountant=Best(accountants=(Gaussian(), Renyi()))
    )
    assert cells[cells.index("μ (Gaussian DP, up to 1e-09)") + 1] == formatting.upper(curve.mu, 4)
    assert "Rényi divergence of order 2" in cells
    assert "BSR(p=2), k=1, b=12" in written
    assert "dpmf report " + " ".join(MECHANISM) in written
    assert "dpmf.strategies.bsr(bandwidth=2)" in written


def test_it_needs_nothing_but_itself(written: str) -> None:
    elements = Elements(written)
    names = [tag for tag, _ in elements.tags]
    assert names.count("svg") == 3  # δ(ε), the Gram matrix and the trade-off curve
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(names)
    for tag, attributes in elements.tags:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                assert value is not None
                assert value.startswith(("#", "data:")), (tag, value)
            assert not name.startswith("on")
    assert "@import" not in written
    assert re.findall(r"url\((?!#)[^)]*\)", written) == []
    policy = [a for t, a in elements.tags if t == "meta" and "content" in a]
    assert "default-src 'none'" in str(policy)


def test_names_cannot_inject_markup() -> None:
    nasty = "<script>alert(1)</script>"
    view = View(nasty, 1.0, 1e-5, "both", (Row(nasty, 1.0), Row("b", problem=nasty)), curves={}, complete=True)
    request = Request("matrix", 1, 2, 1.0, 1e-5, file=f"{nasty}; rm -rf x")
    text = html(view, request, {})
    assert "<script>" not in text
    assert "'<script>" not in shell(request, ["b"]).replace("'<script>alert(1)</script>; rm -rf x'", "")


def test_a_view_without_any_noise_multiplier_is_still_a_report() -> None:
    request = Request("bsr", 1, 6, 2.0, 1e-5, bandwidth=2)
    *_, view = views(request.mechanism(), request, accountants=("lattice",))
    text = html(view, request, drawn(view))
    assert "No accountant found a noise multiplier" in text
    assert text.count("<svg") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "r.txt"], "output must end in .html"),
        (["--output", "missing/r.html"], "output must be in an existing directory"),
        (["--output", "d.html"], "output must be a file, got the directory"),
        (["--output", "r.html", "--accountant", "nonsense"], "--accountant must be one of"),
        (["--output", "r.html", "--noise-multiplier", "-1"], "--noise-multiplier must be positive"),
        (["--output", "r.html", "--direction", "sideways"], "--direction must be one of"),
    ],
)
def test_what_is_wrong_is_one_line_and_no_file(
    words: list[str], message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "d.html").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(*MECHANISM, *TARGET, *words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("dpmf: ")
    assert message in said.err
    assert said.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["d.html"]
