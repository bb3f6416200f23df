# SPDX-License-Identifier: Apache-2.0
"""`deltaserve doctor`: what this machine has, and which optimisations a worker of this configuration would use.

capabilities.py  the K3 optimisations, read out of a vLLM configuration
environment.py   Python, libraries, binaries, device, memory, ports
main.py          the command: builds the configuration, or asks a running worker
"""
