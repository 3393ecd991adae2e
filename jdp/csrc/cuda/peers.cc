// The links between GPUs, the mappings of peer memory, and probes of both.

#include <cstring>
#include <random>
#include <string>

#include "communicator.h"
#include "cuda_check.h"
#include "kernels.h"

namespace jdp {
namespace {

constexpr uint64_t kBlobVersion = 0x6a647063'00000002;

uint64_t this_process() {
  static const uint64_t number = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return number;
}

}  // namespace

Status find_topology(Topology* topology) {
  int num_devices;
  JDP_CUDA(cudaGetDeviceCount(&num_devices));
  *topology = Topology::kNvlink;
  for (int one = 0; one < num_devices; ++one) {
    for (int other = 0; other < num_devices; ++other) {
      // The runtime does not report a link's kind, but only NVLink supports atomics between GPUs.
      int atomics = 1;
      if (one != other) {
        JDP_CUDA(
            cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, one, other));
      }
      if (!atomics) *topology = Topology::kPcie;
    }
  }
  return {};
}

Status Communicator::blob(Blob* blob) {
  JDP_ON_DEVICE(setup_.device);
  char* own = staging_[setup_.rank].base;
  is_known_to_peers_ = setup_.num_ranks > 1;
  *blob = {};
  blob->version = kBlobVersion;
  blob->process = this_process();
  blob->pointer = reinterpret_cast<uint64_t>(own);
  blob->device = setup_.device;
  blob->rank = setup_.rank;
  blob->plan = plan_;
  // Without IPC, ranks of one process can still connect.
  if (cudaIpcGetMemHandle(&blob->handle, own) != cudaSuccess) {
    cudaGetLastError();
    blob->handle = {};
  }
  return {};
}

Status Communicator::connect(const Blob* blobs) {
  JDP_ON_DEVICE(setup_.device);
  for (int rank = 0; rank < setup_.num_ranks; ++rank) {
    const Blob& blob = blobs[rank];
    if (blob.version != kBlobVersion || blob.rank != rank) {
      return {Code::kInvalidArgument, "jdp: entry " + std::to_string(rank) +
                                          " was not written by that rank with this version of jdp"};
    }
    if (memcmp(&blob.plan, &plan_, sizeof plan_) != 0) {
      return {Code::kInvalidArgument,
              "jdp: rank " + std::to_string(rank) + " has the plan (" + describe(blob.plan) +
                  "), rank " + std::to_string(setup_.rank) + " (" + describe(plan_) +
                  "). Ranks with different plans would wait for each other"};
    }
    if (rank != setup_.rank) JDP_RETURN_IF_ERROR(map_peer(blob));
  }
  return {};
}

Status Communicator::map_peer(const Blob& blob) {
  if (blob.process != this_process()) {
    void* memory;
    // The handle refers to the whole allocation.
    JDP_CUDA(cudaIpcOpenMemHandle(&memory, blob.handle, cudaIpcMemLazyEnablePeerAccess));
    imported_.push_back(memory);
    staging_[blob.rank].base = static_cast<char*>(memory);
    return {};
  }
  if (blob.device != setup_.device) {
    int can_access;
    JDP_CUDA(cudaDeviceCanAccessPeer(&can_access, setup_.device, blob.device));
    if (!can_access) {
      return {Code::kUnavailable, "jdp: GPU " + std::to_string(setup_.device) +
                                      " cannot reach the memory of GPU " +
                                      std::to_string(blob.device)};
    }
    const cudaError_t error = cudaDeviceEnablePeerAccess(blob.device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
    } else {
      JDP_CUDA(error);
    }
  }
  staging_[blob.rank].base = reinterpret_cast<char*>(blob.pointer);
  return {};
}

Status Communicator::probe(cudaError_t (*launch)(const Arguments&, uint32_t*, cudaStream_t),
                           const char* what) {
  JDP_ON_DEVICE(setup_.device);
  JDP_CUDA(cudaMemsetAsync(num_wrong_, 0, sizeof *num_wrong_, stream_));
  JDP_CUDA(launch(arguments(), num_wrong_, stream_));
  uint32_t num_wrong;
  JDP_CUDA(cudaMemcpyAsync(&num_wrong, num_wrong_, sizeof num_wrong, cudaMemcpyDefault, stream_));
  JDP_CUDA(cudaStreamSynchronize(stream_));
  if (num_wrong) {
    return {Code::kUnavailable, "jdp: rank " + std::to_string(setup_.rank) + " of " +
                                    std::to_string(setup_.num_ranks) + ": " + what + " " +
                                    std::to_string(num_wrong) +
                                    " ranks was read back wrong, although the driver reports that "
                                    "their memory is accessible. Check the IOMMU and ACS settings"};
  }
  return {};
}

Status Communicator::probe_write() { return probe(launch_probe_write, "what was written to"); }

Status Communicator::probe_read() { return probe(launch_probe_read, "what was written by"); }

}  // namespace jdp
