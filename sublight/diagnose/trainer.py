"""Hugging Face's Trainer runs the loop, the loader and the optimizer: what to change is an argument of its own."""

from __future__ import annotations

from sublight.diagnose.python_advice import PRINT, SAVE
from sublight.trace.record import Trace

FILE = "transformers/trainer.py"
ARGUMENTS = {
    "pageable-copy": "dataloader_pin_memory=True",
    "fp32-where-bf16-serves": "bf16=True",
    "no-tensor-cores": "tf32=True",
    "unfused-optimizer": 'optim="adamw_torch_fused"',
    "exposed-communication": "ddp_bucket_cap_mb=100",
    "host-sync": "logging_steps=100, logging_nan_inf_filter=False",  # which reads every loss
}
COMPILES = {
    "launch-bound": 'torch_compile=True, torch_compile_mode="reduce-overhead"',
    "unfused-pointwise": "torch_compile=True",
}
BY_FIX = {SAVE.fix: 'save_strategy="steps", save_steps=1000', PRINT.fix: "logging_steps=100"}


def runs(trace: Trace) -> bool:
    """Whether it runs the steps: by the looks at Python's stack, or by the functions that were recorded."""
    samples = trace.meta.get("samples")
    frames = samples.get("frames") if isinstance(samples, dict) else None
    if isinstance(frames, list) and any(
        isinstance(frame, list) and frame and str(frame[0]).startswith(FILE) for frame in frames
    ):
        return True
    return any(f"{FILE}(" in name for name in trace.names)


def fix(finding: str, plain: str) -> str:
    """The Trainer's own way, where it has one; else the way of a loop that is the user's."""
    compiles = COMPILES.get(finding, "") if "torch.compile(" in plain else ""
    argument = ARGUMENTS.get(finding) or BY_FIX.get(plain) or compiles
    return f"TrainingArguments(..., {argument})" if argument else plain
