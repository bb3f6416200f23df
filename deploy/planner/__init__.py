# SPDX-License-Identifier: Apache-2.0
"""How many workers each role needs: `deltaserve plan`. docs/scaling.md."""
