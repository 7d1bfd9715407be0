"""A machine with a GPU, as far as a script can see: what it launches is noted, and nothing runs on a GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from sublight.backend.listen import Proceed, Request, listening
from sublight.backend.record import Launch, compilable, launch_of
from sublight.gpus import Gpu


@contextlib.contextmanager
def gpu_pretended(gpu: Gpu, launches: list[Launch]) -> Iterator[None]:
    """A machine with that GPU, as far as a script can see; what it launches is noted."""
    from sublight.xray.pretend.torch_cuda import OnCpu, cuda_of, modes_in_threads, no_comparisons
    from sublight.xray.pretend.triton_driver import at_first_sizes, driver_of, nothing_timed

    def benchmark(mark: Any, *args: Any, **kwargs: Any) -> None:
        """Where the script has launched its kernels before, their sizes are better than those of a benchmark."""
        if not launches:
            at_first_sizes(mark, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_of(gpu))
        stack.enter_context(driver_of(gpu))
        stack.enter_context(nothing_timed(benchmark))
        stack.enter_context(no_comparisons())
        stack.enter_context(modes_in_threads(lambda: OnCpu(has_results=False)))
        stack.enter_context(listening(functools.partial(note, gpu, launches, proceeds=False)))
        yield


def note(gpu: Gpu, launches: list[Launch], request: Request, proceed: Proceed, *, proceeds: bool) -> Any:
    """A launch that only compiles is none; what it compiled may be launched later."""
    launch = launch_of(request.kernel, request.args, request.kwargs, grid=request.grid, capability=compilable(gpu))
    if not request.warmup:
        launches.append(launch)
    return proceed(request) if proceeds else Recorded(launch, gpu, launches)


class Recorded:
    """In place of the compiled kernel that a launch gives back: scripts ask for its registers, and launch it again.

    It is compiled when it is asked, for the GPU that is pretended, so that a grid made of its registers is right.
    """

    def __init__(self, launch: Launch, gpu: Gpu, launches: list[Launch]) -> None:
        self._launch, self._gpu, self._launches = launch, gpu, launches
        self.name, self.n_max_threads = launch.kernel, 1024

    def _init_handles(self) -> None: ...

    def result(self) -> Recorded:
        return self

    @functools.cached_property
    def _compiled(self) -> Any:
        from sublight.xray.build import compiled

        return compiled(self._launch, compilable(self._gpu))

    @functools.cached_property
    def _used(self) -> Any:
        from sublight.xray import binary

        return binary.usage(self._compiled.asm["cubin"])[self._compiled.metadata.name]

    @property
    def asm(self) -> Any:
        return self._compiled.asm

    @property
    def metadata(self) -> Any:
        return self._compiled.metadata

    @property
    def n_regs(self) -> int:
        return int(self._used["REG"])

    @property
    def n_spills(self) -> int:
        return int(self._used["STACK"])

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._relaunch, grid)

    def _relaunch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        """With all arguments, or without the constants, as versions of Triton differ."""
        parameters = self._launch.jit.params
        given = list(args)
        if len(args) < len(parameters):
            rest = iter(args)
            given = [
                self._launch.arguments[each.name]
                if each.is_constexpr
                else next(rest, self._launch.arguments[each.name])
                for each in parameters
            ]
        names = {each.name for each in parameters}
        options = {name: value for name, value in self._launch.options.items() if name not in names}
        self._launches.append(
            launch_of(self._launch.jit, tuple(given), options, grid=grid, capability=compilable(self._gpu))
        )
