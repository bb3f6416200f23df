# SPDX-License-Identifier: Apache-2.0
"""The wire: .proto files, the stubs generated from them (`make proto`), and the codecs beside them."""
