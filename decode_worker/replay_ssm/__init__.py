# SPDX-License-Identifier: Apache-2.0
"""ReplaySSM: speculative decoding on recurrent state that is read once and written once a step."""
