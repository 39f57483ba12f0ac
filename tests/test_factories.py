"""Every tensor that the library makes names its dtype and device. Read from the source: the defaults are the user's."""

import ast

from symexplin import __file__ as home
from test_acyclic import sources

# What makes tensors from no tensor. Modules such as nn.Linear follow the user's defaults, as the user expects:
# SELLinear's own constructor and the laboratory's network do. `*_like` and `new_*` follow their tensor.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "bernoulli", "cartesian_prod", "complex", "empty", "empty_strided", "eye"),
    *("frombuffer", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm"),
    *("range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    *("Tensor", "FloatTensor", "LongTensor"),  # which cannot name them
}


def calls(tree):
    """Yield the calls of torch's functions as (name, node)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module = node.func.value
            if isinstance(module, ast.Name) and module.id == "torch":
                yield node.func.attr, node


def test_every_tensor_names_its_dtype_and_device():
    found = [(file, name, node) for file, tree in sources().items() for name, node in calls(tree) if name in FACTORIES]
    assert len(found) > 30, home
    silent = [
        f"{file}: {ast.unparse(node)}"
        for file, _, node in found
        if not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
    ]
    assert not silent


def test_no_name_of_a_factory_is_imported_and_no_module_asks_for_the_defaults():
    """So that the search above sees all of them."""
    for file, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                assert not {alias.name for alias in node.names} & (FACTORIES - {"Tensor"}), file
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("get_default_dtype", "get_default_device", "set_default_dtype"), file
