// The ring all-reduce, written once for the host and for the device.
//
// A Link knows how elements reach the next rank and where this rank's own lie: cpu/cpu_link.h goes
// through memory that threads or processes share, cuda/cuda_link.cuh through peer memory, where one
// thread block is one Link. This file knows neither.
//
// 2 (n - 1) messages of an n-th of the vector for each rank, which is the least possible:
// Patarasuk & Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.

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
  int64_t size;   // elements; 0 for the last chunks of a vector shorter than the ring
};

// The chunk that `rank` (any integer, taken modulo `num_ranks`) begins with, of `count` elements
// from `begin`. `align` divides the begin of every chunk, so that vector loads stay possible.
JDP_HOST_DEVICE inline Span chunk_span(int rank, int num_ranks, int64_t begin, int64_t count,
                                       int64_t align) {
  const int64_t chunk = (rank % num_ranks + num_ranks) % num_ranks;
  const int64_t nth = (count + num_ranks - 1) / num_ranks;
  const int64_t width = (nth + align - 1) / align * align;
  const int64_t first = chunk * width < count ? chunk * width : count;
  const int64_t last = first + width < count ? first + width : count;
  return {begin + first, last - first};
}

// Replaces elements [0, count) of this rank by their sum over ranks, scaled. Every rank gets the
// same bits: a chunk is summed along one path, in the type of the sum, rounded once where the sum
// is complete, and from there on only copied.
//
// The Link's members take a Span; what one rank sends in its i-th call is what the next one
// receives in its i-th receiving call:
//   send         its own elements, as sums
//   add_send     received sums plus its own, passed on as sums
//   finish_send  received sums plus its own, scaled and rounded: kept, and passed on as elements
//   keep_send    received elements: kept, and passed on
//   keep         received elements: kept
//   finish       its own, scaled and rounded: kept (there is no other rank)
// and `capacity()` is the largest Span in elements, a multiple of `align()`. A rank sends before it
// receives, so a Link must hold one message without a receiver.
template <typename Link>
JDP_HOST_DEVICE void ring_all_reduce(Link& link, int64_t count, int rank, int num_ranks) {
  const int64_t round = link.capacity() * num_ranks;
  for (int64_t begin = 0; begin < count; begin += round) {
    const int64_t size = count - begin < round ? count - begin : round;
    const auto chunk = [&](int index) {
      return chunk_span(index, num_ranks, begin, size, link.align());
    };
    if (num_ranks == 1) {
      link.finish(chunk(0));
      continue;
    }
    // Reduce-scatter: the sum of chunk c starts at rank c and is complete at rank c - 1.
    link.send(chunk(rank));
    for (int step = 1; step < num_ranks - 1; ++step) link.add_send(chunk(rank - step));
    link.finish_send(chunk(rank + 1));
    // All-gather: pass the complete chunks on.
    for (int step = 1; step < num_ranks - 1; ++step) link.keep_send(chunk(rank + 1 - step));
    link.keep(chunk(rank + 2));
  }
}

}  // namespace jdp
