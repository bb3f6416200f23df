# SPDX-License-Identifier: Apache-2.0
"""The wire's benchmark counts what has come, and says when its aim is missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wire import __main__ as benchmark


def test_every_shape_has_a_row_a_token_a_message_costs_more_and_a_missed_aim_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "AIM", 1e-9)
    file = tmp_path / "rows.json"
    assert benchmark.main(["--tokens", "5120", "--json", str(file)]) == 1
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    assert [(row["tokens"], row["messages"]) for row in rows.values()] == [(5120, 20), (5120, 5120), (0, 20)]
    step, token = rows["a message a step"], rows["a message a token"]
    for end in ("reading", "writing"):
        assert 0 < step[end] < token[end], end


def test_tokens_that_are_lost_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = benchmark.codec.decode_step

    def losing(step: Any) -> Any:
        return decode(step)[1:]

    monkeypatch.setattr(benchmark.codec, "decode_step", losing)
    with pytest.raises(RuntimeError, match="tokens came"):
        benchmark.main(["--tokens", "512"])


def test_less_than_a_step_is_refused() -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--tokens", "9"])
