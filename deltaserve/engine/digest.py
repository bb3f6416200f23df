# SPDX-License-Identifier: Apache-2.0
"""The model digest: state of one model means nothing to another, so every boundary carries it.

It covers config.json and every safetensors file: small ones whole; of large ones the header (names, shapes, types,
offsets), the size and samples of the data. Hashing all bytes of a terabyte would take minutes at every start; two
checkpoints of one training run differ in nearly every tensor, so 64 samples of 64 KiB a file tell them apart.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

WHOLE_BYTES = 64 << 20
SAMPLES = 64
SAMPLE_BYTES = 64 << 10
_COSMETIC = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map")


def model_digest(model: Path, dtype: str) -> str:
    """Digest of the model in folder `model` as run in `dtype`, 16 hexadecimal digits.

    Raises FileNotFoundError naming the folder when there is no config.json or no weights.
    """
    config_path = model / "config.json"
    if not config_path.is_file():
        raise FileNotFoundError(f"model: {model} has no config.json; give the folder of a model with --model")
    weights = sorted(model.glob("*.safetensors"))
    if not weights:
        raise FileNotFoundError(
            f"model: {model} has no *.safetensors weights; give a complete model with --model"
        )
    config = json.loads(config_path.read_text())
    for name in _COSMETIC:
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps([config, dtype], sort_keys=True).encode())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                digest.update(file.read())
                continue
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            for i in range(SAMPLES):
                file.seek(
                    i * (size - SAMPLE_BYTES) // (SAMPLES - 1)
                )  # the first sample to the very last byte
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
