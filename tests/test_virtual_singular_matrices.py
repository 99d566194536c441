"""Matrices that cannot be factorised: where their values are known, the virtual GPU says what a card says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.usefixtures("card_with_values")

REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "cholesky": lambda: torch.linalg.cholesky(-torch.eye(3).cuda()),
    "inv": lambda: torch.linalg.inv(torch.zeros(3, 3, device="cuda")),
    "solve": lambda: torch.linalg.solve(torch.zeros(2, 2, device="cuda"), torch.ones(2, 1, device="cuda")),
    "computed": lambda: torch.linalg.cholesky(
        (lambda one: -(one @ one.T))(torch.tensor([[1.0, 2.0], [0.0, 3.0]]).cuda())
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_known_values_that_cannot_be_factorised_raise_the_cards_error(name: str) -> None:
    with pytest.raises(torch.linalg.LinAlgError, match="linalg"):
        REFUSED[name]()


def test_one_that_can_be_and_one_that_nobody_knows_raise_nothing() -> None:
    assert torch.linalg.inv(2 * torch.eye(2).cuda()).tolist() == [[0.5, 0.0], [0.0, 0.5]]
    unknown = torch.randn(64, 64, device="cuda")
    assert torch.linalg.cholesky(unknown @ unknown.T + torch.eye(64, device="cuda")).shape == (64, 64)
    assert torch.linalg.cholesky_ex(-torch.eye(3).cuda()).info.item() == 1
