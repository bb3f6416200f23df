# SPDX-License-Identifier: Apache-2.0
"""Who may enter, and when: API keys, limits, deadlines and a fair queue (docs/overload.md).

keys.py        API keys and their limits, read from a file
fair_queue.py  who is next: priority, then fairness between keys
pace.py        how long a request will wait, learned from how fast slots come free
door.py        puts them together: `Door.enter` returns when a request may go on, or raises `Refused`
"""

from router.admission.door import PROMPT_SEEN, Door, Permit, Refused
from router.admission.keys import Key, KeyRing, KeysInvalid

__all__ = ["PROMPT_SEEN", "Door", "Key", "KeyRing", "KeysInvalid", "Permit", "Refused"]
