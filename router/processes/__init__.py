# SPDX-License-Identifier: Apache-2.0
"""Several router processes behind one port (`--processes N`; docs/router.md has the protocol).

start.py     checks, sockets and a folder, before the processes part
parent.py    the process that was started: imports vLLM once, forks the others, restarts what ends
place.py     what a child knows of where it is, and what parent and child say to each other
tally.py     counts that all processes see: limits of API keys, places at the door
siblings.py  one process asks the others, for answers that speak of all of them
merge.py     their answers put together
"""
