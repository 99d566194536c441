"""The gradient of a product of Householder's reflections as a device works it out (`householder_product_backward` in
``FunctionsManual.cpp``): written into zeros, and in place unless it is to have a gradient of its own. For subclasses of tensors
C++ collects a tensor for each reflection, and joins these at the end. As an H100 was asked with 2.11.
"""

from __future__ import annotations

from typing import Any

import torch


def gradients(gradient: Any, result: Any, vectors: Any, factors: Any) -> tuple[Any, Any]:
    """Of the vectors and of their factors. What C++ makes in one expression it makes from right to left."""
    if not vectors.numel() or not factors.numel():
        return None, None
    count = factors.shape[-1]
    lower = vectors.tril(-1)
    lower.diagonal(0, -2, -1).fill_(1.0)
    reflecting = lower.narrow(-1, 0, count)
    squares = reflecting * reflecting.conj()
    lengths = squares.sum(-2)
    del squares
    stretched = factors * lengths
    divisors = stretched - 1.0
    inverses = factors / divisors
    del divisors, stretched
    turned = _reflected(result.matmul(gradient.mH), 0, lower, inverses, 0)
    of_vectors, of_factors = torch.zeros_like(vectors), torch.zeros_like(factors)
    for place in range(count):
        of_vector, of_factor = _of_one(turned, place, lower.narrow(-1, place, 1), factors.narrow(-1, place, 1))
        of_vectors.select(-1, place).copy_(of_vector.squeeze(-1))
        of_factors.select(-1, place).copy_(of_factor.squeeze(-1))
        if place < count - 1:
            turned = _reflected(turned, place + 1, lower, inverses, place + 1)
            turned = _reflected(turned, place, lower, factors, place, from_right=True)
        del of_vector, of_factor
    of_vectors.tril_(-1)
    del turned, inverses, lengths, reflecting, lower
    return of_vectors, of_factors


def _of_one(turned: Any, place: int, vector: Any, factor: Any) -> tuple[Any, Any]:
    rest = turned.shape[-1] - place
    vector, factor = vector.narrow(-2, place, rest), factor.unsqueeze(-1)
    before = vector.mH.matmul(turned.narrow(-2, place, rest))
    behind = turned.narrow(-1, place, rest).matmul(vector)
    second = factor * behind
    opposite = -factor
    first = opposite * before
    of_vector = first.conj().squeeze(-2) - second.squeeze(-1)
    del first, opposite, second
    product = before.narrow(-1, place, rest).matmul(vector)
    of_factor = -product.conj()
    del product, behind, before
    return of_vector.unsqueeze(-1), of_factor.squeeze(-1)


def _reflected(matrix: Any, first: int, vectors: Any, factors: Any, place: int, from_right: bool = False) -> Any:
    """Less what lies along that vector, which is zero before `first`."""
    rest = matrix.shape[-1] - first
    vector, factor = vectors.narrow(-1, place, 1), factors.narrow(-1, place, 1).unsqueeze(-1)
    vector = vector.narrow(-2, first, rest)
    part = matrix.narrow(-1 if from_right else -2, first, rest)
    if from_right:
        scaled = factor * vector
        along = part.matmul(scaled)
        del scaled
        taken = along * vector.mH
    else:
        along = vector.mH.matmul(part)
        scaled = factor * vector
        taken = scaled * along
    if torch.is_grad_enabled():
        places = (0, 0) if first == 0 else ((first, 0) if from_right else (0, 0, first, 0))
        return matrix - torch.nn.functional.pad(taken, places)
    part.sub_(taken)
    del taken
    if not from_right:
        del scaled
    del along
    return matrix
