# SPDX-License-Identifier: Apache-2.0
"""The boundary record: round trip, and a clear refusal for everything that breaks the contract."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statestore.boundary import (
    BoundaryInvalid,
    BoundaryRecord,
    Epoch,
    ObjectEntry,
    RankEntry,
    boundary_id,
    object_key,
    prefix_of_ids,
)
from statestore.sweeping import object_keys
from tests.support.records import committed, entry, pending, written

EPOCH = Epoch(0x1F, 3)


def test_round_trip_of_pending_and_committed() -> None:
    for record in (pending(EPOCH), committed(EPOCH, ranks=8)):
        again = BoundaryRecord.from_json(record.to_json())
        assert again == record
        assert again.to_json() == record.to_json()
        assert BoundaryRecord.from_json(record.to_json().encode()) == record


@given(
    lease=st.integers(1, (1 << 63) - 1),
    counter=st.integers(0, 10**9),
    length=st.integers(1, 1 << 20),
    geometry=st.text(),
    created=st.floats(0, 1e12),
    null_free=st.booleans(),
    segment=st.text(max_size=30),
)
def test_round_trip_of_any(
    lease: int, counter: int, length: int, geometry: str, created: float, null_free: bool, segment: str
) -> None:
    epoch = Epoch(lease, counter)
    assert Epoch.parse(str(epoch)) == epoch
    record = replace(
        pending(epoch, length=length),
        geometry=geometry,
        created=created,
        ranks=(RankEntry(0, "written", (replace(entry(epoch, 0), null_free=null_free, segment=segment),)),),
    )
    assert BoundaryRecord.from_json(record.to_json()) == record


def test_size_of_a_record_of_eight_ranks() -> None:
    assert len(committed(EPOCH, ranks=8).to_json()) < 6000


def test_objects_and_bytes() -> None:
    record = committed(EPOCH, ranks=2)
    assert [e.key for e in record.objects()] == [
        object_key(record.model_digest, EPOCH, group, rank) for rank in (0, 1) for group in ("kda", "mla")
    ]
    assert record.nbytes == sum(rank.nbytes for rank in record.ranks) == 2 * (100 + 200)


def test_keys_are_new_for_every_epoch_group_and_rank() -> None:
    keys = {
        object_key("ab", Epoch(lease, counter), group, rank, link)  # type: ignore[arg-type]
        for lease in (1, 2, 0x11)
        for counter in (0, 1, 11)
        for group in ("kda", "mla")
        for rank in (0, 1, 11)
        for link in (0, 1, 11)
    }
    assert len(keys) == 3 * 3 * 2 * 3 * 3
    assert object_key("ab", EPOCH, "kda", 1) == "ds/ab/1f-3/0/kda/1"
    with pytest.raises(BoundaryInvalid, match="group"):
        object_key("ab", EPOCH, "conv", 0)  # type: ignore[arg-type]


def test_rows_below_base_belong_to_the_parents() -> None:
    record = committed(EPOCH)
    rows = next(e for e in record.objects() if e.group == "mla")
    assert rows.token_lo == 0
    with pytest.raises(BoundaryInvalid, match="token_lo: 0 is below base 1"):
        replace(record, base=1, parents=("p",))
    ranks = (replace(record.ranks[0], objects=(replace(rows, token_lo=1, token_hi=2),)), *record.ranks[1:])
    above = replace(record, base=1, parents=("p",), ranks=ranks, reusable=True)
    assert BoundaryRecord.from_json(above.to_json()) == above


def test_a_sweep_of_a_pending_record_covers_every_link() -> None:
    record = replace(pending(EPOCH), links=3)
    keys = object_keys(record)
    assert len(set(keys)) == len(keys) == 3 * 2 * len(record.ranks)
    assert object_key(record.model_digest, EPOCH, "mla", 0, 2) in keys
    assert set(object_keys(replace(committed(EPOCH), link=2))) <= set(keys)


def test_ids_begin_with_what_finds_them() -> None:
    one, two = boundary_id("ab", "cd", Epoch(1, 1)), boundary_id("ab", "cd", Epoch(1, 2))
    assert one != two
    assert one.startswith(prefix_of_ids("ab", "cd"))
    assert not boundary_id("ab", "cde", EPOCH).startswith(prefix_of_ids("ab", "cd"))
    assert replace(pending(EPOCH), id=one).id == one


# ---- a record that breaks the contract is refused by the name of its field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"id": ""}, "id"),
        ({"id": "a/b"}, "id"),
        ({"id": "a\n"}, "id"),
        ({"id": 3}, "id"),
        ({"model_digest": ""}, "model_digest"),
        ({"model_digest": "XY"}, "model_digest"),
        ({"prefix_hash": "ghi"}, "prefix_hash"),
        ({"length": 0}, "length"),
        ({"length": 1.5}, "length"),
        ({"length": True}, "length"),
        ({"epoch": "1-2"}, "epoch"),
        ({"owner": ""}, "owner"),
        ({"geometry": None}, "geometry"),
        ({"packing_dcp": 0}, "packing_dcp"),
        ({"packing_interleave": -1}, "packing_interleave"),
        ({"created": -1.0}, "created"),
        ({"created": "now"}, "created"),
        ({"state": "done"}, "state"),
        ({"ranks": ()}, "ranks"),
        ({"ranks": (RankEntry(1),)}, r"ranks\[0\]\.rank"),
        ({"state": "committed"}, r"ranks\[0\]\.status"),
        ({"state": "evicting"}, r"ranks\[0\]\.status"),
        ({"base": -1}, "base"),
        ({"base": 1 << 30, "parents": ("p",)}, "base"),
        ({"base": 1}, "parents"),
        ({"parents": ("p",)}, "parents"),
        ({"base": 1, "parents": ("a/b",)}, "parents"),
        ({"link": -1}, "link"),
        ({"links": 0}, "links"),
        ({"reusable": 1}, "reusable"),
    ],
)
def test_fields_of_a_record(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(BoundaryInvalid, match=f"^{field}:"):
        replace(pending(EPOCH), **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"key": ""}, "key"),
        ({"group": "conv"}, "group"),
        ({"nbytes": 0}, "nbytes"),
        ({"digests": ()}, "digests"),
        ({"digests": ("XYZ",)}, "digests"),
        ({"digests": (1,)}, "digests"),
        ({"token_lo": -1}, "token_lo"),
        ({"token_lo": 5, "token_hi": 5}, "token_hi"),
        ({"null_free": 1}, "null_free"),
        ({"segment": None}, "segment"),
    ],
)
def test_fields_of_an_object(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(BoundaryInvalid, match=f"^{field}:"):
        replace(entry(EPOCH, 0), **changes)


def test_fields_of_a_rank() -> None:
    for bad, field in (({"rank": -1}, "rank"), ({"status": "lost"}, "status")):
        with pytest.raises(BoundaryInvalid, match=f"^{field}:"):
            RankEntry(**{"rank": 0, **bad})  # type: ignore[arg-type]
    with pytest.raises(BoundaryInvalid, match=r"^objects:"):
        RankEntry(0, "pending", (entry(EPOCH, 0),))


@pytest.mark.parametrize(
    "text", ["1f3", "-3", "1f-", "1f-3 ", "xx-3", "0-3", "1F-3", "1f--3", "1f-3-4", None, 3]
)
def test_epochs_refused(text: object) -> None:
    with pytest.raises(BoundaryInvalid, match=r"^epoch"):
        Epoch.parse(text)


def test_commit_needs_every_rank_and_every_proof() -> None:
    record = pending(EPOCH, ranks=2)
    assert record.committed([written(EPOCH, 0), written(EPOCH, 1)]).state == "committed"
    with pytest.raises(BoundaryInvalid, match=r"ranks\[1\]\.status: 'pending' must be written"):
        record.committed([written(EPOCH, 0), RankEntry(1)])
    null = RankEntry(1, "written", (replace(entry(EPOCH, 1), null_free=False),))
    with pytest.raises(BoundaryInvalid, match=r"ranks\[1\].*null_free"):
        record.committed([written(EPOCH, 0), null])
    with pytest.raises(BoundaryInvalid, match="is named twice"):
        record.committed([written(EPOCH, 0), RankEntry(1, "written", (entry(EPOCH, 0),))])
    long = RankEntry(1, "written", (replace(entry(EPOCH, 1), token_hi=record.length + 1),))
    with pytest.raises(BoundaryInvalid, match="token_hi"):
        record.committed([written(EPOCH, 0), long])


# ---- text from elsewhere


def _edit(change: Any) -> str:
    values = json.loads(committed(EPOCH, ranks=2).to_json())
    change(values)
    return json.dumps(values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "record.*is not JSON"),
        ("[]", "record.*must be an object"),
        (_edit(lambda v: v.pop("owner")), "lacks a field.*owner"),
        (_edit(lambda v: v.update(colour=1)), "'colour'.*does not know"),
        (_edit(lambda v: v.update(length="9")), "length: '9'"),
        (_edit(lambda v: v.pop("epoch")), "epoch"),
        (_edit(lambda v: v.update(ranks=None)), "ranks: None must be a list"),
        (_edit(lambda v: v["ranks"].pop(0)), r"ranks\[0\]\.rank: 1 must be 0"),
        (_edit(lambda v: v["ranks"].append(7)), r"ranks\[2\]: 7 must be an object"),
        (_edit(lambda v: v["ranks"][1].update(status="odd")), r"ranks\[1\]\.status: 'odd'"),
        (
            _edit(lambda v: v["ranks"][1]["objects"][0].pop("nbytes")),
            r"ranks\[1\]\.objects\[0\].*lacks.*nbytes",
        ),
        (
            _edit(lambda v: v["ranks"][1]["objects"][0].update(nbytes=-1)),
            r"ranks\[1\]\.objects\[0\]\.nbytes: -1",
        ),
        (_edit(lambda v: v["ranks"][1]["objects"][0].update(extra=1)), r"objects\[0\].*'extra'"),
        (_edit(lambda v: v["ranks"][1]["objects"][0].update(digests="ab")), "digests.*must be a list"),
        (_edit(lambda v: v["ranks"][0]["objects"][0].update(null_free=False)), "null_free"),
    ],
)
def test_text_that_is_no_record(text: str, words: str) -> None:
    with pytest.raises(BoundaryInvalid, match=words):
        BoundaryRecord.from_json(text)


def test_the_record_needs_no_library() -> None:
    code = (
        "import statestore.boundary, sys; "
        "print([m for m in ('vllm', 'torch', 'etcd3aio', 'grpc', 'mooncake') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_objects_are_plain_values() -> None:
    assert isinstance(hash(committed(EPOCH)), int)
    with pytest.raises(AttributeError):
        committed(EPOCH).length = 3  # type: ignore[misc]
    assert ObjectEntry.__dataclass_fields__.keys() >= {"digests", "null_free", "segment"}


def test_records_of_versions_with_one_digest_are_read_and_compared() -> None:
    """Such a record has no name of a digest; transactions compare what is stored with `to_json`, byte by byte."""
    record = committed(EPOCH, ranks=2)
    old = record.to_json()
    assert '"digest"' not in old
    assert BoundaryRecord.from_json(old).to_json() == old
    rank = record.ranks[0]
    other = replace(rank, objects=(replace(rank.objects[0], digest="ml64"), *rank.objects[1:]))
    named = replace(record, ranks=(other, *record.ranks[1:]))
    assert '"digest":"ml64"' in named.to_json()
    assert BoundaryRecord.from_json(named.to_json()) == named
