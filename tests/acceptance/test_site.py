"""The documentation site builds without a warning, needs nothing from elsewhere, and leaves no page out."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import paths
import pytest
from browser import chromium, resize
from waiting import until

ROOT = paths.ROOT
DOCS = ROOT / "docs"

pytest.importorskip("mkdocs", reason="the site needs the extra [docs]")
pytest.importorskip("mkdocstrings", reason="the site needs the extra [docs]")
pytest.importorskip("latex2mathml", reason="the site needs the extra [docs]")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return target


class Fetched(HTMLParser):
    """What a browser would load by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and attributes.get("src"):
            self.addresses.append(str(attributes["src"]))
        if tag == "link" and attributes.get("rel") not in ("canonical", "prev", "next", "edit"):
            self.addresses.append(str(attributes.get("href")))


def test_every_page_is_built_and_in_the_menu(site: Path, hooks: ModuleType) -> None:
    listed = [page for section in hooks.navigation(DOCS) for pages in section.values() for page in pages]
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(there)
    for page in listed:
        assert (site / page).with_suffix(".html").is_file()
    menu = (site / "index.html").read_text()
    for page in listed:
        assert f'href="{Path(page).with_suffix(".html").as_posix()}"' in menu


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for address in Fetched(page.read_text()).addresses:
            assert "//" not in address, (page.name, address)
            # The page for addresses that do not exist is served from anywhere, so its links are absolute.
            base = site if page.name == "404.html" else page.parent
            assert (base / address.lstrip("/").split("?")[0].split("#")[0]).exists(), (page.name, address)


# Whatever is wider than the screen or than its own box. A display formula may be moved sideways on a phone.
TOO_WIDE = """
const content = document.querySelectorAll(
  "[data-page] pre, [data-page] code, [data-page] table, [data-page] .md-typeset__scrollwrap, [data-page] img"
);
const wide = [...content].filter((e) =>
  e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 || e.getBoundingClientRect().right > innerWidth + 1
);
if (document.documentElement.scrollWidth > innerWidth) wide.push(document.documentElement);
return wide.map((e) => (e.closest("[data-page]") ?? e).dataset.page + ": " + e.textContent.slice(0, 60));
"""
ARTICLE = re.compile(r'(<article class="md-content__inner md-typeset">)(.*)(?=</article>)', flags=re.DOTALL)


def all_in_one(site: Path) -> str:
    """The first page with the contents of every page in it: one page for the browser to load."""
    contents = []
    for page in sorted(site.rglob("*.html")):
        found = ARTICLE.search(page.read_text())
        if found is not None:
            above = "/".join(page.relative_to(site).parts[:-1])
            text = re.sub(r'(src|srcset)="(?=\.\./)', rf'\1="{above}/', found[2]) if above else found[2]
            contents.append(f'<div data-page="{page.relative_to(site)}">{text}</div>')
    assert len(contents) > 40
    return ARTICLE.sub(lambda found: found[1] + "\n".join(contents), (site / "index.html").read_text())


def test_from_disk_pages_can_be_searched_and_nothing_is_cut_off(site: Path, tmp_path: Path) -> None:
    everything = site / "all-in-one.htm"
    everything.write_text(all_in_one(site))
    with chromium(tmp_path / "profile") as browser:
        browser.get(everything.as_uri())
        for width in (1400, 390):
            resize(browser, width)
            browser.execute_async_script("setTimeout(arguments[0], 400)")  # the header glides to its new width
            assert browser.execute_script(TOO_WIDE) == []
        browser.get((site / "theory" / "chain.html").as_uri())
        resize(browser, 1400)
        field = browser.find_element("css selector", ".md-search__input")
        until(field.is_displayed)
        field.click()
        field.send_keys("cyclic Poisson")
        until(lambda: bool(browser.find_elements("css selector", ".md-search-result__link")))
        found = browser.find_elements("css selector", ".md-search-result__link")
        assert any("/batchings.html" in str(link.get_attribute("href")) for link in found)


def test_scripts_and_data_are_not_published(site: Path) -> None:
    assert not list(site.rglob("*.py"))
    assert not (site / "data").exists()


def test_formulas_are_mathml(site: Path) -> None:
    notation = (site / "notation.html").read_text()
    assert notation.count("<math") > 20
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'class="arithmatex"' not in text, page.name
        assert not re.search(r"\\(?:frac|sum|mathbb|varepsilon|langle)\b", text), page.name
        # A command that the converter does not know stays as it is.
        assert not re.search(r"\\[A-Za-z|]+</m\w+>", text), page.name


@pytest.mark.parametrize(
    ("latex", "parts"),
    [
        (r"\mathbb E A", ["𝔼"]),
        (r"\mathcal N(0, 1)", ["𝒩"]),
        (r"\mathbf 1", ["𝟏"]),
        (r"\mathbb R", ["ℝ"]),
        (r"a \le b \tag{7}", ["<span>(7)</span>"]),
        (r"\frac{a}{b}", ["<mfrac>"]),
    ],
)
def test_letters_and_tags(hooks: ModuleType, latex: str, parts: list[str]) -> None:
    made = hooks.mathml(latex, display=True)
    for part in parts:
        assert part in made
    assert "mathvariant" not in made
    assert "tag" not in made


def test_the_reference_has_the_public_functions_and_their_guarantees(site: Path) -> None:
    functions = (site / "reference" / "api.html").read_text()
    for name in ("calibrate", "epsilon", "delta", "profile", "lower_noise_multiplier", "BallsInBins", "Mechanism"):
        assert re.search(rf'id="dpmf\.[\w.]*\b{name}"', functions), name
    assert functions.count("Formal guarantees") >= 6
    from dpmf.accountants import ACCOUNTANTS

    accountants = (site / "reference" / "accountants.html").read_text()
    for accountant in ACCOUNTANTS.values():
        assert f'id="{accountant.__module__}.{accountant.__name__}"' in accountants, accountant.__name__


def test_the_reference_has_every_command_and_its_options(site: Path) -> None:
    page = (site / "reference" / "cli.html").read_text()
    for words in (
        "dpmf calibrate",
        "dpmf explore",
        "dpmf report",
        "--batches-per-epoch",
        "--no-browser",
        "--time-limit",
    ):
        assert words in page


def test_links_to_the_repository_become_text(hooks: ModuleType, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "code.py").write_text("")
    (docs / "page.md").write_text("")
    text = "[a](../code.py#L3) [b](../docs/page.md) [c](../missing.py) ![d](../code.py)"
    expected = text.replace("[a](../code.py#L3)", "a")
    assert hooks.without_links_outside(text, docs / "page.md", docs) == expected


def test_pages_that_others_add_find_their_place(hooks: ModuleType, tmp_path: Path) -> None:
    for name in ("index.md", "theory/new.md", "theory/index.md", "howto/new.md", "another.md", "faq.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# x\n")
    assert hooks.navigation(tmp_path) == [
        {"Start": ["index.md"]},
        {"How to": ["howto/new.md"]},
        {"In depth": ["another.md"]},
        {"Theory": ["theory/index.md", "theory/new.md"]},
        {"Reference": ["faq.md"]},
    ]
