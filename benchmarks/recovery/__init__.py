# SPDX-License-Identifier: Apache-2.0
"""Streams over killed decode workers: how many go on exactly, and how long the client sees nothing.

A cluster of one prefill and two decode workers serves streams of four kinds (greedy; seeded with penalties; under a
JSON schema; a chat); in the middle of them the decode worker that has most of them is killed. Every stream is compared
with the same one undisturbed. The pause is the longest gap between two chunks of a stream that was moved; the longest
gap of the undisturbed streams stands beside it. The aims: 99 of 100 kills exact, a median pause of 1.5 s or less.
"""
