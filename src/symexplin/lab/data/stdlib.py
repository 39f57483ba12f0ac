"""Python's own standard library as text that every machine has: whole, its code alone, or its docstrings alone.

Code and docstrings are two texts without a common sentence, to train on one and go on with the other.
"""

import ast
import warnings
from collections.abc import Callable, Iterable, Iterator

__all__ = ["STDLIB", "parts_of"]

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _docstrings(text: str) -> str:
    r"""Return the docstrings of a source file, each with an empty line after it.

    >>> _docstrings("def f():\n    'Return one.'\n    return 1  # always")
    'Return one.\n'
    """
    nodes = [node for node in ast.walk(_parsed(text)) if isinstance(node, _Documented)]
    return "\n\n".join(found for node in nodes if (found := ast.get_docstring(node))) + "\n"


def _code(text: str) -> str:
    r"""Return a source file without docstrings and comments.

    >>> _code("def f():\n    'Return one.'\n    return 1  # always")
    'def f():\n    return 1\n'
    """
    tree = _parsed(text)
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
    return ast.unparse(tree) + "\n"


def _parsed(text: str) -> ast.Module:
    with warnings.catch_warnings():  # of escapes in old files
        warnings.simplefilter("ignore")
        return ast.parse(text)


STDLIB: dict[str, Callable[[str], str]] = {"stdlib": str, "stdlib-code": _code, "stdlib-docs": _docstrings}


def parts_of(texts: Iterable[str], name: str) -> Iterator[str]:
    """Yield what the source `name` of :data:`STDLIB` takes of each file, without files that do not parse."""
    for text in texts:
        try:
            yield STDLIB[name](text)
        except SyntaxError:
            continue
