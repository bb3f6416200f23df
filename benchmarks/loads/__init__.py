# SPDX-License-Identifier: Apache-2.0
"""What loads of handed-over state cost the answers that a decode worker generates meanwhile (docs/gpu.md)."""
