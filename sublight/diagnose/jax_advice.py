"""A JAX trace's fixes in JAX's words: the rules speak PyTorch's."""

from __future__ import annotations

import re

_AHEAD = """\
# copy a step ahead: device_put returns at once, and the copy runs beside the step
next_batch = jax.device_put(next(batches))"""
_ONE_JIT = """\
# XLA fuses what is inside one jitted function, and nothing outside of it
step = jax.jit(step, donate_argnums=(0,))"""
FIXES = {
    "launch-bound": """\
# one jitted function for the whole step, several steps in one call
state, losses = jax.lax.scan(step, state, batches)""",
    "host-bound": """\
# put it into the jitted step; or several steps in one call, so that Python is asked less often
state, losses = jax.lax.scan(step, state, batches)""",
    "host-sync": """\
# no float(loss), .item(), print(loss) or np.asarray(x) in every step: each waits for the device
if step % 100 == 0:
    print(float(loss))""",
    "data-loading": _AHEAD,
    "pageable-copy": _AHEAD,
    "exposed-copy": _AHEAD,
    "unfused-pointwise": _ONE_JIT,
    "unfused-norm": _ONE_JIT,
    "unfused-optimizer": _ONE_JIT,
    "redundant-cast-or-copy": _ONE_JIT,
    "unfused-attention": "jax.nn.dot_product_attention(q, k, v)   # and the mask that is there",
    "no-tensor-cores": 'jax.config.update("jax_default_matmul_precision", "tensorfloat32")',
    "fp32-where-bf16-serves": "y = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)   # parameters stay float32",
    "exposed-communication": "XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true",
    "recompilation": "# shapes that change compile anew: pad them, or round them up to a few sizes",
    "start-up": "# record later steps: jax.profiler.start_trace after the first calls have compiled",
    "device-idle": """\
# what the host does in the gaps above is the place to look
# record later steps: jax.profiler.start_trace after the first calls have compiled""",
}
_PYTORCHS = re.compile(r"torch|\bnn\.|\bF\.|DataLoader|CUDA_LAUNCH|sublight\.")


def fix(finding: str, plain: str) -> str:
    """JAX's own way; of what has none here, the remarks that are no PyTorch."""
    remarks = [line for line in plain.splitlines() if line.startswith("#") and not _PYTORCHS.search(line)]
    return FIXES.get(finding) or "\n".join(remarks) or "# the evidence above is the place to look"
