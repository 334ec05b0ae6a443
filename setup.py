"""Build script: what pyproject.toml cannot say is that the package has configs/."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithData(build_py):
    """A checkout has this folder beside the package; an installed package has it inside."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "megatron_wlb", "configs")
            shutil.copytree("configs", target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithData})
