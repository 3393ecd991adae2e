#include <optional>

#include "call.h"
#include "communicator.h"
#include "float_mode.h"
#include "progress.h"
#include "rendezvous_registry.h"

namespace jdp {

Status collective(const Call& call, const Bucket& bucket) {
  if (call.rank < 0 || call.rank >= call.num_ranks) {
    return {Code::kInvalidArgument,
            "jdp: bucket " + std::to_string(call.bucket) + ": rank " + std::to_string(call.rank) +
                " is not one of the ranks 0 to " + std::to_string(call.num_ranks - 1)};
  }
  const ProgressScope progress(call.bucket);
  std::optional<DefaultFloatMode> float_mode;
  if (!call.as_xla) float_mode.emplace();
  return call.communicator == 0 ? collective_in_process(call, bucket)
                                : collective_in_segment(call, bucket);
}

}  // namespace jdp
