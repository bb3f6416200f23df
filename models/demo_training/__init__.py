# SPDX-License-Identifier: Apache-2.0
"""How the demonstration model is built, trained and measured.

The model has Kimi K3's text form at a size that fits in a repository. It is trained from fixed seeds on
generated data so that its answers depend on every part of the state that a handoff moves.
"""
