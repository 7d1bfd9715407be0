"""What is kept between runs: the cache folder, and the limits in it."""

from __future__ import annotations

import tempfile

from sublight.doctor.packages import first_line
from sublight.doctor.record import Check


def cache() -> Check:
    """Can measured limits be kept? Tried by writing: permissions do not tell of a full or read-only disk."""
    from sublight.folder import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"sublight")
    except OSError as error:
        fix = "make it writable, or set SUBLIGHT_CACHE to a folder that is"
        return Check(
            name="cache folder",
            state="broken",
            found=f"{folder}: {error.strerror}",
            needed_for="keeping measured limits",
            fix=fix,
        )
    return Check(name="cache folder", state="ok", found=str(folder), needed_for="keeping measured limits")


def limits() -> Check:
    from sublight.limits import run

    needed_for = "floors without measuring anew"
    try:
        limits = run.cached(run.this_machine())
    except Exception as error:  # whatever the reason, an earlier row of the table has named it
        return Check(
            name="limits", state="broken", found=first_line(error), needed_for=needed_for, fix="see the lines above"
        )
    if limits is None:
        return Check(
            name="limits", state="missing", found="not measured yet", needed_for=needed_for, fix="sublight limits"
        )
    return Check(
        name="limits",
        state="ok",
        found=f"{len(limits.limits)} of {limits.device}, {limits.date[:10]}",
        needed_for=needed_for,
    )
