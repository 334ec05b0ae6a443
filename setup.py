"""Build script: what pyproject.toml cannot say is that the package has configs/ and patches/."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithData(build_py):
    """A checkout has these folders beside the package; an installed package has them inside."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in ("configs", "patches"):
                target = Path(self.build_lib, "megatron_wlb", folder)
                shutil.copytree(folder, target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithData})
