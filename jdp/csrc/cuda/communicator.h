// One rank's end of a reduction: its memory, the way to its peers, its stream. No XLA here.
//
// A rank is one GPU of this process; other ranks are in this process or in another one of this
// host. Made in three steps, with a barrier over all ranks after each: `open`, `connect` with what
// every rank's `blob` said, `probe_write` and `probe_read`. From then on calls only enqueue: they
// do not allocate, and wait for the host threads of this process's other devices alone.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../common/status.h"
#include "arena.h"
#include "arguments.h"
#include "plan.h"
#include "rendezvous.h"

namespace jdp {

struct Setup {
  int device;  // CUDA's number
  int rank;
  int num_ranks;
  Topology topology;
  int64_t arena_bytes;  // room for the results of all buckets between their start and their done
};

// What a rank tells its peers. The same size everywhere; plain bytes to send.
struct Blob {
  uint64_t version;
  uint64_t process;  // a random number of each process
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
  // Allocates, makes streams and events, and loads all kernels.
  static Status open(const Setup& setup, std::unique_ptr<Communicator>* communicator);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // From here on peers may write into this rank's memory.
  Status blob(Blob* blob);
  bool is_known_to_peers() const { return is_known_to_peers_; }
  // `blobs`: [num_ranks], in the order of ranks.
  Status connect(const Blob* blobs);
  Status probe_write();
  Status probe_read();

  // From now on `start` waits for the other devices of this process, see rendezvous.h. `ordinal`:
  // of this one among them.
  void meet(int32_t ordinal, std::shared_ptr<Rendezvous> devices);
  // They wait for this one no longer. True: it was the last.
  bool part();

  // Begins to reduce the leaves, once what is on `stream` is done: their mean is in the arena when
  // `finish` of the same bucket is. `scale` is on the device: a float, or a double for kF64.
  // `run`: of the program, the same on all devices. Waits until all devices of this process are
  // here.
  Status start(int64_t run, int bucket, Type type, const std::vector<Leaf>& leaves,
               const void* scale, cudaStream_t stream);
  // Puts the result into `to`, once `stream` comes to it. `from` are the leaves of `start`.
  Status finish(int bucket, Type type, const std::vector<Leaf>& from, const std::vector<Leaf>& to,
                cudaStream_t stream);
  // Loads the kernels on this device, if they are not.
  Status load();
  // This device's run has failed for another reason: the other devices do not wait for it.
  void give_up(const Status& why);

  // What an earlier call found out by now: a rank that did not answer, or an abort.
  Status failure() const;
  // Ends every wait of this rank's kernels, and of its peers'.
  void abort();
  // As after probe_read. To be called on all ranks, between two barriers.
  Status reset();
  // Makes the arena at least this large; nothing may be in flight.
  Status reserve(int64_t arena_bytes);

  const Plan& plan() const { return plan_; }
  // On the device.
  int64_t memory_bytes() const;
  // Buckets that were reduced again in `finish`, for XLA had moved their leaves in between.
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
  Flight* find(int bucket);
  Flight* take(int bucket);
  Status no_room(int bucket, int64_t bytes) const;
  const void* scale_of(const Flight& flight) const;
  Status reduce(const Flight& flight, const std::vector<Leaf>& from, const std::vector<Leaf>& to,
                cudaStream_t stream);
  Status copy(const Flight& flight, const std::vector<Leaf>& to, cudaStream_t stream);
  std::vector<Leaf> in_arena(const Flight& flight) const;
  // Work enqueued on `then` from now on begins after what is on `first`.
  Status order(cudaStream_t first, cudaStream_t then);

  const Setup setup_;
  const Plan plan_;
  mutable std::mutex mutex_;  // one ring at a time is enqueued; the stream runs one at a time
  Staging staging_[kMaxRanks] = {};
  std::vector<void*> imported_;  // of other processes
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
  std::shared_ptr<Rendezvous> devices_;
  int64_t last_run_ = INT64_MIN;  // read and written by the thread of this device
};

// Of all waits of this process; 0: none. 30 to begin with.
void set_timeout_s(double timeout_s);
double timeout_s();

// Whether the GPUs that this process sees all have NVLink between them.
Status find_topology(Topology* topology);

}  // namespace jdp
