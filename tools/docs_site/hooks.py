"""MkDocs' hooks: pages that are not in docs/, and links that would leave the site.

The pages of docs/ are also read in the repository, where a link may name any file. On the site, a link to
CONTRIBUTING.md or CHANGELOG.md goes to a page made of it, and one to any other file becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.docs_site.reference import PAGES

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code, and those of the repository's root."""
    pages = {name: render() for name, render in PAGES.items()}
    pages |= {name: _read_root_page(name) for name in ROOT_PAGES}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def _read_root_page(name: str) -> str:
    """A page of the root, with its links as they are in docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return _LINK.sub(lambda link: _move_link(link).replace("](docs/", "]("), text)


def _move_link(link: re.Match[str]) -> str:
    """The link of a root page, as one of docs/ would spell it."""
    target = link["target"]
    inside = target.startswith("docs/") or target in ROOT_PAGES
    return link[0] if inside else f"[{link['text']}](../{target}{link['anchor'] or ''})"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files outside docs/ into pages of the site, or into the file's name."""
    folder = posixpath.dirname(page.file.src_uri)
    root = Path(config.docs_dir).parent

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link["target"]))
        if target.startswith("docs/"):
            return link[0]
        if target in ROOT_PAGES:
            return f"[{link['text']}]({posixpath.relpath(target, folder or '.')}{link['anchor'] or ''})"
        if not (root / target).exists():
            raise PluginError(f"{page.file.src_uri} links to {link['target']}, which does not exist")
        return link["text"] if target in link["text"] else f"{link['text']} (`{target}`)"

    return _LINK.sub(rewrite, markdown)
