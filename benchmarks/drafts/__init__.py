# SPDX-License-Identifier: Apache-2.0
"""Long greedy answers of the CPU engine with drafts folded at start, compared with those without drafts."""
