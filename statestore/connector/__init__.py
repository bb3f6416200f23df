# SPDX-License-Identifier: Apache-2.0
"""vLLM's door to the state store: `kv_connector_module_path="statestore.connector"`, class `DeltaserveConnector`.

connector.py is the class that vLLM constructs; scheduler_half.py decides, worker_half.py moves bytes, messages.py is
what they say to each other, cache_view.py knows how vLLM's caches lie in memory.
"""

from statestore.connector.connector import DeltaserveConnector

__all__ = ["DeltaserveConnector"]
