"""Begins the profile of a child that was started, not forked; then the `sitecustomize` that this one stands before.

It runs in whatever Python the program starts, so it takes nothing for granted and lets nothing of itself fail aloud.
"""

import contextlib
import os
import sys


def _begin() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != folder]
    settings = os.environ.pop("SUBLIGHT_PYPROF", "")
    paths = os.environ.get("PYTHONPATH", "")
    rest = os.pathsep.join(path for path in paths.split(os.pathsep) if path != folder)
    if rest:
        os.environ["PYTHONPATH"] = rest
    else:
        os.environ.pop("PYTHONPATH", None)
    if settings and sys.version_info >= (3, 11):
        package = os.path.dirname(os.path.dirname(os.path.dirname(folder)))
        sys.path.append(package)
        try:
            from sublight.pyprof import children

            children.begin_spawned(settings, paths)
        finally:
            sys.path.remove(package)


def _next() -> None:
    import importlib.machinery
    import importlib.util

    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


with contextlib.suppress(Exception):  # the child runs as without us; the parent says that it was not followed
    _begin()
_next()
