"""A cost from first principles: the model's operations at the rates of a machine.

Per device and layer, forward, of a micro-batch (``h`` hidden; bytes and rates are those of each
operation's precision):

* matrix products: 2 FLOPs a weight and token, over TP and CP;
* causal attention: ``2 · heads · dim · d²`` FLOPs a document, over TP and CP; with a sliding window
  as many less as :func:`~megatron_wlb.cost.document.unseen` says;
* TP: two all-gathers or reduce-scatters of ``[tokens / CP, h]`` a part (an all-reduce is as much).
  Nothing hides them, as ``--tp-comm-overlap`` is turned off;
* CP: the other ranks' K and V, and the copy of all ranks' into the order that the attention kernel
  takes; of all keys, though with a sliding window long documents exchange fewer. The exchange of
  the first of ``g`` head groups is not hidden, that of the others is for the machine's
  ``cp_overlap``. With multi-latent attention one latent a token is exchanged, and each rank
  projects those of all tokens up to keys and values, and once more in backward;
* experts: ``topk`` copies of each token go to the ranks that have its experts and come back, with
  an all-to-all each way, and one more each way in backward; with TP of experts, these ranks gather
  what each has got, and reduce what they give. Nothing hides them. Routing is even;
* element-wise operations: what they read and write, at memory bandwidth.

The first stage has the embedding besides, the last one the LM head and its fp32 loss. So has each
layer that predicts further ahead, and a product that joins its two inputs. Sends between stages
belong to the schedule, so :mod:`megatron_wlb.simulator` has them. Backward takes twice the
forward's linear work and 2.5 times its attention work (flash attention computes the scores again),
and once more the forward of what is recomputed. Its TP collectives are others: Megatron gathers a
part's input again (with sequence parallelism) and reduces its gradient beside matrix products, so
``tp_overlap`` of them is hidden, as far as the products last. The gathering of the gradient of a
part's output is not.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from megatron_wlb.cost.document import DocumentCost, WithoutDocuments
from megatron_wlb.cost.execution import Executed
from megatron_wlb.cost.hardware import Hardware
from megatron_wlb.cost.layers import Layer, Precision, Precisions, Runs, slices
from megatron_wlb.cost.shape import Stage
from megatron_wlb.cost.slices import PrefixCosts
from megatron_wlb.cost.workspace import FP32

BACKWARD_LINEAR, BACKWARD_ATTENTION = 2.0, 2.5
"""Work of the backward pass, in forwards."""

_LOSS_BYTES = 9 * FP32
"""A logit's fp32 traffic: cast, maximum, subtraction, exponential, sum, division."""


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """The forward pass of one layer, or of a stage's other parts: µs on each device."""

    matrix_us: float
    """A token, as are those that follow."""
    elementwise_us: float
    tp_us: float
    """Tensor-parallel collectives."""
    tp_backward_us: float
    """The part of the backward pass's collectives that is not hidden."""
    cp_us: float = 0.0
    """Context-parallel exchange that is not hidden."""
    cp_copy_us: float = 0.0
    """Copying what the exchange brings."""
    attention_us: float = 0.0
    """A token²."""
    unseen_us: float = 0.0
    """What a sliding window saves of that, a token² beyond its reach."""
    again_us: float = 0.0
    """The part of the forward pass that runs once more in backward, a token."""
    ep_us: float = 0.0
    """Exchange with experts of other ranks, as much backward as forward."""
    routed_us: float = 0.0
    """The experts' part of ``matrix_us`` and ``elementwise_us``. A rank computes it for all ranks
    that exchange tokens with it."""

    @property
    def linear_us(self) -> float:
        """All that grows with the tokens."""
        local_us = self.matrix_us + self.elementwise_us + self.tp_us + self.cp_us
        return local_us + self.cp_copy_us + self.ep_us

    @property
    def backward_linear_us(self) -> float:
        """The same of the backward pass."""
        both_us = self.tp_us + self.ep_us
        once_us = BACKWARD_LINEAR * (self.linear_us - both_us) + self.tp_backward_us + self.ep_us
        return once_us + self.again_us


@dataclass(frozen=True, slots=True)
class AnalyticModel(Executed):
    """Times of a model's parts on a machine."""

    hardware: Hardware

    def layer(self, layer: Layer | None = None) -> ForwardTimes:
        """The times of a transformer layer; without ``layer`` of one with the shape's own sizes.

        Raises :class:`ConfigError` for a precision of which the machine has no rate.
        """
        shape, p, machine = self.shape, self.parallelism, self.hardware
        layer = layer or shape.layer
        precisions = self._precisions(layer)
        attention = precisions.attention
        # Numbers read and written a token. A part's norm: 2; its residual addition: 3.
        spread = 5 * len(layer.parts) * shape.hidden_size / p.sequence_shards
        local = sum(part.elementwise_numbers for part in layer.parts)
        exchange_us, ordered_us = self._keys_us(layer)
        up_us = self._matrix_us(sum(part.up_weights for part in layer.parts), precisions.matrix)
        weights = layer.weights(shape.hidden_size)
        scan_tflops = machine.reached_tflops("scan_share", attention.peak)
        scan_us = 2 * layer.state_products / (self._devices * scan_tflops * 1e6)
        attention_tflops = machine.reached_tflops("attention_share", attention.peak)
        pair_us = 2 / (self._devices * attention_tflops * 1e6)
        # Experts without a shared one have no product that tensor parallelism divides.
        num_parts = sum(part.columns > 0 for part in layer.parts)
        columns = shape.hidden_size * sum(part.columns for part in layer.parts)
        dispatched = [part.dispatched_numbers(p, shape.hidden_size) for part in layer.parts]
        copies, sent, copied = (sum(numbers, 0.0) for numbers in zip(*dispatched, strict=True))
        routed = float(sum(part.routed_elementwise_numbers for part in layer.parts))
        routed_us = self._matrix_us(
            sum(part.routed_weights(shape.hidden_size) for part in layer.parts),
            precisions.matrix,
        ) + self._elementwise_us(routed / p.tp_size * precisions.elementwise.element_bytes)
        products = sum(part.product_numbers(shape.hidden_size, p) for part in layer.parts)
        return ForwardTimes(
            self._matrix_us(weights, precisions.matrix)
            + scan_us
            + (p.cp_size - 1) * up_us
            + self._traffic_us(products, precisions.matrix),
            self._elementwise_us(
                (spread + copied + (local + routed) / p.tp_size)
                * precisions.elementwise.element_bytes
            ),
            self._tp_forward_us(2 * num_parts, weights, precisions),
            self._tp_backward_us(num_parts, num_parts, columns, precisions),
            (1 - machine.cp_overlap * self._beside_attention(layer)) * exchange_us,
            ordered_us,
            layer.query_size * pair_us,
            layer.windowed_query_size * pair_us,
            p.cp_size * up_us if p.cp_size > 1 else 0.0,
            self._exchange_us(sent * precisions.collective.element_bytes, copies),
            routed_us,
        )

    def _keys_us(self, layer: Layer, num_replicas: int = 1) -> tuple[float, float]:
        """The exchange of a token's keys and values over the CP ranks of so many replicas, and the
        copy of all ranks' into the order of the kernel.
        """
        p = self.parallelism
        num_ranks = p.cp_size * num_replicas
        if num_ranks == 1:
            return 0.0, 0.0
        element_bytes = self._precisions(layer).attention.element_bytes
        sent = sum(part.sent_numbers(p) for part in layer.parts) * (num_ranks - 1) / num_ranks
        copied = sum(part.copied_numbers(p) for part in layer.parts)
        return (
            self.hardware.transfer_us(sent * element_bytes, p.tp_size * num_ranks, num_ranks),
            self.hardware.memory_us(copied * element_bytes),
        )

    def _precisions(self, layer: Layer) -> Precisions:
        return layer.precisions or Precisions.same(self.element_bytes)

    def _traffic_us(self, numbers: float, precision: Precision) -> float:
        """What matrix products wait for their inputs and outputs, and the casts of these.

        Outputs have the dtype of training. A cast reads that and writes the other, and once more
        transposed; those of backward are two thirds of all.
        """
        num_bytes = self.element_bytes * 1.0
        if precision.element_bytes < self.element_bytes:
            num_bytes += (self.element_bytes + 2 * precision.element_bytes) / 3
        return (1 - self.hardware.product_overlap) * self._elementwise_us(numbers * num_bytes)

    def _exchange_us(self, num_bytes: float, copies: float) -> float:
        """Time in which so many bytes of a token's copies over CP go to experts, and back."""
        p, machine = self.parallelism, self.hardware
        each, tp_size = num_bytes / p.cp_size, p.expert_tp_size
        copies = copies if self.execution.sends_once else 0.0
        gathered_us = machine.transfer_us((tp_size - 1) * each, tp_size, tp_size)
        shown = 1 - machine.tp_overlap if self.execution.ep_overlapped else 1.0
        return 2 * (shown * machine.all_to_all_us(each, p.ep_size, tp_size, copies) + gathered_us)

    def embedding(self) -> ForwardTimes:
        """What the first stage has besides its layers."""
        spread = 2 * self.shape.hidden_size / self.parallelism.sequence_shards
        return ForwardTimes(
            0.0,
            self._elementwise_us(spread * self.element_bytes),
            self._tp_us(1, self.element_bytes),
            self._tp_backward_us(1, 0, 0, Precisions.same(self.element_bytes)),
        )

    def head(self) -> ForwardTimes:
        """What the last stage has besides its layers: norm, LM head, loss."""
        shape, p = self.shape, self.parallelism
        weights, precisions = shape.head_linear_parameters, Precisions.same(self.element_bytes)
        norm_bytes = 2 * shape.hidden_size / p.sequence_shards * self.element_bytes
        loss_bytes = shape.vocab_size / p.tp_size * (self.element_bytes + _LOSS_BYTES)
        return ForwardTimes(
            self._matrix_us(weights, precisions.matrix),
            self._elementwise_us(norm_bytes + loss_bytes),
            self._tp_us(1, self.element_bytes),
            self._tp_backward_us(0, 1, weights, precisions),
        )

    def joining(self, layer: Layer) -> ForwardTimes:
        """What a layer that predicts further ahead does with its two inputs: norms, one product.

        Its input is gathered where sequence parallelism spreads it; its output always, as the
        product is divided by columns.
        """
        shape, p = self.shape, self.parallelism
        weights = shape.joining_parameters
        precisions = self._precisions(layer)
        # Both are read and written by a norm, and by what puts them side by side.
        numbers = 8 * shape.hidden_size / p.sequence_shards
        return ForwardTimes(
            self._matrix_us(weights, precisions.matrix),
            self._elementwise_us(numbers * precisions.elementwise.element_bytes),
            self._tp_us(3 if p.sequence_parallel else 1, precisions.collective.element_bytes),
            self._tp_backward_us(1, 2, weights, precisions),
        )

    def stage_cost(self, stage: Stage) -> DocumentCost:
        """Cost of a document in a virtual stage."""
        if not (stage.layers or stage.first or stage.last):
            return WithoutDocuments()
        recompute, further = self.recompute, self.shape.predictors if stage.last else ()
        layers, again = self._runs(stage)
        linear_us, backward_us, attention_us, unseen_us = self._layers_us(layers)
        again_us, _, again_attention_us, again_unseen_us = self._layers_us(again)
        if recompute.granularity == "selective":
            again_attention_us, again_unseen_us = attention_us, unseen_us
        joining = [(num, self.joining(layer)) for num, layer in further]
        ends = self._ends(stage) + joining
        linear_us += sum(num * part.linear_us for num, part in ends)
        backward_us += sum(num * part.backward_linear_us for num, part in ends)
        if recompute.of_predictors:
            again_us += sum(num * part.linear_us for num, part in joining)
        if (
            self.execution.reduce_in_fp32
        ):  # Backward gathers keys and values, and reduces their gradients.
            backward_us += sum(num * self._longer_us(layer) for num, layer in layers)
        return DocumentCost(
            linear_us,
            attention_us,
            backward_us + again_us,
            BACKWARD_ATTENTION * attention_us + again_attention_us,
            self.hardware.kernel_us * self._num_kernels(stage),
            unseen_us,
            BACKWARD_ATTENTION * unseen_us + again_unseen_us,
            self.shape.reach_tokens,
        )

    def _ends(self, stage: Stage) -> list[tuple[int, ForwardTimes]]:
        """How many embeddings and LM heads a virtual stage has, and what each takes."""
        num_ahead = self.shape.num_ahead if stage.last else 0
        return [
            (stage.first + num_ahead, self.embedding()),
            (stage.last + num_ahead, self.head()),
        ]

    def ends_us(self) -> tuple[float, ...]:
        """What a token's embedding and LM head take in each virtual stage's forward."""
        return tuple(
            sum((num * part.linear_us for num, part in self._ends(stage)), 0.0)
            for stage in self.parallelism.stages(self.shape)
        )

    def mlps_us(self) -> tuple[float, ...]:
        """What a token's dense MLPs take in each virtual stage's forward, collectives too."""
        return tuple(
            sum((num * self._mlp_us(layer) for num, layer in self._runs(stage)[0]), 0.0)
            for stage in self.parallelism.stages(self.shape)
        )

    def _mlp_us(self, layer: Layer) -> float:
        shape, p, precisions = self.shape, self.parallelism, self._precisions(layer)
        taken_us = 0.0
        for part in layer.parts:
            if part.is_mlp:
                weights = part.weights(shape.hidden_size)
                products = part.product_numbers(shape.hidden_size, p)
                numbers = part.elementwise_numbers / p.tp_size
                taken_us += self._matrix_us(weights, precisions.matrix)
                taken_us += self._traffic_us(products, precisions.matrix)
                taken_us += self._elementwise_us(numbers * precisions.elementwise.element_bytes)
                taken_us += self._tp_forward_us(2, weights, precisions)
        return taken_us

    def stage_costs(self) -> tuple[DocumentCost, ...]:
        """Cost in each virtual stage (chunk ``c`` of rank ``r`` is ``c · PP + r``)."""
        stages = self.parallelism.stages(self.shape)
        costs = {stage: self.stage_cost(stage) for stage in set(stages)}
        return tuple(costs[stage] for stage in stages)

    def _num_kernels(self, stage: Stage) -> float:
        """Kernels of a micro-batch's forward and backward in a virtual stage."""
        p = self.parallelism
        once, again = (
            sum(num * part.num_kernels(p) for num, layer in runs for part in layer.parts)
            for runs in self._runs(stage)
        )
        return (1 + BACKWARD_LINEAR) * once + again

    def launches_us(self) -> tuple[float, ...]:
        """What the host takes for a micro-batch's forward and backward in each virtual stage."""
        stages = self.parallelism.stages(self.shape)
        return tuple(self.hardware.launch_us * self._num_kernels(stage) for stage in stages)

    def prefix_costs(self) -> PrefixCosts:
        """What slices take for the rows before them; layers of a sliding window see few."""
        p = self.parallelism
        row_us: list[float] = []
        stages = [self._runs(stage)[0] for stage in p.stages(self.shape)]
        for runs in stages:
            us = 0.0
            for num, layer in runs:
                keys = sum(part.key_size for part in layer.parts if part.reach_tokens is None)
                own_bytes = self._precisions(layer).attention.element_bytes
                num_bytes = 2 * own_bytes + 2 * max(FP32, own_bytes)
                us += num * self.hardware.memory_us(2 * keys / p.tp_size * num_bytes)
            row_us.append(us)
        merged_us = tuple(
            tuple(
                sum((n * self._merged_us(layer, 1 << k) for n, layer in runs), 0.0)
                for runs in stages
            )
            for k in range(p.dp_size.bit_length())
        )
        num_heads = -(-self.shape.num_attention_heads // p.tp_size)
        rows_us = [
            [[(num, self._rows_us(layer, 1 << k)) for num, layer in runs] for runs in stages]
            for k in range(p.dp_size.bit_length())
        ]
        forward_us, backward_us = (
            [tuple(sum((n * us[at] for n, us in own), 0.0) for own in each) for each in rows_us]
            for at in (0, 1)
        )
        divided_us = tuple(zip(forward_us, backward_us, strict=True))
        return PrefixCosts(
            num_heads, p.cp_size, self.hardware.num_processors, tuple(row_us), merged_us, divided_us
        )

    def _rows_us(self, layer: Layer, num_replicas: int) -> tuple[float, float]:
        """What the exchange of a slice's row takes in forward and in backward, where the CP ranks
        of so many replicas divide it: it is gathered in both and put in its place, and its
        gradients are reduced. Layers of a sliding window see few.
        """
        p, machine = self.parallelism, self.hardware
        num_ranks = p.cp_size * num_replicas
        if num_ranks == 1:
            return 0.0, 0.0
        keys = sum(part.key_size for part in layer.parts if part.reach_tokens is None)
        own_bytes = self._precisions(layer).attention.element_bytes
        shown = 1 - machine.cp_overlap  # The next layer's run beside this one's work.

        sum_bytes = max(FP32, own_bytes)

        def taken_us(each_bytes: int, copied: int) -> float:
            numbers = 2 * keys / p.tp_size
            received = numbers * each_bytes * (num_ranks - 1) / num_ranks
            sent_us = machine.transfer_us(received, p.tp_size * num_ranks, num_ranks)
            return shown * sent_us + machine.memory_us(numbers * copied)

        forward_us = taken_us(own_bytes, 2 * own_bytes)
        sent_bytes = sum_bytes if self.execution.reduce_in_fp32 else own_bytes
        # Sums are set to zero, and copied in the order in which they go.
        return forward_us, forward_us + taken_us(sent_bytes, 2 * sum_bytes + sent_bytes)

    def _merged_us(self, layer: Layer, num_replicas: int) -> float:
        """What a token's keys and values take more on each of so many replicas together than their
        shares of one replica's time.
        """
        return sum(self._keys_us(layer, num_replicas)) - sum(self._keys_us(layer)) / num_replicas

    def _runs(self, stage: Stage) -> tuple[Runs, Runs]:
        """All layers of a virtual stage, and those that run forward once more in backward."""
        further = self.shape.predictors if stage.last else ()
        (again,) = slices(stage.layers, [self.recompute.recomputed_layers(stage.num_layers)])
        return stage.layers + further, again + (further if self.recompute.of_predictors else ())

    def routed_us(self, stage: Stage) -> tuple[float, float]:
        """What a token's experts do in a virtual stage, forward and backward."""
        layers, again = self._runs(stage)
        forward_us, again_us = (
            sum((num * self.layer(layer).routed_us for num, layer in runs), 0.0)
            for runs in (layers, again)
        )
        return forward_us, BACKWARD_LINEAR * forward_us + again_us

    def cost(self) -> DocumentCost:
        """Cost of a document in the whole model: the sum over its stages."""
        stages = self.stage_costs()
        names = [f.name for f in fields(DocumentCost)][:-1]
        sums = {name: sum(getattr(stage, name) for stage in stages) for name in names}
        return replace(stages[0], **sums)

    @property
    def _devices(self) -> int:
        """Devices that share a layer."""
        return self.parallelism.tp_size * self.parallelism.cp_size

    def _beside_attention(self, layer: Layer) -> float:
        """The share of the exchange that runs beside the attention of another head group."""
        tp_size = self.parallelism.tp_size
        groups = [part.head_groups(tp_size, self.execution.num_head_groups) for part in layer.parts]
        num = min((num for num in groups if num is not None), default=1)
        return (num - 1) / num

    def _layers_us(self, runs: Runs) -> tuple[float, float, float, float]:
        """Sums over layers: linear µs a token in forward and in backward, µs a token² of attention,
        and the µs a token² that windows save of it.
        """
        times = [(num, self.layer(layer)) for num, layer in runs]
        linear_us = sum((num * layer.linear_us for num, layer in times), 0.0)
        backward_us = sum((num * layer.backward_linear_us for num, layer in times), 0.0)
        attention_us = sum((num * layer.attention_us for num, layer in times), 0.0)
        unseen_us = sum((num * layer.unseen_us for num, layer in times), 0.0)
        return linear_us, backward_us, attention_us, unseen_us

    def _longer_us(self, layer: Layer) -> float:
        """By how much the exchange of gradients takes longer in fp32 than in their own dtype."""
        precisions = self._precisions(layer)
        own_bytes = precisions.attention.element_bytes
        return (max(FP32, own_bytes) / own_bytes - 1) * self.layer(layer).cp_us

    def _matrix_us(self, num_weights: int, precision: Precision) -> float:
        tflops = self.hardware.reached_tflops(precision.share, precision.peak)
        return 2 * num_weights / (self._devices * tflops * 1e6)

    def _elementwise_us(self, num_bytes: float) -> float:
        return self.hardware.memory_us(num_bytes / self.parallelism.cp_size)

    def _tp_us(self, num_collectives: int, element_bytes: int) -> float:
        p = self.parallelism
        hidden_bytes = self.shape.hidden_size * element_bytes / p.cp_size
        received = num_collectives * hidden_bytes * (p.tp_size - 1) / p.tp_size
        return self.hardware.transfer_us(received, p.tp_size, p.tp_size)

    def _tp_forward_us(
        self, num_collectives: int, num_weights: int, precisions: Precisions
    ) -> float:
        """The part of a layer's forward collectives that its matrix products do not hide."""
        tp_us = self._tp_us(num_collectives, precisions.collective.element_bytes)
        if not self.execution.tp_overlapped:
            return tp_us
        products_us = self._matrix_us(num_weights, precisions.matrix)
        return tp_us - self.hardware.tp_overlap * min(tp_us, products_us)

    def _tp_backward_us(
        self, num_outputs: int, num_inputs: int, num_weights: int, precisions: Precisions
    ) -> float:
        """Collectives of gradients of outputs, and of inputs beside the products of weights.

        Without sequence parallelism whole outputs' gradients are there already, and inputs; an
        all-reduce is two collectives.
        """
        element_bytes = precisions.collective.element_bytes
        gathered = num_outputs if self.parallelism.sequence_parallel else 0
        beside_us = self._tp_us(2 * num_inputs, element_bytes)
        products_us = BACKWARD_LINEAR * self._matrix_us(num_weights, precisions.matrix)
        alone_us = self._tp_us(gathered, element_bytes)
        if self.execution.tp_overlapped:
            alone_us, beside_us = 0.0, alone_us + beside_us
        return alone_us + beside_us - self.hardware.tp_overlap * min(beside_us, products_us)
