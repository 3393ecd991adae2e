// The memory that processes of one host share, and its layout.
//
// It is an anonymous file (memfd_create), which the others open through /proc. It has no name that
// could remain, and is freed with its last process.

#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "call.h"
#include "cpu_link.h"
#include "fuzzing.h"

namespace jdp {

// Describes a call; must be equal on all ranks.
struct Signature {
  uint64_t leaves;  // Bucket::fingerprint
  int64_t count;    // elements
  uint64_t nth;     // number of the call of this bucket
  double scale;
  int64_t bucket;
  Algorithm algorithm;
  Operation operation;
};
static_assert(sizeof(Signature) == 48, "signatures are compared byte by byte: no padding");

// One rank's part of a round. `data` holds its elements, and `result` the sum of its own chunk in
// an all-reduce. They are separate because the last round of a bucket is shorter, so a rank's own
// chunk is at different bytes in different rounds.
struct Slot {
  static constexpr int64_t kBytes = kSlotBytes;

  Signature signature;
  int64_t entered_ns;  // when the rank entered the call, on a clock that all processes share
  alignas(128) std::byte data[kBytes];
  // With two ranks or more, a chunk is at most half of a round.
  static_assert(kBytes % 128 == 0, "half of a slot is a multiple of the chunks' alignment");
  alignas(128) std::byte result[kBytes / 2];
};

// One rank's part of the memory, written by that rank alone. Counters count all rounds, modulo
// 2^32.
struct Seat {
  static constexpr int kNumSlots = 3;  // three are enough: see segment_call.cc

  std::atomic<uint64_t> owner;  // Process, see process.h; 0 until its process has attached
  uint64_t num_rounds;          // `sent` as 64 bits; read by this rank alone, to find the slot
  Counter sent;                 // the slot holds this rank's elements
  Counter reduced;              // it has read all slots, and written `result`
  Mailbox mailbox;              // of the ring, to the next rank
  Slot slots[kNumSlots];
};

class Segment {
 public:
  // Creates the memory, and returns its file; -1 and errno on failure.
  static int create(int num_ranks, uint64_t* nonce);

  // Opens file `fd` of process `pid` for the ranks of this process; null sets `why`.
  static std::shared_ptr<Segment> attach(int pid, int fd, uint64_t nonce, int num_ranks,
                                         const std::vector<int>& local_ranks, std::string* why);

  // Returns the segment that replaces `current`: the latest one, if another process has created it
  // already, else a new one. Null sets `why`.
  //
  // `first`, which all processes attached, holds the address of the latest one. `current` is
  // stopped, so that peers that still use it get an error.
  static std::shared_ptr<Segment> renew(Segment& first, Segment& current, std::string* why);

  Segment(const Segment&) = delete;
  ~Segment();

  int num_ranks() const;
  Seat& seat(int rank);
  bool is_local(int rank) const;

  // Whether the process of this rank has ended. False until it has attached.
  bool is_gone(int rank);

  // Ends every current and later wait of every process; the first reason is kept.
  Status stop(const Status& why);
  bool is_stopped() const;
  Status stop_reason() const;

 private:
  struct Header;
  class Renewal;
  Header& header() const { return *static_cast<Header*>(memory_); }
  Segment(int fd, void* memory, size_t size, std::vector<int> local_ranks);

  const int fd_;
  void* const memory_;
  const size_t size_;
  const std::vector<int> local_ranks_;
};

}  // namespace jdp
