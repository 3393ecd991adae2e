"""Simulates one step of one rank, by the rules in docs/plan.md.

Lanes: computation, "link" within the host, "network" between hosts; on CPUs one for all. A rank is
slow for a whole step, so the slowest rank's schedule is that of the step.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MiB = 2**20
STATE_BYTES = 4  # float32: of a parameter, and each number that the optimizer keeps of it


class ModelLeaf(NamedTuple):
    """A leaf of the parameters; `work`: its share of a pass's time."""

    params: float
    work: float


class Workload(NamedTuple):
    """A step of one rank alone; `bucket_bytes` also limits parameter groups."""

    leaves: tuple[ModelLeaf, ...]
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    micro_batches: int = 1
    gather_bytes: float = 4
    reduce_bytes: float = 4
    bucket_bytes: float = 4 * MiB

    @property
    def params(self) -> float:
        """Number of parameters."""
        return sum(leaf.params for leaf in self.leaves)

    def alone_s(self) -> float:
        """Return a step's seconds of one rank alone."""
        return self.forward_s + self.backward_s + self.update_s


def uniform(params: float, layers: int, leaves_per_layer: int) -> tuple[ModelLeaf, ...]:
    """Return the leaves of equal layers.

    >>> uniform(8, layers=2, leaves_per_layer=2)[0]
    ModelLeaf(params=2.0, work=0.25)
    """
    count = layers * leaves_per_layer
    return (ModelLeaf(params / count, 1 / count),) * count


def grouped(
    leaves: Sequence[ModelLeaf], bytes_per_param: float, capacity_bytes: float
) -> list[list[ModelLeaf]]:
    """Group leaves in order into groups of at most `capacity_bytes`; a larger leaf is a group.

    >>> [len(group) for group in grouped(uniform(6, 6, 1), 4, capacity_bytes=8)]
    [2, 2, 2]
    """
    groups: list[list[ModelLeaf]] = []
    used = math.inf
    for leaf in leaves:
        num_bytes = leaf.params * bytes_per_param
        if used + num_bytes > capacity_bytes:
            groups.append([])
            used = 0.0
        groups[-1].append(leaf)
        used += num_bytes
    return groups


def work_of(group: Sequence[ModelLeaf]) -> float:
    """Return a group's share of a pass."""
    return sum(leaf.work for leaf in group)


def params_of(group: Sequence[ModelLeaf]) -> float:
    """Count a group's parameters."""
    return sum(leaf.params for leaf in group)


LINK, NETWORK = "link", "network"
ALGORITHMS = ("ring", "tree", "best")
# NCCL's tuning model, src/graph/tuning.cc: a tree reaches 92 % of a ring's bandwidth.
_OF_RING = 0.92


class Group(NamedTuple):
    """Ranks that reduce or gather together; `sharing` groups use a host's network at once."""

    hosts: int
    per_host: int
    sharing: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.per_host

    @property
    def lane(self) -> str:
        """Its collectives' lane."""
        return NETWORK if self.hosts > 1 else LINK


class Fabric(NamedTuple):
    """Links from a GPU to others of its host, and from a host to others.

    An all-reduce is a "ring", a "tree", or the "best". Gathers and scatters are rings.
    """

    link_bytes_per_s: float
    link_hop_s: float
    network_bytes_per_s: float
    network_hop_s: float
    start_s: float = 0.0
    algorithm: str = "best"

    def all_reduce_s(self, num_bytes: float, group: Group) -> float:
        """Return an all-reduce's seconds for `num_bytes` of each rank."""
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
        """Return an all-gather's or reduce-scatter's seconds for `num_bytes` in all."""
        if group.size == 1:
            return 0.0
        sent = (group.size - 1) / group.size * num_bytes / self._bytes_per_s(group)
        return self.start_s + self._ring_s(group) + sent

    def _ring_s(self, group: Group) -> float:
        """In a ring of all ranks, hosts - 1 hops are between hosts."""
        between = group.hosts - 1
        return between * self.network_hop_s + (group.size - 1 - between) * self.link_hop_s

    def _bytes_per_s(self, group: Group) -> float:
        network = self.network_bytes_per_s / group.sharing
        if group.hosts == 1:
            return self.link_bytes_per_s
        # All ranks of a host in the group use its network together.
        return network if group.per_host == 1 else min(self.link_bytes_per_s, network)


COMPUTE = "compute"
REPLICATED, STAGE_1, STAGE_2, STAGE_3, HSDP = "replicated", "stage1", "stage2", "stage3", "hsdp"
METHODS = (REPLICATED, STAGE_1, STAGE_2, STAGE_3, HSDP)


class Task(NamedTuple):
    """A piece of one lane's work; the tasks `after` must have ended."""

    lane: str
    seconds: float
    after: tuple[int, ...]


class Program:
    """A step's tasks, in program order; `overlaps`: links send during computation."""

    def __init__(self, *, overlaps: bool = True) -> None:
        self.tasks: list[Task] = []
        self._overlaps = overlaps

    def add(self, lane: str, seconds: float, after: Iterable[int] = ()) -> int:
        """Append a task, and return its position."""
        self.tasks.append(Task(lane, seconds, tuple(after)))
        return len(self.tasks) - 1

    def ends(self, slowness: float = 1.0) -> list[float]:
        """Return each task's end, in seconds from the step's start."""
        ends: list[float] = []
        free = dict.fromkeys((COMPUTE, LINK, NETWORK), 0.0)
        for lane, seconds, after in self.tasks:
            used = lane if self._overlaps else COMPUTE
            begin = free[used]
            for i in after:
                begin = max(begin, ends[i])
            ends.append(begin + (seconds * slowness if lane == COMPUTE else seconds))
            free[used] = ends[-1]
        return ends

    def step_s(self, slowness: float = 1.0) -> float:
        """Return the step's seconds, for its slowest rank's factor."""
        return max(self.ends(slowness))

    def exposed_s(self) -> float:
        """Return the step's seconds without computation."""
        computes = sum(task.seconds for task in self.tasks if task.lane == COMPUTE)
        return max(0.0, self.step_s() - computes)  # sums of other orders differ in the last digits


class Deployment(NamedTuple):
    """A step's method and hardware."""

    method: str
    hosts: int
    per_host: int
    fabric: Fabric
    overlaps: bool = True

    @property
    def all_ranks(self) -> Group:
        """All ranks' group."""
        return Group(self.hosts, self.per_host)

    @property
    def sharded_over(self) -> Group:
        """The ranks that split a state."""
        if self.method == REPLICATED:
            return Group(1, 1)
        return Group(1, self.per_host) if self.method == HSDP else self.all_ranks


def program_of(workload: Workload, deployment: Deployment) -> Program:
    """Return a step's tasks."""
    builder = _Builder(workload, deployment)
    if deployment.method in (STAGE_3, HSDP):
        builder.parameters_in_time()
    else:
        builder.whole_parameters()
    return builder.program


class _Read(NamedTuple):
    group: list[ModelLeaf]
    seconds: float
    sends: bool  # a backward pass, after which gradients are sent


class _Builder:
    def __init__(self, workload: Workload, deployment: Deployment):
        self.program = Program(overlaps=deployment.overlaps)
        self._workload, self._deployment = workload, deployment
        count = workload.micro_batches
        self._forward_s, self._backward_s = workload.forward_s / count, workload.backward_s / count
        self._update_s = workload.update_s / deployment.sharded_over.size

    def whole_parameters(self) -> None:
        """Add a step of whole parameters: `replicated`, stages 1 and 2."""
        method, count = self._deployment.method, self._workload.micro_batches
        buckets, sent = self._buckets(self._workload.reduce_bytes), []
        for number in range(count):
            self.program.add(COMPUTE, self._forward_s)
            for bucket in buckets:
                done = self.program.add(COMPUTE, self._backward_s * work_of(bucket))
                if method == STAGE_2 or number == count - 1:
                    sent.append(self._reduce(bucket, done))
        update = self.program.add(COMPUTE, self._update_s, sent)
        if method != REPLICATED:
            for bucket in self._buckets(STATE_BYTES):
                self._gather(bucket, STATE_BYTES, [update])

    def parameters_in_time(self) -> None:
        """Add a step that gathers parameters where they are read: stage 3 and HSDP."""
        groups, count = (
            self._buckets(self._workload.gather_bytes)[::-1],
            self._workload.micro_batches,
        )
        reads = self._reads(groups) * count
        size = self._workload.gather_bytes
        gathered, computed, sent = [self._gather(reads[0].group, size)], [], []
        for i, read in enumerate(reads):
            if i + 1 < len(reads):
                gathered.append(self._gather(reads[i + 1].group, size, computed[-1:]))
            if i and reads[i - 1].sends:
                sent.append(self._reduce(reads[i - 1].group, computed[-1]))
            computed.append(self.program.add(COMPUTE, read.seconds, [gathered[i]]))
        sent.append(self._reduce(reads[-1].group, computed[-1]))
        self.program.add(COMPUTE, self._update_s, sent)

    def _reads(self, groups: list[list[ModelLeaf]]) -> list[_Read]:
        forward = [_Read(it, self._forward_s * work_of(it), sends=False) for it in groups]
        return forward + [
            _Read(it, self._backward_s * work_of(it), sends=True) for it in groups[::-1]
        ]

    def _buckets(self, bytes_per_param: float) -> list[list[ModelLeaf]]:
        """The backward pass begins with the last leaf."""
        capacity = self._workload.bucket_bytes
        return grouped(self._workload.leaves[::-1], bytes_per_param, capacity)

    def _reduce(self, bucket: list[ModelLeaf], done: int) -> int:
        method, fabric = self._deployment.method, self._deployment.fabric
        num_bytes = params_of(bucket) * self._workload.reduce_bytes
        group = self._deployment.all_ranks
        if method == REPLICATED:
            return self.program.add(group.lane, fabric.all_reduce_s(num_bytes, group), [done])
        split = self._deployment.sharded_over
        part = self.program.add(split.lane, fabric.gather_s(num_bytes, split), [done])
        if method != HSDP or group.hosts == 1:
            return part
        across = Group(group.hosts, 1, sharing=split.size)
        seconds = fabric.all_reduce_s(num_bytes / split.size, across)
        return self.program.add(NETWORK, seconds, [part])

    def _gather(self, group: list[ModelLeaf], size: float, after: Iterable[int] = ()) -> int:
        split = self._deployment.sharded_over
        seconds = self._deployment.fabric.gather_s(params_of(group) * size, split)
        return self.program.add(split.lane, seconds, after)
