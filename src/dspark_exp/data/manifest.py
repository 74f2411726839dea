"""What made a folder or file: written beside it, and compared before anything is added or reused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark_exp.errors import DataError


def check_manifest(path: Path, manifest: dict[str, Any], what: str) -> None:
    """Write the manifest, or compare it with the one that is there.

    Raises:
        DataError: they differ; the message names every field with both values.
    """
    if path.exists():
        found = json.loads(path.read_text())
        changed = [
            f"{key} was {found.get(key)!r}, now {manifest.get(key)!r}"
            for key in sorted(found.keys() | manifest.keys())
            if found.get(key) != manifest.get(key)
        ]
        if changed:
            raise DataError(f"{path} was made with other settings: {'; '.join(changed)}. Give another {what}.")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, manifest)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(value, indent=1))
    temporary.replace(path)
