// Memory that processes of one host share, and what they write into it.
//
// It is an anonymous file (memfd_create), which the other processes open through /proc: it has no
// name that could be left behind, and ends with the last process that uses it, however that ends.

#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "call.h"
#include "cpu_link.h"
#include "fuzzing.h"

namespace jdp {

// What must be the same on all ranks, beside the data.
struct Signature {
  uint64_t leaves;  // Bucket::fingerprint
  int64_t count;    // elements
  uint64_t nth;     // call of this bucket
  double scale;
  int32_t bucket;
  Algorithm algorithm;
};

// One rank's part of a round: what it adds to the chunks of the others, and the sum of its own
// chunk. These are two places, because rounds are cut differently: the last one of a bucket is
// shorter, so a rank's own chunk is not the same bytes in two rounds.
struct Slot {
  static constexpr int64_t kBytes = kSlotBytes;

  Signature signature;
  alignas(128) std::byte data[kBytes];
  // The chunk of a rank that has others to share with is at most half of a round.
  alignas(128) std::byte result[kBytes / 2];
};

// One rank's part of the memory, written by that rank alone. Counters count rounds since the
// segment was made, modulo 2^32.
struct Seat {
  static constexpr int kNumSlots = 3;  // communicator.cc says why three are enough

  std::atomic<uint64_t> owner;  // Process, see process.h; 0 until its process has attached
  uint64_t num_rounds;          // `sent` in full; read by its own rank, to find the slot
  Counter sent;                 // the slot holds this rank's elements
  Counter reduced;              // the slot holds the sum of its chunk
  Mailbox mailbox;              // of the ring, to the next rank
  Slot slots[kNumSlots];
};

class Segment {
 public:
  // Makes the memory for `num_ranks` ranks; -1 and errno if that is not possible.
  static int create(int num_ranks, uint64_t* nonce);

  // Opens file `fd` of process `pid` for the ranks of this process. Null, and why.
  static std::shared_ptr<Segment> attach(int pid, int fd, uint64_t nonce, int num_ranks,
                                         const std::vector<int>& local_ranks, std::string* why);

  Segment(const Segment&) = delete;
  ~Segment();

  int num_ranks() const;
  Seat& seat(int rank);
  bool is_local(int rank) const;

  // Has the process of this rank ended? False until it has attached.
  bool is_gone(int rank);

  // Ends every wait of every process, for good. Only the first one's reason is told.
  Status stop(const Status& why);
  bool is_stopped() const;
  // What `stop` was told.
  Status why_stopped() const;

 private:
  struct Header;
  Segment(int fd, void* memory, size_t size, std::vector<int> local_ranks);

  const int fd_;
  void* const memory_;
  const size_t size_;
  const std::vector<int> local_ranks_;
};

}  // namespace jdp
