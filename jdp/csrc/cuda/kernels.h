// Launches the kernels.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "arguments.h"

namespace jdp {

// Makes the driver load every kernel on the current device. A load at the first launch could wait
// for a running kernel that waits for this launch.
cudaError_t load_kernels();

// Computes how many blocks of any kernel the current device runs at once.
cudaError_t count_resident_blocks(int* num_blocks);

// Reduces one rank's leaves with `arguments.num_channels` blocks.
cudaError_t launch(Type type, const Arguments& arguments, cudaStream_t stream);

// Copies up to kMaxSegments segments from `in` to `out`; their sizes are in bytes.
cudaError_t launch_copy(const Arguments& arguments, cudaStream_t stream);

// What rank `source` writes to `target` in the test of a path.
JDP_HOST_DEVICE constexpr uint32_t probe_pattern(int source, int target) {
  return 0x6a647000u + static_cast<uint32_t>(source * kMaxRanks + target);
}

// Writes this rank's pattern to every peer and reads it back; `*num_wrong` (on the device) counts
// the peers that return another one.
cudaError_t launch_probe_write(const Arguments& arguments, uint32_t* num_wrong,
                               cudaStream_t stream);

// Counts the peers whose pattern did not arrive here.
cudaError_t launch_probe_read(const Arguments& arguments, uint32_t* num_wrong, cudaStream_t stream);

}  // namespace jdp
