# SPDX-License-Identifier: Apache-2.0
"""Container definitions, and the lock of the packages that the CUDA image is made of."""
