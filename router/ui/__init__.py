# SPDX-License-Identifier: Apache-2.0
"""The status page: /ui for people, /ui/state for `deltaserve top` and whoever else wants to look."""

from router.ui.page import StatusPage

__all__ = ["StatusPage"]
