# SPDX-License-Identifier: Apache-2.0
"""Streams over killed workers: how many go on exactly, and how long the client sees nothing.

A cluster of one prefill and two decode workers (or more) serves streams of five kinds (greedy; seeded with penalties;
under a JSON schema; a chat; a tool call). At a random point of one of them, each kind in turn, the decode worker that
has it is killed; every fourth kill is of the prefill worker while it computes their prompts. Every stream is compared
with the same one undisturbed. A kill waits until a prefill and two decode workers serve: with more, it need not wait
for the last victim's restart, which then takes its share of the processors. Runs add up in a file (`--go-on`). The
pause is the longest gap between two chunks of a stream that was moved; the longest gap of the undisturbed streams
stands beside it. The aims: 99 of 100 kills exact, a median pause of 1.5 s or less.
"""
