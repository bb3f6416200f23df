# SPDX-License-Identifier: Apache-2.0
"""What a front costs: CPU time for streamed tokens and short requests, memory of idle streams, added latency.

`python -m benchmarks.router --json FILE [--quick]` measures, in one run and over one engine simulator, this router
(face one, face two), vLLM's own Rust front end, and the routers `vllm-router` and `smg`, bare (they relay text) and
with that front end behind them (they then do what our faces do). The peers are installed into `.peers/`.
"""
