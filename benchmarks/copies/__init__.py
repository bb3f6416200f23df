# SPDX-License-Identifier: Apache-2.0
"""State on and off a GPU: the kernels of `statestore.gpu` against plain copies of the same bytes, in the same run.

caches.py makes a rank's paged caches of random state, checks.py compares every kernel's bytes and digests with plain
indexing and with the CPU's digest, timing.py measures, __main__.py prints.
"""
