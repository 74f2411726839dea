"""Short names for long things: hashes of files and of plain values. Knows nothing else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 24


def file_digest(*paths: Path) -> str:
    """SHA-256 of the contents of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def short_digest(value: Any) -> str:
    """16 hexadecimal digits that stand for a plain value (anything JSON can write), whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
