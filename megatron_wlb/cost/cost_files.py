"""Costs in files: of one layout, or a folder of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_wlb.cost import (
    Cost,
    ModelShape,
    Parallelism,
    ProfiledCost,
    check_model,
    cost_from_dict,
    read_cost_file,
)
from megatron_wlb.errors import ConfigError

COST_SUFFIXES = ".json", ".yaml", ".yml"


def read_cost(
    path: str | Path,
    flag: str,
    shape: ModelShape | None = None,
    layout: Parallelism | None = None,
    *,
    extrapolate: bool = False,
) -> Cost:
    """Reads the cost in a file: coefficients, a fit or tables.

    ``shape`` and ``layout`` are compared with the file's if they are given. Raises
    :class:`ConfigError`, which names the ``flag`` and the path, for a file without a cost, or with
    that of another model or layout.
    """
    try:
        values = read_cost_file(path)
        inner = values.get("cost", values)
        if inner is not values and "model" in values and shape is not None:
            check_model(values["model"], shape)
        cost = cost_from_dict(inner)
        if isinstance(cost, ProfiledCost):
            if layout is not None and shape is not None:
                cost.check(shape, layout.tp_size, layout.cp_size)
            elif shape is not None:
                check_model(cost.model, shape)
            if extrapolate:
                cost = replace(cost, extrapolate=True)
    except ConfigError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise ConfigError(f"{flag} {path}: {reason}") from None
    return cost


def read_costs(
    folder: str | Path, flag: str, shape: ModelShape, *, extrapolate: bool = False
) -> dict[tuple[int, int], Cost]:
    """Reads the tables of a folder, each of one TP and CP.

    Raises :class:`ConfigError` as :func:`read_cost`, for files without a layout, and two of one.
    """
    found: dict[tuple[int, int], Cost] = {}
    paths = [path for path in sorted(Path(folder).glob("*")) if path.suffix in COST_SUFFIXES]
    for path in paths:
        cost = read_cost(path, flag, shape, extrapolate=extrapolate)
        if not isinstance(cost, ProfiledCost):
            raise ConfigError(
                f"{flag} {path}: coefficients have no layout; give tables, as "
                "megatron_wlb.measure_cost writes them"
            )
        sizes = cost.tp_size, cost.cp_size
        if sizes in found:
            raise ConfigError(
                f"{flag} {path}: TP {sizes[0]} and CP {sizes[1]} have tables in another file of "
                "the folder, too; leave one of them out"
            )
        found[sizes] = cost
    if not found:
        raise ConfigError(
            f"{flag} {folder} is not a folder with tables ({', '.join(COST_SUFFIXES)}); give one, "
            "with a file of each TP and CP"
        )
    return found
