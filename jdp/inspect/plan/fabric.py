"""Times of collectives over hosts of GPUs: hops of a ring or tree, and bytes over a link."""

from typing import NamedTuple

LINK, NETWORK = "link", "network"
ALGORITHMS = ("ring", "tree", "best")
# NCCL's tuning model, src/graph/tuning.cc: a tree reaches 92 % of the bandwidth of a ring.
_OF_RING = 0.92


class Group(NamedTuple):
    """Ranks that reduce or gather together.

    Attributes:
      hosts: number of hosts, >= 1.
      per_host: ranks of each of them, >= 1.
      sharing: groups like this one that send over the network of a host at the same time.
    """

    hosts: int
    per_host: int
    sharing: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.per_host

    @property
    def lane(self) -> str:
        """The resource that its collectives occupy."""
        return NETWORK if self.hosts > 1 else LINK


class Fabric(NamedTuple):
    """Links within hosts and between them.

    Attributes:
      link_bytes_per_s: bytes that a GPU sends to others of its host in a second.
      link_hop_s: seconds of a hop within a host.
      network_bytes_per_s: bytes that a host sends to others in a second.
      network_hop_s: seconds of a hop between hosts.
      start_s: seconds to start a collective.
      algorithm: of an all-reduce: "ring", "tree", or "best", the faster of the two. A gather or
        scatter is a ring.
    """

    link_bytes_per_s: float
    link_hop_s: float
    network_bytes_per_s: float
    network_hop_s: float
    start_s: float = 0.0
    algorithm: str = "best"

    def all_reduce_s(self, num_bytes: float, group: Group) -> float:
        """Return the seconds of an all-reduce of `num_bytes` of each rank.

        >>> fabric = Fabric(1e9, 1e-6, 1e9, 1e-5)
        >>> round(fabric.all_reduce_s(4e6, Group(hosts=1, per_host=4)), 9)
        0.006006
        """
        if group.size == 1:
            return 0.0
        sent = 2 * (group.size - 1) / group.size * num_bytes / self._bytes_per_s(group)
        ring = 2 * self._ring_s(group) + sent
        levels = (group.hosts - 1).bit_length()
        hops = levels * self.network_hop_s + (group.per_host - 1) * self.link_hop_s
        tree = 2 * hops + sent / _OF_RING
        times = {"ring": ring, "tree": tree, "best": min(ring, tree)}
        return self.start_s + times[self.algorithm]

    def gather_s(self, num_bytes: float, group: Group) -> float:
        """Return the seconds of an all-gather of `num_bytes` in all, or of a reduce-scatter.

        >>> round(Fabric(1e9, 1e-6, 1e9, 1e-5).gather_s(4e6, Group(hosts=1, per_host=4)), 9)
        0.003003
        """
        if group.size == 1:
            return 0.0
        sent = (group.size - 1) / group.size * num_bytes / self._bytes_per_s(group)
        return self.start_s + self._ring_s(group) + sent

    def _ring_s(self, group: Group) -> float:
        """Return the seconds of all hops of a ring: hosts - 1 of them are between hosts."""
        between = group.hosts - 1
        return between * self.network_hop_s + (group.size - 1 - between) * self.link_hop_s

    def _bytes_per_s(self, group: Group) -> float:
        network = self.network_bytes_per_s / group.sharing
        if group.hosts == 1:
            return self.link_bytes_per_s
        # All ranks of a host that are in the group use its network together.
        return network if group.per_host == 1 else min(self.link_bytes_per_s, network)
