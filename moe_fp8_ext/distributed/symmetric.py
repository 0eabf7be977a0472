"""Exchange of rows through torch's symmetric memory. Only the device knows their number, so the host never waits.

The all-to-all is torch's, over NVSHMEM: `torch.ops.symm_mem.all_to_all_vdev_2d`, and `all_to_all_vdev_2d_offset` back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fp8_ext import _torch
from moe_fp8_ext.ops.checks import fail


class SymmetricRows:
    """Moves at most `slots` rows of each rank, sorted by expert, to the ranks of these experts, and back.

    The first call for a dtype and width allocates buffers with room for every routing. All ranks must make it together.
    """

    def __init__(self, group: dist.ProcessGroup, slots: int, num_experts: int, device: torch.device | str) -> None:
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            fail("SymmetricRows", f"device must be a GPU that torch sees, got {device}; symmetric memory is on GPUs")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.memory = None if _torch.symmetric_memory is None else _torch.symmetric_memory(device)
        backend = None if self.memory is None else self.memory.backend
        if backend != "NVSHMEM":
            how = 'torch.distributed._symmetric_memory.set_backend("NVSHMEM") before anything is allocated'
            fail("SymmetricRows", f"symmetric memory of torch must have the backend NVSHMEM, got {backend}; call {how}")
        self.group, self.ranks, self.slots, self.num_experts = group, group.size(), slots, num_experts
        self.device = device
        self._sets: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}

    def to_experts(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Sends rows to the experts of all ranks. counts [num_experts] int64: the number of rows for each expert.

        Returns:
            received rows [N, ...], sorted by expert and rank; and places [2, num_experts] int64, the counts and first
            rows for each expert of this rank and each rank. Contents of other rows are undefined.
        """
        token_rows, expert_rows, sent, places, _ = self._turn(rows)
        token_rows[: rows.shape[0]].copy_(rows)
        self.memory.dispatch(token_rows, expert_rows, sent.copy_(counts), places, self.group.group_name)
        return expert_rows.clone(), places.clone()

    def to_tokens(self, rows: Tensor, places: Tensor) -> Tensor:
        """Sends rows [N, ...] back to their ranks. Returns this rank's rows in the order of the first sending."""
        token_rows, expert_rows, _, received, back = self._turn(rows)
        self.memory.combine(expert_rows.copy_(rows), token_rows, received.copy_(places), back, self.group.group_name)
        return token_rows.clone()

    def experts_of(self, places: Tensor, rows: int) -> Tensor:
        """Returns the expert of each received row, [rows] int32; -1 for rows between or behind the rows of experts."""
        counts, first = places.view(2, -1, self.ranks)
        row = torch.arange(rows, device=places.device)
        expert = torch.bucketize(row, first[:, 0].contiguous(), right=True) - 1
        end = first[:, -1] + counts[:, -1]
        return torch.where(row < end[expert], expert, -1).int()

    def _turn(self, rows: Tensor) -> list[Tensor]:
        """Returns symmetric memory for rows like these: rows of tokens, rows of experts, counts, and places twice.

        There are two sets, used alternately. No rank leaves an op before all ranks have entered it. So when this rank
        has left an op, no rank reads or writes the set of the previous op.
        """
        key = rows.dtype, rows.shape[1]
        if key not in self._sets:
            room = self.ranks * self.slots + self.num_experts // self.ranks  # an expert without rows may take one
            row_kinds = [((count, rows.shape[1]), rows.dtype) for count in (self.slots, room)]
            count_kinds = [(size, torch.int64) for size in ((self.num_experts,), *[(2, self.num_experts)] * 2)]
            kinds = [*row_kinds, *count_kinds] * 2
            with torch.inference_mode(False):  # calls outside of inference mode write to this memory too
                made = [self.memory.make(size, dtype, self.device, self.group) for size, dtype in kinds]
            self._sets[key] = [made[:5], made[5:]]
        sets = self._sets[key]
        sets.reverse()
        return sets[0]
