# SPDX-License-Identifier: Apache-2.0
"""The command line: options made from the configuration models, and the table of commands."""
