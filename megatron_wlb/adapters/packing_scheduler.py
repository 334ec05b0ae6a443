"""Megatron-core's scheduler of packed sequences, planned by :func:`megatron_wlb.plan_batch`.

Megatron-core after 0.19 packs each global batch anew if ``--sequence-packing-scheduler`` is
``dp_balanced``, and so does Megatron-Bridge with ``dataset.enable_global_batch_packing``. Before
training add::

    from megatron.core.datasets.data_schedule import scheduler_map
    install(scheduler_map)

Megatron fetches samples, sends them to their ranks and packs them as before. Which run together is
ours. It keeps what Megatron asks for: each sample once, as many micro-batches on each data-parallel
rank, a multiple of ``microbatch_group_size_per_vp_stage`` with virtual stages, none without a
sample, none above ``--max-seqlen-per-dp-cp-rank`` × CP, or above ``max_num_seqs`` where Megatron
has that. Nothing here imports Megatron: its map is an argument.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from megatron_wlb.adapters.trainers import TOKENS, cost_of_flops, filled_ranks
from megatron_wlb.cost import DocumentCost, Parallelism
from megatron_wlb.errors import ConfigError

Groups = list[list[list[int]]]
"""``[micro-batches][DP × CP ranks][numbers of samples]``; CP ranks of a DP rank have the same."""


def install(scheduler_map: MutableMapping[Any, Any], cost: DocumentCost | None = None) -> None:
    """Puts :func:`planned` in the place of ``dp_balanced`` in Megatron's ``scheduler_map``, whose
    keys are names, or members of an enumeration with them as values.

    Raises :class:`ConfigError` where the map has no ``dp_balanced``.
    """
    names = {getattr(key, "value", key): key for key in scheduler_map}
    if "dp_balanced" not in names:
        raise ConfigError(
            f"Megatron's scheduler_map has {', '.join(map(str, names)) or 'nothing'}, but no "
            "dp_balanced; take a Megatron-LM whose --sequence-packing-scheduler has it"
        )
    key = names["dp_balanced"]
    scheduler_map[key] = planned(scheduler_map[key], cost)


def planned(base: Any, cost: DocumentCost | None = None) -> Any:
    """A subclass of Megatron's ``DpBalancedScheduler`` whose groups are planned here.

    ``cost`` is what balance is measured by; if not given, FLOPs of the model that Megatron trains.
    """

    class PlannedScheduler(base):  # type: ignore[misc]
        """Which samples run together is planned by megatron-wlb."""

        pp_size, vpp_size = 1, 1
        model_cost = cost

        def run(
            self, data_iterator: Any, num_microbatches: int, dp_group: Any, tp_group: Any,
            pp_group: Any, dp_cp_group: Any, dev: Any, config: Any,
        ) -> Any:  # fmt: skip
            """Megatron's, which is told here what the plan needs to know."""
            self.pp_size = pp_group.size()
            self.vpp_size = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
            if self.model_cost is None:
                self.model_cost = cost_of_config(config)
            return super().run(
                data_iterator, num_microbatches, dp_group, tp_group, pp_group, dp_cp_group, dev,
                config,
            )  # fmt: skip

        def get_groups_and_subsamples(
            self, sample_id_seqlens: Sequence[tuple[int, int]]
        ) -> list[list[list[int]]]:
            """Groups of samples given as ``(number, padded length)``."""
            group = self.microbatch_group_size_per_vp_stage
            vpp_size = max(self.vpp_size, 2) if group is not None else 1
            layout = Parallelism(
                pp_size=max(self.pp_size, 2) if vpp_size > 1 else self.pp_size,
                vpp_size=vpp_size,
                dp_size=self.dp_size,
                group_size=group,
            )
            max_tokens = self.max_seqlen_per_dp_cp_rank * self.cp_size
            return groups_of(
                sample_id_seqlens, max_tokens, layout, self.cp_size,
                self.model_cost or DEFAULT_COST, getattr(self, "max_num_seqs", None),
            )  # fmt: skip

    return PlannedScheduler


def groups_of(
    samples: Sequence[tuple[int, int]],
    max_tokens: int,
    layout: Parallelism,
    cp_size: int,
    cost: DocumentCost,
    most_samples: int | None = None,
) -> Groups:
    """The groups in which samples, given as ``(number, padded length)``, run.

    ``layout`` has no context parallelism: lengths are padded for it.

    Raises :class:`ConfigError` for a sample above ``max_tokens``, or too few samples.
    """
    for number, length in samples:
        if length > max_tokens:
            raise ConfigError(
                f"sample {number} has {length} tokens, above {max_tokens}, which all CP ranks hold "
                "together; raise --max-seqlen-per-dp-cp-rank or cut the sample"
            )
    lengths = [length for _, length in samples]
    ranks = filled_ranks(lengths, max_tokens, layout, cost, most_samples=most_samples)
    return [
        [sorted(samples[n][0] for n in micro_batch) for micro_batch in turn for _ in range(cp_size)]
        for turn in zip(*ranks, strict=True)
    ]


def cost_of_config(config: Any) -> DocumentCost:
    """By FLOPs of a layer of Megatron's ``TransformerConfig``; :data:`DEFAULT_COST` without one."""
    names = "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"
    hidden, ffn, heads, channels = (getattr(config, name, None) for name in names)
    if not (hidden and ffn and heads and channels):
        return DEFAULT_COST
    groups = getattr(config, "num_query_groups", None) or heads
    matrices = 3 if getattr(config, "gated_linear_unit", False) else 2
    if getattr(config, "num_moe_experts", None):
        ffn = (getattr(config, "moe_ffn_hidden_size", None) or ffn) * (
            getattr(config, "moe_router_topk", None) or 1
        )
    linear = 2 * hidden * (2 * channels * (heads + groups) + matrices * ffn)
    quadratic = 2 * heads * channels  # causal: half of all pairs
    layers = getattr(config, "num_layers", None) or 1
    return cost_of_flops(*(layers * (linear * n + quadratic * n * n) for n in (TOKENS, 2 * TOKENS)))


DEFAULT_COST = cost_of_flops(
    *(32 * (2 * 202375168 * n + 8192 * n * n) for n in (TOKENS, 2 * TOKENS))
)
"""A 7B model: 32 layers of 202 million weights, 32 heads of 128."""
