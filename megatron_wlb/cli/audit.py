"""``wlb audit``: proves which documents a run trained on, each token once."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.output import remark
from megatron_wlb.errors import CheckpointError
from megatron_wlb.planning.ledger.history import History, Report, audit
from megatron_wlb.planning.ledger.lines import NAME
from megatron_wlb.planning.ledger.replay import replay
from megatron_wlb.reading import path_of_flag
from megatron_wlb.runtime.saving.state_file import newest_state

_EPILOG = f"""\
RUN is the folder of --save. Training writes {NAME} there, a line a step, unless --wlb-no-ledger is
given. The audit puts its documents together with those that wait in the newest checkpoint. Steps
that a restart ran again count once. Where there is no checkpoint, what did not run is not judged.

--replay also plans every step again, from the corpora and the settings of the run, and compares.

Exit status: 0 if each token of what arrived ran once or waits; 6 if some are lost or ran twice, or
if a line is damaged.

examples:
  wlb audit checkpoints
  wlb audit checkpoints --json | jq .lost.number
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("folder", type=path_of_flag, metavar="RUN", help="the folder of --save")
    flag(parser, "--replay", "plan every step again, and compare digests")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    history = History(folder / NAME)
    saved = newest_state(folder)
    if saved is not None and history.has_taken_back(saved[0]):
        remark(
            f"the checkpoint of step {saved[0]} is left over: the run began after step "
            f"{history.starts[-1].iteration} again and has not saved since"
        )
        saved = None
    report = audit(history, saved)
    replayed = replay(history) if args.replay else None
    fails = bool(report.lost.number or report.twice.number)
    if args.json:
        more = {} if replayed is None else {"replayed": replayed}
        print(json.dumps({"ok": not fails, **asdict(report), **more}))
    else:
        print("\n".join(_lines(report, replayed)))
    if report.is_torn:
        remark("the last line is torn, as by a crash while it was written; it does not count")
    return CheckpointError.exit_code if fails else 0


def _lines(report: Report, replayed: int | None) -> list[str]:
    r = report
    lines = [
        f"steps      {r.steps:,} ({r.first_iteration} to {r.last_iteration}), "
        f"{r.restarts} restarts, which ran {r.rolled_back} steps again",
        f"documents  {r.documents:,} of {r.tokens:,} tokens",
        "epochs     " + ", ".join(f"{name} {epochs:.3f}" for name, epochs in r.epochs.items()),
    ]
    if r.skipped:
        lines.append(f"skipped    {r.skipped} steps of {r.skipped_tokens:,} tokens, not trained")
    if r.dropped_tokens:
        lines.append(f"dropped    {r.dropped_tokens:,} tokens, of documents above the window")
    if r.proven_until is None:
        lines.append("waiting    not known: there is no checkpoint")
    else:
        lines.append(
            f"waiting    {r.waiting:,} documents of {r.waiting_tokens:,} tokens after step "
            f"{r.proven_until}, the oldest for {r.oldest_steps} steps"
        )
    for name, faults in (("lost", r.lost), ("twice", r.twice)):
        more = ["and more"] if faults.number > len(faults.first) else []
        lines.append(f"{name:10} {faults.number:,}")
        lines += [f"           {text}" for text in [*faults.first, *more]]
    if replayed is not None:
        lines.append(f"replayed   {replayed:,} steps, all planned alike")
    return lines
