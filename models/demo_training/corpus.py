# SPDX-License-Identifier: Apache-2.0
"""Free text: Python's own documentation and docstrings (PSF licence), read from the standard library.

It fills the space between the records of sparse recall and gives the tokenizer and the model some English.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from pathlib import Path
from random import Random

_SKIPPED = ("test", "idlelib", "lib2to3", "site-packages", "pydoc_data", "turtledemo", "dist-packages")


def _clean(text: str) -> str:
    text = re.sub(r"[ \t]+", " ", text.replace("\r", ""))
    text = re.sub(r"[^\x0a\x20-\x7e]", "", text)
    text = re.sub(r"([-=~*.])\1{4,}", r"\1\1\1", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in found if text and len(text) > 60]


def documents(seed: int = 0, limit: int = 4_000_000) -> list[str]:
    """Shuffled documents of together at most `limit` characters."""
    from pydoc_data import topics

    texts = [str(text) for text in topics.topics.values()]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if not any(part in _SKIPPED for part in path.relative_to(root).parts):
            texts += _docstrings(path)
    texts = [_clean(text) for text in texts]
    Random(seed).shuffle(texts)
    kept: list[str] = []
    total = 0
    for text in texts:
        total += len(text)
        if total > limit:
            break
        kept.append(text)
    return kept
