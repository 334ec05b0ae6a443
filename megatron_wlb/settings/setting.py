"""What a setting is besides its value: its help, its limits, and who asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from megatron_wlb.reading import MAX_SIZE, MOST_DEVICES, MOST_MICRO_BATCHES

SAME = "same"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that the package needs to know of a setting besides its name, type and default."""

    help: str
    short: str = ""
    """What commands of ``wlb`` and a layout call it: ``--tp-size`` is `tp_size`."""
    least: int | None = None
    most: int | None = None
    within: tuple[float, float] | None = None
    """Half-open."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """What it may be, where that is one of a table, with an ``about`` of each."""
    script: str = ""
    """The argument of Megatron-LM's script that means this and has its form: another name, or
    ``same``; empty where there is none."""
    resume: Literal["same", "told", "free"] = "free"
    """What may become of it where a checkpoint is loaded: ``same`` is what :class:`.SampleTrainer`
    must be told again, ``told`` is another value with a warning of the launcher."""
    layout: bool = False
    """Whether it says how a model is divided. :class:`.SampleTrainer` must be told the same again,
    and strategies say it themselves."""
    planned: bool = False
    """Whether it is Megatron's, no weight tells of it, and plans depend on it."""
    alike: bool = True
    """Whether all ranks have the same."""
    searched: bool = False
    """Whether commands that search layouts and packings decide it, whatever a model's file says."""
    script_default: Any = None
    """What Megatron-LM's script has where it is not given, if predictions depend on it and that is
    not our default."""

    def beyond(self, flag: str, value: Any) -> Iterator[str]:
        """Says of a value, or of each in a list, which limit it is beyond; ``flag`` gave it."""
        for one in value if isinstance(value, tuple | list) else [value]:
            if one is None or isinstance(one, str):
                continue
            said = f"{flag} is {one}; give"
            if self.most is not None and one > self.most:
                yield f"{said} at most {self.most}"
            if self.least is not None and one < self.least:
                yield f"{said} at least {self.least}"
            if self.within is not None and not self.within[0] <= one < self.within[1]:  # or NaN
                yield f"{said} a number in [{self.within[0]}, {self.within[1]})"


def setting(default: Any, help: str, **traits: Any) -> Any:
    """A dataclass field with the text that ``--help`` shows, and what :class:`Setting` has."""
    return field(default=default, metadata={"help": help, **traits})


searched = partial(setting, searched=True)
count = partial(setting, least=1)
size = partial(setting, least=1, most=MAX_SIZE)
devices = partial(setting, least=1, most=MOST_DEVICES)
micro_batches = partial(setting, least=1, most=MOST_MICRO_BATCHES)
real = partial(setting, within=(0, math.inf))
factor = partial(setting, within=(1, math.inf))
share = partial(setting, within=(0, 1))
