// One rank's call of the all-reduce: its rank, its bucket and its group.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/status.h"
#include "bucket.h"
#include "wait.h"

namespace jdp {

enum class Algorithm : int32_t { kDirect = 0, kRing = 1 };

struct Call {
  int64_t run;           // identifies one execution of a program in this process
  int64_t communicator;  // 0: all ranks are threads of this process
  int32_t group;         // number of the group of ranks that reduce together
  int32_t bucket;        // number of the call site
  int32_t rank;          // within the group
  int32_t num_ranks;     // of the group
  Algorithm algorithm;
  double scale;  // floats only; a float32 scale is represented exactly
};

// Sums `bucket` over the ranks that make the same call, then scales and rounds once. Returns when
// no other rank accesses this rank's memory any more.
Status all_reduce(const Call& call, const Bucket& bucket);

// Errors that both implementations share. `nth` counts the calls of this bucket from 1.
Status timed_out(const Call& call, uint64_t nth, double waited_s, const std::vector<int>& missing);
Status peer_gone(const Call& call, uint64_t nth, const std::vector<int>& gone);
Status was_aborted(const Call& call, uint64_t nth, const std::string& reason);
Status invalid(const Call& call, uint64_t nth, const std::string& what);

}  // namespace jdp
