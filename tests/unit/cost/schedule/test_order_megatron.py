"""Megatron's own schedule functions, one thread a rank, against ``order``: no GPU, no processes."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace

import pytest

from megatron_wlb.cost.schedule.order import Action, receive_order, schedule
from megatron_wlb.errors import ConfigError

OFF = (
    "cuda_graph_impl", "deallocate_pipeline_outputs", "finalize_model_grads_func",
    "fine_grained_activation_offloading", "grad_sync_func", "no_sync_func",
    "num_microbatches_with_partial_activation_checkpoints", "overlap_moe_expert_parallel_comm",
    "param_sync_func", "sequence_parallel", "timers", "variable_seq_lengths",
)  # fmt: skip
"""What Megatron's configuration must have, and these tests do not use."""


class Channel:
    """A first-in first-out line of messages; a receive is posted first and read later."""

    def __init__(self):
        self.messages, self.num_posted, self.changed = [], 0, threading.Condition()

    def send(self, message):
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def post(self):
        self.num_posted += 1
        return self, self.num_posted - 1

    def read(self, at):
        with self.changed:
            arrived = self.changed.wait_for(lambda: len(self.messages) > at, timeout=10)
        assert arrived, "a receive that nobody sends for"
        return self.messages[at]


def read(message):
    """The tensor behind a posted receive. Megatron passes lists where stages are not chunked."""
    if isinstance(message, list):
        (message,) = message
    return message[0].read(message[1]) if message and isinstance(message[0], Channel) else message


@pytest.fixture(scope="module")
def megatron():
    """Megatron's schedules with forward and backward steps that check and record, and no CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from megatron.core.pipeline_parallel import p2p_communication, schedules, utils
        from megatron.core.process_groups_config import ProcessGroupCollection

    class Communicator(p2p_communication.P2PCommunicator):
        def __init__(self, rank, size, config, forward, backward):
            self.pp_group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
            self.config = config
            self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
            self.from_previous, self.to_next = forward[rank], forward[(rank + 1) % size]
            self.from_next, self.to_previous = backward[rank], backward[(rank - 1) % size]

        def _communicate(
            self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape,
            wait_on_reqs=True,
        ):  # fmt: skip
            if tensor_send_next is not None:
                self.to_next.send(tensor_send_next)
            if tensor_send_prev is not None:
                self.to_previous.send(tensor_send_prev)
            received = {}
            if recv_prev:
                received["recv_prev"] = self.from_previous.post()
            if recv_next:
                received["recv_next"] = self.from_next.post()
            if wait_on_reqs:
                for message in received.values():
                    read(message)
            handles = {name: SimpleNamespace(wait=lambda: None) for name in received}
            return received.get("recv_prev"), received.get("recv_next"), handles

    class CpuTorch:
        """The torch that ``schedules`` sees."""

        def __getattr__(self, name):
            return getattr(torch, name)

        def zeros(self, *size, device, **kwargs):
            return torch.zeros(*size, **kwargs)

    class Chunk(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.model_type = config, None

    def run(pp_size, vpp_size, num_micro_batches, group_size, overlap=False, forward_only=False):
        """``(order, receives)``: actions per rank; per rank forward and backward messages."""
        last_stage = pp_size * vpp_size - 1
        order = [[] for _ in range(pp_size)]
        forward = [Channel() for _ in range(pp_size)]
        backward = [Channel() for _ in range(pp_size)]
        thread = threading.local()

        def forward_step(_, data_iterator, model, num_microbatches, input_tensor, *args, **kwargs):
            chunk, micro_batch = kwargs.get("vp_stage") or 0, kwargs["current_microbatch"]
            stage = chunk * pp_size + thread.rank
            wanted = ("F", stage - 1, micro_batch) if stage else None
            assert read(input_tensor) == wanted
            order[thread.rank].append(Action("F", chunk, micro_batch))
            output = ("F", stage, micro_batch)
            return ([output] if vpp_size == 1 else output), 0

        def backward_step(input_tensor, output_tensor, output_tensor_grad, *args):
            _, stage, micro_batch = read(output_tensor)
            wanted = ("B", stage + 1, micro_batch) if stage < last_stage else None
            assert read(output_tensor_grad) == wanted
            chunk, rank = divmod(stage, pp_size)
            assert rank == thread.rank
            order[rank].append(Action("B", chunk, micro_batch))
            gradient = ("B", stage, micro_batch)
            return [gradient] if vpp_size == 1 else gradient

        def run_rank(rank):
            thread.rank = rank
            config = SimpleNamespace(
                **dict.fromkeys(OFF),
                virtual_pipeline_model_parallel_size=vpp_size if vpp_size > 1 else None,
                microbatch_group_size_per_vp_stage=group_size or pp_size,
                overlap_p2p_comm=overlap,
                overlap_p2p_comm_warmup_flush=overlap == "warm-up and flush",
                batch_p2p_comm=not overlap,
                hidden_size=1,
            )
            communicator = Communicator(rank, pp_size, config, forward, backward)
            one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
            groups = ProcessGroupCollection(
                tp=one, cp=one, dp_cp=one, embd=None, pos_embd=None, pp=communicator.pp_group
            )
            function = schedules.get_forward_backward_func(
                pp_size, config.virtual_pipeline_model_parallel_size
            )
            function(
                forward_step_func=None,
                data_iterator=[None] * vpp_size,
                model=[Chunk(config) for _ in range(vpp_size)],
                num_microbatches=num_micro_batches,
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=communicator,
                pg_collection=groups,
            )

        errors = []

        def guarded(rank):
            try:
                run_rank(rank)
            except BaseException as error:
                errors.append(error)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedules, "torch", CpuTorch())
            patch.setattr(utils, "get_pg_rank", lambda group: group.rank())
            patch.setattr(utils, "get_pg_size", lambda group: group.size())
            patch.setattr(schedules, "forward_step", forward_step)
            patch.setattr(schedules, "backward_step", backward_step)
            threads = [threading.Thread(target=guarded, args=(r,)) for r in range(pp_size)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        if errors:
            raise errors[0]

        def units(channel, step):
            assert channel.num_posted == len(channel.messages)
            return [((stage + step) // pp_size, m) for _, stage, m in channel.messages]

        return order, [
            (units(forward[rank], 1), units(backward[rank], -1)) for rank in range(pp_size)
        ]

    return run


def agrees(megatron, sizes, overlap=False):
    order, received = megatron(*sizes, overlap)
    expected = [receive_order(*sizes, rank) for rank in range(sizes[0])]
    return order == schedule(*sizes) and received == expected


@pytest.mark.parametrize("pp_size", [2, 3, 4, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5, 8, 13])
def test_one_f_one_b_is_what_megatron_runs_and_receives(megatron, pp_size, num_micro_batches):
    assert agrees(megatron, (pp_size, 1, num_micro_batches, None))


@pytest.mark.parametrize("overlap", [False, True, "warm-up and flush"])
@pytest.mark.parametrize("vpp_size", [2, 3, 4])
@pytest.mark.parametrize("pp_size", [2, 3, 4, 5])
def test_interleaved_is_what_megatron_runs_receives_and_refuses(
    megatron, pp_size, vpp_size, overlap
):
    refused = set()
    for num_micro_batches in range(2, 13):
        for group_size in range(pp_size - 1, num_micro_batches + 2):
            sizes = (pp_size, vpp_size, num_micro_batches, group_size)
            try:
                schedule(*sizes)
            except ConfigError:
                refused.add(sizes)
                with pytest.raises((ValueError, RuntimeError), match=r"micro-batch"):
                    megatron(*sizes, overlap)
            else:
                assert agrees(megatron, sizes, overlap), sizes
    assert refused


@pytest.mark.parametrize("overlap", [False, True, "warm-up and flush"])
@pytest.mark.parametrize("sizes", [(3, 2, 7, 4), (4, 3, 9, 5), (2, 2, 4, 2), (4, 1, 6, None)])
def test_forward_only_steps_receive_the_same_activations(megatron, sizes, overlap):
    order, received = megatron(*sizes, overlap if sizes[1] > 1 else False, forward_only=True)
    assert order == [[a for a in actions if a.kind == "F"] for actions in schedule(*sizes)]
    assert received == [(receive_order(*sizes, rank).forward, []) for rank in range(sizes[0])]
