"""What a machine can do: a file of peak rates, achieved shares of them, and link bandwidths.

The files are ``configs/hardware/*.yaml`` of the repository; an installed package carries a copy.
Each figure is ``{value, source}``: the source says which data sheet it is from, what was measured
and on what, or why a share is assumed. A file that ``wlb profile`` wrote has ``attention`` too: the
measured tables of attention kernels.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from megatron_wlb.cost.attention import AttentionProfile
from megatron_wlb.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "configs" / "hardware", _PACKAGE.parent / "configs" / "hardware")
"""Where an installed package and where a checkout has the files."""

_SHARES = (
    "linear_share", "attention_share", "memory_share", "link_share", "tp_overlap", "cp_overlap",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one device and its links.

    Raises :class:`ConfigError` for a figure that is not positive, or a share outside (0, 1]
    (an overlap outside [0, 1]).
    """

    peak_tflops: float
    """10¹² FLOP/s of dense matrix products in the precision of training."""
    memory_gb_s: float
    """10⁹ B/s between the device and its memory."""
    memory_gib: float
    """2³⁰ bytes of device memory."""
    node_link_gb_s: float
    """10⁹ B/s that one device receives from the others of its node while it sends as much."""
    network_gb_s: float
    """10⁹ B/s that one device receives from other nodes."""
    devices_per_node: int
    linear_share: float
    """Of the peak, that matrix products of training reach."""
    attention_share: float
    """Of the peak, that causal attention of long documents reaches."""
    memory_share: float
    """Of the memory bandwidth, that element-wise operations reach."""
    link_share: float
    """Of the links' bandwidth, that collectives reach."""
    tp_overlap: float
    """Share of the tensor-parallel collectives that is hidden behind matrix products."""
    cp_overlap: float
    """Share of the context-parallel exchange of K and V that is hidden behind attention."""
    latency_us: float = 10.0
    """Time that a message between devices takes besides its bytes; 10 if not given."""
    attention: tuple[AttentionProfile, ...] = ()
    """Measured attention kernels, where there are any."""

    def __post_init__(self) -> None:
        for name in FIGURES:
            value = getattr(self, name)
            least = 0.0 if name.endswith(("_overlap", "_us")) else math.ulp(0.0)
            most = 1.0 if name in _SHARES else math.inf
            if not (math.isfinite(value) and least <= value <= most):
                raise ConfigError(
                    f"hardware: {name} is {value}; give a positive number"
                    + (", at most 1" if name in _SHARES else "")
                )

    @property
    def linear_tflops(self) -> float:
        """10¹² FLOP/s that matrix products reach."""
        return self.peak_tflops * self.linear_share

    @property
    def attention_tflops(self) -> float:
        """10¹² FLOP/s that attention reaches."""
        return self.peak_tflops * self.attention_share

    def memory_us(self, num_bytes: float) -> float:
        """Time that element-wise operations need to read and write so many bytes."""
        return num_bytes / (self.memory_gb_s * self.memory_share * 1e3)

    def transfer_us(self, num_bytes: float, num_devices: int) -> float:
        """Time to receive so many bytes from a group that spans ``num_devices`` neighbours."""
        inside = num_devices <= self.devices_per_node
        gb_s = self.node_link_gb_s if inside else self.network_gb_s
        return num_bytes / (gb_s * self.link_share * 1e3)


FIGURES = tuple(f.name for f in fields(Hardware) if f.name != "attention")
"""The entries of a hardware file that are one number each."""


def hardware_names() -> list[str]:
    """The machines whose files come with the project."""
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.yaml")})


def load_hardware(name_or_path: str) -> Hardware:
    """The machine called so (``h100-sxm``), or that of a YAML file.

    Raises:
        ConfigError: an unknown name (the nearest one is named), an unreadable file, or one with an
            unknown, missing or impossible figure, or a figure without its source.
    """
    path, content = read_hardware(name_or_path)
    return _from_figures(path, content)


def read_hardware(name_or_path: str) -> tuple[Path, Mapping[str, Any]]:
    """The file that :func:`load_hardware` reads, and what it says, unchecked."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        found = [folder / f"{name_or_path.lower()}.yaml" for folder in _FOLDERS]
        existing = [candidate for candidate in found if candidate.is_file()]
        if not existing:
            names, wanted = hardware_names(), name_or_path.lower()
            near = [name for name in names if name.startswith(wanted)]
            near = near or difflib.get_close_matches(wanted, names, n=1) or names
            raise ConfigError(
                f"unknown hardware {name_or_path}; use {' or '.join(near)}, or give a YAML file"
            )
        path = existing[0]
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"hardware {path}: {' '.join(str(error).split())}; give {' or '.join(hardware_names())}"
            ", or a file such as `wlb profile` writes"
        ) from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"hardware {path}: expected figures as `name: {{value, source}}`")
    return path, content


def _from_figures(path: Path, content: Mapping[str, Any]) -> Hardware:
    known = [*FIGURES, "attention"]
    values: dict[str, float] = {}
    for name, figure in content.items():
        if name in ("description", "attention"):
            continue
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1) or known
            raise ConfigError(f"hardware {path}: unknown figure {name}; use {near[0]}")
        if not isinstance(figure, Mapping) or set(figure) != {"value", "source"}:
            raise ConfigError(f"hardware {path}: {name} is {figure}; give {{value, source}}")
        value = figure["value"]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"hardware {path}: {name} is {value!r}; give a number")
        if name == "devices_per_node" and not isinstance(value, int):
            raise ConfigError(f"hardware {path}: {name} is {value}; give a whole number")
        values[name] = value
    missing = [f.name for f in fields(Hardware) if f.default is MISSING and f.name not in values]
    if missing:
        raise ConfigError(f"hardware {path}: {missing[0]} is missing; add it with its source")
    tables = content.get("attention", [])
    if not (isinstance(tables, list) and all(isinstance(table, Mapping) for table in tables)):
        raise ConfigError(f"hardware {path}: attention is no list of tables; run `wlb profile`")
    try:
        attention = tuple(map(AttentionProfile.from_dict, tables))
        return Hardware(**values, attention=attention)  # type: ignore[arg-type]  # an int is one
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
