#include "communicator.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "cuda_check.h"
#include "kernels.h"
#include "residency.h"

namespace jdp {
namespace {

std::atomic<double> process_timeout_s{30};

// Never destroyed: communicators may be closed while the process exits.
Residency& residency() {
  static Residency* const residency = new Residency;
  return *residency;
}

template <typename T>
Status allocate_on_device(T** memory, int64_t bytes) {
  return of_cuda(cudaMalloc(reinterpret_cast<void**>(memory), bytes), "cudaMalloc");
}

uint32_t load_acquire(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

}  // namespace

void set_timeout_s(double timeout_s) { process_timeout_s = timeout_s; }

double timeout_s() { return process_timeout_s; }

Status Communicator::open(const Setup& setup, std::unique_ptr<Communicator>* communicator) {
  if (setup.num_ranks < 1 || setup.num_ranks > kMaxRanks || setup.rank < 0 ||
      setup.rank >= setup.num_ranks) {
    return {Code::kInvalidArgument,
            "jdp: rank " + std::to_string(setup.rank) + " of " + std::to_string(setup.num_ranks) +
                ": num_ranks must be from 1 to " + std::to_string(kMaxRanks) +
                ", and rank less than num_ranks"};
  }
  JDP_ON_DEVICE(setup.device);
  std::unique_ptr<Communicator> made(new Communicator(setup));
  JDP_RETURN_IF_ERROR(made->allocate());
  *communicator = std::move(made);
  return {};
}

Status Communicator::allocate() {
  Staging& own = staging_[setup_.rank];
  JDP_RETURN_IF_ERROR(allocate_on_device(&own.base, staging_bytes(plan_.layout)));
  JDP_RETURN_IF_ERROR(allocate_on_device(&scales_, kMaxFlights * sizeof(double)));
  JDP_RETURN_IF_ERROR(allocate_on_device(&num_wrong_, sizeof *num_wrong_));
  JDP_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&report_), sizeof *report_,
                         cudaHostAllocMapped | cudaHostAllocPortable));
  memset(report_, 0, sizeof *report_);
  int low;
  int high;
  JDP_CUDA(cudaDeviceGetStreamPriorityRange(&low, &high));
  JDP_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, high));
  JDP_CUDA(cudaEventCreateWithFlags(&handed_over_, cudaEventDisableTiming));
  flights_.reserve(kMaxFlights);
  for (int i = 0; i < kMaxFlights; ++i) {
    Flight flight;
    JDP_CUDA(cudaEventCreateWithFlags(&flight.finished, cudaEventDisableTiming));
    flights_.push_back(std::move(flight));
  }
  JDP_RETURN_IF_ERROR(load());
  int num_resident;
  JDP_CUDA(count_resident_blocks(&num_resident));
  JDP_RETURN_IF_ERROR(residency().reserve(setup_.device, plan_.layout.num_channels, num_resident));
  is_resident_ = true;
  JDP_RETURN_IF_ERROR(reserve(setup_.arena_bytes));
  return clear_flags();
}

Status Communicator::load() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_loaded_) return {};
  JDP_ON_DEVICE(setup_.device);
  JDP_CUDA(load_kernels());
  is_loaded_ = true;
  return {};
}

Communicator::~Communicator() {
  const OnDevice on_device(setup_.device);
  if (!on_device.status().ok()) return;  // the driver has shut down
  if (report_) abort();
  if (stream_) cudaStreamSynchronize(stream_);
  if (is_resident_) residency().release(setup_.device, plan_.layout.num_channels);
  for (void* memory : imported_) cudaIpcCloseMemHandle(memory);
  for (Flight& flight : flights_) cudaEventDestroy(flight.finished);
  if (handed_over_) cudaEventDestroy(handed_over_);
  if (stream_) cudaStreamDestroy(stream_);
  cudaFree(staging_[setup_.rank].base);
  cudaFree(arena_);
  cudaFree(scales_);
  cudaFree(num_wrong_);
  cudaFreeHost(report_);
}

Status Communicator::clear_flags() {
  abort();  // even without a deadline
  JDP_CUDA(cudaStreamSynchronize(stream_));
  JDP_CUDA(cudaMemsetAsync(staging_[setup_.rank].base, 0, flags_bytes(plan_.layout), stream_));
  JDP_CUDA(cudaStreamSynchronize(stream_));
  memset(report_, 0, sizeof *report_);
  regions_.clear();
  for (Flight& flight : flights_) flight.in_flight = false;
  return {};
}

Arguments Communicator::arguments() const {
  Arguments arguments = {};
  arguments.layout = plan_.layout;
  std::copy(std::begin(staging_), std::end(staging_), arguments.staging);
  arguments.report = report_;
  // Not positive, or longer than 30 years, means no deadline.
  const double limit_s = timeout_s();
  arguments.timeout_ns = limit_s > 0 && limit_s < 1e9 ? static_cast<uint64_t>(limit_s * 1e9) : 0;
  arguments.rank = setup_.rank;
  return arguments;
}

Status Communicator::failure() const {
  const uint32_t outcome = load_acquire(&report_->outcome);
  if (outcome == static_cast<uint32_t>(Outcome::kNone)) {
    if (!load_acquire(&report_->abort)) return {};
    return {Code::kAborted,
            "jdp: rank " + std::to_string(setup_.rank) + " was aborted by its host"};
  }
  const std::string where = "bucket " + std::to_string(report_->bucket) + ", call " +
                            std::to_string(report_->call) + ", step " +
                            std::to_string(report_->step);
  const std::string rank = "jdp: rank " + std::to_string(report_->rank);
  if (outcome == static_cast<uint32_t>(Outcome::kLate)) {
    return {Code::kDeadlineExceeded,
            rank + ": received nothing from rank " + std::to_string(report_->peer) + " for " +
                std::to_string(timeout_s()) + " s in " + where +
                ". Check whether that process is alive. Gradients since then are NaN"};
  }
  const std::string end = ". Gradients since then are NaN";
  if (outcome == static_cast<uint32_t>(Outcome::kMismatched)) {
    const auto named = [](int64_t bucket, int64_t call, int64_t num_vectors) {
      return "bucket " + std::to_string(bucket) + " (call " + std::to_string(call) + ", " +
             std::to_string(16 * num_vectors) + " bytes)";
    };
    const Tag& sent = report_->sent;
    return {Code::kFailedPrecondition,
            rank + " reduces " + named(report_->bucket, report_->call, report_->num_vectors) +
                ", and rank " + std::to_string(report_->peer) + " sent part of " +
                named(sent.bucket, sent.call, sent.num_vectors) +
                ". All ranks must run the same steps in the same order" + end};
  }
  const std::string other = "rank " + std::to_string(report_->gave_up);
  if (report_->peer < 0) {
    return {Code::kAborted, rank + " stopped in " + where + ": " +
                                (report_->gave_up < 0 ? "this process" : other) + " was aborted" +
                                end};
  }
  const bool is_mismatched = report_->why == static_cast<uint32_t>(Outcome::kMismatched);
  return {is_mismatched ? Code::kFailedPrecondition : Code::kDeadlineExceeded,
          rank + " stopped in " + where + ": " + other +
              (is_mismatched ? " received a message of another bucket from rank "
                             : " gave up waiting for rank ") +
              std::to_string(report_->peer) + end};
}

void Communicator::abort() {
  __atomic_store_n(&report_->abort, 1, __ATOMIC_RELEASE);
  if (devices_) devices_->abort({Code::kAborted, "jdp: this process was aborted"});
}

void Communicator::join_barrier(int32_t ordinal, std::shared_ptr<DeviceBarrier> devices) {
  ordinal_ = ordinal;
  devices_ = std::move(devices);
  devices_->add_device(ordinal);
}

bool Communicator::leave_barrier() { return !devices_ || devices_->remove_device(ordinal_); }

Status Communicator::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  JDP_ON_DEVICE(setup_.device);
  JDP_RETURN_IF_ERROR(clear_flags());
  if (devices_) devices_->reset();
  return {};
}

Status Communicator::reserve(int64_t arena_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (arena_bytes <= regions_.capacity()) return {};
  JDP_ON_DEVICE(setup_.device);
  if (regions_.used()) {
    return {Code::kFailedPrecondition, "jdp: the arena cannot grow while buckets are in flight"};
  }
  char* larger;
  JDP_RETURN_IF_ERROR(allocate_on_device(&larger, arena_bytes));
  char* const smaller = std::exchange(arena_, larger);
  regions_.resize(arena_bytes);
  JDP_CUDA(cudaFree(smaller));  // waits for the device
  return {};
}

int64_t Communicator::memory_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return staging_bytes(plan_.layout) + regions_.capacity() +
         kMaxFlights * static_cast<int64_t>(sizeof(double)) + sizeof *num_wrong_;
}

}  // namespace jdp
