// What Python calls, through ctypes. What returns an int returns 0, or -1 and jdp_cuda_last_error.

#pragma once

#include <cstdint>

#define JDP_EXPORT __attribute__((visibility("default")))

extern "C" {

// -1 on a machine without a driver.
JDP_EXPORT int jdp_cuda_num_devices();

// 0: PCIe, 1: NVLink between all GPUs that this process sees; -1: see jdp_cuda_last_error.
JDP_EXPORT int jdp_cuda_topology();

// Makes one rank's end of a communicator; then, with a barrier over all ranks after each:
// export and import, probe_write, probe_read. See communicator.h.
//
// Args:
//   communicator: key, the attribute of calls; 0 if all ranks are devices of this process.
//   ordinal: XLA's number of the device, by which a call finds its rank.
//   device: CUDA's number.
//   topology: 0: PCIe, 1: NVLink, 2: all ranks on one device; the same on all ranks.
//   arena_bytes: of all gradients of a step.
JDP_EXPORT int jdp_cuda_open(int64_t communicator, int32_t ordinal, int32_t device, int32_t rank,
                             int32_t num_ranks, int32_t topology, int64_t arena_bytes);
// 1: its memory stays taken until the process ends, for other ranks may still write into it.
JDP_EXPORT int jdp_cuda_close(int64_t communicator, int32_t ordinal);

// What the other ranks must know; so many bytes, which may be sent to other processes of the host.
JDP_EXPORT int64_t jdp_cuda_blob_bytes();
JDP_EXPORT int jdp_cuda_export(int64_t communicator, int32_t ordinal, void* blob);
// `blobs`: [num_ranks] of all ranks in their order, one behind the other.
JDP_EXPORT int jdp_cuda_import(int64_t communicator, int32_t ordinal, const void* blobs);
JDP_EXPORT int jdp_cuda_probe_write(int64_t communicator, int32_t ordinal);
JDP_EXPORT int jdp_cuda_probe_read(int64_t communicator, int32_t ordinal);

// Makes the arena at least so large; nothing may be in flight.
JDP_EXPORT int jdp_cuda_reserve(int64_t communicator, int32_t ordinal, int64_t arena_bytes);
// Of the device, taken by this rank; -1: there is no such communicator.
JDP_EXPORT int64_t jdp_cuda_memory_bytes(int64_t communicator, int32_t ordinal);
// Buckets reduced a second time, for XLA had moved their leaves; -1: no such communicator.
JDP_EXPORT int64_t jdp_cuda_num_repeated(int64_t communicator, int32_t ordinal);
// Which algorithm for which size, in a line. Valid until this thread's next call.
JDP_EXPORT const char* jdp_cuda_describe(int64_t communicator, int32_t ordinal);

// The deadline of every wait of this process, in seconds; 0: none. 30 to begin with.
JDP_EXPORT void jdp_cuda_set_timeout_s(double timeout_s);
JDP_EXPORT double jdp_cuda_timeout_s();
// Whether an earlier call failed.
JDP_EXPORT int jdp_cuda_check(int64_t communicator, int32_t ordinal);
// Ends every wait of all communicators of this process, and of their peers.
JDP_EXPORT void jdp_cuda_abort();
// Forgets an abort, failed and unfinished calls. On all ranks, between two barriers.
JDP_EXPORT int jdp_cuda_reset(int64_t communicator, int32_t ordinal);

// Of this thread's last call.
JDP_EXPORT const char* jdp_cuda_last_error();

// Of the headers that this library was built with: a runtime that is older must not load it.
JDP_EXPORT int jdp_ffi_api_version();

}  // extern "C"
