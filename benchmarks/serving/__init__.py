# SPDX-License-Identifier: Apache-2.0
"""Three ways to serve one model on two devices, under the same open-loop load, in one run.

    agg     two whole vLLM engines, requests to them in turn
    nixl    vLLM's own prefill and decode over NixlConnector, joined as vLLM's proxy does it
    delta   deltaserve: router, a prefill and a decode worker, etcd, Mooncake

`python -m benchmarks.serving --out FOLDER` starts one side after the other and gives each the same rows: Poisson
arrivals of a fixed seed, prompts of random tokens that no cache knows, answers of a fixed length, read as streams from
the same HTTP endpoint (`/v1/completions`, prompts as token ids). Engines have the same sizes on every side.

workload.py says what arrives when, client.py and load.py send it and keep the times, sides.py starts and stops what is
measured, stats.py turns times into a row, parts.py asks the sides what they have counted, model.py writes a model of
random weights for machines with GPUs, table.py prints.
"""
