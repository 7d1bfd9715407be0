"""Autotuned kernels: every configuration is tried on the real tensors, so a launch must be one that can be repeated.

The launch is made a second time, with what `restore_value` and `reset_to_zero` name put back, and the tensors that it
stores to are compared: where they differ, trials change the result. Then everything is as after the first launch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sublight.xray.sanitize.memory import Argument, Memory, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What an autotuner does about a kernel that works in place."""

    restored: frozenset[str]  # arguments that are put back, or set to zero
    has_hooks: bool  # functions of the user's, which may put anything back

    @classmethod
    def of(cls, tuner: Any) -> Tuned:
        hooks = [getattr(tuner, f"user_defined_{name}_hook", False) for name in ("pre", "post")]
        hooks += [config.pre_hook is not None for config in tuner.configs]
        return cls(restored=frozenset((*tuner.restore_value, *tuner.reset_to_zero)), has_hooks=any(hooks))


def kept(memory: Memory, bound: Mapping[str, Any], names: Iterable[str]) -> dict[int, bytes]:
    """The bytes behind these arguments now, by address."""
    storages = [memory.of(bound[name]) for name in names if hasattr(bound.get(name), "data_ptr")]
    return {storage.address: _bytes(storage) for storage in storages}


def changed_again(
    arguments: list[Argument], before: Mapping[int, bytes], restored: frozenset[str], again: Callable[[], Any]
) -> Iterator[tuple[Argument, str]]:
    """Arguments that a second launch changes once more, with words about it."""
    stored = {each.storage.address: each for each in arguments if each.storing_programs and each.name not in restored}
    written = {each.storage.address: each.storage for each in arguments if each.storing_programs}
    after = {address: _bytes(storage) for address, storage in written.items()}
    for address, data in before.items():
        ctypes.memmove(address, data, len(data))
    try:
        with contextlib.suppress(Exception):  # of a launch that nobody asked for
            again()
            for address, argument in stored.items():
                if _bytes(written[address]) != after[address]:
                    yield argument, _words(argument)
    finally:
        for address, data in {**before, **after}.items():
            ctypes.memmove(address, data, len(data))


def _words(argument: Argument) -> str:
    name = argument.name
    return (
        f"autotune tries this kernel on the real tensors, and each trial changes {name} ({argument.text}) once more: "
        f"add restore_value=[{name!r}] to @triton.autotune (or reset_to_zero, for a sum)"
    )


def _bytes(storage: Storage) -> bytes:
    return ctypes.string_at(storage.address, storage.byte_count)
