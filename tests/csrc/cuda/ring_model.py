"""The all-reduce of the CUDA kernels in numpy, bit by bit, with their order of additions."""

import numpy as np

VECTOR_BYTES = 16


def all_reduce(leaves, scale, *, algorithm, num_channels, slot_bytes):
    """Sum over ranks and scale, in the order of the kernels.

    Args:
      leaves: [rank][leaf], arrays of one dtype.
      scale: factor of a floating-point sum before it is rounded.
      algorithm: "ring", "one_shot" or "two_shot".
      num_channels: number of parts of the vector that are reduced in parallel.
      slot_bytes: size of one message of the ring, which holds sums.

    Returns:
      [leaf], the same on every rank.
    """
    dtype = leaves[0][0].dtype
    sum_dtype = np.float32 if dtype.itemsize == 2 and dtype.kind != "u" else dtype
    vectors = [_as_vectors(leaves_of_rank).astype(sum_dtype) for leaves_of_rank in leaves]
    num_vectors, vector_size = vectors[0].shape
    sums = np.empty_like(vectors[0])
    capacity = slot_bytes // (vector_size * np.dtype(sum_dtype).itemsize)
    for channel in range(num_channels):
        part = _chunk(channel, num_channels, 0, num_vectors)
        for chunk, first_rank in _chunks(part, len(leaves), algorithm, capacity):
            ranks = np.roll(np.arange(len(leaves)), -first_rank)
            total = vectors[ranks[0]][chunk]
            for rank in ranks[1:]:
                total = total + vectors[rank][chunk]
            sums[chunk] = total
    if dtype.kind != "u":
        sums = sums * sums.dtype.type(scale)
    return _as_leaves(sums.astype(dtype), leaves[0])


# Yields pairs of a slice of vectors and the rank with which its sum begins.
def _chunks(part, num_ranks, algorithm, capacity):
    if algorithm != "ring":
        yield part, 0
        return
    for begin in range(part.start, part.stop, capacity * num_ranks):
        size = min(part.stop - begin, capacity * num_ranks)
        for rank in range(num_ranks):
            yield _chunk(rank, num_ranks, begin, size), rank


# Returns part `rank` of `num_ranks` parts of `size` vectors from `begin`.
def _chunk(rank, num_ranks, begin, size):
    width = -(-size // num_ranks)
    return slice(begin + min(rank * width, size), begin + min((rank + 1) * width, size))


# [num_vectors, vector_size]: each leaf is padded with zeros to 16 bytes.
def _as_vectors(leaves):
    vector_size = VECTOR_BYTES // leaves[0].dtype.itemsize
    padded = [np.pad(leaf, (0, -leaf.size % vector_size)) for leaf in leaves]
    return np.concatenate(padded).reshape(-1, vector_size)


def _as_leaves(vectors, like):
    flat, leaves = vectors.reshape(-1), []
    for leaf in like:
        leaves.append(flat[: leaf.size])
        flat = flat[leaf.size + -leaf.size % vectors.shape[1] :]
    return leaves
