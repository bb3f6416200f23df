# SPDX-License-Identifier: Apache-2.0
"""The Helm chart's tools: the schema of its values, and capacity planning."""
