"""Matrices of two elements, one on and below a diagonal and one above it: causal masks. They are known whatever their size, too.

A storage's twin is then a `Triangle`. Whoever looks at all of it as that matrix, or as its transpose, sees the two elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.uniform import BITS, Uniform, is_whole

# The largest host matrix that is looked through, in elements.
_MOST_COMPARED = 1 << 23
_FIRST = 16
_LOWER, _UPPER = set(overloads("tril tril_")), set(overloads("triu triu_"))
# Beside those that work element by element (these of them have no tag that says so): copies, and what asks all elements at once.
_KEEPING = set(overloads("masked_fill_.Scalar masked_fill_.Tensor _to_copy clone copy_ all any max min"))


class Shape(NamedTuple):
    """Where the two elements of a matrix are: the first where column - row <= diagonal, the second in all other places."""

    rows: int
    columns: int
    diagonal: int

    def there(self, elements: torch.Tensor) -> torch.Tensor:
        """Those of the two elements that have a place."""
        if self.diagonal >= self.columns - 1:
            return elements[:1]
        return elements[1:] if self.diagonal <= -self.rows else elements

    def transposed(self) -> Shape:
        """The transpose's; its elements are swapped."""
        return Shape(self.columns, self.rows, -self.diagonal - 1)

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """The matrix."""
        first = torch.ones((self.rows, self.columns), dtype=torch.bool).tril(self.diagonal)
        return torch.where(first, elements[0], elements[1])


class Triangle(Uniform):
    """The twin of a storage that holds such a matrix, row by row."""

    def __init__(self, elements: torch.Tensor, shape: Shape, nbytes: int) -> None:
        super().__init__(elements[0], nbytes)
        self.elements = elements
        self.shape = shape

    def fits(self, tensor: Any) -> bool:
        return super().fits(tensor) and self.seen_by(tensor) is not None

    def seen_by(self, tensor: Any) -> tuple[torch.Tensor, Shape] | None:
        """The elements and their places in a tensor on the storage; None where it looks at it otherwise."""
        sides = _sides(tensor)
        if sides is None:
            return None
        rows, columns, plain = sides
        if plain:
            return (self.elements, self.shape) if (rows, columns) == self.shape[:2] else None
        return (self.elements.flip(0), self.shape.transposed()) if (columns, rows) == self.shape[:2] else None

    def seen_as(self, tensor: Any) -> torch.Tensor:
        found = self.seen_by(tensor)
        assert found is not None
        elements, shape = found
        return shape.of(elements).view(tensor.size())

    def holds(self, element: torch.Tensor) -> bool:
        return False


def _sides(tensor: Any) -> tuple[int, int, bool] | None:
    """A tensor's rows and columns, and whether its storage has it row by row (else column by column); None if it is no matrix
    on a whole storage. Dimensions of one element do not matter."""
    wide = [(size, stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size != 1]
    if len(wide) != 2 or not is_whole(tensor):
        return None
    return wide[0][0], wide[1][0], wide[1][1] == 1


def follows(func: Any) -> bool:
    """Whether an operator makes such a matrix, or one element, of matrices with the same places."""
    return torch.Tag.pointwise in func.tags or func in _KEEPING


def cuts(func: Any) -> bool:
    return func in _LOWER or func in _UPPER


def cut(func: Any, args: Any, kwargs: Any, element: torch.Tensor, out: Any) -> tuple[torch.Tensor, Shape] | None:
    """What `tril` and `triu` make of a matrix of equal elements; None where it is no matrix."""
    sides = _sides(out)
    if sides is None or out.size(-1) == 1 or out.size(-2) == 1:
        return None
    diagonal = args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    zero = torch.zeros_like(element)
    if func in _UPPER:
        return torch.stack([zero, element]), Shape(sides[0], sides[1], diagonal - 1)
    return torch.stack([element, zero]), Shape(sides[0], sides[1], diagonal)


def twin(tensor: Any, elements: torch.Tensor, shape: Shape) -> Triangle | None:
    """The twin of the storage of a tensor with these elements in these places; None where it does not look at all of it."""
    sides = _sides(tensor)
    if sides is None or sides[:2] != shape[:2]:
        return None
    nbytes = tensor.untyped_storage().nbytes()
    if sides[2]:
        return Triangle(elements, shape, nbytes)
    return Triangle(elements.flip(0), shape.transposed(), nbytes)


def of_host(host: torch.Tensor) -> tuple[torch.Tensor, Shape] | None:
    """The same of a host tensor's own elements; None where it is no such matrix. Most others are told by their first row."""
    if host.layout is not torch.strided or host.is_meta or host.numel() > _MOST_COMPARED:
        return None
    sizes = [size for size in host.size() if size != 1]
    if len(sizes) != 2 or not host.numel():
        return None
    bits = BITS.get(host.element_size())
    if bits is None or host.is_quantized or host.is_conj() or host.is_neg():
        return None
    matrix = host.reshape(sizes).view(bits)
    rows, columns = sizes
    ends = torch.stack([matrix[-1, 0], matrix[0, -1]])
    low = ends[0]
    if bool(low == ends[1]) or not bool(((matrix[0, :_FIRST] == low) | (matrix[0, :_FIRST] == ends[1])).all()):
        return None
    across, down = int((matrix[0] == low).sum()), int((matrix[:, 0] == low).sum())
    shape = Shape(rows, columns, across - 1 if across else down - rows)
    return (ends.view(host.dtype), shape) if torch.equal(shape.of(ends), matrix) else None
