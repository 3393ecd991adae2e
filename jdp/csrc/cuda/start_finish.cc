// The two calls of a step. They enqueue, do not allocate, and wait only for other devices of this
// process.

#include <algorithm>
#include <string>
#include <utility>

#include "communicator.h"
#include "cuda_check.h"
#include "kernels.h"

namespace jdp {
namespace {

// Vectors are counted in 31 bits, with a margin for index + stride.
constexpr int64_t kMaxBytes = int64_t{1} << 34;

int64_t bytes_of(Type type, const Leaf& leaf) { return leaf.size * bytes_of(type); }

int64_t padded(int64_t bytes) { return (bytes + 15) / 16 * 16; }

int64_t arena_bytes_of(Type type, const std::vector<Leaf>& leaves) {
  int64_t bytes = 0;
  for (const Leaf& leaf : leaves) bytes += padded(bytes_of(type, leaf));
  return bytes;
}

bool same_sizes(const std::vector<Leaf>& one, const std::vector<Leaf>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](const Leaf& a, const Leaf& b) { return a.size == b.size; });
}

bool same_leaves(const std::vector<Leaf>& one, const std::vector<Leaf>& other) {
  return std::equal(
      one.begin(), one.end(), other.begin(), other.end(),
      [](const Leaf& a, const Leaf& b) { return a.data == b.data && a.size == b.size; });
}

// Calls `launch` for kMaxSegments leaves at a time; `size_of(leaf)` in units of `unit_bytes`.
template <typename SizeOf, typename Launch>
Status for_each_table(Arguments arguments, const std::vector<Leaf>& from,
                      const std::vector<Leaf>& to, int64_t unit_bytes, SizeOf size_of,
                      Launch launch) {
  size_t i = 0;
  while (i < from.size()) {
    arguments.num_segments = 0;
    arguments.num_vectors = 0;
    for (; i < from.size() && arguments.num_segments < kMaxSegments; ++i) {
      const int64_t size = size_of(from[i]);
      if (size == 0) continue;
      arguments.segments[arguments.num_segments++] = {from[i].data, to[i].data, size,
                                                      arguments.num_vectors};
      arguments.num_vectors += static_cast<int32_t>(padded(size * unit_bytes) / 16);
    }
    if (arguments.num_segments) JDP_RETURN_IF_ERROR(launch(arguments));
  }
  return {};
}

}  // namespace

Communicator::Flight* Communicator::find_flight(int bucket) {
  for (Flight& flight : flights_) {
    if (flight.in_flight && flight.bucket == bucket) return &flight;
  }
  return nullptr;
}

void Communicator::begin_run() {
  std::lock_guard<std::mutex> lock(mutex_);
  // These are of a run that ended with an error between a start and its done.
  for (Flight& flight : flights_) {
    if (flight.in_flight) regions_.free(flight.region);
    flight.in_flight = false;
  }
}

Communicator::Flight* Communicator::claim_flight(int bucket) {
  // If still in flight, an iteration of a loop has ended before its done.
  Flight* flight = find_flight(bucket);
  if (flight) {
    regions_.free(flight->region);
    return flight;
  }
  for (Flight& free : flights_) {
    if (!free.in_flight) return &free;
  }
  return nullptr;
}

const void* Communicator::scale_of(const Flight& flight) const {
  return scales_ + (&flight - flights_.data()) * sizeof(double);
}

std::vector<Leaf> Communicator::in_arena(const Flight& flight) const {
  std::vector<Leaf> leaves = flight.leaves;
  char* place = arena_ + flight.region;
  for (Leaf& leaf : leaves) {
    leaf.data = place;
    place += padded(bytes_of(flight.type, leaf));
  }
  return leaves;
}

Status Communicator::order(cudaStream_t first, cudaStream_t then) {
  JDP_CUDA(cudaEventRecord(handed_over_, first));
  JDP_CUDA(cudaStreamWaitEvent(then, handed_over_, 0));
  return {};
}

Status Communicator::start(int64_t run, int bucket, Type type, const std::vector<Leaf>& leaves,
                           const void* scale, cudaStream_t stream) {
  const auto all_at = [&](const std::string& where) {
    return devices_ ? devices_->wait(ordinal_, where, timeout_s()) : Status();
  };
  const std::string where = "bucket " + std::to_string(bucket) + " of run " + std::to_string(run);
  if (run != std::exchange(last_run_, run)) {
    begin_run();
    JDP_RETURN_IF_ERROR(all_at("the first ring, " + where));
  }
  const Status status = enqueue(bucket, type, leaves, scale, stream);
  if (!status.ok()) {
    give_up(status);
    return status;
  }
  return all_at(where);
}

void Communicator::give_up(const Status& why) {
  if (devices_) devices_->abort(why);
}

Status Communicator::enqueue(int bucket, Type type, const std::vector<Leaf>& leaves,
                             const void* scale, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  JDP_RETURN_IF_ERROR(failure());
  JDP_ON_DEVICE(setup_.device);
  const int64_t bytes = arena_bytes_of(type, leaves);
  if (bytes >= kMaxBytes) {
    return {Code::kInvalidArgument, "jdp: bucket " + std::to_string(bucket) + " has " +
                                        std::to_string(bytes) + " bytes, more than the limit of " +
                                        std::to_string(kMaxBytes) +
                                        ". Lower bucket_bytes, or split the leaf"};
  }
  Flight* flight = claim_flight(bucket);
  if (!flight) {
    return {Code::kResourceExhausted,
            "jdp: bucket " + std::to_string(bucket) + ": " + std::to_string(kMaxFlights) +
                " buckets are in flight, which is the limit. Raise bucket_bytes"};
  }
  // Waits for the last ring of this flight, whose scale is overwritten below.
  JDP_CUDA(cudaStreamWaitEvent(stream, flight->finished, 0));
  flight->in_flight = false;
  const int64_t region = regions_.allocate(bytes);
  if (region < 0) return no_room(bucket, bytes);
  flight->in_flight = true;
  flight->bucket = bucket;
  flight->type = type;
  flight->region = region;
  flight->leaves = leaves;
  // The leaves are operands of done, so XLA keeps them until then, but not the scale.
  JDP_CUDA(cudaMemcpyAsync(const_cast<void*>(scale_of(*flight)), scale,
                           type == Type::kF64 ? sizeof(double) : sizeof(float),
                           cudaMemcpyDeviceToDevice, stream));
  JDP_RETURN_IF_ERROR(order(stream, stream_));
  JDP_RETURN_IF_ERROR(reduce(*flight, leaves, in_arena(*flight), stream_));
  JDP_CUDA(cudaEventRecord(flight->finished, stream_));
  return {};
}

Status Communicator::no_room(int bucket, int64_t bytes) const {
  return {Code::kResourceExhausted, "jdp: bucket " + std::to_string(bucket) + " needs " +
                                        std::to_string(bytes) + " bytes of the arena, but " +
                                        std::to_string(regions_.used()) + " of " +
                                        std::to_string(regions_.capacity()) +
                                        " are taken by buckets in flight. Reserve at least " +
                                        std::to_string(regions_.used() + bytes + 256) +
                                        " bytes: the size of all gradients of a step"};
}

Status Communicator::reduce(const Flight& flight, const std::vector<Leaf>& from,
                            const std::vector<Leaf>& to, cudaStream_t stream) {
  Arguments arguments = this->arguments();
  arguments.bucket = flight.bucket;
  arguments.scale = scale_of(flight);
  return for_each_table(
      arguments, from, to, bytes_of(flight.type), [](const Leaf& leaf) { return leaf.size; },
      [&](Arguments& table) {
        const int64_t bytes = int64_t{table.num_vectors} * 16;
        table.algorithm = choose(plan_, bytes);
        table.num_channels = num_channels(plan_, bytes);
        return of_cuda(launch(flight.type, table, stream), "launching an all-reduce");
      });
}

Status Communicator::copy(const Flight& flight, const std::vector<Leaf>& to, cudaStream_t stream) {
  return for_each_table(
      arguments(), in_arena(flight), to, 1,
      [&](const Leaf& leaf) { return bytes_of(flight.type, leaf); },
      [&](Arguments& table) { return of_cuda(launch_copy(table, stream), "launching a copy"); });
}

Status Communicator::finish(int bucket, Type type, const std::vector<Leaf>& from,
                            const std::vector<Leaf>& to, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  JDP_RETURN_IF_ERROR(failure());
  JDP_ON_DEVICE(setup_.device);
  Flight* flight = find_flight(bucket);
  if (!flight || flight->type != type || !same_sizes(flight->leaves, from) ||
      !same_sizes(from, to)) {
    return {Code::kFailedPrecondition,
            "jdp: bucket " + std::to_string(bucket) + ": done has no start with the same leaves"};
  }
  JDP_CUDA(cudaStreamWaitEvent(stream, flight->finished, 0));
  if (same_leaves(flight->leaves, from)) {
    JDP_RETURN_IF_ERROR(copy(*flight, to, stream));
    // The next start may write where this copy reads.
    JDP_RETURN_IF_ERROR(order(stream, stream_));
  } else {
    // XLA copied the leaves for this call, so it may have overwritten those of `start` before the
    // ring read them. All ranks run the same program, so all repeat the reduction.
    ++num_repeated_;
    JDP_RETURN_IF_ERROR(order(stream, stream_));
    JDP_RETURN_IF_ERROR(reduce(*flight, from, to, stream_));
    JDP_CUDA(cudaEventRecord(flight->finished, stream_));
    JDP_CUDA(cudaStreamWaitEvent(stream, flight->finished, 0));
  }
  regions_.free(flight->region);
  flight->in_flight = false;
  return {};
}

}  // namespace jdp
