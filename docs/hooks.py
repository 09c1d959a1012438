"""Hooks of mkdocs: links that leave docs/, and where the library's sources are.

Pages link to files beside docs/ as GitHub needs it, `../examples/digits.py`. On the
site

- a page (`../README.md`), an example and a module are pages below repository/, made
  from the files where they stand;
- any other file is a link to the repository, if `repo_url` in mkdocs.yml names one,
  else its link's text alone.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
INSIDE = "repository"  # where files beside docs/ are on the site
SHOWN = ("examples", "kerasdist", "callbacks")  # whose files are shown as code
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}

_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_sources: list[tempfile.TemporaryDirectory[str]] = []


@event_priority(100)  # before mkdocstrings looks at its settings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version; lay out the sources as they are installed.

    callbacks/ is inside of the package then.
    """
    text = (ROOT / "kerasdist/_version.py").read_text(encoding="utf-8")
    config.site_name += " " + text.split("__version__ = ")[1].split('"')[1]
    folder = tempfile.TemporaryDirectory(prefix="kerasdist-docs-")
    _sources.append(folder)
    package = Path(folder.name) / "kerasdist"
    ignore = shutil.ignore_patterns("__pycache__")
    for source, target in (
        ("kerasdist", package),
        ("callbacks", package / "callbacks"),
    ):
        shutil.copytree(ROOT / source, target, copy_function=os.symlink, ignore=ignore)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [folder.name]
    return config


def on_shutdown() -> None:
    """Remove the layout of the sources."""
    while _sources:
        _sources.pop().cleanup()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages and examples that are linked, also indirectly."""
    waiting = [page.src_uri for page in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        place = _of_site(waiting.pop())
        if place.suffix != ".md":
            continue
        for _, _, target in _LINK.findall(_FENCED.sub("", place.read_text("utf-8"))):
            found = _resolve(place, target.partition("#")[0])
            uri = None if found is None else _on_site(found)
            if uri is None or uri in seen or not uri.startswith(INSIDE):
                continue
            seen.add(uri)
            waiting.append(uri)
            files.append(File.generated(config, uri, content=_content(found)))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Rewrite the links that leave docs/."""
    place = _of_site(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, mark, anchor = target.partition("#")
        found = _resolve(place, path)
        if found is None:
            return match[0]
        if not found.exists():
            raise PluginError(f"{place.relative_to(ROOT)}: no such file: {target}")
        uri = _on_site(found)
        if uri is not None:
            there = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
            return f"{image}[{text}]({there}{mark}{anchor})"
        if config.repo_url and not image:
            inside = found.relative_to(ROOT).as_posix()
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{inside})"
        return text

    parts = re.split(f"({_FENCED.pattern})", markdown, flags=_FENCED.flags)
    return "".join(
        part if index % 2 else _LINK.sub(rewritten, part)
        for index, part in enumerate(parts)
    )


def _resolve(place: Path, target: str) -> Path | None:
    """Return the file that a link on the page at `place` means; None: not a file."""
    if not target or "://" in target or target.startswith("mailto:"):
        return None
    return Path(os.path.normpath(place.parent / target))


def _on_site(path: Path) -> str | None:
    """Return where a file of the repository is on the site, if it is there."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    inside = path.relative_to(ROOT)
    if path.suffix == ".md":
        return f"{INSIDE}/{inside.as_posix()}"
    if inside.parts[0] in SHOWN and path.suffix in LANGUAGES:
        return f"{INSIDE}/{inside.as_posix()}.md"
    return None


def _of_site(uri: str) -> Path:
    """Return the file that a page of the site is made from."""
    if not uri.startswith(f"{INSIDE}/"):
        return ROOT / "docs" / uri
    path = ROOT / uri.removeprefix(f"{INSIDE}/")
    return path if path.exists() else path.with_suffix("")


def _content(path: Path) -> str:
    """Return a page: the file itself, or its text as code."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return text
    name = path.relative_to(ROOT).as_posix()
    # A search would find hardly anything else.
    head = "---\nsearch: {exclude: true}\n---\n"
    return f"{head}# {name}\n\n```{LANGUAGES[path.suffix]}\n{text}```\n"
