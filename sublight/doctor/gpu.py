"""The GPU, its driver, its hardware counters, and the parts of PyTorch and Triton that launches go through."""

from __future__ import annotations

import re
from pathlib import Path

from sublight import gpus, nvml
from sublight.doctor.packages import first_line, load
from sublight.doctor.record import Check

DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
CAP_SYS_ADMIN = 21  # the bit of the capability that may read counters whatever the driver says


def device() -> Check:
    needed_for = "kernels at speed; without one the CPU is measured"
    try:
        gpu = gpus.detect()
    except Exception as error:  # a driver that torch cannot talk to fails in many ways
        fix = "reboot, or install a driver that fits this torch"
        return Check(name="GPU", state="broken", found=first_line(error), needed_for=needed_for, fix=fix)
    if gpu is not None:
        capability = f", sm_{''.join(map(str, gpu.compute_capability))}" if gpu.compute_capability else ""
        return Check(name="GPU", state="ok", found=f"{gpu.name}{capability}", needed_for=needed_for)
    if nvml.health() is not None:  # the driver sees one, torch does not
        return Check(
            name="GPU",
            state="broken",
            found="torch cannot use it",
            needed_for=needed_for,
            fix="install a torch built for CUDA",
        )
    return Check(
        name="GPU", state="missing", needed_for=needed_for, fix="none needed; `--device cpu` is the default here"
    )


def driver() -> Check:
    health = nvml.health()
    needed_for = "clocks, throttling, energy beside every time"
    if health is not None:
        return Check(name="NVML and driver", state="ok", found=health.driver, needed_for=needed_for)
    missing = isinstance(load("pynvml"), Exception)
    fix = "pip install nvidia-ml-py" if missing else "install NVIDIA's driver"
    return Check(
        name="NVML and driver",
        state="missing",
        found="no pynvml" if missing else "no driver",
        needed_for=needed_for,
        fix=fix,
    )


def counters() -> Check:
    """May ncu read hardware counters? The driver keeps them for administrators unless told otherwise."""
    needed_for = "ncu: what a kernel waits for"
    try:
        parameters = DRIVER_PARAMETERS.read_text()
    except OSError:
        return Check(
            name="GPU counters",
            state="missing",
            found="no NVIDIA kernel module",
            needed_for=needed_for,
            fix="install NVIDIA's driver",
        )
    if "RmProfilingAdminOnly: 1" in parameters and not _is_admin():
        fix = "sudo, or the module option NVreg_RestrictProfilingToAdminUsers=0 and a reboot"
        return Check(
            name="GPU counters", state="broken", found="for administrators only", needed_for=needed_for, fix=fix
        )
    return Check(name="GPU counters", state="ok", found="readable", needed_for=needed_for)


def _is_admin() -> bool:
    """Root in a container often lacks the capability that the driver asks for."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(match and int(match[1], 16) >> CAP_SYS_ADMIN & 1)


def backend() -> list[Check]:
    """The private parts of Triton and PyTorch that we use, quick launches, and calls in C++."""
    needed = {"internals": "xray, patch, graph", "quick launches": "eager calls of ops: 15 µs each"}
    try:
        import torch

        from sublight.backend import launch, native, private
        from sublight.backend.jit import AVAILABLE, why_no_gluon
    except ImportError:
        return []  # a missing package has a row of its own
    is_cuda = gpus.detect() is not None
    lacking = private.missing(without=() if AVAILABLE else ("triton",)) if is_cuda or AVAILABLE else []
    lacking = [words for words in lacking if is_cuda or "_cuda" not in words]
    lacking += [why_no_gluon] if AVAILABLE and why_no_gluon else []
    newest = "use torch 2.11 to 2.13 and triton 3.6 to 3.9, or tell us"
    checks = [
        Check(
            name="internals", state="broken" if lacking else "ok", needed_for=needed["internals"],
            found="; ".join(lacking) or f"all {len(private.PARTS)} of torch and triton that we use",
            fix=newest if lacking else "",
        )
    ]  # fmt: skip
    if not is_cuda or not AVAILABLE:
        return checks
    try:
        launch.self_check(torch.cuda.current_device())
        slow = launch.why_slow()
    except Exception as error:
        slow = first_line(error)
    checks.append(
        Check(
            name="quick launches", state="broken" if slow else "ok", needed_for=needed["quick launches"],
            found=slow or "as Triton's own", fix=newest if slow else "",
        )
    )  # fmt: skip
    why_not = native.why_not()
    built = native.file_of(cuda=True).exists()
    checks.append(
        Check(
            name="calls in C++", state="missing" if why_not else "ok", needed_for="eager calls of ops: 5 to 10 µs each",
            found=why_not or ("built" if built else "built in the background at an op's first call"),
            fix="" if not why_not or "SUBLIGHT_NATIVE" in why_not else "install g++ and the CUDA toolkit's headers",
        )
    )  # fmt: skip
    return checks
