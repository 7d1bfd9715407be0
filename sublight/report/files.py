"""Write a picture or a page whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sublight.op import BadInput


def write(content: str | bytes, path: Path) -> None:
    """A temporary file beside the target, then a rename: nobody finds half a file."""
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}; name another file") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None
    finally:
        Path(name).unlink(missing_ok=True)
