# SPDX-License-Identifier: Apache-2.0
"""The boundary record: one piece of sequence state that one worker published and others may load.

A boundary is (model digest, token-prefix hash with vLLM's extra keys, length, epoch). Its geometry is an attribute that
`statestore.reshard` checks. The bytes lie in the pool, under keys that no other epoch shares; the record lies in the
ledger and names every one of them. Life cycle, with who acts:

    open      publisher: a record with every rank pending, before or while the prefill computes (ledger write 1)
    write     every rank: objects into the pool, then its entry (keys, bytes, digests, proof that they are not null)
    commit    publisher: every rank's entry in one transaction, fenced by its lease (ledger write 2); visible from here
    loaded*   readers: get the committed record, read their share of the objects, check all of it, use it
    release   publisher: the objects go, then the record
    evict     publisher, of a checkpoint (docs/checkpoints.md): like release, when no record rests on it
    abort     publisher: like release, for a record that was never committed
    swept     anybody, when the owner is dead: like release

    pending ──commit──▶ committed ──release──▶ gone
       │                    ├──evict──▶ evicting ──▶ gone
       └────abort, swept────┴──swept──────┴─────────▶ gone

There is no way back and no other edge: a replacement is a new record under a new epoch.

Records are plain data; nothing here imports vLLM, torch or a client library. A record of 8 ranks is about 5 KB of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

Group = Literal["kda", "mla"]
"""Layer group: KDA state (recurrent and convolution), or MLA latent rows."""
State = Literal["pending", "committed", "evicting"]
RankStatus = Literal["pending", "written"]

_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}\Z")
_HEX = re.compile(r"[0-9a-f]+\Z")
_MAX_LEASE = (1 << 63) - 1


class BoundaryInvalid(ValueError):
    """A record that breaks the contract. The message names the field, its value and what is expected."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}: {value!r} {expected}")
        self.field = field


@dataclass(frozen=True, order=True)
class Epoch:
    """Which publication this is: never reused, so neither are the keys that carry it."""

    lease: int
    """The publisher's etcd lease; etcd never gives an id twice."""
    counter: int
    """Counts that lease's publications."""

    def __post_init__(self) -> None:
        _check_int("epoch.lease", self.lease, 1, _MAX_LEASE)
        _check_int("epoch.counter", self.counter, 0)

    def __str__(self) -> str:
        return f"{self.lease:x}-{self.counter}"

    @classmethod
    def parse(cls, text: object) -> Epoch:
        """Inverse of `str`: the lease in hexadecimal, as etcd's own tools print it, a dash, the counter."""
        match = re.fullmatch(r"([0-9a-f]{1,16})-([0-9]{1,18})", text) if isinstance(text, str) else None
        if match is None:
            raise BoundaryInvalid("epoch", text, "must be <lease in hexadecimal>-<counter>")
        return cls(int(match[1], 16), int(match[2]))


@dataclass(frozen=True)
class ObjectEntry:
    """One object in the pool; the layout of its bytes is `statestore.reshard`'s."""

    key: str
    group: Group
    nbytes: int
    digests: tuple[str, ...]
    """Hexadecimal, of every unit (`statestore.reshard.Unit`), in order; `digest` says which."""
    token_lo: int
    """First token that the object covers."""
    token_hi: int
    """One past the last token."""
    null_free: bool
    """The writer's proof that no layer's state is null (`statestore.digest`)."""
    segment: str = ""
    """Segment of the pool where it lies, as the pool names it."""
    digest: str = "xxh3-128"
    """Algorithm of the digests, of `statestore.digest.ALGORITHMS`; a reader refuses one that it does not know."""

    def __post_init__(self) -> None:
        _check_text("key", self.key)
        _check_choice("group", self.group, get_args(Group))
        _check_int("nbytes", self.nbytes, 1)
        if not self.digests:
            raise BoundaryInvalid("digests", self.digests, "must hold one digest a unit")
        for digest in self.digests:
            if not isinstance(digest, str) or not _HEX.match(digest):
                raise BoundaryInvalid("digests", digest, "must be hexadecimal digits")
        _check_int("token_lo", self.token_lo, 0)
        _check_int("token_hi", self.token_hi, self.token_lo + 1)
        _check_type("null_free", self.null_free, bool)
        _check_type("segment", self.segment, str)
        _check_text("digest", self.digest)


@dataclass(frozen=True)
class RankEntry:
    """What one rank of the publisher has written."""

    rank: int
    status: RankStatus = "pending"
    objects: tuple[ObjectEntry, ...] = ()

    def __post_init__(self) -> None:
        _check_int("rank", self.rank, 0)
        _check_choice("status", self.status, get_args(RankStatus))
        if self.status == "pending" and self.objects:
            raise BoundaryInvalid("objects", len(self.objects), "must be none while the rank is pending")

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has written."""
        return sum(entry.nbytes for entry in self.objects)


@dataclass(frozen=True)
class BoundaryRecord:
    """See the module's description."""

    id: str
    """Key in the ledger, unique for ever: `boundary_id`, or anything else that carries the epoch."""
    model_digest: str
    """Hexadecimal, of configuration, weights and quantisation."""
    prefix_hash: str
    """Hexadecimal, of the tokens with vLLM's extra keys (cache salt, adapter, image)."""
    length: int
    """Tokens whose state this is: the state after token `length`."""
    epoch: Epoch
    owner: str
    """Worker id of the publisher."""
    geometry: str
    """The publisher's `statestore.geometry.Geometry` as JSON; opaque here."""
    packing_dcp: int = 1
    """MLA rows are grouped for readers of this DCP size ..."""
    packing_interleave: int = 1
    """... and this interleave."""
    created: float = 0.0
    """Seconds since 1970, by the publisher's clock; for people, not for decisions."""
    state: State = "pending"
    ranks: tuple[RankEntry, ...] = ()
    """One entry for every rank of the publisher, ranks 0, 1, 2 ... in order."""
    base: int = 0
    """MLA rows of the tokens [0, base) lie in `parents`; this record's own cover [base, length)."""
    parents: tuple[str, ...] = ()
    """Ids of the records whose rows join to [0, base), oldest first (docs/checkpoints.md)."""
    link: int = 0
    """Which of the records of this epoch; part of its objects' keys."""
    links: int = 1
    """While pending: how many links may have been written under this epoch, so that a sweep finds their objects."""
    reusable: bool = False
    """A checkpoint: it outlives the request that wrote it, until its owner evicts it."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _ID.match(self.id):
            raise BoundaryInvalid("id", self.id, "must be 1 to 200 letters, digits and . _ : -")
        for name in ("model_digest", "prefix_hash"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _HEX.match(value):
                raise BoundaryInvalid(name, value, "must be hexadecimal digits")
        _check_int("length", self.length, 1)
        _check_type("epoch", self.epoch, Epoch)
        _check_text("owner", self.owner)
        _check_type("geometry", self.geometry, str)
        _check_int("packing_dcp", self.packing_dcp, 1)
        _check_int("packing_interleave", self.packing_interleave, 1)
        if not isinstance(self.created, (int, float)) or isinstance(self.created, bool) or self.created < 0:
            raise BoundaryInvalid("created", self.created, "must be seconds since 1970")
        _check_choice("state", self.state, get_args(State))
        if not self.ranks:
            raise BoundaryInvalid("ranks", self.ranks, "must hold an entry for every rank")
        for number, entry in enumerate(self.ranks):
            if entry.rank != number:
                raise BoundaryInvalid(f"ranks[{number}].rank", entry.rank, f"must be {number}")
        _check_int("base", self.base, 0)
        if self.base >= self.length:
            raise BoundaryInvalid("base", self.base, f"must be less than length {self.length}")
        if bool(self.base) != bool(self.parents):
            raise BoundaryInvalid(
                "parents", self.parents, f"must name who holds the rows of [0, {self.base})"
            )
        for parent in self.parents:
            if not isinstance(parent, str) or not _ID.match(parent) or parent == self.id:
                raise BoundaryInvalid("parents", parent, "must be ids of other records")
        _check_int("link", self.link, 0)
        _check_int("links", self.links, 1)
        _check_type("reusable", self.reusable, bool)
        if self.state != "pending":
            self.check_committable()

    def objects(self) -> list[ObjectEntry]:
        """Every object, ranks in order."""
        return [entry for rank in self.ranks for entry in rank.objects]

    @property
    def nbytes(self) -> int:
        """Bytes of every object."""
        return sum(rank.nbytes for rank in self.ranks)

    def check_committable(self) -> None:
        """Raises BoundaryInvalid unless every rank has written, no object is null and no key is named twice."""
        keys: set[str] = set()
        for rank in self.ranks:
            if rank.status != "written":
                raise BoundaryInvalid(f"ranks[{rank.rank}].status", rank.status, "must be written to commit")
            for entry in rank.objects:
                where = f"ranks[{rank.rank}] object {entry.key}"
                if not entry.null_free:
                    raise BoundaryInvalid(f"{where}: null_free", False, "must be proven to commit")
                if entry.token_hi > self.length:
                    raise BoundaryInvalid(
                        f"{where}: token_hi", entry.token_hi, f"exceeds length {self.length}"
                    )
                if entry.group == "mla" and entry.token_lo < self.base:
                    raise BoundaryInvalid(f"{where}: token_lo", entry.token_lo, f"is below base {self.base}")
                if entry.key in keys:
                    raise BoundaryInvalid(f"{where}: key", entry.key, "is named twice")
                keys.add(entry.key)

    def committed(self, ranks: Iterable[RankEntry] | None = None) -> BoundaryRecord:
        """This record, committed, with these entries. Raises BoundaryInvalid when it is not complete."""
        return replace(self, state="committed", ranks=self.ranks if ranks is None else tuple(ranks))

    def to_json(self) -> str:
        """The value stored in the ledger; equal records give equal text."""
        ranks = [{**vars(rank), "objects": [_entry(entry) for entry in rank.objects]} for rank in self.ranks]
        values = {**vars(self), "epoch": str(self.epoch), "ranks": ranks}
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> BoundaryRecord:
        """Inverse of `to_json`. Raises BoundaryInvalid naming the field that is missing, unknown or wrong."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise BoundaryInvalid("record", text[:80], f"is not JSON: {error}") from error
        values = _known(cls, values, "record")
        values["epoch"] = Epoch.parse(values.get("epoch"))
        values["ranks"] = tuple(
            _rank(item, f"ranks[{number}]") for number, item in enumerate(_list(values.get("ranks"), "ranks"))
        )
        values["parents"] = tuple(_list(values.get("parents", []), "parents"))
        return _build(cls, values, "record")


def _entry(entry: ObjectEntry) -> dict[str, Any]:
    """Its fields. The default digest is not written: records from before there were two are compared as text, and
    workers from then refuse a field that they do not know."""
    values = dict(vars(entry))
    if values["digest"] == ObjectEntry.digest:
        del values["digest"]
    return values


def boundary_id(model_digest: str, prefix_hash: str, epoch: Epoch) -> str:
    """An id under which the ledger finds every boundary of one prefix: <model>.<prefix>.<epoch>."""
    return f"{prefix_of_ids(model_digest, prefix_hash)}{epoch}"


def prefix_of_ids(model_digest: str, prefix_hash: str) -> str:
    """What the ids of every boundary of one prefix begin with."""
    return f"{model_digest[:16]}.{prefix_hash}."


def object_key(model_digest: str, epoch: Epoch, group: Group, rank: int, link: int = 0) -> str:
    """Key in the pool of what one rank writes of one group and link.

    The epoch makes it new; what is under it never changes.
    """
    _check_choice("group", group, get_args(Group))
    _check_int("rank", rank, 0)
    _check_int("link", link, 0)
    return f"ds/{model_digest[:16]}/{epoch}/{link}/{group}/{rank}"


def _rank(item: Any, where: str) -> RankEntry:
    values = _known(RankEntry, item, where)
    objects = _list(values.get("objects", []), f"{where}.objects")
    values["objects"] = tuple(
        _object(entry, f"{where}.objects[{number}]") for number, entry in enumerate(objects)
    )
    return _build(RankEntry, values, where)


def _object(item: Any, where: str) -> ObjectEntry:
    values = _known(ObjectEntry, item, where)
    values["digests"] = tuple(_list(values.get("digests"), f"{where}.digests"))
    return _build(ObjectEntry, values, where)


def _build(cls: Any, values: dict[str, Any], where: str) -> Any:
    try:
        return cls(**values)
    except TypeError as error:
        raise BoundaryInvalid(where, sorted(values), f"lacks a field: {error}") from error
    except BoundaryInvalid as error:
        if where == "record":
            raise
        inner = BoundaryInvalid(f"{where}.{error.field}", "", "")
        inner.args = (f"{where}.{error}",)
        raise inner from error


def _known(cls: Any, values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise BoundaryInvalid(where, values, "must be an object")
    unknown = sorted(set(values) - {field.name for field in fields(cls)})
    if unknown:
        raise BoundaryInvalid(where, unknown, "are fields that this version of deltaserve does not know")
    return dict(values)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BoundaryInvalid(where, value, "must be a list")
    return value


def _check_int(field: str, value: object, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BoundaryInvalid(field, value, f"must be a whole number of at least {least}")
    if most is not None and value > most:
        raise BoundaryInvalid(field, value, f"must be at most {most}")


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise BoundaryInvalid(field, value, "must be a text that is not empty")


def _check_type(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise BoundaryInvalid(field, value, f"must be of type {kind.__name__}")


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BoundaryInvalid(field, value, f"must be one of {', '.join(choices)}")
