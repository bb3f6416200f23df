# SPDX-License-Identifier: Apache-2.0
"""The cluster as Ray actors; docs/ray.md. Ray itself is imported only where an actor or a handle is made."""
