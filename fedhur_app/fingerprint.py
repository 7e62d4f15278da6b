"""Fingerprint of the code: server and clients must run the same."""

import hashlib
from functools import lru_cache
from pathlib import Path

PACKAGES = ("fedhur_app", "client_app", "server_app")


@lru_cache(maxsize=1)
def code_fingerprint() -> str:
    """Twelve hex digits over the Python files of the three packages (names and contents)."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
