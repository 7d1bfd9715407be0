"""What goes wrong with a request, as OpenAI says it: a status, a message, a kind, the field, a code."""

from __future__ import annotations

from typing import Any


class Failure(Exception):
    def __init__(self, status: int, message: str, *, kind: str = "", param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> Failure:
    return Failure(400, message, param=param, code=code)
