// One rank's end of a communicator: its memory, its mappings of peer memory, its stream.
//
// A rank is one GPU of this process; other ranks are in this process or another one of this host.
// It is set up in steps, with a barrier over all ranks after each: `open`; `connect` with the
// `blob` of every rank; `probe_write`; `probe_read`. Later calls only enqueue: they do not
// allocate, and wait only for the host threads of this process's other devices.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../common/status.h"
#include "arena.h"
#include "arguments.h"
#include "device_barrier.h"
#include "plan.h"

namespace jdp {

struct Setup {
  int device;  // CUDA's number
  int rank;
  int num_ranks;
  Topology topology;
  int64_t arena_bytes;  // for the results between their start and their done
};

// What a rank sends to its peers: plain bytes, of the same size on all ranks.
struct Blob {
  uint64_t version;
  uint64_t process;  // a random number that identifies the process
  uint64_t pointer;  // valid in that process
  int32_t device;
  int32_t rank;
  cudaIpcMemHandle_t handle;
  Plan plan;
};

struct Leaf {
  void* data;
  int64_t size;  // elements
};

class Communicator {
 public:
  // Allocates memory, and loads all kernels.
  static Status open(const Setup& setup, std::unique_ptr<Communicator>* communicator);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Once its blob is sent, peers may write into this rank's memory.
  Status blob(Blob* blob);
  bool is_known_to_peers() const { return is_known_to_peers_; }
  // `blobs`: [num_ranks], in rank order.
  Status connect(const Blob* blobs);
  Status probe_write();
  Status probe_read();

  // Makes `start` wait for the other devices of this process, see device_barrier.h. `ordinal` is
  // XLA's.
  void join_barrier(int32_t ordinal, std::shared_ptr<DeviceBarrier> devices);
  // Returns whether this device was the last one.
  bool leave_barrier();

  // Enqueues the reduction of the leaves after the work on `stream`. The mean stays in the arena
  // until `finish` of the same bucket. `scale` is on the device: a float, or a double for kF64.
  // `run`: number of the program's run, the same on all devices. Waits until all devices of this
  // process have made this call.
  Status start(int64_t run, int bucket, Type type, const std::vector<Leaf>& leaves,
               const void* scale, cudaStream_t stream);
  // Enqueues on `stream` a copy of the result to `to`. `from` are the leaves of `start`.
  Status finish(int bucket, Type type, const std::vector<Leaf>& from, const std::vector<Leaf>& to,
                cudaStream_t stream);
  Status load();
  // Reports that this device's run has failed for another reason, so that the others stop waiting.
  void give_up(const Status& why);

  // Returns the failure of an earlier call, if it is known.
  Status failure() const;
  // Ends all waits of this rank's kernels and of its peers'.
  void abort();
  // Restores the state after probe_read. On all ranks, between two barriers.
  Status reset();
  // Grows the arena to at least `arena_bytes`. Nothing may be in flight.
  Status reserve(int64_t arena_bytes);

  const Plan& plan() const { return plan_; }
  int64_t memory_bytes() const;
  // Buckets that `finish` reduced again, because XLA had moved their leaves.
  int64_t num_repeated() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_repeated_;
  }

 private:
  struct Flight {
    bool in_flight = false;
    int bucket;
    Type type;
    int64_t region;  // of the arena
    std::vector<Leaf> leaves;
    cudaEvent_t finished;
  };
  static constexpr int kMaxFlights = 512;

  explicit Communicator(const Setup& setup)
      : setup_(setup), plan_(make_plan(setup.num_ranks, setup.topology)), regions_(0) {}

  Status allocate();
  Status enqueue(int bucket, Type type, const std::vector<Leaf>& leaves, const void* scale,
                 cudaStream_t stream);
  Status clear_flags();
  Status map_peer(const Blob& blob);
  Status probe(cudaError_t (*launch)(const Arguments&, uint32_t*, cudaStream_t), const char* what);
  Arguments arguments() const;
  // Forgets the buckets of earlier runs.
  void begin_run();
  Flight* find_flight(int bucket);
  Flight* claim_flight(int bucket);
  Status no_room(int bucket, int64_t bytes) const;
  const void* scale_of(const Flight& flight) const;
  Status reduce(const Flight& flight, const std::vector<Leaf>& from, const std::vector<Leaf>& to,
                cudaStream_t stream);
  Status copy(const Flight& flight, const std::vector<Leaf>& to, cudaStream_t stream);
  std::vector<Leaf> in_arena(const Flight& flight) const;
  // Makes later work on `then` wait for the current work on `first`.
  Status order(cudaStream_t first, cudaStream_t then);

  const Setup setup_;
  const Plan plan_;
  mutable std::mutex mutex_;  // one reduction is enqueued at a time; the stream runs one at a time
  Staging staging_[kMaxRanks] = {};
  std::vector<void*> imported_;  // memory of other processes
  char* arena_ = nullptr;
  Arena regions_;
  char* scales_ = nullptr;  // 8 bytes for each flight
  uint32_t* num_wrong_ = nullptr;
  Report* report_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t handed_over_ = nullptr;
  std::vector<Flight> flights_;
  int64_t num_repeated_ = 0;
  bool is_loaded_ = false;
  bool is_resident_ = false;
  bool is_known_to_peers_ = false;
  int32_t ordinal_ = 0;
  std::shared_ptr<DeviceBarrier> devices_;
  int64_t last_run_ = INT64_MIN;  // used by the thread of this device only
};

// The time limit of all waits of this process; 0: none. The default is 30.
void set_timeout_s(double timeout_s);
double timeout_s();

// Whether NVLink connects all GPUs that this process sees.
Status find_topology(Topology* topology);

}  // namespace jdp
