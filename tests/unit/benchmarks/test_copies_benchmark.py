# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of copies does without a GPU: it reads its arguments, and says what is missing."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.copies.__main__ import _PARTS, PARTS, main


def test_an_unknown_part_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["copies", "--parts", "check,speed"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "--parts: speed: unknown; choose from check, bandwidth" in capsys.readouterr().err
    assert tuple(_PARTS) == PARTS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["copies"])
    assert main() == 2
    assert "no CUDA device is visible" in capsys.readouterr().err
