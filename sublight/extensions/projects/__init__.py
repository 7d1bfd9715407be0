"""An op for PyTorch as a project of its own: one op written six ways, each built, tested and timed by itself."""

from sublight.extensions.projects.ways import STARTS, WAYS
from sublight.extensions.projects.write import Project, write

__all__ = ["STARTS", "WAYS", "Project", "write"]
