# SPDX-License-Identifier: Apache-2.0
"""The state copies for speculation with prefix caching, on real memory through the addresses vLLM hands over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deltaserve.engine.cpu import state_copies

BLOCKS, COLUMNS, WIDTH, CHANNELS = 12, 6, 5, 6
BLOCK_SIZE = 16


class Caches:
    """Two requests; one recurrent and one convolution state in padded pages, the table of their blocks."""

    def __init__(self, columns_last: bool) -> None:
        self.columns_last = columns_last
        shape = (CHANNELS, WIDTH) if columns_last else (WIDTH, CHANNELS)
        self.page = torch.randn(BLOCKS, 64)
        self.conv = self.page[:, : WIDTH * CHANNELS].unflatten(1, shape)
        self.page2 = torch.randn(BLOCKS, 48)
        self.recurrent = self.page2[:, :32]
        self.table = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 0]], dtype=torch.int32)
        self.pointers = torch.tensor([self.table.data_ptr()])

    def arguments(self) -> tuple[Any, ...]:
        def ints(*values: int) -> Tensor:
            return torch.tensor(values)

        return (
            self.pointers,
            COLUMNS,
            ints(self.page.data_ptr(), self.page2.data_ptr()),
            ints(4 * 64, 4 * 48),
            ints(4, 4),
            ints(CHANNELS, 32),
            ints(WIDTH, 0),
            ints(0, 0),
            ints(CHANNELS, 0),
            ints(4 * WIDTH, 0),
        )

    def columns(self, block: int) -> Tensor:
        return self.conv[block].t() if self.columns_last else self.conv[block]


@pytest.mark.parametrize("columns_last", [False, True])
@pytest.mark.parametrize("bias", [0, 2])
def test_precopy(columns_last: bool, bias: int) -> None:
    c = Caches(columns_last)
    conv = {b: c.columns(b).clone() for b in range(BLOCKS)}
    recurrent, page, page2 = c.recurrent.clone(), c.page.clone(), c.page2.clone()
    # Request 0 moves from column 1 to 4; request 1 stays in its column.
    state_copies.precopy(
        torch.tensor([4, 2]),
        torch.tensor([1, 2]),
        torch.tensor([bias, 1]),
        *c.arguments(),
        None,
        2,
        1024,
        columns_last,
        False,
    )
    assert torch.equal(c.recurrent[5], recurrent[[2, 3, 4][bias]]), "the state after the last accepted token"
    assert torch.equal(c.columns(5)[: WIDTH - bias], conv[2][bias:])
    assert torch.equal(c.columns(5)[WIDTH - bias :], conv[5][WIDTH - bias :])
    others = [b for b in range(BLOCKS) if b != 5]
    assert torch.equal(c.page[others], page[others])
    assert torch.equal(c.page2[others], page2[others])
    assert torch.equal(c.page2[5, 32:], page2[5, 32:]), "padding stays as it was"
    assert not torch.equal(c.page2[5], page2[5])


@pytest.mark.parametrize("columns_last", [False, True])
def test_precopy_leaves_fresh_and_unmapped_requests(columns_last: bool) -> None:
    c = Caches(columns_last)
    page, page2 = c.page.clone(), c.page2.clone()
    mapping = torch.tensor([1, -1])  # row 0 is request 1, which is fresh; row 1 is padding
    columns = torch.tensor([3, 2]), torch.tensor([1, -1]), torch.tensor([0, 0])
    state_copies.precopy(*columns, *c.arguments(), mapping, 2, 1024, columns_last, True)
    assert torch.equal(c.page, page)
    assert torch.equal(c.page2, page2)


@pytest.mark.parametrize("columns_last", [False, True])
def test_postprocess_keeps_the_state_at_a_crossed_boundary(columns_last: bool) -> None:
    """Request 0 ran from 30 to 34 in column 2: the state after 32 belongs in column 1. Request 1 crosses nothing."""
    c = Caches(columns_last)
    conv, recurrent = c.columns(3).clone(), c.recurrent.clone()
    out = torch.tensor([9, 9])
    state_copies.postprocess(
        torch.tensor([4, 3]),
        torch.tensor([2, 2]),
        torch.tensor([4, 4]),
        torch.tensor([30, 36]),
        torch.tensor([3, 3]),
        *c.arguments(),
        out,
        None,
        2,
        BLOCK_SIZE,
        1024,
        columns_last,
    )
    # 31 tokens after the first of the window, so 32 is one accepted token on.
    assert torch.equal(c.recurrent[2], recurrent[4])
    assert torch.equal(c.columns(2)[: WIDTH - 1], conv[1:])
    assert out.tolist() == [9, 9]
    assert torch.equal(
        c.recurrent[[1, 3, 4, 5, 6, 7, 8, 9, 10, 11]], recurrent[[1, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
    )


def test_postprocess_in_the_running_column_resets_the_accepted_count() -> None:
    c = Caches(False)
    conv, recurrent = c.columns(2).clone(), c.recurrent.clone()
    out = torch.tensor([4, 4])
    arguments = torch.tensor([4, 4]), torch.tensor([1, 1]), None, torch.tensor([33, 31]), None
    state_copies.postprocess(
        *arguments, *c.arguments(), out, None, 2, BLOCK_SIZE, 1024, False, PRECOMPUTED_NEW_COMPUTED=True
    )
    assert out.tolist() == [1, 4], "request 1 stopped before the boundary"
    assert torch.equal(c.recurrent[2], recurrent[4]), "32 is two tokens on from 30"
    assert torch.equal(c.columns(2)[: WIDTH - 2], conv[2:]), "shifted within its own page"
    with pytest.raises(ValueError, match="token counts are needed"):
        state_copies.postprocess(*arguments, *c.arguments(), out, None, 2, BLOCK_SIZE, 1024, False)
