# SPDX-License-Identifier: Apache-2.0
"""Small models for tests and first steps: the demonstration model and how it was trained."""
