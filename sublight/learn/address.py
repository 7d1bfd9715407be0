"""Addresses that the environment names: an assistant, a board. Secrets go there encrypted, and nowhere else."""

from __future__ import annotations

import urllib.parse
import urllib.request
from typing import Any

from sublight.errors import BadInput

_LOCAL = ("localhost", "127.0.0.1", "::1")


def checked(variable: str, url: str, example: str, secret_variable: str, secret: str) -> str:
    """The address without a slash at its end."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise BadInput(f"{variable}={url}: write an address such as {example}")
    if secret and parts.scheme == "http" and parts.hostname not in _LOCAL:
        raise BadInput(f"{variable}={url} would send {secret_variable} unencrypted: use https")
    return url.rstrip("/")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry code and secrets to an address that nobody named."""

    def redirect_request(self, *args: Any, **words: Any) -> None:
        return None


def opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects)


def plain(words: str) -> str:
    """Without control characters, which could steer the terminal.

    >>> plain("a\\x1b[31mb\\tc\\n")
    'a[31mb\\tc\\n'
    """
    return "".join(each for each in words if each in "\n\t" or each.isprintable())
