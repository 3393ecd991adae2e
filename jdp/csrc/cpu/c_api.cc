#include "c_api.h"

#include <cerrno>
#include <cstring>

#include "communicator.h"
#include "progress.h"
#include "rendezvous_registry.h"

namespace {

thread_local std::string last_error;

}  // namespace

void jdp_set_timeout_s(double timeout_s) { jdp::set_timeout_s(timeout_s); }

double jdp_timeout_s() { return jdp::timeout_s(); }

void jdp_abort(const char* reason) {
  jdp::abort_waits(reason);
  jdp::stop_communicators(reason);
}

int jdp_reset() {
  jdp::clear_abort();
  jdp::forget_rendezvous();
  return jdp::renew_communicators(&last_error) ? 0 : -1;
}

void jdp_set_progress(void* progress) { jdp::set_progress(static_cast<jdp::Progress*>(progress)); }

int jdp_segment_create(int32_t num_ranks, uint64_t* nonce) {
  const int fd = jdp::Segment::create(num_ranks, nonce);
  if (fd < 0) last_error = std::string("cannot create shared memory: ") + std::strerror(errno);
  return fd;
}

int jdp_communicator_attach(int64_t communicator, int32_t group, int32_t num_ranks,
                            const int32_t* local_ranks, int32_t num_local, int32_t pid, int32_t fd,
                            uint64_t nonce) {
  const std::vector<int> locals(local_ranks, local_ranks + num_local);
  auto segment = jdp::Segment::attach(pid, fd, nonce, num_ranks, locals, &last_error);
  if (!segment) return -1;
  jdp::attach_communicator(communicator, group, std::move(segment));
  return 0;
}

const char* jdp_last_error() { return last_error.c_str(); }
