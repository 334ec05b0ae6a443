from __future__ import annotations

from pathlib import Path

from megatron_wlb.cli.flags import flag
from megatron_wlb.settings.command_line import Parser


def test_value_is_read_as_its_name_says() -> None:
    parser = Parser()
    for words in ("--steps N", "--share X", "--plot FILE", "--model NAME|FILE", "--packing a,b"):
        flag(parser, words, "of a step")
    flag(parser, "--thresholds L", "in tokens", [], of=int)
    flag(parser, "--force", "replace it")
    words = "--steps 3 --share 0.5 --plot p.png --model 7b --packing wlb,hold --thresholds 1,2"
    args = parser.parse_args(words.split())
    assert (args.steps, args.share, args.plot, args.model) == (3, 0.5, Path("p.png"), "7b")
    assert (args.packing, args.thresholds, args.force) == (["wlb", "hold"], [1, 2], False)


def test_help_says_the_default() -> None:
    parser = Parser(prog="p")
    flag(parser, "--rows N", "shown", 12)
    flag(parser, "--share X", "free", 0.05)
    flag(parser, "--packing a,b", "tried", ["wlb", "hold"])
    flag(parser, "--look-ahead K", "steps", 0)
    assert parser.parse_args([]).look_ahead == 0
    for said in ("shown (default: 12)", "free (default: 0.05)", "tried (default: wlb,hold)"):
        assert said in parser.format_help()
    assert "steps (default" not in parser.format_help()
