"""Copies of a followed block that are more than a load or a store: cp.async, TMA, the loads and stores of wmma, and
what wgmma reads itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from sublight.xray.occupancy.sm import WARP
from sublight.xray.ptx.numbers import Kind
from sublight.xray.ptx.transactions import PASS_BYTES
from sublight.xray.record import AccessKind

if TYPE_CHECKING:
    from sublight.xray.ptx.addresses import Addresses
    from sublight.xray.ptx.entry import Instruction
    from sublight.xray.ptx.machine import Step


_TILE = re.compile(r"m64n(\d+)k\d+")
_GROUP_WARPS = 4  # that make one wgmma
_K_BYTES = 32  # of a row of either operand, whatever its type


class Copier:
    """Makes their steps."""

    def __init__(self, accessor: Addresses) -> None:
        self.accessor, self.machine, self.builder = accessor, accessor.machine, accessor.builder

    def step(self, index: int, instruction: Instruction) -> Step | None:
        """None: it is none of these."""
        parts = instruction.parts
        if parts[0] == "wmma" and parts[1] in ("load", "store"):
            return self._fragment(index, instruction)
        if parts[0] == "wgmma" and parts[1] == "mma_async":
            return self._product(index, instruction)
        if parts[0] != "cp":
            return None
        if parts[1] == "async" and "bulk" in parts:
            return self._bulk(index, instruction)
        is_copy = parts[1] == "async" and any(word.startswith("shared") for word in parts)
        return self._copy(index, instruction) if is_copy else lambda: None

    def _copy(self, index: int, instruction: Instruction) -> Step:
        """cp.async: done at once. Bytes beyond the source's size are zeros, and no lane fetches nothing."""
        operands, accessor = instruction.operands, self.accessor
        (to, to_offset), (source, offset) = accessor.address(operands[0]), accessor.address(operands[1])
        width = int(operands[2], 0)
        has_size = len(operands) > 3 and self.builder.entry.registers.get(operands[3]) not in ("b64", "u64", "pred")
        size = self.builder.source(operands[3], Kind("b32")) if has_size else None
        element = min(width, 4)
        machine, is_needed = self.machine, "shared" in self.builder.needed.spaces

        def step() -> None:
            at, why = accessor.lanes_at(source, offset)
            target, why_target = accessor.lanes_at(to, to_offset)
            active = machine.active()
            of_size = machine.whys[size.slot] if size else None
            sized = np.zeros(1, np.uint8) if of_size is None else np.where(active, of_size, np.uint8(0))
            sizes = np.broadcast_to(self.builder.read(size) if size else np.array([width], np.uint32), at.shape)
            unsure = np.broadcast_to(sized if why is None else np.maximum(why, sized), at.shape)
            fetching = active & (unsure == 0) & (sizes > 0)
            if sized.any():
                reason = f"how much it copies depends on {machine.start.reasons[int(sized.max())]}"
                machine.recorder.note_unknown(index, "global", "async copy", width, reason)
            elif fetching.any() or why is not None:
                accessor.note(index, "global", "async copy", at, fetching, width, why)
            accessor.note(index, "shared", "async copy", target, active, width, why_target, copied=(at, fetching))
            if why_target is not None or not is_needed:
                return
            whole = []
            for k, (bits, doubt) in enumerate(accessor.fetch("global", at, fetching, element, width // element)):
                inside = sizes > k * element
                doubt = np.maximum(unsure, 0 if doubt is None else doubt)
                whole.append((np.where(inside, bits, bits.dtype.type(0)), doubt if doubt.any() else None))
            accessor.keep("shared", target, active, whole)

        return step

    def _fragment(self, index: int, instruction: Instruction) -> Step:
        """wmma: which lane takes what is not documented, so nothing is said of sectors or passes."""
        parts, operands, accessor = instruction.parts, instruction.operands, self.accessor
        is_load = parts[1] == "load"
        kind: AccessKind = "matrix load" if is_load else "matrix store"
        source, offset = accessor.address(operands[1 if is_load else 0])
        named = next((word for part in parts if (word := part.partition("::")[0]) in ("global", "shared")), "")
        machine, builder = self.machine, self.builder
        targets = [builder.target(word) for word in operands[0].strip("{}").split(",")] if is_load else []
        why = np.array([machine.reason("what wmma loads")], np.uint8)

        def step() -> None:
            at, _ = accessor.lanes_at(source, offset)
            space, _ = accessor.resolve(named, at, machine.active())
            if space in ("global", "shared"):
                reason = "which lane takes what is not documented: mma.sync with ldmatrix can be followed"
                machine.recorder.note_unknown(index, "global" if space == "global" else "shared", kind, 0, reason)
            for target in targets:
                if target.slot >= 0:
                    machine.put(target.slot, machine.values[target.slot], why)

        return step

    def _product(self, index: int, instruction: Instruction) -> Step:
        """wgmma reads B, and A where it is no registers, out of shared memory: each whole tile, 128 bytes a pass.

        So ncu counted it on an H200, for 64 × 16 by 16 × 64 and by 16 × 128; a second product with the same B reads it
        again. Which values come out is not followed.
        """
        machine, builder = self.machine, self.builder
        tile = next((found for part in instruction.parts if (found := _TILE.fullmatch(part))), None)
        targets = [builder.target(word) for word in instruction.operands[0].strip("{}").split(",")]
        why = np.array([machine.reason(f"{instruction.opcode}, which is not emulated")], np.uint8)
        is_sparse = "sp" in instruction.parts
        rows = (int(tile[1]) if tile else 0) + (0 if instruction.operands[1].startswith("{") else 64)
        passes = rows * _K_BYTES // PASS_BYTES

        def step() -> None:
            warps = int(machine.active().reshape(-1, WARP).any(1).sum())
            if tile and not is_sparse:
                machine.recorder.note_operands(index, warps, -(-warps // _GROUP_WARPS) * passes)
            else:
                machine.recorder.note_unknown(index, "shared", "matrix operand", 0, "a form of wgmma not known here")
            for target in targets:
                if target.slot >= 0:
                    machine.put(target.slot, machine.values[target.slot], why)

        return step

    def _bulk(self, index: int, instruction: Instruction) -> Step:
        """TMA: one thread asks for a whole piece or tile; what arrives is not followed."""
        parts, operands = instruction.parts, instruction.operands
        if not operands or not operands[0].startswith("["):  # commit_group, wait_group
            return lambda: None
        is_tensor = "tensor" in parts
        sized = next((word for word in operands[1:] if not word.startswith(("[", "{"))), "") if not is_tensor else ""
        size = self.builder.source(sized, Kind("b32")) if sized else None
        machine = self.machine
        spaces = [name for part in parts if (name := part.partition("::")[0]) in ("global", "shared")]
        pointer = operands[spaces.index("global")] if "global" in spaces else operands[0]
        source, offset = self.accessor.address(pointer) if size else (None, np.int64(0))

        def step() -> None:
            if size is None or source is None or machine.whys[size.slot] is not None:
                machine.recorder.note_unknown(index, "global", "bulk copy", 0, "TMA moves whole tiles")
                return
            at, why = self.accessor.lanes_at(source, offset)
            for lane in np.flatnonzero(machine.active()):
                length = int(np.broadcast_to(self.builder.read(size), at.shape)[lane])
                pieces = np.zeros(-(-length // (16 * WARP)) * WARP, np.int64)
                pieces[: length // 16] = at[lane] + 16 * np.arange(length // 16)
                on = np.arange(len(pieces)) < length // 16
                if why is None and len(pieces):
                    machine.recorder.note(index, "global", "bulk copy", pieces, on, 16)

        return step
