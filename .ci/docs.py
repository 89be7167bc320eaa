"""Hooks of mkdocs: files outside docs/ that pages link to, and the options of the command line."""

from __future__ import annotations

import argparse
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- command line -->"
LINK = re.compile(r"(?<=\]\()(?P<up>(?:\.\./)+)(?P<path>[\w./-]+)(?P<anchor>#[\w-]+)?(?=\))")


def outside(page: str, link: re.Match[str]) -> str | None:
    """Return the link's path from the repository's root; None for a link within docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link["up"], link["path"]))
    return None if path.startswith("docs/") else path


def copied(path: str) -> str:
    """Return where the site keeps a file of the repository; Markdown stays text there."""
    return f"repository/{path}.txt" if path.endswith((".md", ".py", ".json")) else f"repository/{path}"


def on_files(files: Files, config: Any) -> Files:
    """Add each file outside docs/ that a page links to."""
    found = set()
    for file in files.documentation_pages():
        links = LINK.finditer(file.content_string)
        found |= {path for link in links if (path := outside(file.src_uri, link))}
    for path in sorted(found):
        files.append(File.generated(config, copied(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the copies, and write the options of each command."""

    def rewritten(link: re.Match[str]) -> str:
        path = outside(page.file.src_uri, link)
        here = posixpath.dirname(page.file.src_uri)
        return posixpath.relpath(copied(path), here) if path else link[0]

    markdown = LINK.sub(rewritten, markdown)
    return markdown.replace(MARK, command_line()) if MARK in markdown else markdown


def command_line() -> str:
    """Return the help of every command."""
    sys.path.insert(0, str(ROOT))  # mkdocs takes it away after it has loaded this file
    from grpo_fast.cli import build_parser

    def width(prog: str) -> argparse.HelpFormatter:
        return argparse.HelpFormatter(prog, width=100)

    parts = []
    for name, parser in build_parser()[1].items():
        if parser.add_help:
            parser.formatter_class = width
            parts += [f"## {name}", f"```text\n{parser.format_help()}```"]
    return "\n\n".join(parts)
