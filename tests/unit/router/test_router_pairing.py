# SPDX-License-Identifier: Apache-2.0
"""Workers whose caches do not map are never paired, and the router says why, naming the field."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from deltaserve.membership import Member
from router.roster import Roster
from statestore.geometry import Geometry
from statestore.reshard import meaning, refusal
from tests.property.reshard_cases import geometry

G = geometry(tp=2, head_v=4)
LAID_OUT_OTHERWISE = geometry(tp=4, head_v=4, dcp=2, interleave=8, block_size=32, conv_layout="DS")
OTHER_DTYPE = dataclasses.replace(G, recurrent_dtype="bfloat16")


def worker(name: str, cache: str, model: str = "m") -> Any:
    member = Member(name, name.partition("-")[0], "h:1", model, "", 1, cache=cache)  # type: ignore[arg-type]
    return SimpleNamespace(worker_id=name, member=member, ready=True, legs={}, outstanding=0)


def roster(*workers: Any) -> Roster:
    made = Roster(None, None, None)  # type: ignore[arg-type]
    made._links = {one.worker_id: one for one in workers}
    return made


def teams(made: Roster) -> list[tuple[list[str], list[str]]]:
    return [
        ([one.worker_id for one in t.prefills], [one.worker_id for one in t.decodes]) for t in made.teams()
    ]


def test_caches_that_map_are_one_team() -> None:
    made = roster(
        worker("prefill-a", G.to_json()),
        worker("decode-a", LAID_OUT_OTHERWISE.to_json()),
        worker("decode-b", G.to_json()),
    )
    assert teams(made) == [(["prefill-a"], ["decode-a", "decode-b"])]
    assert made._refusals() == []


def test_another_meaning_is_another_team_and_is_told() -> None:
    made = roster(
        worker("prefill-a", G.to_json()),
        worker("prefill-b", OTHER_DTYPE.to_json()),
        worker("decode-a", LAID_OUT_OTHERWISE.to_json()),
    )
    assert teams(made) == [(["prefill-a"], ["decode-a"]), (["prefill-b"], [])]
    (sentence,) = made._refusals()
    assert "prefill-b is not paired with decode-a: geometry field recurrent_dtype differs" in sentence
    assert "mamba_ssm_cache_dtype" in sentence, "the remedy"


def test_another_model_is_nobodys_business() -> None:
    made = roster(worker("prefill-a", G.to_json(), "m"), worker("decode-a", OTHER_DTYPE.to_json(), "n"))
    assert teams(made) == [(["prefill-a"], []), ([], ["decode-a"])]
    assert made._refusals() == []


def test_who_does_not_say_is_paired_with_its_like() -> None:
    made = roster(worker("prefill-a", ""), worker("decode-a", ""))
    assert teams(made) == [(["prefill-a"], ["decode-a"])]


def test_a_geometry_that_cannot_be_read_is_a_team_of_its_own() -> None:
    made = roster(worker("prefill-a", '{"tp": 1}'), worker("decode-a", G.to_json()))
    assert teams(made) == [(["prefill-a"], []), ([], ["decode-a"])]
    assert "prefill-a is not paired with decode-a" in made._refusals()[0]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Geometry)])
def test_meaning_and_refusal_agree(field: str) -> None:
    """Grouping by meaning is the same as asking for every pair, whatever field differs."""
    changes: dict[str, Any] = {
        "model_digest": "other",
        "quantisation": "fp8",
        "kda_layers": (0, 1, 2, 9),
        "mla_layers": (7,),
        "conv_layout": "DS",
        "recurrent_dtype": "bfloat16",
        "conv_dtype": "float16",
        "kv_cache_dtype": "float16",
        "layout_version": 1,
        "num_spec": 1,
        "tp": 1,
        "page_bytes": G.page_bytes * 2,
    }
    try:
        other = dataclasses.replace(G, **{field: changes.get(field, getattr(G, field))})
    except ValueError:
        pytest.skip("no such geometry")
    one, two = G.to_json(), other.to_json()
    assert (meaning(one) == meaning(two)) == (refusal(one, two) == "")
