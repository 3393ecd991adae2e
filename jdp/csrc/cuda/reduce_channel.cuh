// The work of one thread block in one launch.

#pragma once

#include "../common/ring_all_reduce.h"
#include "channel.cuh"
#include "cuda_link.cuh"
#include "one_two_shot.cuh"

namespace jdp {

// Replaces this channel's part of one rank's leaves by its scaled sum over ranks.
template <typename T, Algorithm kAlgorithm, typename Block>
JDP_DEVICE void reduce_channel(const Arguments& arguments, int index, Block block) {
  Channel<T, Block> channel(arguments, index, block);
  if constexpr (kAlgorithm == Algorithm::kRing) {
    CudaLink<T, Block> link(channel);
    ring_all_reduce(link, channel.span.size, arguments.rank, arguments.layout.num_ranks);
  } else if constexpr (kAlgorithm == Algorithm::kOneShot) {
    Exchange<T, Block>(channel).one_shot();
  } else {
    Exchange<T, Block>(channel).two_shot();
  }
  channel.end_call();
}

}  // namespace jdp
