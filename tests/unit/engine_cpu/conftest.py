# SPDX-License-Identifier: Apache-2.0
"""Kernel tests run on one thread: on a busy machine every parallel region would wait for the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)
