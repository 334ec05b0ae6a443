"""Chains of slices that replicas have in common, where they meet in each pass."""

from __future__ import annotations


class Chains:
    """The chains of replicas that run alike, and how many of their units are taken."""

    def __init__(self, num_merged: int, num_replicas: int) -> None:
        """The first chain runs documents of several replicas, if there are any."""
        self.lengths = [num_merged] if num_merged else []
        self.num_units = num_merged
        """Units of all chains."""
        self._free: list[list[range]] = [[] for _ in range(num_replicas)]
        self._num_used = [0] * num_replicas

    def place(self, num_slices: int) -> tuple[int, int]:
        """A replica and the unit in which a document's first slice runs there.

        It is behind the documents of a chain that has room, of the replica with the fewest slices,
        and of its chains the one with the least room. Else it begins a chain, which is then one of
        all replicas.
        """
        rooms = [
            (self._num_used[replica], len(free), number, replica)
            for replica, own in enumerate(self._free)
            for number, free in enumerate(own)
            if len(free) >= num_slices
        ]
        if rooms:
            *_, number, replica = min(rooms)
        else:
            number, replica = len(self._free[0]), self._num_used.index(min(self._num_used))
            begin = self.num_units
            self.num_units += num_slices
            self.lengths.append(num_slices)
            for own in self._free:
                own.append(range(begin, self.num_units))
        free = self._free[replica][number]
        self._free[replica][number] = free[num_slices:]
        self._num_used[replica] += num_slices
        return replica, free.start
