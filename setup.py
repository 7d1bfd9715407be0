"""All else stands in pyproject.toml; this leaves tests and their stand-ins out of wheels."""

from setuptools import setup
from setuptools.command.build_py import build_py


class WithoutTests(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if not each[1].endswith(("_test", "conftest", "fake", "fakes", "trials"))]


setup(cmdclass={"build_py": WithoutTests})
