// The ring all-reduce, written once for the host and for the device.
//
// A Link moves elements to the next rank and reads and writes this rank's own. cpu/cpu_link.h uses
// shared memory; cuda/cuda_link.cuh uses peer memory, with one Link for each thread block.
//
// Each rank sends 2 (n - 1) messages of 1/n of the vector, which is optimal: Patarasuk & Yuan 2009,
// https://doi.org/10.1016/j.jpdc.2008.09.002.

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JDP_HOST_DEVICE __host__ __device__
#else
#define JDP_HOST_DEVICE
#endif

namespace jdp {

struct Span {
  int64_t begin;  // elements
  int64_t size;   // 0 for the last chunks of a vector shorter than the ring
};

// Returns the chunk with which `rank` (modulo `num_ranks`) starts, out of `count` elements from
// `begin`. Every chunk begins at a multiple of `align`, for vector loads.
JDP_HOST_DEVICE inline Span chunk_span(int rank, int num_ranks, int64_t begin, int64_t count,
                                       int64_t align) {
  const int64_t chunk = (rank % num_ranks + num_ranks) % num_ranks;
  const int64_t nth = (count + num_ranks - 1) / num_ranks;
  const int64_t width = (nth + align - 1) / align * align;
  const int64_t first = chunk * width < count ? chunk * width : count;
  const int64_t last = first + width < count ? first + width : count;
  return {begin + first, last - first};
}

// Replaces elements [0, count) of this rank by their scaled sum over ranks. All ranks get the same
// bits: each chunk is summed along one path, in the accumulation type, and rounded once when its
// sum is complete. Afterwards it is only copied.
//
// The Link's members take a Span and are named as in NCCL. The message of a rank's i-th sending
// call is received by the next rank's i-th receiving call:
//   send                   sends this rank's elements, widened to sums
//   recv_reduce_send       adds its own elements to the received sums, and sends the sums
//   recv_reduce_copy_send  the same, but scales and rounds; copies to the output, and sends
//   recv_copy_send         copies the received elements to the output, and sends them
//   recv_copy              copies the received elements to the output
//   copy_scaled            copies its own elements, scaled and rounded (a single rank)
// `capacity()` is the largest Span in elements, a multiple of `align()`. A rank sends before it
// receives, so a Link must buffer at least one message.
template <typename Link>
JDP_HOST_DEVICE void ring_all_reduce(Link& link, int64_t count, int rank, int num_ranks) {
  const int64_t round = link.capacity() * num_ranks;
  for (int64_t begin = 0; begin < count; begin += round) {
    const int64_t size = count - begin < round ? count - begin : round;
    const auto chunk = [&](int index) {
      return chunk_span(index, num_ranks, begin, size, link.align());
    };
    if (num_ranks == 1) {
      link.copy_scaled(chunk(0));
      continue;
    }
    // Reduce-scatter: the sum of chunk c starts at rank c and is complete at rank c - 1.
    link.send(chunk(rank));
    for (int step = 1; step < num_ranks - 1; ++step) link.recv_reduce_send(chunk(rank - step));
    link.recv_reduce_copy_send(chunk(rank + 1));
    // All-gather: forward the complete chunks.
    for (int step = 1; step < num_ranks - 1; ++step) link.recv_copy_send(chunk(rank + 1 - step));
    link.recv_copy(chunk(rank + 2));
  }
}

}  // namespace jdp
