// The C interface that Python calls through ctypes. Functions that return an int return 0, or -1
// and set jdp_cuda_last_error.

#pragma once

#include <cstdint>

#define JDP_EXPORT __attribute__((visibility("default")))

extern "C" {

// -1 on a machine without a driver.
JDP_EXPORT int jdp_cuda_num_devices();

// 0: PCIe; 1: NVLink between all GPUs that this process sees.
JDP_EXPORT int jdp_cuda_topology();

// Opens one rank's end of a communicator. Then call, with a barrier over all ranks after each:
// export and import, probe_write, probe_read. See communicator.h.
//
// Args:
//   communicator: key that calls have as an attribute; 0 if all ranks are devices of this process.
//   ordinal: XLA's number of the device, by which a call finds its communicator.
//   device: CUDA's number.
//   topology: 0: PCIe, 1: NVLink, 2: all ranks on one device; the same on all ranks.
//   arena_bytes: size of all gradients of a step.
JDP_EXPORT int jdp_cuda_open(int64_t communicator, int32_t ordinal, int32_t device, int32_t rank,
                             int32_t num_ranks, int32_t topology, int64_t arena_bytes);
// Returns 1 if its memory stays allocated until the process ends, because other ranks may still
// write into it; else 0.
JDP_EXPORT int jdp_cuda_close(int64_t communicator, int32_t ordinal);

// The data that the other ranks need: export writes jdp_cuda_blob_bytes() bytes, which may be sent
// to other processes of the host.
JDP_EXPORT int64_t jdp_cuda_blob_bytes();
JDP_EXPORT int jdp_cuda_export(int64_t communicator, int32_t ordinal, void* blob);
// `blobs`: [num_ranks] blobs of all ranks, contiguous, in rank order.
JDP_EXPORT int jdp_cuda_import(int64_t communicator, int32_t ordinal, const void* blobs);
JDP_EXPORT int jdp_cuda_probe_write(int64_t communicator, int32_t ordinal);
JDP_EXPORT int jdp_cuda_probe_read(int64_t communicator, int32_t ordinal);

// Grows the arena to at least `arena_bytes`. Nothing may be in flight.
JDP_EXPORT int jdp_cuda_reserve(int64_t communicator, int32_t ordinal, int64_t arena_bytes);
// Device memory that this rank holds, in bytes; -1: no such communicator.
JDP_EXPORT int64_t jdp_cuda_memory_bytes(int64_t communicator, int32_t ordinal);
// Buckets that were reduced a second time because XLA had moved their leaves; -1: no such
// communicator.
JDP_EXPORT int64_t jdp_cuda_num_repeated(int64_t communicator, int32_t ordinal);
// One line with the algorithm for each size. Valid until this thread's next call.
JDP_EXPORT const char* jdp_cuda_describe(int64_t communicator, int32_t ordinal);

// The time limit of every wait of this process, in seconds; 0: none. The default is 30.
JDP_EXPORT void jdp_cuda_set_timeout_s(double timeout_s);
JDP_EXPORT double jdp_cuda_timeout_s();
// Returns -1 if an earlier call failed.
JDP_EXPORT int jdp_cuda_check(int64_t communicator, int32_t ordinal);
// Ends all waits of all communicators of this process, and of their peers.
JDP_EXPORT void jdp_cuda_abort();
// Clears an abort, failed calls and unfinished calls. Call it on all ranks, between two barriers.
JDP_EXPORT int jdp_cuda_reset(int64_t communicator, int32_t ordinal);

// The error message of this thread's last failed call.
JDP_EXPORT const char* jdp_cuda_last_error();

// The version of the FFI headers. An older runtime must not load the library.
JDP_EXPORT int jdp_ffi_api_version();

}  // extern "C"
