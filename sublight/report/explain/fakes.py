"""Explanations made by hand, for tests and for looking at the report without profiling anything."""

from __future__ import annotations

import dataclasses

from sublight.diagnose.record import BREAKDOWN, Explanation, Finding, OpRow, Place, RangeRow
from sublight.diagnose.source import SourceLine
from sublight.report import fakes
from sublight.report.explain.trace_fakes import GEMM, HOSTILE, LANES, STEP_NS, Tape, trace
from sublight.results import Limit, Limits
from sublight.trace.record import Kind


def _op(
    name: str, family: str, shape: str, calls: float, device_s: float, floor_s: float | None, **more: object
) -> OpRow:
    given: dict[str, object] = {
        "dtype": "bf16",
        "module": "",
        "source": "",
        "cpu_s": calls * 12e-6,
        "bound": "memory" if floor_s else "",
        "flops": 0.0,
        "bytes": (floor_s or 0.0) * (fakes.limits().value("hbm_copy") or 0.0),
        "kernels": ("vectorized_elementwise_kernel",),
        **more,
    }
    return OpRow(
        name=name,
        family=family,
        shape=shape,
        calls=calls,
        device_s=device_s,
        floor_s=floor_s,
        **given,  # type: ignore[arg-type]
    )


def ops() -> tuple[OpRow, ...]:
    """Every family, one of unknown cost, one with a name that is markup."""
    gemm = {"bound": "matmul_bf16", "kernels": (GEMM,), "module": "Model/layers/mlp.fc1", "source": "model.py:41"}
    where = {"module": "Model/layers/ln_2", "source": "model.py:38"}
    rows = (
        _op(
            "aten::mm", "matmul", "8192x4096, 4096x1024", 12, 2.28e-3, 1.07e-3, flops=8.2e11, **gemm | {"bytes": 1.1e9}
        ),
        _op(
            "aten::addmm",
            "matmul",
            "8192x1024, 1024x4096",
            6,
            1.14e-3,
            0.54e-3,
            flops=4.1e11,
            **gemm | {"bytes": 5.4e8},
        ),
        _op(
            "aten::addmm",
            "matmul",
            "8192x4096, 4096x1024",
            6,
            1.18e-3,
            0.54e-3,
            flops=4.1e11,
            **gemm | {"bytes": 5.4e8},
        ),
        _op("aten::native_layer_norm_backward", "norm", "8192x1024", 6, 0.53e-3, 0.1e-3, flops=4e8, **where),
        _op("aten::gelu_backward", "pointwise", "8192x4096", 6, 0.42e-3, 0.3e-3, flops=3e9, source="model.py:40"),
        _op("aten::gelu", "pointwise", "8192x4096", 6, 0.37e-3, 0.2e-3, flops=2e9, source="model.py:40"),
        _op("aten::native_layer_norm", "norm", "8192x1024", 6, 0.23e-3, 0.05e-3, flops=3e8, **where),
        _op("aten::_foreach_add_", "optimizer", "38 tensors", 60, 0.18e-3, 0.06e-3, dtype="fp32", flops=1e8),
        _op("aten::add", "pointwise", "8192x1024", 6, 0.18e-3, 0.08e-3, flops=5e7),
        _op("aten::copy_", "copy", "8192x768", 1, 0.57e-3, 0.23e-3, dtype="fp32", bound="h2d_pinned"),
        _op("aten::fill_", "copy", "8192x4096", 2, 0.05e-3, 0.03e-3),
        _op(f"mylib::mystery{HOSTILE}", "other", "", 3, 0.09e-3, None, dtype=""),
        *(
            _op(f"aten::tiny_{n}", "pointwise", f"{n + 1}x16", 4, 9e-6 / (n + 1), 4e-6 / (n + 1), bound="launch")
            for n in range(20)
        ),
    )
    return tuple(sorted(rows, key=lambda row: -row.device_s))


def findings() -> tuple[Finding, ...]:
    """In order of saving; the first with markup in what it quotes."""
    begin = STEP_NS / 1e9
    return (
        Finding(
            id="data-loading",
            title="The GPU waits 6.2 ms a step for the next batch",
            saving_s=6.1e-3,
            evidence=(
                "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__ takes 6.18 ms of the 20.0 ms step",
                "no kernel runs in that time; the loader has no workers: it runs in the training process",
            ),
            fix="loader = DataLoader(dataset, batch_size=256, num_workers=4, pin_memory=True,\n"
            "                    persistent_workers=True, prefetch_factor=4)",
            places=(Place(start_s=begin + 0.00002, end_s=begin + 0.0062, label="next batch"),),
        ),
        Finding(
            id="unfused-norm",
            title="12 layer norms and the adds before them run as separate kernels",
            saving_s=0.9e-3,
            evidence=("aten::native_layer_norm: 38.0 µs a call, floor 8.4 µs", f"kernel: layer_norm{HOSTILE}"),
            fix="model = torch.compile(model)  # fuses add + layer_norm",
            places=tuple(
                Place(start_s=begin + 7.03e-3 + n * 523.5e-6, end_s=begin + 7.068e-3 + n * 523.5e-6) for n in range(6)
            ),
            ops=("aten::native_layer_norm", "aten::add"),
        ),
        Finding(
            id="host-sync",
            title="loss.item() stops the host once a step until the GPU has caught up",
            saving_s=0.72e-3,
            evidence=("cudaStreamSynchronize 2.60 ms, called from aten::item at train.py:52",),
            fix="losses.append(loss.detach())   # read them once every 100 steps\n"
            "if step % 100 == 0: print(torch.stack(losses).mean().item())",
            places=(Place(start_s=begin + 0.0102, end_s=begin + 0.0103),),
            ops=("aten::item",),
            sources=(
                SourceLine(
                    place="train.py:52",
                    count=1.0,
                    number=52,
                    above=("    loss.backward()",),
                    below=("",),
                    before="    total += loss.item()",
                    after="    total += loss.detach()",
                ),
            ),
        ),
        Finding(
            id="pageable-copy",
            title="The batch is copied from pageable memory at 22.1 GB/s",
            saving_s=0.34e-3,
            evidence=("Memcpy HtoD (Pageable -> Device), 12.6 MB in 570 µs; pinned: 55.0 GB/s",),
            fix="batch = batch.to(device, non_blocking=True)  # with pin_memory=True in the DataLoader",
            places=(Place(start_s=begin + 0.0063, end_s=begin + 0.00687),),
        ),
        Finding(
            id="unfused-optimizer",
            title="The optimizer launches 60 kernels of 3 µs",
            saving_s=0.21e-3,
            evidence=("aten::_foreach_add_ 60 calls a step",),
            fix="torch.optim.AdamW(params, fused=True)",
        ),
        Finding(
            id="small-grid",
            title="4 kernels use 8 of 132 SMs",
            saving_s=0.05e-3,
            evidence=("grid 8×1×1",),
            fix="Batch the small products: torch.bmm",
        ),
    )


def explanation(**changes: object) -> Explanation:
    """A GPU run with something of everything; `changes` replace fields."""
    parts = {
        "floor": 3.6,
        "fusable": 1.1,
        "above_floor": 3.9,
        "unknown": 0.09,
        "launch": 1.9,
        "sync": 0.75,
        "data": 6.2,
    }
    parts |= {"python": 1.66, "copy": 0.6, "allocator": 0.05}
    breakdown = dict.fromkeys(BREAKDOWN, 0.0) | {name: 1e-3 * ms for name, ms in parts.items()}
    breakdown["other"] = 20e-3 - sum(breakdown.values())
    whole = Explanation(
        source="train.py --batch 256",
        device="NVIDIA H200",
        kind="cuda",
        limits=dataclasses.replace(fakes.limits(), device="NVIDIA H200"),
        limits_from="measured on this machine 2026-11-15",
        steps=3,
        steps_from="optimizer steps",
        step_s=20e-3,
        step_spread_s=0.21e-3,
        op_floor_s=4.7e-3,
        floor_s=3.6e-3,
        verdict="data-loading",
        sentence=f"{findings()[0].title}: fixing it saves 6.10 of 20.0 ms (31 %)",
        combined_saving_s=7.9e-3,
        fixed_floor_s=3.6e-3,
        traced_step_s=20e-3,
        breakdown=breakdown,
        findings=findings(),
        ops=ops(),
        ranges=(
            RangeRow(name="forward", calls=1, host_s=0.54e-3, device_s=3.1e-3, streams=1),
            RangeRow(name=f"evil {HOSTILE}", calls=2, host_s=0.1e-3, device_s=0.0, streams=0),
        ),
        caveats=("The machine was busy: a load of 9.0 on 2 cores. The host's times are too long.",),
        notes=("0.5 % of device time is in ops whose cost is not known: mylib::mystery.",),
        trace=trace(),
        window_s=(STEP_NS / 1e9, 2 * STEP_NS / 1e9),
    )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def on_cpu() -> Explanation:
    """A healthy run without a GPU: no findings, no device events, no memory log, one step."""
    tape = Tape()
    for call in range(8):
        tape.add(Kind.OP, "aten::mm", 0, call * 1_000_000, call * 1_000_000 + 950_000)
    size = "256x256, 256x256"
    known = {"dtype": "fp32", "bound": "matmul_fp32", "cpu_s": 7.6e-3, "flops": 1.36e8, "bytes": 6.3e6, "kernels": ()}
    breakdown = dict.fromkeys(BREAKDOWN, 0.0) | {"floor": 7.2e-3, "above_floor": 0.4e-3, "python": 0.4e-3}
    return explanation(
        source="matmul.py",
        device="AMD EPYC 9654",
        kind="cpu",
        limits=Limits(
            device="AMD EPYC 9654",
            kind="cpu",
            limits=(
                Limit(name="host_copy", unit="B/s", value=21e9),
                Limit(name="matmul_fp32", unit="FLOP/s", value=19e9),
            ),
        ),
        steps=1,
        steps_from="the whole run",
        step_s=8e-3,
        step_spread_s=0.0,
        op_floor_s=7.2e-3,
        floor_s=7.2e-3,
        verdict="healthy",
        sentence="Healthy: ops run for 95 % of the 8.00 ms step, at 90 % of the limit",
        caveats=(),
        combined_saving_s=0.0,
        breakdown=breakdown,
        findings=(),
        ops=(_op("aten::mm", "matmul", size, 8, 7.6e-3, 7.2e-3, **known),),
        ranges=(),
        notes=(),
        trace=tape.trace(None, LANES[:1]),
        window_s=(0.0, 8e-3),
    )


def hostile() -> Explanation:
    """The same markup in every text that can come from outside."""
    bad = f'"><b>{HOSTILE}\u2028&lt;'
    whole = explanation()
    events = trace()
    texts = {"name": bad, "shape": bad, "dtype": bad, "module": bad, "source": bad, "bound": bad, "family": bad}
    line = SourceLine(place=bad, count=1.0, number=1, before=bad, above=(bad,), below=(bad,), after=bad + "!")
    finding = {"id": bad, "title": bad, "evidence": (bad,), "fix": bad, "ops": (bad,), "sources": (line,)}
    lane = {"process": bad, "number": bad, "label": bad}
    return dataclasses.replace(
        whole,
        **dict.fromkeys(("source", "device", "limits_from", "steps_from", "sentence", "verdict"), bad),  # type: ignore[arg-type]
        notes=(bad,),
        caveats=(bad + "!",),
        findings=(dataclasses.replace(whole.findings[0], **finding),),  # type: ignore[arg-type]
        ops=tuple(dataclasses.replace(row, **texts, kernels=(bad,)) for row in whole.ops),  # type: ignore[arg-type]
        ranges=tuple(dataclasses.replace(row, name=bad) for row in whole.ranges),
        trace=dataclasses.replace(
            events,
            source=bad,
            names=tuple(bad + name for name in events.names),
            lost=(bad,),
            lanes=tuple(dataclasses.replace(each, **lane) for each in events.lanes),  # type: ignore[arg-type]
        ),
    )
