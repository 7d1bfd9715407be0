"""Tokens on disk, mapped into memory; the order of sequences follows from the seed and one number, the position.

So a run that resumes needs no state of the data but how many sequences it has read. Each epoch cuts the tokens anew, at
another place, and takes the pieces in another order.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sublight.engines.train import source, tokens
from sublight.engines.train.tokens import Tokenizer
from sublight.errors import BadInput
from sublight.results import write_file, write_json

HELD_OUT = 0.1  # the last tenth is for evaluation
META = "tokens.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Tokens to learn from and tokens to be judged by."""

    name: str
    tokenizer: Tokenizer
    train: NDArray[Any]
    held_out: NDArray[Any]

    def check(self, context: int) -> None:
        """Refuse data whose training or held-out part is shorter than a sequence."""
        if (least := min(self.train.size, self.held_out.size)) <= context:
            most = max(1, least - 1)
            raise BadInput(f"{self.name} has too few tokens ({least} in a part): take more text, or --context {most}")


def prepare(path: Path | None, words: str, folder: Path, *, most_bytes: int | None = None) -> Data:
    """Text to tokens, kept in the run's folder; a .bin is mapped where it lies."""
    if path is not None and path.suffix == ".bin":
        if words:
            raise BadInput(f"{path} holds tokens already: leave --tokens {words} out")
        return _prepare_bin(path, folder)
    texts = source.read_texts(path, most_bytes=most_bytes)
    tokenizer = tokens.choose(words, texts)
    ids = np.concatenate([tokenizer.encode(text) for text in texts])
    if ids.size < 2:
        raise BadInput(f"{path} holds {ids.size} tokens: take more text")
    dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    cut = ids.size - max(1, round(HELD_OUT * ids.size))
    for name, part in (("train", ids[:cut]), ("held_out", ids[cut:])):
        write_file(part.astype(dtype).tobytes(), folder / f"{name}.bin")
    name = "Python's library" if path is None else path.name
    files = {"train": "train.bin", "held_out": "held_out.bin"}
    write_json({"name": name, "dtype": dtype, **files, "tokenizer": tokenizer.to_json()}, folder / META)
    return opened(folder)


def _prepare_bin(path: Path, folder: Path) -> Data:
    """uint16 tokens; train.bin may have val.bin beside it, else its own last tenth is held out."""
    train = _mapped(path, "uint16")
    beside = path.with_name("val.bin") if path.name == "train.bin" else path
    largest = int(max(train.max(), _mapped(beside, "uint16").max())) if beside.exists() else int(train.max())
    held_out = beside if beside.exists() and beside != path else None
    meta: dict[str, Any] = {"name": path.name, "dtype": "uint16", "train": str(path.resolve())}
    meta["held_out"] = str(held_out.resolve()) if held_out else ""
    meta["seen"] = {str(each.resolve()): _seen(each) for each in (path, held_out) if each}
    write_json({**meta, "tokenizer": tokens.Numbers(largest + 1).to_json()}, folder / META)
    return opened(folder)


def opened(folder: Path) -> Data:
    """What `prepare` left."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise BadInput(f"{folder} has no readable {META}: this is no run's folder, or it is damaged") from None
    for path, seen in meta.get("seen", {}).items():
        _check_unchanged(Path(path), seen)
    train = _mapped(folder / meta["train"], meta["dtype"])
    if meta["held_out"]:
        held_out = _mapped(folder / meta["held_out"], meta["dtype"])
    else:
        cut = train.size - max(1, round(HELD_OUT * train.size))
        train, held_out = train[:cut], train[cut:]
    return Data(name=meta["name"], tokenizer=tokens.from_json(meta["tokenizer"]), train=train, held_out=held_out)


def _seen(path: Path) -> dict[str, int]:
    """What tells later whether this is the file that it was."""
    found, crc = path.stat(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "crc32": crc}


def _check_unchanged(path: Path, seen: Mapping[str, int]) -> None:
    """Other tokens would be another run. A file that was copied is read again: its time is new, its bytes are not."""
    try:
        now = path.stat()
        if (now.st_size, now.st_mtime_ns) == (seen["size"], seen["mtime_ns"]):
            return
        is_same = now.st_size == seen["size"] and _seen(path)["crc32"] == seen["crc32"]
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    if not is_same:
        raise BadInput(f"{path} has changed since this run began: put back what it was, or start with another --out")


def _mapped(path: Path, dtype: str) -> NDArray[Any]:
    try:
        if not path.stat().st_size or path.stat().st_size % np.dtype(dtype).itemsize:
            raise BadInput(f"{path} has {path.stat().st_size} bytes, which are no {dtype} tokens")
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None


class Order:
    """Which sequence comes at which position, for ever: a shuffled epoch after another."""

    def __init__(self, ids: NDArray[Any], context: int, seed: int) -> None:
        self.ids, self.context, self.seed = ids, context, seed
        self.per_epoch = max(1, (ids.size - context) // context)  # pieces, wherever an epoch's first one starts
        self._starts = functools.lru_cache(maxsize=2)(self._starts_of)

    def _starts_of(self, epoch: int) -> NDArray[np.int64]:
        random = np.random.default_rng([self.seed, epoch])
        slack = self.ids.size - 1 - self.per_epoch * self.context
        return random.permutation(self.per_epoch) * self.context + random.integers(slack + 1)

    def sequence(self, position: int) -> NDArray[np.int64]:
        """context + 1 tokens: the last is only a label."""
        epoch, place = divmod(position, self.per_epoch)
        start = int(self._starts(epoch)[place])
        return self.ids[start : start + self.context + 1].astype(np.int64)

    def batch(self, position: int, size: int) -> torch.Tensor:
        """(size, context + 1) from this position on."""
        return torch.from_numpy(np.stack([self.sequence(position + each) for each in range(size)]))


class Ahead:
    """Batches one after another; a thread makes the next while the device computes, in pinned memory for a GPU."""

    def __init__(self, order: Order, size: int, device: torch.device) -> None:
        self.order, self.size, self.device = order, size, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._coming: dict[int, Future[torch.Tensor]] = {}

    def batch(self, position: int) -> torch.Tensor:
        """On the device; the copy runs beside the step before it."""
        found = self._coming.pop(position, None) or self._thread.submit(self._made, position)
        self._coming = {position + self.size: self._thread.submit(self._made, position + self.size)}
        return found.result().to(self.device, non_blocking=True)

    def _made(self, position: int) -> torch.Tensor:
        batch = self.order.batch(position, self.size)
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def close(self) -> None:
        self._thread.shutdown()


def split_labels(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the one behind each."""
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def evaluation_batches(ids: NDArray[Any], context: int, size: int, most: int) -> Iterator[torch.Tensor]:
    """At most so many batches, spread evenly over the held-out tokens: the same every time."""
    room = ids.size - context - 1
    count = min(size * most, room // context + 1)
    starts = [round(place * room / max(1, count - 1)) for place in range(count)]
    for first in range(0, count, size):
        yield torch.from_numpy(
            np.stack([ids[at : at + context + 1].astype(np.int64) for at in starts[first : first + size]])
        )
