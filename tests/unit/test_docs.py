"""What the documentation names is there: links, commands, flags, paths."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_imports import FLOORS

from megatron_wlb.cli import inputs
from megatron_wlb.cli.main import COMMANDS
from megatron_wlb.errors import ConfigError
from megatron_wlb.settings.command_line import Parser, _flags_of, megatron_flags, parse_known
from megatron_wlb.settings.config import WlbConfig, flag_of, groups_of_settings

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"
PAGES = {
    str(path.relative_to(PROJECT)): path.read_text(encoding="utf-8")
    for path in (
        *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "patches/README.md")),
        *sorted([*DOCS.glob("*.md"), *(DOCS / "results").glob("*.md")]),
    )
}
README_LINES, READERS_PAGES = 120, 20
PLACES = ("megatron_wlb", "tests", "scripts", "configs", "docs", "patches")
SETTINGS = {flag_of(name) for g in groups_of_settings().values() for name in g.__annotations__}
OURS = {flag for flag in SETTINGS if flag.startswith("--wlb-")}

ALL_PAGES = pytest.mark.parametrize("page", PAGES)


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Code inside lines."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each command in the shell blocks of a page, without variables before it."""
    for block in re.findall(r"^```bash\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        words = shlex.shlex(block.replace("\\\n", " ").replace("\n", "\n;\n"), posix=True)
        words.whitespace_split = True
        words.commenters = "#"
        for end, group in itertools.groupby(words, lambda word: word in (";", "&&", "|")):
            line = list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), group))
            if not end and line:
                yield line


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^()\s]+)\)", prose(text))


@cache
def command_parser(name: str) -> Parser:
    parser = Parser(prog=f"wlb {name}")
    importlib.import_module(f"megatron_wlb.cli.{name}").configure(parser)
    return parser


@cache
def scenario_flags() -> frozenset[str]:
    """Flags of model and layout, which scripts share with `wlb simulate`."""
    parser = Parser()
    inputs.add_model(parser)
    inputs.add_layout(parser)
    return frozenset(itertools.chain.from_iterable(a.option_strings for a in parser._actions))


def check_words(words: list[str]) -> None:
    """Raises for a command line that its program would not take."""
    words = words[: words.index("--")] if "--" in words else words
    if words[0] == "wlb":
        command_parser(words[1]).parse_args(words[2:])
    elif words[0].startswith("scripts/") and words[0].endswith(".py"):
        source = (PROJECT / words[0]).read_text(encoding="utf-8")
        shared = scenario_flags() if "inputs.add_layout(" in source else ()
        for flag in (word for word in words if word.startswith("--")):
            assert re.search(rf'"{flag}[" ]', source) or flag in shared, flag
    elif "megatron_wlb.launch" in words:
        parse_known(words[words.index("megatron_wlb.launch") + 1 :])  # a script is no flag


def test_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= README_LINES


@ALL_PAGES
def test_links_lead_somewhere(page: str) -> None:
    for link in links(PAGES[page]):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        path = ((PROJECT / page).parent / name).resolve() if name else PROJECT / page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("folder", [DOCS, DOCS / "results"])
def test_index_has_every_page(folder: Path) -> None:
    index = f"{folder.relative_to(PROJECT)}/README.md"
    pages = {path.name for path in folder.glob("*.md")} - {"README.md"}
    assert {link.partition("#")[0] for link in links(PAGES[index])} >= pages


def test_readers_pages_are_few_and_plain() -> None:
    pages = {path: PAGES[str(path.relative_to(PROJECT))] for path in DOCS.glob("*.md")}
    assert len(pages) - 1 <= READERS_PAGES, "with the index beside them"
    for path, text in pages.items():
        found = re.search("of which|by which|is none", " ".join(text.split()))
        assert not found, f"{path.name}: {found}"


def test_every_picture_is_shown() -> None:
    shown = {Path(link).name for text in PAGES.values() for link in links(text)}
    assert {path.name for path in DOCS.rglob("*.png")} <= shown


@ALL_PAGES
def test_commands_are_ones_that_their_programs_take(page: str) -> None:
    for words in command_lines(PAGES[page]):
        try:
            check_words(words)
        except ConfigError as error:
            pytest.fail(f"{shlex.join(words)}: {error}")


@ALL_PAGES
def test_commands_named_in_sentences_have_their_flags(page: str) -> None:
    for code in spans(PAGES[page]):
        words = code.split()
        if words[0] == "wlb" and words[1:]:
            assert words[1] in COMMANDS, code
            flags = {word.split("=")[0] for word in words if word.startswith("--")}
            assert flags <= _flags_of(command_parser(words[1])), code
        elif words[0].startswith("scripts/") and words[0].endswith(".py"):
            check_words(words)


@ALL_PAGES
def test_flags_of_ours_exist(page: str) -> None:
    assert set(re.findall(r"--wlb-[a-z][a-z0-9-]*[a-z0-9]", PAGES[page])) <= OURS


def test_page_of_flags_has_each_of_ours() -> None:
    named = {code for code in spans(PAGES["docs/flags.md"]) if code.startswith("--wlb-")}
    assert {flag_of(name) for name in WlbConfig.__annotations__} <= named
    assert named >= OURS


@ALL_PAGES
def test_paths_and_modules_exist(page: str) -> None:
    for path in re.findall(rf"(?<![\w/.-])(?:{'|'.join(PLACES)})/[\w./-]*\w", PAGES[page]):
        assert (PROJECT / path).exists() or (PROJECT / page).parent.joinpath(path).exists(), path
    for module in re.findall(r"megatron_wlb(?:\.\w+)+", PAGES[page]):
        parts = module.split(".")
        stems = [PROJECT.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
        files = [stem.with_suffix(".py") for stem in stems]
        *inner, last = [file for stem, file in zip(stems, files, strict=True)
                        if stem.is_dir() or file.is_file()]  # fmt: skip
        named = parts[len(inner) + 1 :]
        # By its text: importing some takes Megatron, and seconds.
        source = last if last.is_file() else last.with_suffix("") / "__init__.py"
        text = source.read_text(encoding="utf-8")
        assert not named or re.search(rf"^((def|class) )?{named[0]}\b", text, re.MULTILINE), module


def test_picture_of_the_layers_is_the_order_that_the_code_keeps() -> None:
    block = PAGES["docs/architecture.md"].split("```")[1]
    floors = [re.findall(r"^.{4}(\w+)  +\w", floor, flags=re.MULTILINE)
              for floor in re.split(r"^(?= \d )", block, flags=re.MULTILINE)]  # fmt: skip
    assert [tuple(names) for names in floors if names][::-1] == [*FLOORS, ("scripts",)]


def test_finder_of_commands_sees_what_a_shell_would() -> None:
    text = "x\n```bash\nA=1 wlb pack --window \\\n  8  # why\nsource a && wlb doctor | head\n```\n"
    assert [*command_lines(text)] == [
        ["wlb", "pack", "--window", "8"], ["source", "a"], ["wlb", "doctor"], ["head"],
    ]  # fmt: skip
    for wrong in (["wlb", "pack", "--windw", "8"], ["-m", "megatron_wlb.launch", "--moe"]):
        with pytest.raises(ConfigError):
            check_words(wrong)
    assert megatron_flags() - SETTINGS, "flags of Megatron's script are known beside ours"
    assert sum(words[0] == "wlb" for text in PAGES.values() for words in command_lines(text)) > 15
