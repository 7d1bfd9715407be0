"""Sends a submission to a board, and asks what became of it."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sublight.errors import BadInput
from sublight.learn.address import checked, opener, plain
from sublight.learn.verdict import Verdict

URL, TOKEN = "SUBLIGHT_BOARD_URL", "SUBLIGHT_BOARD_TOKEN"
SILENCE_S, LOOK_S, MOST_S = 30.0, 1.0, 300.0
REPLY_BYTES = 1 << 22
PENDING = ("queued", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Where entries go, and as whom."""

    url: str
    token: str

    def send(self, verdict: Verdict, source: str) -> dict[str, Any]:
        """The entry as the board has it."""
        claim: dict[str, Any] = {"fraction": verdict.fraction, "machine": machine(), "versions": versions()}
        if verdict.timing:
            claim["timed"] = {"seconds": verdict.timing.seconds, "fraction": verdict.timing.fraction}
        entry = {"exercise": verdict.exercise, "gpu": verdict.gpu, "source": source, "claim": claim}
        return self._ask("/api/entries", json.dumps(entry).encode())

    def outcome(
        self, number: int, *, progress: Callable[[str], None] | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> dict[str, Any]:
        """The entry once the server has run it, or as it stands after five minutes."""
        entry, waited_s = self._ask(f"/api/entries/{number}"), 0.0
        while entry["state"] in PENDING and waited_s < MOST_S:
            if progress:
                progress(entry["state"])
            sleep(LOOK_S)
            waited_s += LOOK_S
            entry = self._ask(f"/api/entries/{number}")
        return entry

    def _ask(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with opener().open(request, timeout=SILENCE_S) as response:
                reply = json.loads(response.read(REPLY_BYTES))
            if not isinstance(reply, dict) or "state" not in reply or "id" not in reply:
                raise ValueError
            return reply
        except urllib.error.HTTPError as error:
            raise BadInput(f"{self.url} answered {error.code}: {_complaint(error)}") from None
        except urllib.error.URLError as error:
            raise BadInput(f"{self.url} cannot be reached: {error.reason}; see {URL}") from None
        except (OSError, http.client.HTTPException) as error:
            raise BadInput(f"{self.url} broke off: {error or type(error).__name__}; send it again") from None
        except ValueError:
            raise BadInput(f"{self.url} is no board: see {URL}") from None


def board_of(environment: Mapping[str, str] = os.environ) -> Board:
    url, token = (environment.get(name, "").strip() for name in (URL, TOKEN))
    if not url:
        raise BadInput(f"to which board? Set {URL} to its address, and {TOKEN} to your token there")
    address = checked(URL, url, "https://board.example.org", TOKEN, token)
    if not token:
        raise BadInput(f"{URL} is set and {TOKEN} is not: whoever runs the board gives you one")
    return Board(url=address, token=token)


def machine() -> str:
    from sublight.limits.run import this_machine

    return this_machine().device


def versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    from sublight import __version__

    found = {"sublight": __version__, "python": platform.python_version()}
    for name in ("torch", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _complaint(error: urllib.error.HTTPError) -> str:
    try:
        return plain(str(json.loads(error.read(4096))["error"]))[:300]
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)
