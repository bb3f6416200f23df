# SPDX-License-Identifier: Apache-2.0
"""Hybrid Kimi models on vLLM without a GPU: kernels in torch, and the platform that installs them."""
