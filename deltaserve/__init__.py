# SPDX-License-Identifier: Apache-2.0
"""deltaserve: prefill and decode apart for hybrid Kimi models, exact to the token."""

__version__ = "0.1.0"
