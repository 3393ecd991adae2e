#include "c_api.h"

#include <string>

#include "registry.h"

namespace {

thread_local std::string last_text;

int return_code(const jdp::Status& status) {
  if (status.ok()) return 0;
  last_text = status.message;
  return -1;
}

// Calls `visit` with a communicator.
template <typename Visit>
int with(int64_t key, int32_t ordinal, Visit visit) {
  const auto communicator = jdp::find(key, ordinal);
  if (communicator) return return_code(visit(*communicator));
  return return_code({jdp::Code::kFailedPrecondition,
                      "jdp: no communicator " + std::to_string(key) + " is open on device " +
                          std::to_string(ordinal) + "; call jdp_cuda_open first"});
}

}  // namespace

int jdp_cuda_num_devices() {
  int num_devices;
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error == cudaSuccess) return num_devices;
  last_text = cudaGetErrorString(error);
  return -1;
}

int jdp_cuda_topology() {
  jdp::Topology topology;
  const int failed = return_code(jdp::find_topology(&topology));
  return failed ? failed : static_cast<int>(topology);
}

int jdp_cuda_open(int64_t communicator, int32_t ordinal, int32_t device, int32_t rank,
                  int32_t num_ranks, int32_t topology, int64_t arena_bytes) {
  const jdp::Setup setup = {device, rank, num_ranks, static_cast<jdp::Topology>(topology),
                            arena_bytes};
  std::unique_ptr<jdp::Communicator> made;
  const int failed = return_code(jdp::Communicator::open(setup, &made));
  if (!failed) jdp::enter(communicator, ordinal, std::move(made));
  return failed;
}

int jdp_cuda_close(int64_t communicator, int32_t ordinal) {
  return jdp::remove(communicator, ordinal);
}

int64_t jdp_cuda_blob_bytes() { return sizeof(jdp::Blob); }

int jdp_cuda_export(int64_t communicator, int32_t ordinal, void* blob) {
  return with(communicator, ordinal,
              [&](jdp::Communicator& c) { return c.blob(static_cast<jdp::Blob*>(blob)); });
}

int jdp_cuda_import(int64_t communicator, int32_t ordinal, const void* blobs) {
  return with(communicator, ordinal, [&](jdp::Communicator& c) {
    return c.connect(static_cast<const jdp::Blob*>(blobs));
  });
}

int jdp_cuda_probe_write(int64_t communicator, int32_t ordinal) {
  return with(communicator, ordinal, [](jdp::Communicator& c) { return c.probe_write(); });
}

int jdp_cuda_probe_read(int64_t communicator, int32_t ordinal) {
  return with(communicator, ordinal, [](jdp::Communicator& c) { return c.probe_read(); });
}

int jdp_cuda_reserve(int64_t communicator, int32_t ordinal, int64_t arena_bytes) {
  return with(communicator, ordinal, [&](jdp::Communicator& c) { return c.reserve(arena_bytes); });
}

int64_t jdp_cuda_memory_bytes(int64_t communicator, int32_t ordinal) {
  int64_t bytes = -1;
  with(communicator, ordinal, [&](jdp::Communicator& c) {
    bytes = c.memory_bytes();
    return jdp::Status();
  });
  return bytes;
}

int64_t jdp_cuda_num_repeated(int64_t communicator, int32_t ordinal) {
  int64_t num_repeated = -1;
  with(communicator, ordinal, [&](jdp::Communicator& c) {
    num_repeated = c.num_repeated();
    return jdp::Status();
  });
  return num_repeated;
}

const char* jdp_cuda_describe(int64_t communicator, int32_t ordinal) {
  with(communicator, ordinal, [](jdp::Communicator& c) {
    last_text = jdp::describe(c.plan());
    return jdp::Status();
  });
  return last_text.c_str();
}

void jdp_cuda_set_timeout_s(double timeout_s) { jdp::set_timeout_s(timeout_s); }

double jdp_cuda_timeout_s() { return jdp::timeout_s(); }

int jdp_cuda_check(int64_t communicator, int32_t ordinal) {
  return with(communicator, ordinal, [](jdp::Communicator& c) { return c.failure(); });
}

void jdp_cuda_abort() {
  jdp::for_each([](jdp::Communicator& c) { c.abort(); });
}

int jdp_cuda_reset(int64_t communicator, int32_t ordinal) {
  return with(communicator, ordinal, [](jdp::Communicator& c) { return c.reset(); });
}

const char* jdp_cuda_last_error() { return last_text.c_str(); }
