"""The oracle's experts: routers of one process, and their losses by definition.

Megatron's layer routes, with all experts and without any loss of its own. Its routers' logits are
noted while documents run alone; the losses are made of them here, by the formulas of the papers.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

from helpers.workload import Workload
from megatron_wlb.plan import StepPlan
from megatron_wlb.settings.config import Config
from megatron_wlb.settings.megatron import ModelConfig

_SAME = (
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk "
    "moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
    "moe_latent_size moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_dtype"
)
NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def expert_settings(model: ModelConfig) -> dict[str, Any]:
    """What Megatron's configuration of one process says of experts."""
    if not model.num_experts:
        return {}
    from megatron_wlb.reading import read_pattern

    return {
        **{name: getattr(model, name) for name in _SAME.split()},
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": read_pattern(model.moe_layer_freq),
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }


def layer_specs(core: Any) -> Any:
    """Megatron's stock local layers."""
    from megatron.core.models.gpt import gpt_layer_specs

    if core.num_moe_experts:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            core, use_transformer_engine=False, normalization=core.normalization
        )
    return gpt_layer_specs.get_gpt_layer_local_spec(
        qk_layernorm=core.qk_layernorm,
        normalization=core.normalization,
        multi_latent_attention=core.multi_latent_attention,
    )


class OracleRouters:
    """Runs a step and adds the losses of all routers of a model."""

    def __init__(self, model: Any, config: Config) -> None:
        self.model, self.settings = model, config.model
        self.coeffs = dict(
            zip(
                config.model.moe_router_load_balancing_type,
                config.model.moe_aux_loss_coeff,
                strict=True,
            )
        )
        self.routers: dict[int, Any] = {}
        """By layer; those that predict further ahead come after the decoder's."""
        self.names: dict[int, str] = {}
        self._logits: dict[int, list[Any]] = {}
        routers = {n: m for n, m in model.named_modules() if n.endswith(".router")}
        for name, router in routers.items():
            *_, number = [int(part) for part in name.split(".") if part.isdigit()]
            number += config.model.num_layers if name.startswith("mtp.") else 0
            self.names[number], self.routers[number] = name, router
            self._note(number, router)

    @property
    def biases(self) -> dict[str, Any]:
        return {
            f"{self.names[number]}.expert_bias": router.expert_bias.numpy().copy()
            for number, router in self.routers.items()
            if router.expert_bias is not None
        }

    def losses(
        self, workload: Workload, step: int, plan: StepPlan
    ) -> tuple[Any, dict[str, list[float]]]:
        """The sum of all auxiliary losses of a step whose documents have run, as a tensor; and each
        of each layer.
        """
        import torch

        if not self._kinds():  # nor do plans matter, which may share prefixes
            plan = replace(plan, micro_batches=())
        number_of = {(d.number, d.offset): n for n, d in enumerate(workload.steps[step])}
        rows = [
            [
                [(number_of[d.number, d.offset], start, stop) for d, start, stop in m.spans]
                for rank, m in enumerate(row)
                if m is not None and rank == min(m.replicas, default=rank)
            ]
            for row in zip_longest(*plan.micro_batches)
        ]
        whole, auxiliary = torch.zeros(()), {}
        for name, coeff in self._kinds():
            values = [0.0] * (self.settings.num_layers + (self.settings.mtp_num_layers or 0))
            for layer, logits in self._logits.items():
                value = self._loss(name, logits, rows)
                values[layer] = value.item()
                whole = whole + coeff * value
            auxiliary[NAMES.get(name, name)] = values
        for noted in self._logits.values():
            noted.clear()
        return whole, auxiliary

    def _note(self, number: int, router: Any) -> None:
        gating, noted = router.gating, self._logits.setdefault(number, [])

        def noting(hidden: Any) -> Any:
            logits = gating(hidden)
            noted.append(logits.reshape(-1, logits.shape[-1]))
            return logits

        router.gating = noting

    def _kinds(self) -> list[tuple[str, float]]:
        kinds = [(kind, coeff) for kind, coeff in self.coeffs.items() if coeff]
        z_loss = self.settings.moe_z_loss_coeff
        return kinds + ([("z_loss", z_loss)] if z_loss else [])

    def _loss(
        self, name: str, logits: list[Any], rows: list[list[list[tuple[int, int, int]]]]
    ) -> Any:
        """The mean of a loss over the tokens of a step, of a layer with ``logits`` by document.

        ``rows`` are the documents, from where to where, of the micro-batches that replicas run at
        the same time.
        """
        import torch

        num_tokens = sum(map(len, logits))
        if name == "z_loss":
            return sum((torch.logsumexp(one, 1) ** 2).sum() for one in logits) / num_tokens
        if name == "seq_aux_loss":
            groups = [[(number, 0, len(own))] for number, own in enumerate(logits)]
        elif name == "aux_loss":
            groups = [micro_batch for row in rows for micro_batch in row]
        else:
            groups = [[span for micro_batch in row for span in micro_batch] for row in rows]
        num_experts = self.settings.num_experts or 0
        loss, before = torch.zeros(()), torch.zeros(num_experts)
        for group in filter(None, groups):
            scores = self._scores(torch.cat([logits[n][start:stop] for n, start, stop in group]))
            chosen = torch.zeros_like(scores).scatter(1, self._top(scores), 1.0).sum(0)
            if name == "global_aux_loss":
                chosen = before = before + chosen
            share = chosen / chosen.sum()
            mean = scores.mean(0)
            loss = loss + num_experts * (share * mean).sum() * len(scores)
        return loss / num_tokens

    def _scores(self, logits: Any) -> Any:
        if self.settings.moe_router_score_function == "softmax":
            return logits.softmax(1)
        scores = logits.sigmoid()
        return scores / scores.sum(1, keepdim=True)

    def _top(self, scores: Any) -> Any:
        return scores.detach().topk(self.settings.moe_router_topk, 1).indices

    def move_biases(self) -> None:
        """Up for experts with fewer tokens than the mean of the step, down for those with more."""
        import torch

        for router in self.routers.values():
            if router.expert_bias is not None:
                counts = router.local_tokens_per_expert
                rate = self.settings.moe_router_bias_update_rate
                router.expert_bias += rate * torch.sign(counts.mean() - counts)
                counts.zero_()
