"""What the sampler promises beside its doctest: the interpreter's switch interval comes back."""

from __future__ import annotations

import sys

from sublight.sampling import Sampler


def test_the_switch_interval_is_shorter_only_while_it_looks() -> None:
    before = sys.getswitchinterval()
    sampler = Sampler(hz=1000)
    sampler.switch_s = before / 4
    sampler.start()
    assert sys.getswitchinterval() < before / 2
    sampler.stop()
    assert sys.getswitchinterval() == before
    sampler.stop()
    sampler.switch_s = 0.0
    sampler.start()
    assert sys.getswitchinterval() == before
    sampler.stop()
