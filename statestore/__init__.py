# SPDX-License-Identifier: Apache-2.0
"""The state store: what a boundary is, where its bytes lie, how they move between two layouts, who may see them."""
