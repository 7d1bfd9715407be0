"""Begins the profile of a child that was started, not forked; then the `sitecustomize` that this one stands before.

It runs in whatever Python the program starts, Python 2 included, so it takes nothing for granted and lets nothing of
itself fail aloud.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
import os
import sys


def _begin():
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != folder]
    settings = os.environ.pop("SUBLIGHT_PYPROF", "")
    paths = os.environ.get("PYTHONPATH", "")
    rest = os.pathsep.join(path for path in paths.split(os.pathsep) if path != folder)
    if rest:
        os.environ["PYTHONPATH"] = rest
    else:
        os.environ.pop("PYTHONPATH", None)
    if not settings:
        return
    if sys.version_info < (3, 11):  # noqa: UP036
        _say_that_it_began(settings)
        return
    package = os.path.dirname(os.path.dirname(os.path.dirname(folder)))
    sys.path.append(package)
    try:
        from sublight.pyprof import children

        children.begin_spawned(settings, paths)
    except Exception:
        _say_that_it_began(settings)
    finally:
        sys.path.remove(package)


def _say_that_it_began(settings):
    """The parent counts it among those that it knows nothing of."""
    import json

    folder = json.loads(settings)["folder"]
    if os.path.isdir(folder):
        open(os.path.join(folder, "%d.began" % os.getpid()), "w").close()  # noqa: UP031


def _next():
    if sys.version_info < (3, 4):  # noqa: UP036
        ours = sys.modules.pop("sitecustomize")
        try:
            import sitecustomize  # noqa: F401
        except ImportError:
            sys.modules["sitecustomize"] = ours
        return
    import importlib.machinery
    import importlib.util

    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:  # noqa: SIM105
    _begin()
except Exception:  # the child runs as without us
    pass
_next()
