// One rank's call of the all-reduce: who calls, for which bucket, with whom.

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
  int64_t run;           // tells executions of programs in this process apart
  int64_t communicator;  // 0: all ranks are threads of this process
  int32_t group;         // which of the groups of ranks that reduce among themselves
  int32_t bucket;        // which call site
  int32_t rank;          // within the group
  int32_t num_ranks;     // of the group
  Algorithm algorithm;
  double scale;  // floats only; holds a float's value exactly
};

// Sums `bucket` over the ranks that make the same call, scales and rounds once. Returns when no
// rank needs this one's memory any more.
Status all_reduce(const Call& call, const Bucket& bucket);

// The errors of both ways, alike. `nth` counts the calls of this bucket from 1.
Status timed_out(const Call& call, uint64_t nth, double waited_s, const std::vector<int>& missing);
Status peer_gone(const Call& call, uint64_t nth, const std::vector<int>& gone);
Status was_aborted(const Call& call, uint64_t nth, const std::string& reason);
Status invalid(const Call& call, uint64_t nth, const std::string& what);

}  // namespace jdp
