"""Imports go one way. Read from the source: those inside of functions and for type checkers count too."""

import ast
import functools
import graphlib
from pathlib import Path

import symexplin

ROOT = Path(symexplin.__file__).parent
OUTER = ("lab", "experiments", "cli")  # what the core must not know


def module_of(path):
    """Return the name of a module, without "symexplin."; that of the package itself is empty."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def sources():
    return {module_of(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def imported(name, tree):
    """Return the modules of this package that a module names in any import, wherever it stands."""
    found = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            inner = [f"{node.module}.{local}" for local in names]
            names = [n if n.removeprefix("symexplin.") in sources() else node.module for n in inner]
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and name:
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        found |= {n.removeprefix("symexplin.") for n in names if n.startswith("symexplin.")} & sources().keys()
    return found - {name}


def test_imports_are_acyclic():
    """A package counts as what its __init__ imports; symexplin itself only re-exports, by name and at first use."""
    graph = {name: imported(name, tree) for name, tree in sources().items() if name}
    assert len(graph) > 40
    assert sum(map(len, graph.values())) > 100
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle


def test_the_core_knows_nothing_of_what_is_built_on_it():
    for name, tree in sources().items():
        if name.partition(".")[0] not in (*OUTER, "__main__"):
            assert not {n for n in imported(name, tree) if n.partition(".")[0] in OUTER}, name
