"""What building the site needs beyond MkDocs: the menu, formulas as MathML, tables and pictures that fit a phone.

Formulas are turned into MathML when the site is built: every browser shows that by itself, so no script is loaded, from
here or from elsewhere. A formula that cannot be read stops the build.
"""

from __future__ import annotations

import html
import re
import unicodedata
from pathlib import Path
from typing import Any

# Pages in the order of the menu; one that is not there is left out, one that is not listed comes last in its section.
ORDER: dict[str, list[str]] = {
    "Start": ["index.md", "mechanisms.md", "start.md", "concepts.md", "batchings.md", "explore.md"],
    "How to": [
        "howto/calibrate.md",
        "howto/compare.md",
        "howto/own-matrix.md",
        "howto/report.md",
        "howto/compose.md",
        "howto/train-pytorch.md",
        "howto/train-huggingface.md",
        "howto/train-lightning.md",
        "howto/train-jax.md",
        "howto/reproduce.md",
    ],
    "In depth": [
        "accountants.md",
        "training.md",
        "noise.md",
        "ecosystem.md",
        "tightness.md",
        "soundness.md",
        "extremes.md",
    ],
    "Results": ["results.md", "benchmarks.md"],
    "Theory": [
        "theory/index.md",
        "theory/gram-domination.md",
        "theory/discretisation.md",
        "theory/chain.md",
        "theory/majorants.md",
        "theory/moments.md",
        "theory/own_bin.md",
        "theory/cascade.md",
        "theory/conditional.md",
        "theory/batchings.md",
        "theory/batch-sizes.md",
        "theory/randomness.md",
        "theory/monte_carlo.md",
        "theory/lower_bounds.md",
        "theory/floating-point.md",
    ],
    "Reference": [
        "reference/api.md",
        "reference/strategies.md",
        "reference/accountants.md",
        "reference/results.md",
        "reference/cli.md",
        "notation.md",
        "faq.md",
        "advisories.md",
    ],
}
_SECTION_OF_FOLDER = {"howto": "How to", "theory": "Theory", "reference": "Reference"}
# A display in the middle of a paragraph comes as an inline formula between two dollar signs.
_FORMULA = re.compile(r'(\$?)<(span|div) class="arithmatex">(.*?)</\2>\1', flags=re.DOTALL)
_LETTERS = re.compile(r'<(m\w+) mathvariant="(double-struck|script|bold|fraktur|sans-serif)">(\w)</\1>')
_DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
_LINK_UP = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")
_EVERY_COMMAND = "<!-- every command -->"
_EVERY_ACCOUNTANT = "<!-- every accountant -->"
_TABLE = re.compile(r"<table>.*?</table>", flags=re.DOTALL)
_HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", flags=re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", flags=re.DOTALL)
_ENTRY = re.compile(r"<td\b([^>]*)>(.+?)</td>", flags=re.DOTALL)
_MARKUP = re.compile(r"<[^>]*>")
_IMAGE = re.compile(r'<img [^>]*src="([^":]+\.png)"[^>]*>')
_LONG = 45  # a formula in the text with more letters of TeX may be wider than a phone, and can then be moved sideways
_NORM = re.compile(r"\\[lr]Vert\b")
_TAG = re.compile(r"\\tag\{([^}]*)\}")


def navigation(docs: Path) -> list[dict[str, list[str]]]:
    """The menu: the pages of ORDER that exist, then the others."""
    there = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    menu = {section: [page for page in pages if page in there] for section, pages in ORDER.items()}
    for page in sorted(there - {page for pages in menu.values() for page in pages}):
        menu[_SECTION_OF_FOLDER.get(page.split("/")[0], "In depth")].append(page)
    return [{section: pages} for section, pages in menu.items() if pages]


def mathml(latex: str, display: bool) -> str:
    """A formula as MathML; its \\tag, if it has one, beside it."""
    from latex2mathml.converter import convert

    tag = _TAG.search(latex)
    plain = _NORM.sub(r"\\Vert", _TAG.sub("", latex)).strip()
    body = _LETTERS.sub(_letter, convert(plain, display="block" if display else "inline"))
    if not display:
        return f'<span class="long">{body}</span>' if len(latex) > _LONG else body
    return f'<span class="equation">{body}<span>{f"({tag[1]})" if tag else ""}</span></span>'


def _letter(found: re.Match[str]) -> str:
    """Browsers ignore most values of mathvariant; Unicode has the letters themselves."""
    element, style, character = found[1], found[2].upper(), found[3]
    if character.isdigit():
        kind = f"DIGIT {_DIGITS[int(character)]}"
    elif character.isascii():
        kind = ("CAPITAL " if character.isupper() else "SMALL ") + character.upper()
    else:
        return found[0]
    for name in (f"MATHEMATICAL {style} {kind}", f"{style} {kind}"):
        try:
            return f"<{element}>{unicodedata.lookup(name)}</{element}>"
        except KeyError:
            continue
    return found[0]


def on_config(config: Any) -> Any:
    config.nav = navigation(Path(config.docs_dir))
    return config


def without_links_outside(markdown: str, page: Path, docs: Path) -> str:
    """Links to files of the repository that are not on the site become their text: they work where the files are."""

    def replace(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        return found[0] if target.is_relative_to(docs.resolve()) or not target.exists() else found[1]

    return _LINK_UP.sub(replace, markdown)


def every_command() -> str:
    """The commands with their options, as ``--help`` has them."""
    import typer

    from dpmf import cli

    parts = []
    for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        rows = ["| option | | default |", "|---|---|---|"]
        for option in command.params:
            if not getattr(option, "hidden", False):
                names = ", ".join(f"`{word}`" for word in (*option.opts, *option.secondary_opts))
                words = str(getattr(option, "help", None) or "").replace("|", "\\|").replace("<", "&lt;")
                default = "required" if option.required else "" if option.default in (None, False) else option.default
                rows.append(f"| {names} | {words} | {default} |")
        parts.append(f"## dpmf {name}\n\n{command.help}\n\n" + "\n".join(rows if len(rows) > 2 else []))
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The references of accountants and commands list those that there are."""
    if _EVERY_COMMAND in markdown:
        markdown = markdown.replace(_EVERY_COMMAND, every_command())
    markdown = without_links_outside(markdown, Path(page.file.abs_src_path), Path(config.docs_dir))
    if _EVERY_ACCOUNTANT not in markdown:
        return markdown
    from dpmf.accountants import ACCOUNTANTS

    entries = "\n\n".join(f"::: {cls.__module__}.{cls.__name__}" for cls in ACCOUNTANTS.values())
    return markdown.replace(_EVERY_ACCOUNTANT, entries)


def with_heads(content: str) -> str:
    """Give each entry of a table the head of its column, which the style sheet shows on a phone."""

    def labelled(table: re.Match[str]) -> str:
        heads = [html.escape(html.unescape(_MARKUP.sub("", head)).strip()) for head in _HEAD.findall(table[0])]

        def row(found: re.Match[str]) -> str:
            left = iter(heads)
            return _ENTRY.sub(
                lambda entry: f'<td data-head="{next(left, "")}"{entry[1]}><span>{entry[2]}</span></td>', found[0]
            )

        return _ROW.sub(row, table[0])

    return _TABLE.sub(labelled, content)


def for_phones(content: str, page: Path) -> str:
    """Offer a picture's narrow twin (``name-phone.png``), where there is one, to narrow screens."""

    def replace(found: re.Match[str]) -> str:
        twin = found[1].replace(".png", "-phone.png")
        if not (page.parent / twin).is_file():
            return found[0]
        return f'<picture><source media="(max-width: 44.9375em)" srcset="{twin}">{found[0]}</picture>'

    return _IMAGE.sub(replace, content)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    content = for_phones(with_heads(content), Path(page.file.abs_src_path))

    def replace(found: re.Match[str]) -> str:
        text = html.unescape(found[3]).strip()
        display = text.startswith("\\[") or found[1] == "$"
        try:
            if "</span>" in text:
                raise ValueError("two formulas became one; separate them by an empty line")
            return mathml(text[2:-2], display)
        except Exception as error:
            raise ValueError(f"{page.file.src_path}: no formula: {text} ({type(error).__name__}: {error})") from error

    return _FORMULA.sub(replace, content)
