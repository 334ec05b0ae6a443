"""The patch files of ``patches/`` on a Megatron source tree: what state it is in, apply, revert.

A patch names the git blob of each file before and after it, so the state of a file is known from
its bytes alone. ``git apply`` makes the patched files in a folder beside, and they are put in place
only if they are the blobs that were promised.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat.source import MegatronSource

State = Literal["stock", "patched", "partly patched"]

_PACKAGE = Path(__file__).resolve().parents[2]
_FOLDERS = (_PACKAGE / "patches", _PACKAGE.parent / "patches")
"""Where an installed package and where a checkout has the files."""

_SAME_FILES = {"0.19.1": "0.19.2"}
"""Versions whose files are those of another: the tag core_v0.19.0 says that it is 0.19.1."""

_DIFF = re.compile(
    r"^diff --git a/(\S+) b/\1\nindex ([0-9a-f]{40})\.\.([0-9a-f]{40})", re.MULTILINE
)


@dataclass(frozen=True)
class FilePatch:
    """One file's diff."""

    patch: Path
    path: str
    """The file's path below the folder that holds ``megatron``."""
    before: str
    """The git blob it applies to, and the one that comes of it."""
    after: str


@dataclass(frozen=True)
class PatchSeries:
    """The patches of one version."""

    version: str
    folder: Path
    files: tuple[FilePatch, ...]

    @classmethod
    def of(cls, version: str) -> PatchSeries:
        """The patches of a version. Raises :class:`CompatibilityError` where it has none."""
        for folder in _FOLDERS:
            if (found := folder / f"core_v{_SAME_FILES.get(version, version)}").is_dir():
                files = (
                    FilePatch(patch, *groups)
                    for patch in sorted(found.glob("*.patch"))
                    for groups in _DIFF.findall(patch.read_text(encoding="utf-8"))
                )
                return cls(version, found, tuple(files))
        raise CompatibilityError(
            f"there are no patches for megatron-core {version}, only for "
            f"{', '.join(patched_versions())}; leave it unpatched: the plugin works without"
        )

    def state(self, source: MegatronSource) -> State:
        """Whether the source has the patches.

        Raises :class:`CompatibilityError` for a file that is missing, or neither as released nor as
        patched.
        """
        patched = [self._is_patched(source, file) for file in self.files]
        if all(patched):
            return "patched"
        return "partly patched" if any(patched) else "stock"

    def apply(self, source: MegatronSource) -> tuple[str, ...]:
        """Patches the files that are not; returns their paths.

        All files or none: they are made beside the old ones and then put in their places, and those
        that were are put back should one fail. A run that is killed in between leaves files that
        are each whole, and the next ``apply`` or ``revert`` finishes the work. Raises
        :class:`CompatibilityError` as :meth:`state`, and for a dirty checkout, a file that cannot
        be written, or where git is not installed.
        """
        return self._change(source, revert=False)

    def revert(self, source: MegatronSource) -> tuple[str, ...]:
        """Undoes :meth:`apply`: the files are byte for byte what they were."""
        return self._change(source, revert=True)

    def _is_patched(self, source: MegatronSource, file: FilePatch) -> bool:
        path = source.core_root / file.path
        try:
            found = blob(path.read_bytes())
        except OSError as error:
            raise CompatibilityError(
                f"cannot read {path}: {error.strerror}; reinstall megatron-core {self.version}"
            ) from None
        if found not in (file.before, file.after):
            raise CompatibilityError(
                f"{path} is neither as megatron-core {self.version} was released nor as patched; "
                "restore it (git checkout, or pip install --force-reinstall --no-deps) or leave "
                "the tree unpatched"
            )
        return found == file.after

    def _change(self, source: MegatronSource, *, revert: bool) -> tuple[str, ...]:
        todo = [f for f in self.files if self._is_patched(source, f) == revert]
        _require_clean(source, self.files)
        if todo:
            try:
                with tempfile.TemporaryDirectory(prefix=".wlb-", dir=source.core_root) as beside:
                    _change_beside(source.core_root, Path(beside), todo, revert=revert)
            except OSError as error:
                raise CompatibilityError(
                    f"cannot write {error.filename}: {error.strerror}; nothing was changed: make "
                    "the folder writable, or give a copy of the tree"
                ) from None
        return tuple(file.path for file in todo)


def has_patches(version: str) -> bool:
    """Whether there are patches for a version."""
    return _SAME_FILES.get(version, version) in patched_versions()


def patched_versions() -> list[str]:
    """The versions that have patches."""
    found = {path.name for folder in _FOLDERS for path in folder.glob("core_v*")}
    return sorted(name.removeprefix("core_v") for name in found)


def blob(content: bytes) -> str:
    """The name that git gives a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _git(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = ["git", *words], {**os.environ, **environment}
    try:
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise CompatibilityError(
            "git is not installed, which applies and reverts the patches; install it, or leave the "
            "tree as it is: the plugin works with both"
        ) from None


def _require_clean(source: MegatronSource, files: Sequence[FilePatch]) -> None:
    """Refuses a git checkout with changes of somebody else's."""
    root = source.core_root
    if not (root / ".git").exists():
        return
    done = _git(root, "status", "--porcelain", "--untracked-files=no", "--no-renames", "-z")
    if done.returncode:
        raise CompatibilityError(f"git status fails in {root}: {done.stderr.strip()}; repair it")
    ours = {file.path for file in files}
    changed = [entry[3:] for entry in done.stdout.split("\0") if entry]
    foreign = [path for path in changed if path not in ours]
    if foreign:
        raise CompatibilityError(
            f"{root} has changes that are not committed, as in {foreign[0]}; commit or stash them "
            "first, so that the patches stay apart from them"
        )


def _change_beside(root: Path, beside: Path, todo: Sequence[FilePatch], *, revert: bool) -> None:
    """Changes copies of the files and puts them in place, all or none."""
    old, new = beside / "old", beside / "new"
    for file in todo:
        for copies in (old, new):
            (copies / file.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / file.path, copies / file.path)
    done = _git(
        new,
        "apply",
        *["-R"] * revert,
        "--whitespace=nowarn",
        *(f"--include={file.path}" for file in todo),
        *sorted({str(file.patch) for file in todo}),
        # Neither a repository above nor the user's own settings have a say.
        GIT_CEILING_DIRECTORIES=str(beside),
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
    )
    for file in todo:
        wanted = file.before if revert else file.after
        if done.returncode or blob((new / file.path).read_bytes()) != wanted:
            said = " ".join(done.stderr.split()) or f"it makes another {file.path}"
            raise CompatibilityError(
                f"git cannot apply the patches: {said}; reinstall megatron-wlb"
            )
        shutil.copymode(root / file.path, new / file.path)  # git makes a new file
    try:
        for file in todo:
            os.replace(new / file.path, root / file.path)
    except OSError:
        for file in todo:
            os.replace(old / file.path, root / file.path)
        raise
