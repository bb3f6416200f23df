# SPDX-License-Identifier: Apache-2.0
"""How long a placement decision takes: every policy, 64 and 1,000 workers, prompts of 200 to 8,000 tokens.

The aims: 200 µs at p99 with 64 workers, 1 ms with 1,000. A decision is the router's own (router/chooser.py over the
roster's links), the digests of the prompt's prefixes included, and the policy's memory is full. It never waits, so the
aims are for the processor's time; the clock's stands beside it, which on a busy machine holds others' work as well. The
control is a decision by nothing but a random number, in the same run.
"""
