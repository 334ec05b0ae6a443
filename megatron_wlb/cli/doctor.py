"""``wlb doctor``: what is installed, what fits, what is wrong and what to do about it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_wlb.cli.flags import flag
from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.findings import Finding, examine

_EPILOG = """\
Exit status: 0 if everything that is needed is there and fits, 7 if something is wrong. Packages and
kernels that a run can do without are notes, not errors.

examples:
  wlb doctor
  wlb doctor --megatron ~/Megatron-LM   # a checkout or an unpacked wheel, read without importing it
  wlb doctor --json | jq '.findings[] | select(.level == "wrong")'
"""
_TITLES = {
    "machine": "Machine",
    "package": "Packages",
    "kernel": "Attention kernels",
    "hooks": "Megatron",
}
_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "wrong": "[red]wrong[/]"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    flag(parser, "--megatron PATH", "the tree to examine (default: the installed one)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    findings = examine(args.megatron)
    wrong = [finding for finding in findings if finding.level == "wrong"]
    if args.json:
        print(json.dumps({"ok": not wrong, "findings": [asdict(f) for f in findings]}))
    else:
        _print(findings, wrong)
    return CompatibilityError.exit_code if wrong else 0


def _print(findings: list[Finding], wrong: list[Finding]) -> None:
    console = Console(highlight=False)
    for area, group in groupby(findings, key=lambda finding: finding.area):
        table = Table(
            title=_TITLES[area], title_justify="left", show_header=False, box=None, pad_edge=False
        )
        for name, style in (("mark", ""), ("subject", "bold"), ("found", "")):
            table.add_column(name, style=style, overflow="fold")
        for finding in group:
            table.add_row(_MARKS[finding.level], escape(finding.subject), escape(finding.found))
            if finding.remedy:
                table.add_row("", "", f"→ {escape(finding.remedy)}")
        console.print(table)
        console.print()
    console.print(
        f"{len(wrong)} wrong" if wrong else "Everything that is needed is there and fits."
    )
