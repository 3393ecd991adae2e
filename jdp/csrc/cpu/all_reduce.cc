#include "call.h"
#include "communicator.h"
#include "float_mode.h"
#include "meeting.h"
#include "progress.h"

namespace jdp {

Status all_reduce(const Call& call, const Bucket& bucket) {
  if (call.rank < 0 || call.rank >= call.num_ranks) {
    return {Code::kInvalidArgument, "jdp: bucket " + std::to_string(call.bucket) + ": rank " +
                                        std::to_string(call.rank) + " is none of " +
                                        std::to_string(call.num_ranks)};
  }
  const Underway underway(call.bucket);
  const DefaultFloatMode float_mode;
  return call.communicator == 0 ? all_reduce_in_process(call, bucket)
                                : all_reduce_in_segment(call, bucket);
}

}  // namespace jdp
