"""What Prometheus scrapes, under the names that NVIDIA's DCGM exporter uses, so that its dashboards work.

Units are DCGM's: MHz, °C, W, mJ, percent, MiB, and shares for what it profiles. What is not available has no line.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sublight.errors import BadInput
from sublight.health import check
from sublight.health.record import GpuState, Snapshot, Unavailable, known, leaves

LOCALHOST = "127.0.0.1"
_MIB = 2.0**20
GPU_METRICS: tuple[tuple[str, str, str, float, str], ...] = (  # field, name, type, factor to DCGM's unit, help
    ("sm_clock_hz", "DCGM_FI_DEV_SM_CLOCK", "gauge", 1e-6, "SM clock frequency (in MHz)."),
    ("memory_clock_hz", "DCGM_FI_DEV_MEM_CLOCK", "gauge", 1e-6, "Memory clock frequency (in MHz)."),
    ("memory_temperature_c", "DCGM_FI_DEV_MEMORY_TEMP", "gauge", 1, "Memory temperature (in C)."),
    ("temperature_c", "DCGM_FI_DEV_GPU_TEMP", "gauge", 1, "GPU temperature (in C)."),
    ("slowdown_c", "DCGM_FI_DEV_SLOWDOWN_TEMP", "gauge", 1, "Temperature at which the clock falls (in C)."),
    ("shutdown_c", "DCGM_FI_DEV_SHUTDOWN_TEMP", "gauge", 1, "Temperature at which the GPU stops (in C)."),
    ("fan_share", "DCGM_FI_DEV_FAN_SPEED", "gauge", 100, "Fan speed (in %)."),
    ("power_w", "DCGM_FI_DEV_POWER_USAGE", "gauge", 1, "Power draw (in W)."),
    ("power_limit_w", "DCGM_FI_DEV_POWER_MGMT_LIMIT", "gauge", 1, "Power limit (in W)."),
    ("energy_j", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", 1e3, "Energy since boot (in mJ)."),
    ("pcie_replays", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", 1, "PCIe retries."),
    ("pcie_generation", "DCGM_FI_DEV_PCIE_LINK_GEN", "gauge", 1, "PCIe generation now."),
    ("pcie_width", "DCGM_FI_DEV_PCIE_LINK_WIDTH", "gauge", 1, "PCIe lanes now."),
    ("pcie_generation_max", "DCGM_FI_DEV_PCIE_MAX_LINK_GEN", "gauge", 1, "PCIe generation at most."),
    ("pcie_width_max", "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH", "gauge", 1, "PCIe lanes at most."),
    ("gpu_share", "DCGM_FI_DEV_GPU_UTIL", "gauge", 100, "Time in which a kernel ran (in %)."),
    ("memory_controller_share", "DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", 100, "Memory utilization (in %)."),
    ("encoder_share", "DCGM_FI_DEV_ENC_UTIL", "gauge", 100, "Encoder utilization (in %)."),
    ("decoder_share", "DCGM_FI_DEV_DEC_UTIL", "gauge", 100, "Decoder utilization (in %)."),
    ("memory_used_bytes", "DCGM_FI_DEV_FB_USED", "gauge", 1 / _MIB, "Memory used (in MiB)."),
    ("memory_reserved_bytes", "DCGM_FI_DEV_FB_RESERVED", "gauge", 1 / _MIB, "Memory reserved (in MiB)."),
    ("ecc_corrected", "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "counter", 1, "Corrected ECC errors since the driver's load."),
    ("ecc_uncorrected", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "counter", 1, "Uncorrected ECC errors since then."),
    ("ecc_corrected_ever", "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", "counter", 1, "Corrected ECC errors ever."),
    ("ecc_uncorrected_ever", "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", "counter", 1, "Uncorrected ECC errors ever."),
    ("retired_single_bit", "DCGM_FI_DEV_RETIRED_SBE", "counter", 1, "Pages retired after single-bit errors."),
    ("retired_double_bit", "DCGM_FI_DEV_RETIRED_DBE", "counter", 1, "Pages retired after double-bit errors."),
    ("retirement_pending", "DCGM_FI_DEV_RETIRED_PENDING", "gauge", 1, "Whether pages wait to be retired."),
    ("remapped_correctable", "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "counter", 1, "Rows remapped, correctable."),
    ("remapped_uncorrectable", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter", 1, "Rows remapped, others."),
    ("remap_pending", "DCGM_FI_DEV_ROW_REMAP_PENDING", "gauge", 1, "Whether rows wait to be remapped."),
    ("remap_failed", "DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", 1, "Whether remapping of rows has failed."),
    ("engine_share", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", 1, "Share of time in which a kernel ran."),
    ("sm_share", "DCGM_FI_PROF_SM_ACTIVE", "gauge", 1, "Share of the SMs' cycles with a warp on them."),
    ("occupancy_share", "DCGM_FI_PROF_SM_OCCUPANCY", "gauge", 1, "Share of the warps that there is room for."),
    ("tensor_share", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", 1, "Share of the tensor cores' cycles."),
    ("memory_share", "DCGM_FI_PROF_DRAM_ACTIVE", "gauge", 1, "Share of the memory's cycles with data on it."),
    ("fp64_share", "DCGM_FI_PROF_PIPE_FP64_ACTIVE", "gauge", 1, "Share of the fp64 pipes' cycles."),
    ("fp32_share", "DCGM_FI_PROF_PIPE_FP32_ACTIVE", "gauge", 1, "Share of the fp32 pipes' cycles."),
    ("fp16_share", "DCGM_FI_PROF_PIPE_FP16_ACTIVE", "gauge", 1, "Share of the fp16 pipes' cycles."),
    ("pcie_sent_bytes_per_s", "DCGM_FI_PROF_PCIE_TX_BYTES", "gauge", 1, "Sent over PCIe (in bytes/s)."),
    ("pcie_received_bytes_per_s", "DCGM_FI_PROF_PCIE_RX_BYTES", "gauge", 1, "Received over PCIe (in bytes/s)."),
    ("nvlink_sent_bytes_per_s", "DCGM_FI_PROF_NVLINK_TX_BYTES", "gauge", 1, "Sent over NVLink (in bytes/s)."),
    ("nvlink_received_bytes_per_s", "DCGM_FI_PROF_NVLINK_RX_BYTES", "gauge", 1, "Received over NVLink (in bytes/s)."),
)


def text(snapshot: Snapshot, hostname: str) -> str:
    """The page, in Prometheus' format."""
    lines: list[str] = []
    values = {gpu.index: dict(leaves(gpu)) for gpu in snapshot.gpus}
    labels = {gpu.index: _labels(gpu, snapshot, hostname) for gpu in snapshot.gpus}

    def metric(name: str, kind: str, help_: str, value_of: Callable[[GpuState], Any]) -> None:
        rows = [(gpu, value_of(gpu)) for gpu in snapshot.gpus]
        given = [(gpu, value) for gpu, value in rows if value is not None and not isinstance(value, Unavailable)]
        if given:
            lines.extend((f"# HELP {name} {help_}", f"# TYPE {name} {kind}"))
            lines.extend(f"{name}{{{labels[gpu.index]}}} {float(value):.10g}" for gpu, value in given)

    for field, name, kind, factor, help_ in GPU_METRICS:
        metric(name, kind, help_, lambda gpu, f=field, by=factor: _scaled(values[gpu.index][f], by))  # type: ignore[misc]
    metric("DCGM_FI_DEV_FB_FREE", "gauge", "Memory free (in MiB).", _free_mib)
    metric("DCGM_FI_DEV_XID_ERRORS", "gauge", "The last XID; 0 where there was none.", _last_xid)
    lines += _own(snapshot)
    return "\n".join(lines) + "\n"


def address(words: str) -> tuple[str, int]:
    """Host and port; this machine alone unless a host is named.

    >>> address(":9400"), address("9400"), address("0.0.0.0:9401")
    (('127.0.0.1', 9400), ('127.0.0.1', 9400), ('0.0.0.0', 9401))
    """
    host, _, port = words.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) < 2**16:
        raise BadInput(f"--prometheus {words}: write :9400, or 0.0.0.0:9400 to be reached from other machines")
    return host or LOCALHOST, int(port)


def server(words: str, look: Callable[[], Snapshot]) -> ThreadingHTTPServer:
    """Serves /metrics; every scrape looks at the machine anew."""
    lock, hostname = threading.Lock(), socket.gethostname()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] not in ("/", "/metrics"):
                self.send_error(404, "only /metrics is here")
                return
            with lock:  # the readers count from one look to the next
                body = text(look(), hostname).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:  # what asks whether a service is there asks so
            self.do_GET()

        def log_message(self, format: str, *arguments: Any) -> None:
            """A line a scrape would fill the terminal."""

    host, port = address(words)
    try:
        return ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot listen on {host}:{port}: {why}; name another, such as :9401") from None


def _labels(gpu: GpuState, snapshot: Snapshot, hostname: str) -> str:
    given = {
        "gpu": str(gpu.index),
        "UUID": gpu.uuid,
        "pci_bus_id": known(gpu.bus_id) or "",
        "modelName": gpu.name,
        "Hostname": hostname,
        "DCGM_FI_DRIVER_VERSION": known(snapshot.versions.driver) or "",
    }
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in given.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _scaled(value: Any, factor: float) -> Any:
    return value if isinstance(value, Unavailable) else value * factor


def _free_mib(gpu: GpuState) -> float | None:
    total, used = known(gpu.memory.memory_total_bytes), known(gpu.memory.memory_used_bytes)
    reserved = known(gpu.memory.memory_reserved_bytes) or 0
    return None if total is None or used is None else (total - used - reserved) / _MIB


def _last_xid(gpu: GpuState) -> int | None:
    found = known(gpu.xids)
    return None if found is None else found[-1].number if found else 0


def _own(snapshot: Snapshot) -> Iterator[str]:
    """What DCGM has no name for: the host, and what is not well."""
    for name, value in leaves(snapshot.host):
        if isinstance(value, int | float):
            yield f"# TYPE sublight_host_{name} gauge"
            yield f"sublight_host_{name} {float(value):.10g}"
    yield "# HELP sublight_problem What `sublight top --check` finds, one line a problem."
    yield "# TYPE sublight_problem gauge"
    for problem in check.problems(snapshot):
        if problem.weight == "wrong":
            where = _escaped(problem.where)
            yield f'sublight_problem{{kind="{problem.kind}",where="{where}",words="{_escaped(problem.words)}"}} 1'
