"""What MkDocs needs beside docs/: README and other pages, notebooks, the API from docstrings."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
# Pages of the site that are elsewhere in the repository, by their place there.
PAGES = {"README.md": "index.md", "SECURITY.md": "threat-model.md", "benchmarks/RESULTS.md": "results.md"}
NOTEBOOKS = {
    path.relative_to(ROOT).as_posix(): f"{path.stem}.md" for path in sorted(ROOT.glob("notebooks/*.ipynb"))
}
# The site's search shows an option or an error on its own page before the pages that mention it.
FOUND_FIRST = {"options.md": 8, "errors.md": 2}
API = {
    "In Spark": [
        "register",
        "metrics",
        "QueryMetrics",
        "reason",
        "live_view",
        "ZmqMetricsListener",
    ],
    "Values": [
        "functions.from_msgpack",
        "functions.from_cbor",
        "functions.decompress",
    ],
    "Without Spark": ["Producer", "DurableSubscriber", "DurableMessage", "Proxy"],
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]*)(#[^)\s]*)?\)")
_PAGE_NAME = re.compile(r"docs/([\w-]+)\.md(#[\w-]+)?")
_TEST_MARK = re.compile(r"<!-- test: \w+ -->\n")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for place, name in PAGES.items():
        text = _TEST_MARK.sub("", (ROOT / place).read_text(encoding="utf-8"))
        files.append(File.generated(config, name, content=_relinked(text, (ROOT / place).parent)))
    for place, name in NOTEBOOKS.items():
        own = {"unique_key": Path(name).stem}  # its pictures' names begin so
        text, resources = MarkdownExporter().from_filename(str(ROOT / place), resources=own)
        files.append(File.generated(config, name, content=text))
        for picture, data in resources["outputs"].items():
            files.append(File.generated(config, picture, content=data))
    sections = [
        f"## {title}\n\n"
        + "\n".join(f"::: zmq_datasource.{name}\n    options: {{heading_level: 3}}\n" for name in names)
        for title, names in API.items()
    ]
    files.append(File.generated(config, "api.md", content="# API\n\n" + "\n".join(sections)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    if boost := FOUND_FIRST.get(page.file.src_uri):
        page.meta["search"] = {"boost": boost}
    return markdown if page.file.generated_by else _relinked(markdown, ROOT / "docs")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    # Docstrings name a page by its path in the repository.
    return _PAGE_NAME.sub(r'<a href="\1.html\2">\1</a>', html) if page.file.src_uri == "api.md" else html


def _title(path: Path) -> str:
    """The heading of a page up to a colon, for links that name the page by its file."""
    heading = path.read_text(encoding="utf-8").partition("\n")[0]
    return heading.removeprefix("# ").partition(":")[0]


def _relinked(text: str, directory: Path) -> str:
    """Links as they are in the site; what is not part of it is only named."""

    def replaced(link: re.Match[str]) -> str:
        image, words, path, anchor = link[1], link[2], link[3], link[4] or ""
        target = (directory / path).resolve().relative_to(ROOT).as_posix()
        if words.endswith(".md"):
            words = _title(ROOT / target)
        if page := (PAGES | NOTEBOOKS).get(target):
            return f"{image}[{words}]({page}{anchor})"
        if target.startswith("docs/"):
            return f"{image}[{words}]({target.removeprefix('docs/')}{anchor})"
        return words if words.startswith("`") or " " in words else f"`{words}`"

    return _LINK.sub(replaced, text)
