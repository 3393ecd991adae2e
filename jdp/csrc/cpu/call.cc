#include "call.h"

#include <cstdio>

namespace jdp {
namespace {

std::string prefix(const Call& call, uint64_t nth) {
  return "jdp: bucket " + std::to_string(call.bucket) + ", call " + std::to_string(nth) + ": ";
}

std::string rank_of(const Call& call) {
  return "rank " + std::to_string(call.rank) + " of " + std::to_string(call.num_ranks);
}

}  // namespace

Status timed_out(const Call& call, uint64_t nth, double waited_s, const std::vector<int>& missing) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.1f s", waited_s);
  return {Code::kDeadlineExceeded,
          prefix(call, nth) + rank_of(call) + " waited " + seconds + " for " + name_ranks(missing) +
              ": ended, hanging, or running a different program. All ranks must make the same "
              "calls in the same order. Look for the first error of these ranks."};
}

Status peer_gone(const Call& call, uint64_t nth, const std::vector<int>& gone) {
  return {Code::kDeadlineExceeded, prefix(call, nth) + rank_of(call) + " waited for " +
                                       name_ranks(gone) +
                                       ", whose process has ended. Look for its first error."};
}

Status was_aborted(const Call& call, uint64_t nth, const std::string& reason) {
  return {Code::kAborted, prefix(call, nth) + rank_of(call) + " stopped waiting: " + reason};
}

Status invalid(const Call& call, uint64_t nth, const std::string& what) {
  return {Code::kInvalidArgument, prefix(call, nth) + what};
}

}  // namespace jdp
