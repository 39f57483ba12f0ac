"""How the documentation is built: README is its home page; the command line's help and the notebooks, run, are pages.

Links may leave docs/, to files of the repository.

mkdocs calls the functions `on_...`; mkdocstrings loads the class for the docstrings of the API.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import griffe
import jupytext
import nbclient
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter
from traitlets.config import Config

from symexplin.cli import make_app

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)\s#]+)")
_DOCTEST = re.compile(r"(?m)^( *)>>>.*(?:\n\1\S.*)*")
_ROLE = re.compile(r":\w+:`([^`]+)`")
_COPIED = "copied"  # the folder of pictures from elsewhere in the repository


def on_config(config: MkDocsConfig) -> None:
    """Take the repository's address from pyproject.toml, its one place."""
    with (_ROOT / "pyproject.toml").open("rb") as file:
        config.update(repo_url=tomllib.load(file)["project"]["urls"]["Repository"], repo_name="source")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are made from elsewhere."""
    help_text = make_app().generate_docs(output_format="markdown", include_hidden=False)
    help_text = help_text.partition("## Table of Contents")[0] + help_text.partition("**Commands**:")[2]
    # Lines that begin with two spaces are commands: code in Markdown, after an empty line.
    help_text = re.sub(r"(?m)^(?=\S.*:\n  symexplin )(.*)$", r"\1\n", help_text)
    help_text = re.sub(r"(?m)^  (?=symexplin )", "    ", help_text).replace("# symexplin\n", "# The command line\n", 1)
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    for name, text in {"index.md": readme, "reference/command-line.md": help_text}.items():
        files.append(File.generated(config, name, content=text))
    for source in sorted((_ROOT / "docs" / "notebooks").glob("*.py")):
        for name, content in _notebook(source).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))


def _notebook(source: Path) -> dict[str, str | bytes]:
    """Run a notebook; return its page and its pictures by name."""
    notebook = jupytext.read(source)
    quiet = Config(ConnectionFileMixin={"transport": "ipc"})  # over TCP the kernel warns that nothing is encrypted
    nbclient.NotebookClient(notebook, timeout=600, config=quiet).execute()
    names = {"output_files_dir": ".", "unique_key": source.stem}
    text, resources = MarkdownExporter().from_notebook_node(notebook, resources=names)
    note = f"The source is [{source.name}]({source.name}). `jupytext --to ipynb {source.name}` makes a notebook of it."
    return {f"{source.stem}.md": f"{text}\n\n{note}\n"} | resources["outputs"]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside docs/ at the repository, and copy the pictures among them."""
    home = page.file.src_uri == "index.md"
    base = _ROOT if home else (_ROOT / "docs" / page.file.src_uri).parent

    def place(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(base / link[2]))
        if not target.exists():
            return link[0]  # mkdocs warns
        inside = target.relative_to(_ROOT)
        uri = inside.as_posix().removeprefix("docs/")
        if inside.parts[0] == "docs" and (found := files.get_file_from_path(uri)) and found.inclusion.is_included():
            return link[1] + _relative(uri, page)
        if target.suffix in (".svg", ".png"):
            copy = f"{_COPIED}/{inside.as_posix()}"
            if copy not in files.src_uris:
                files.append(File.generated(config, copy, abs_src_path=str(target)))
            return link[1] + _relative(copy, page)
        kind = "tree" if target.is_dir() else "blob"
        return f"{link[1]}{config['repo_url']}/{kind}/main/{inside.as_posix()}"

    return _LINK.sub(place, markdown)


def _relative(target: str, page: Page) -> str:
    """Return a link from a page to a file of docs/."""
    return os.path.relpath(target, Path(page.file.src_uri).parent)


class Docstrings(griffe.Extension):
    """Make Markdown of what docstrings have of reStructuredText: doctests, roles, literal blocks."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring:
            text = _DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?m)::$", ":", _ROLE.sub(r"`\1`", text))
