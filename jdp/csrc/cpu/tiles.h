// A part of a collective between threads of one process, which any of them can compute.

#pragma once

#include <vector>

#include "call.h"

namespace jdp {

// Computes elements [begin, begin + size) of the whole leaves, for all ranks; `call` is of any
// rank.
//
// With n ranks and leaves of S bytes, each rank computes 1/n of the tiles on average. Together the
// ranks read n S bytes and write n S in an all-reduce or an all-to-all, read n S and write S in a
// reduce-scatter, and read S and write n S in an all-gather, (n - 1) S in one in place. These are
// the smallest possible numbers: the only further copies are of blocks that stay in the L1 cache.
void do_tile(const Call& call, const std::vector<const Bucket*>& buckets, int64_t begin,
             int64_t size);

}  // namespace jdp
