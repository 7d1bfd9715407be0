"""A machine without FastAPI has everything but the web's side."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("fastapi") else ["app.py"]  # app_test.py says itself what it lacks
