# SPDX-License-Identifier: Apache-2.0
"""Everything that `deltaserve verify` can show on a machine with GPUs, in stages that can be resumed (docs/gpu.md)."""
