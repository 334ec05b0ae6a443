"""``wlb patch check|apply|revert``: the optional patches of Megatron-core."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.markup import escape

from megatron_wlb.cli.flags import add_command
from megatron_wlb.reading import text_of_flag
from megatron_wlb.runtime.compat.patch_files import PatchSeries
from megatron_wlb.runtime.compat.source import MegatronSource

_EPILOG = """\
The patches give Megatron's P2PCommunicator a public shape_provider, and let its pipeline schedules
take a length for each micro-batch. Nobody needs them: without them the plugin puts a subclass in
the communicator's place. patches/README.md says why they are there and when they go. git must be
installed to apply and to revert them.

PATH is a folder with megatron/core in it, a checkout or a site-packages; without it, the
megatron-core that Python would import. A file that is neither as released nor as patched, an
unknown version, and a checkout with other uncommitted changes are refused. Revert restores every
byte.

examples:
  wlb patch check
  wlb patch apply ~/Megatron-LM
  wlb patch revert ~/Megatron-LM
"""
_HELP = {
    "check": "say whether the patches are applied",
    "apply": "patch the tree; nothing happens where it is patched already",
    "revert": "take the patches back, byte for byte",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    for name, summary in _HELP.items():
        action = add_command(actions, name, summary)
        action.add_argument(
            "path", nargs="?", type=text_of_flag, metavar="PATH", help="default: the installed one"
        )
        action.add_argument("--json", action="store_true", help="print the result as JSON")
        action.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    source = MegatronSource.installed() if args.path is None else MegatronSource.at(args.path)
    series = PatchSeries.of(source.version)
    changed: tuple[str, ...] = ()
    if args.action != "check":
        changed = getattr(series, args.action)(source)
    state = series.state(source)
    if args.json:
        result = {
            "path": str(source.core_root),
            "megatron_core": source.version,
            "state": state,
            "patches": str(series.folder),
            "files": [file.path for file in series.files],
            "changed": list(changed),
        }
        print(json.dumps(result))
    else:
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"megatron-core {source.version} in {escape(str(source.core_root))}: {state}")
        for path in changed:
            console.print(
                f"  {'reverted' if args.action == 'revert' else 'patched'} {escape(path)}"
            )
    return 0
