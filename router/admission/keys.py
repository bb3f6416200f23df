# SPDX-License-Identifier: Apache-2.0
"""API keys: a file of names with secrets and limits. Secrets are kept as digests and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from deltaserve.config import STRICT


class KeysInvalid(ValueError):
    """A file of keys that cannot be used; the message names the file, the key and the field, and no secret."""


class _Entry(BaseModel):
    model_config = ConfigDict(**STRICT, hide_input_in_errors=True)

    key: str = Field(min_length=8, description="the secret that clients send as a bearer token")
    weight: float = Field(1.0, gt=0, description="share of the cluster among keys that wait")
    priority: int = Field(0, description="the most urgent priority it may ask for; smaller is sooner")
    requests_per_second: float = Field(0.0, ge=0, description="0: no limit")
    concurrency: int = Field(0, ge=0, description="requests at once; 0: no limit")


@dataclass(frozen=True)
class Key:
    """A client, as the door knows it."""

    name: str
    weight: float = 1.0
    priority: int = 0
    requests_per_second: float = 0.0
    concurrency: int = 0


ANONYMOUS = Key("anonymous")


class KeyRing:
    """The keys that open the door; without any, everybody is `ANONYMOUS`."""

    def __init__(self, keys: dict[str, tuple[str, Key]] | None = None) -> None:
        """`keys`: secret and key, by name."""
        self._keys = [(_digest(secret), key) for secret, key in (keys or {}).values()]

    def __bool__(self) -> bool:
        """Whether keys are needed."""
        return bool(self._keys)

    @property
    def limited(self) -> list[str]:
        """Names of the keys that have limits of their own."""
        return [key.name for _, key in self._keys if key.concurrency or key.requests_per_second]

    @classmethod
    def read(cls, path: Path) -> KeyRing:
        """Raises KeysInvalid when the file is not there, is not what it should be, or two names share a secret."""
        try:
            found = TypeAdapter(dict[str, _Entry]).validate_json(path.read_bytes())
        except OSError as error:
            raise KeysInvalid(f"{path}: {error.strerror}; --api-keys names a JSON file") from error
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise KeysInvalid(f"{path}: {where}: {first['msg']}") from None
        if not found:
            raise KeysInvalid(f"{path}: holds no key; leave --api-keys out to let everybody in")
        if len({entry.key for entry in found.values()}) < len(found):
            raise KeysInvalid(f"{path}: two names share a key; give each its own")
        return cls(
            {
                name: (
                    entry.key,
                    Key(name, entry.weight, entry.priority, entry.requests_per_second, entry.concurrency),
                )
                for name, entry in found.items()
            }
        )

    def find(self, authorization: bytes) -> Key | None:
        """The client of an Authorization header (or of a bare x-api-key); None: it opens nothing."""
        if not self._keys:
            return ANONYMOUS
        secret = authorization.removeprefix(b"Bearer ").removeprefix(b"bearer ").strip()
        wanted = hashlib.sha256(secret).digest()
        found = None
        for digest, key in self._keys:  # all of them, whichever fits: the time tells nothing
            if hmac.compare_digest(digest, wanted):
                found = key
        return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
