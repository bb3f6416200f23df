# SPDX-License-Identifier: Apache-2.0
"""What this project changes in vLLM's CUDA engine; nothing here is active unless it is asked for."""
