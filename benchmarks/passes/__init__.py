# SPDX-License-Identifier: Apache-2.0
"""A prompt in one forward pass, and in the passes that it takes where no state is taken inside one (docs/gpu.md)."""
