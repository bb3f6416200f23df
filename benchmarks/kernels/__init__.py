# SPDX-License-Identifier: Apache-2.0
"""Speculative KDA on one Hopper GPU: writing every state, RecoverSSM, and ReplaySSM, in one run.

``python -m benchmarks.kernels --json FILE [--quick]``. The convolution and its state are part of every side.
"""
