"""How the documentation is built: pages from the whole repository, formulas as MathML, no requests to other hosts.

README is the home page. The command line's help, the notebooks with the output that run_notebooks.py has written, and
other files of the repository are pages, too. Links to other files lead to the repository, once pyproject.toml has its
address, and are plain text until then.

mkdocs calls the functions `on_...`; mkdocstrings loads the class for the docstrings of the API.
"""

import html
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

from symexplin.cli import make_app

_ROOT = Path(__file__).parents[1]
_PAGES = {  # pages made from files outside docs/
    "index.md": "README.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/citation.md": "CITATION.cff",
    "project/results.md": "results/README.md",
    "project/benchmarks.md": "benchmarks/README.md",
}
_PAGE_OF = {source: page for page, source in _PAGES.items()}
# On the home page, below its first paragraph.
_BUTTONS = """\
[What to do with your model](#which-method-for-which-model){ .md-button .md-button--primary }
[Compare any optimizer](#compare-any-optimizer-on-your-own-script){ .md-button }

![The map of the default; trained weights, of which the largest grow further](docs/images/idea.svg)"""
_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:|#|mailto:)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)
_REMOTE_IMAGE = re.compile(r"\[!\[[^\]]*\]\([^)]*\)\]\([^)]*\)|!\[[^\]]*\]\(https?:[^)]*\)")  # badges
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_BAR = re.compile(r'<mo(?: stretchy="false")?>&#x0007C;')  # of an absolute value: browsers set it as an infix otherwise
_DOCTEST = re.compile(r"(?m)^( *)>>>.*(?:\n\1\S.*)*")
_ROLE = re.compile(r":\w+:`([^`]+)`")
_SHARED = re.compile(r"(?m)^    (\w+(?:, \w+)+):(.*(?:\n {8,}.*)*)")
_COPIED = "copied"  # the folder of pictures from elsewhere in the repository


def _address() -> str | None:
    """Return the repository's address from pyproject.toml, its one place; None until the owner has filled it in."""
    with (_ROOT / "pyproject.toml").open("rb") as file:
        address: str = tomllib.load(file)["project"]["urls"]["Repository"]
    return None if "OWNER" in address else address


def on_config(config: MkDocsConfig) -> None:
    """Link to the repository in the footer; the theme's own link would request the host's API."""
    if address := _address():
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": address, "name": "Source"}]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are made from elsewhere."""
    help_text = make_app().generate_docs(output_format="markdown", include_hidden=False)
    help_text = help_text.partition("## Table of Contents")[0] + help_text.partition("**Commands**:")[2]
    # Lines that begin with two spaces are commands: code in Markdown, after an empty line.
    help_text = re.sub(r"(?m)^(?=\S.*:\n  symexplin )(.*)$", r"\1\n", help_text)
    help_text = re.sub(r"(?m)^  (?=symexplin )", "    ", help_text).replace("# symexplin\n", "# The command line\n", 1)
    files.append(File.generated(config, "reference/command-line.md", content=help_text))
    for name, path in _PAGES.items():
        text = (_ROOT / path).read_text(encoding="utf-8")
        if path == "README.md":
            title, first, rest = text.split("\n\n", 2)
            text = f"{title}\n\n{first}\n\n{_BUTTONS}\n\n{rest}"
        if path == "CITATION.cff":
            text = f"# Citation\n\nThe file `CITATION.cff`, which citation managers read:\n\n```yaml\n{text}```\n"
        files.append(File.generated(config, name, content=text))
    for notebook in sorted((_ROOT / "docs" / "notebooks").glob("*.ipynb")):
        for name, content in _notebook(notebook).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))


def _notebook(executed: Path) -> dict[str, str | bytes]:
    """Return by name the page of an executed notebook, and its pictures."""
    names = {"output_files_dir": ".", "unique_key": executed.stem}
    text, resources = MarkdownExporter().from_filename(str(executed), resources=names)
    page = f"{text}\n\nDownload this page as an executed notebook: [{executed.name}]({executed.name}).\n"
    return {f"{executed.stem}.md": page} | resources["outputs"]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolve links to files outside docs/, copy the pictures among them, and drop pictures from other hosts."""
    address = _address()
    base = (_ROOT / _PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def place(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(base / link["target"]))
        if not target.exists():
            return link[0]  # mkdocs warns
        inside = target.relative_to(_ROOT).as_posix()
        uri = _PAGE_OF.get(inside) or _PAGE_OF.get(f"{inside}/README.md") or inside.removeprefix("docs/")
        found = files.get_file_from_path(uri)
        if not (found and found.inclusion.is_included()):
            if target.suffix in (".svg", ".png"):
                uri = f"{_COPIED}/{inside}"
                if uri not in files.src_uris:
                    files.append(File.generated(config, uri, abs_src_path=str(target)))
            elif address is None:
                return link["text"] if target.name in link["text"] else f"{link['text']} (`{inside}`)"
            else:
                return f"[{link['text']}]({address}/{'tree' if target.is_dir() else 'blob'}/main/{inside})"
        return f"{link['image']}[{link['text']}]({_relative(uri, page)}{link['anchor'] or ''})"

    return _LINK.sub(place, _REMOTE_IMAGE.sub("", markdown))


def on_page_content(html_text: str, **_: Any) -> str:
    """Make MathML of the formulas, which browsers show without a script."""

    def formula(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        mathml = convert(html.unescape(found[2]), display=display)
        mathml = _BAR.sub('<mo stretchy="false" lspace="0" rspace="0">&#x0007C;', mathml)
        return f'<{found[1]} class="formula">{mathml}</{found[1]}>'

    return _FORMULA.sub(formula, html_text)


def _relative(target: str, page: Page) -> str:
    """Return a link from a page to a file of docs/."""
    return os.path.relpath(target, Path(page.file.src_uri).parent)


class Docstrings(griffe.Extension):
    """Make Markdown of docstrings (doctests, roles, literal blocks), and show the defaults of all arguments."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring:
            text = _DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", obj.docstring.value)
            text = re.sub(r"(?m)::$", ":", _ROLE.sub(r"`\1`", text))
            obj.docstring.value = _SHARED.sub(_each, text)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Show the value of a private constant as the default of a dataclass's field."""
        attr.value = _value(attr.value, attr)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Show the values of private constants as the defaults of arguments."""
        for parameter in func.parameters:
            parameter.default = _value(parameter.default, func)


def _each(found: re.Match[str]) -> str:
    """Return an entry for each of the arguments that share a description, so that each has its own type and default."""
    first, *others = found[1].split(", ")
    again = found[2] if len(found[2]) < 120 else f" see `{first}`."
    return "\n".join([f"    {first}:{found[2]}", *(f"    {name}:{again}" for name in others)])


def _value(default: str | griffe.Expr | None, obj: griffe.Object) -> str | griffe.Expr | None:
    """Return what a private constant of the object's module stands for; another default as it is."""
    constant = obj.module.members.get(str(default)) if str(default).startswith("_") else None
    return constant.value if isinstance(constant, griffe.Attribute) else default
