"""The patch files of ``patches/`` on a Megatron source tree: what state it is in, apply, revert.

A patch names the git blob of each file before and after it (the ``index`` line of the diff). So
the state of a file is known from its bytes alone, a hunk is never placed by guess, and what is
written is known to be right before anything is replaced: apply and revert are exact or nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
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

_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: \d+)?")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@.*")


@dataclass(frozen=True)
class FilePatch:
    """One file's diff."""

    path: str
    """The file's path below the folder that holds ``megatron``."""
    before: str
    """The git blob it applies to, and the one that comes of it."""
    after: str
    hunks: tuple[tuple[int, tuple[bytes, ...]], ...]
    """Per hunk the first line before it (from 1), and its lines with their sign."""

    def applied(self, content: bytes, *, revert: bool = False) -> bytes:
        """``content`` with the patch applied, or taken back. It must be the file as released, or
        as patched: the result then is the other one, byte for byte.
        """
        assert blob(content) == (self.after if revert else self.before)
        drop, add = (b"+", b"-") if revert else (b"-", b"+")
        lines = content.splitlines(keepends=True)
        result: list[bytes] = []
        taken = shift = 0
        for start, changes in self.hunks:
            # A hunk's place is that before the patch; what came before it has moved the lines.
            first = start - 1 + (shift if revert else 0)
            result += lines[taken:first]
            taken = first
            for change in changes:
                sign, line = change[:1], change[1:]
                if sign != add:
                    taken += 1
                if sign != drop:
                    result.append(line)
                shift += {b"+": 1, b"-": -1}.get(sign, 0)
        patched = b"".join([*result, *lines[taken:]])
        assert blob(patched) == (self.before if revert else self.after), self.path
        return patched


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
            if (folder / f"core_v{version}").is_dir():
                found = folder / f"core_v{version}"
                paths = sorted(found.glob("*.patch"))
                files = [file for path in paths for file in _parse(path)]
                return cls(version, found, tuple(files))
        raise CompatibilityError(
            f"there are no patches for megatron-core {version}, only for "
            f"{', '.join(patched_versions())}; leave it unpatched: the plugin works without"
        )

    def state(self, source: MegatronSource) -> State:
        """Whether the source has the patches.

        Raises:
            CompatibilityError: a file is missing, or is neither as released nor as patched.
        """
        patched = [self._is_patched(source, file) for file in self.files]
        if all(patched):
            return "patched"
        return "partly patched" if any(patched) else "stock"

    def apply(self, source: MegatronSource) -> tuple[str, ...]:
        """Patches the files that are not; returns their paths.

        All files or none: they are made beside the old ones and then put in their places, and
        those that were are put back should one fail. A run that is killed in between leaves files
        that are each whole, and the next ``apply`` or ``revert`` finishes the work.

        Raises:
            CompatibilityError: as :meth:`state`; a dirty checkout; a file that cannot be written.
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
        contents = {}
        for file in todo:
            path = source.core_root / file.path
            old = path.read_bytes()
            contents[path] = (old, file.applied(old, revert=revert))
        _replace_all(contents)
        return tuple(file.path for file in todo)


def patched_versions() -> list[str]:
    """The versions that have patches."""
    found = {path.name for folder in _FOLDERS for path in folder.glob("core_v*")}
    return sorted(name.removeprefix("core_v") for name in found)


def blob(content: bytes) -> str:
    """The name that git gives a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _parse(path: Path) -> list[FilePatch]:
    """The file diffs of a patch file, which is one of ours: ``git diff --full-index``."""
    files: list[FilePatch] = []
    name, blobs, hunks = "", ("", ""), list[tuple[int, list[bytes]]]()

    def close() -> None:
        if name:
            done = tuple((start, tuple(lines)) for start, lines in hunks)
            files.append(FilePatch(name, *blobs, done))

    for line in path.read_bytes().splitlines(keepends=True):
        text = line.decode().rstrip("\n")
        if line.startswith(b"diff --git "):
            close()
            name, hunks = text.rpartition(" b/")[2], []
        elif found := _INDEX.fullmatch(text):
            blobs = (found[1], found[2])
        elif place := _HUNK.fullmatch(text):
            hunks.append((int(place[1]), []))
        elif hunks and line[:1] in b" +-":
            hunks[-1][1].append(line)
    close()
    return files


def _require_clean(source: MegatronSource, files: Sequence[FilePatch]) -> None:
    """Refuses a git checkout with changes of somebody else's."""
    root = source.core_root
    if not (root / ".git").exists() or shutil.which("git") is None:
        return
    command = ["git", "status", "--porcelain", "--untracked-files=no", "--no-renames", "-z"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
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


def _replace_all(contents: dict[Path, tuple[bytes, bytes]]) -> None:
    """Puts ``(old, new)`` contents in place, all or none."""
    replaced: list[Path] = []
    try:
        beside = {path: _write_beside(path, new) for path, (_, new) in contents.items()}
        for path, temporary in beside.items():
            os.replace(temporary, path)
            replaced.append(path)
    except OSError as error:
        for path in replaced:
            os.replace(_write_beside(path, contents[path][0]), path)
        for path in contents:
            _beside(path).unlink(missing_ok=True)
        raise CompatibilityError(
            f"cannot write {error.filename}: {error.strerror}; nothing was changed: make the "
            "folder writable, or give a copy of the tree"
        ) from None


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.wlb")


def _write_beside(path: Path, content: bytes) -> Path:
    temporary = _beside(path)
    temporary.write_bytes(content)
    shutil.copymode(path, temporary)
    return temporary
