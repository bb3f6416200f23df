# SPDX-License-Identifier: Apache-2.0
"""The router: vLLM's OpenAI layer over a remote engine core, and the dispatcher that places requests on workers."""
