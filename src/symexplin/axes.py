"""The matrix form of a weight: which of its dimensions are outputs, inputs, or a stack of matrices.

One letter per dimension says so: "o" an output, "i" an input, "e" a stack of matrices (experts).

    nn.Linear "oi"    transformers' Conv1D "io"    bias "o"    nn.Conv2d "oiii"    nn.ConvTranspose2d "ioii"
    experts "eoi" or "eio"    their biases "eo"

A matrix has the dimensions with the letter of the first one as rows, the others as columns, in their order. So the rows
of a convolution are output channels, and its columns everything that a filter reads.
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Axes", "axes_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Axes:
    """The dimensions of a tensor; use :func:`axes_of`, which returns equal axes as one object.

    >>> axes_of("ioi").matrix_shape((3, 5, 7)), axes_of("ioi").matrix_letters
    ((21, 5), 'io')
    >>> axes_of("eoi").panel_shapes((4, 3, 2), {"panel0": 1, "panel1": 1, "scalar": 0, "full": 0})["panel1"]
    (4, 1, 2)
    """

    letters: str
    rows: Shape = field(init=False)  # the dimensions that make the rows of the matrix
    columns: Shape = field(init=False)

    def __post_init__(self) -> None:
        """Find the rows and columns."""
        if not re.fullmatch("e?(o|oi+|i+oi*)", self.letters):
            raise ValueError(
                f"axes must be one letter per dimension, as 'oi', 'io', 'o', 'oii', 'eoi' or 'eo', got {self.letters!r}"
            )
        dims = range(self.stacked, len(self.letters))
        first = self.letters[self.stacked]
        object.__setattr__(self, "rows", tuple(dim for dim in dims if self.letters[dim] == first))
        object.__setattr__(self, "columns", tuple(dim for dim in dims if self.letters[dim] != first))

    @property
    def stacked(self) -> bool:
        """Whether the first dimension counts matrices."""
        return self.letters[0] == "e"

    @functools.cached_property
    def is_matrix(self) -> bool:
        """Whether the tensor is its own matrix form, or a vector."""
        return not self.stacked and len(self.letters) <= 2

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether a contiguous tensor has its matrices in its memory."""
        return (*range(self.stacked), *self.rows, *self.columns) == tuple(range(len(self.letters)))

    @property
    def matrix_letters(self) -> str:
        """The axes of one matrix."""
        letters = self.letters.removeprefix("e")
        return letters[0] + ("" if not self.columns else "i" if letters[0] == "o" else "o")

    @property
    def out_dim(self) -> int:
        """The dimension of one matrix that counts its outputs."""
        return self.matrix_letters.index("o")

    def matrix_shape(self, shape: Sequence[int]) -> Shape:
        """Return the shape of one matrix of a tensor with this shape."""
        groups = (self.rows, self.columns) if self.columns else (self.rows,)
        return tuple(math.prod(shape[dim] for dim in group) for group in groups)

    def fans(self, shape: Sequence[int]) -> Shape:
        """Return the two fans of a weight of this shape, from which its draw follows, as torch computes them.

        A matrix has its sides, also one of a stack. Those of a convolution are its channels times its kernel's size.

        >>> axes_of("oiii").fans((64, 16, 3, 3))
        (576, 144)
        """
        if self.stacked or self.is_matrix:
            return self.matrix_shape(shape)
        kernel = math.prod(shape[2:])
        return shape[0] * kernel, shape[1] * kernel

    def panel_shapes(self, shape: Sequence[int], widths: dict[str, int]) -> dict[str, Shape]:
        """Return the shapes of the panels with these numbers of vectors, for a tensor of this shape."""
        count = tuple(shape[: self.stacked])
        rows, columns = (tuple(shape[dim] for dim in dims) for dims in (self.rows, self.columns))
        return {
            "panel0": (*count, *rows, widths["panel0"]),
            "panel1": (*count, widths["panel1"], *(columns or (0,))),
            "scalar": (*count, widths["scalar"]),
            "full": (*shape, widths["full"]),
        }

    def panel_dim(self, panel: str, dim: int) -> int | None:
        """Return the dimension of a panel along dimension `dim` of the tensor; None: the panel does not have it.

        >>> [axes_of("oi").panel_dim("panel1", dim) for dim in (0, 1)]
        [None, 1]
        """
        if panel == "full" or dim < self.stacked:
            return dim
        if panel == "panel0" and dim in self.rows:
            return self.stacked + self.rows.index(dim)
        if panel == "panel1" and dim in self.columns:
            return self.stacked + 1 + self.columns.index(dim)
        return None

    def vectors_dim(self, panel: str) -> int:
        """Return the dimension of a panel, from the end, that counts its vectors, numbers or matrices."""
        return -1 - max(1, len(self.columns)) if panel == "panel1" else -1

    def separate(self, tensor: Tensor, panel: str | None = None) -> list[Tensor]:
        """Return the matrices of a contiguous tensor, or of its `panel`, one by one, as views of its memory."""
        found = self.matrices(tensor) if panel is None else self.matrix_panel(panel, tensor)
        return list(found.unbind()) if self.stacked else [found]

    def matrices(self, tensor: Tensor, tail: int = 0) -> Tensor:
        """Return a tensor as its matrices, with one leading dimension if it is a stack or has a batch dimension.

        It shares the memory where the strides allow it. The last `tail` dimensions stay.
        """
        if self.is_matrix:
            return tensor
        own = tensor.shape[: tensor.dim() - tail]
        order, leading = self._order(len(own), tail)
        shape = self.matrix_shape(own[len(own) - len(self.letters) :])
        return _joined(tensor.permute(order), leading, (*shape, *tensor.shape[len(own) :]))

    def tensor(self, matrices: Tensor, shape: Sequence[int], tail: int = 0) -> Tensor:
        """Return matrices as the tensor of this shape, the inverse of :meth:`matrices`."""
        if self.is_matrix:
            return matrices
        order, _ = self._order(len(shape) - tail, tail)
        back = sorted(range(len(order)), key=order.__getitem__)
        return matrices.reshape([shape[dim] for dim in order]).permute(back)

    def _order(self, dims: int, tail: int) -> tuple[list[int], int]:
        """Return the dimensions in the order of the matrices, and the number of leading ones."""
        batch = dims - len(self.letters)
        leading = batch + self.stacked
        moved = [batch + dim for dim in (*self.rows, *self.columns)]
        return [*range(leading), *moved, *range(dims, dims + tail)], leading

    def matrix_panel(self, panel: str, tensor: Tensor) -> Tensor:
        """Return a panel of the tensor as that of its matrices, which shares its memory if it is contiguous."""
        if self.is_matrix:
            return tensor
        if panel == "full":
            return self.matrices(tensor, tail=1)
        own = {"panel0": len(self.rows) + 1, "panel1": max(1, len(self.columns)) + 1, "scalar": 1}[panel]
        shape = tensor.shape[tensor.dim() - own :]
        if panel == "panel0":
            shape = torch.Size((math.prod(shape[:-1]), shape[-1]))
        elif panel == "panel1":
            shape = torch.Size((shape[0], math.prod(shape[1:])))
        return _joined(tensor, tensor.dim() - own, shape)

    def panel(self, panel: str, of_matrices: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a panel of the matrices as that of the tensor, with this shape."""
        return self.tensor(of_matrices, shape, tail=1) if panel == "full" else of_matrices.reshape(tuple(shape))


def _joined(tensor: Tensor, leading: int, shape: Shape) -> Tensor:
    """Return a tensor of this shape, with all `leading` dimensions as one in front."""
    count = (math.prod(tensor.shape[:leading]),) if leading else ()
    return tensor.reshape((*count, *shape))


@functools.cache
def axes_of(letters: str) -> Axes:
    """Return the axes with these letters.

    >>> axes_of("oiii") is axes_of("oiii")
    True
    """
    return Axes(letters)
