# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: state that outlives its request, so that a longer prompt starts from it. docs/checkpoints.md.

chain.py says which records join; index.py finds the longest checkpoint of a prompt; budget.py counts bytes and names
what has to go; keeping.py gives objects and records back; publication.py is the life of one publish, for both roles.
"""
