# SPDX-License-Identifier: Apache-2.0
"""vLLM as this cluster runs it: arguments, the host of its engine core, and the CPU kernels."""
