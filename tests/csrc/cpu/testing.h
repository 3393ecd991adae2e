// Shared by the tests: a check that ends the program, ranks as threads, and buckets with known
// sums.

#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "call.h"
#include "communicator.h"
#include "rendezvous_registry.h"

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)

namespace jdp {

// Prints details of a failing test.
inline void describe(const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); }

inline bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  describe("\"" + text + "\" does not contain \"" + part + "\"");
  return false;
}

inline void end_with_parent() { prctl(PR_SET_PDEATHSIG, SIGKILL); }

// Whether the ranks' threads flush subnormal numbers to 0, as XLA's threads do.
inline bool flushes_subnormals = false;

inline void set_float_mode() {
#ifdef __SSE2__
  _mm_setcsr(flushes_subnormals ? 0x1f80 | 0x8040 : 0x1f80);
#endif
}

// Runs body(rank) on a thread for each rank.
inline void on_ranks(const std::vector<int>& ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank : ranks) {
    threads.emplace_back([&body, rank] {
      set_float_mode();
      body(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline std::vector<int> range(int end) {
  std::vector<int> ranks;
  for (int rank = 0; rank < end; ++rank) ranks.push_back(rank);
  return ranks;
}

// All implementations of the all-reduce.
struct Way {
  const char* name;
  int64_t communicator;
  Algorithm algorithm;
};

inline const Way kWays[] = {{"in process, direct", 0, Algorithm::kDirect},
                            {"in process, ring", 0, Algorithm::kRing},
                            {"segment, direct", 1, Algorithm::kDirect},
                            {"segment, ring", 1, Algorithm::kRing}};

// Calls body(T()) for two of the eight types of elements, and for all of them in four turns.
template <typename Body>
void on_some_types(size_t turn, const Body& body) {
  switch (turn % 4) {
    case 0:
      body(float());
      return body(uint8_t());
    case 1:
      body(double());
      return body(uint16_t());
    case 2:
      body(BFloat16());
      return body(uint32_t());
    case 3:
      body(Float16());
      return body(uint64_t());
  }
}

// Creates a communicator for threads of this process, as if they were processes.
inline void make_segment(int num_ranks, int64_t communicator = 1, int32_t group = 0) {
  uint64_t nonce = 0;
  const int fd = Segment::create(num_ranks, &nonce);
  std::string why;
  auto segment = Segment::attach(getpid(), fd, nonce, num_ranks, range(num_ranks), &why);
  if (!segment) describe(why);
  CHECK(segment);
  attach_communicator(communicator, group, segment);
}

inline void reset() {
  clear_abort();
  forget_rendezvous();
  detach_communicators();
  set_timeout_s(30);
}

inline Call call_of(const Way& way, int rank, int num_ranks, int32_t bucket = 3, int64_t run = 1,
                    int32_t group = 0, double scale = 0.5) {
  return {run, way.communicator, group, bucket, rank, num_ranks, way.algorithm, scale};
}

inline Call call_of(Operation operation, const Way& way, int rank, int num_ranks) {
  Call call = call_of(way, rank, num_ranks);
  call.operation = operation;
  return call;
}

template <typename T>
T element_of(int value) {
  if constexpr (std::is_same_v<T, BFloat16>)
    return to_bfloat16(static_cast<float>(value));
  else if constexpr (std::is_same_v<T, Float16>)
    return to_float16(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

// Small whole numbers, so that sums are exact in every type.
inline int value_at(int rank, int64_t i) { return static_cast<int>((i * 7 + rank * 5) % 17) - 8; }

inline int sum_at(int num_ranks, int64_t i) {
  int sum = 0;
  for (int rank = 0; rank < num_ranks; ++rank) sum += value_at(rank, i);
  return sum;
}

// The sum, halved if it is a float's.
template <typename T>
T expected_at(int num_ranks, int64_t i) {
  const int sum = sum_at(num_ranks, i);
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(sum);
  else if constexpr (std::is_same_v<T, double>)
    return sum * 0.5;
  else if constexpr (std::is_same_v<T, float>)
    return sum * 0.5f;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return to_bfloat16(sum * 0.5f);
  else
    return to_float16(sum * 0.5f);
}

template <typename T>
constexpr Type type_of() {
  if constexpr (std::is_same_v<T, float>)
    return Type::kF32;
  else if constexpr (std::is_same_v<T, double>)
    return Type::kF64;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return Type::kBF16;
  else if constexpr (std::is_same_v<T, Float16>)
    return Type::kF16;
  else if constexpr (sizeof(T) == 1)
    return Type::kU8;
  else if constexpr (sizeof(T) == 2)
    return Type::kU16;
  else if constexpr (sizeof(T) == 4)
    return Type::kU32;
  else
    return Type::kU64;
}

// One rank's leaves: each begins `shift` elements after an aligned address, between elements that
// must stay unchanged.
template <typename T>
class Leaves {
 public:
  // `salt` makes the values of different calls differ.
  Leaves(int rank, std::vector<int64_t> counts, bool in_place, int shift, int64_t salt = 0)
      : counts_(std::move(counts)), shift_(shift), in_place_(in_place), salt_(salt) {
    int64_t i = salt_;
    for (int64_t count : counts_) {
      std::vector<T> in(count + shift + 1, element_of<T>(77));
      outs_.push_back(in);
      for (int64_t k = 0; k < count; ++k) in[shift + k] = element_of<T>(value_at(rank, i++));
      ins_.push_back(std::move(in));
    }
  }

  Bucket bucket() {
    std::vector<Leaf> leaves;
    for (size_t i = 0; i < counts_.size(); ++i) {
      T* in = ins_[i].data() + shift_;
      leaves.push_back({in, in_place_ ? in : outs_[i].data() + shift_, counts_[i]});
    }
    return Bucket(type_of<T>(), std::move(leaves));
  }

  // Checks every element of this rank, and the elements around them that must stay unchanged.
  void check(int num_ranks) const {
    std::string wrong = first_wrong(num_ranks);
    if (!wrong.empty()) describe(wrong);
    CHECK(wrong.empty());
  }

  // Describes the first wrong element and the number of wrong ones; empty if all are right.
  std::string first_wrong(int num_ranks) const {
    const T untouched = element_of<T>(77);
    int64_t i = salt_, num_wrong = 0, index = 0;
    std::string first;
    for (const std::vector<T>& leaf : in_place_ ? ins_ : outs_) {
      const int64_t end = static_cast<int64_t>(leaf.size()) - 1;
      for (int64_t k = 0; k <= end; ++k) {
        const bool outside = k < shift_ || k == end;
        const T expected = outside ? untouched : expected_at<T>(num_ranks, i++);
        if (std::memcmp(&leaf[k], &expected, sizeof(T)) == 0) continue;
        if (++num_wrong == 1) {
          first = "leaf " + std::to_string(index) + ", element " + std::to_string(k - shift_);
        }
      }
      ++index;
    }
    return num_wrong == 0 ? "" : std::to_string(num_wrong) + " wrong elements, first " + first;
  }

 private:
  std::vector<int64_t> counts_;
  int shift_;
  bool in_place_;
  int64_t salt_;
  std::vector<std::vector<T>> ins_, outs_;
};

// How a leaf is cut: the whole is [num_rows][num_ranks][run], a slice [num_rows][run]. The result
// of an all-to-all has runs of `out_run` elements, which divides a slice; 0: of `run`. In a
// reduce-scatter a leaf of num_rows * run elements may stay whole.
struct Cut {
  int64_t num_rows;
  int64_t run;
  int64_t out_run = 0;
  bool stays_whole = false;
};

// One rank's leaves of an operation with slices; otherwise like `Leaves`.
template <typename T>
class Shards {
 public:
  // `in_place` is for an all-gather.
  Shards(Operation operation, int rank, int num_ranks, std::vector<Cut> cuts, int shift,
         int64_t salt = 0, bool in_place = false)
      : operation_(operation),
        rank_(rank),
        num_ranks_(num_ranks),
        cuts_(std::move(cuts)),
        shift_(shift),
        salt_(salt),
        in_place_(in_place && operation == Operation::kAllGather) {
    const T untouched = element_of<T>(77);
    int64_t first = salt_;
    for (const Cut& cut : cuts_) {
      const int64_t slice = cut.num_rows * cut.run, whole = slice * num_slices(cut);
      const int64_t count = operation == Operation::kAllGather ? slice : whole;
      std::vector<T> in(count + shift + 1, untouched);
      for (int64_t i = 0; i < count; ++i) {
        in[shift + i] = element_of<T>(value_at(rank, first + i));
      }
      first += count;
      ins_.push_back(std::move(in));
      outs_.emplace_back((operation == Operation::kReduceScatter ? slice : whole) + shift + 1,
                         untouched);
      if (in_place_) put_in_place(cut);
    }
  }

  Bucket bucket() {
    const bool is_copied = operation_ != Operation::kReduceScatter;
    const int64_t unit = is_copied ? sizeof(T) : 1;
    std::vector<Leaf> leaves;
    for (size_t i = 0; i < cuts_.size(); ++i) {
      const Cut& cut = cuts_[i];
      leaves.push_back({(in_place_ ? outs_ : ins_)[i].data() + shift_, outs_[i].data() + shift_,
                        cut.num_rows * cut.run * num_slices(cut) * unit,
                        is_whole(cut) ? 0 : std::max<int64_t>(cut.run, 1) * unit,
                        operation_ == Operation::kAllToAll ? out_run(cut) * unit : 0});
    }
    return Bucket(is_copied ? Type::kU8 : type_of<T>(), std::move(leaves));
  }

  // As of `Leaves`.
  std::string first_wrong(int num_ranks) const {
    CHECK(num_ranks == num_ranks_);
    const T untouched = element_of<T>(77);
    int64_t first = salt_, num_wrong = 0;
    std::string text;
    for (size_t leaf = 0; leaf < cuts_.size(); ++leaf) {
      const int64_t end = static_cast<int64_t>(outs_[leaf].size()) - 1;
      for (int64_t k = 0; k <= end; ++k) {
        const bool outside = k < shift_ || k == end;
        const T expected = outside ? untouched : expected_in(cuts_[leaf], first, k - shift_);
        if (std::memcmp(&outs_[leaf][k], &expected, sizeof(T)) == 0) continue;
        if (++num_wrong == 1) {
          text = "leaf " + std::to_string(leaf) + ", element " + std::to_string(k - shift_);
        }
      }
      first += cuts_[leaf].num_rows * cuts_[leaf].run *
               (operation_ == Operation::kAllGather ? 1 : num_slices(cuts_[leaf]));
    }
    return num_wrong == 0 ? "" : std::to_string(num_wrong) + " wrong elements, first " + text;
  }

 private:
  // Copies the last leaf's slice to its place in the whole leaf.
  void put_in_place(const Cut& cut) {
    for (int64_t i = 0; i < cut.num_rows * cut.run; ++i) {
      const int64_t place = (i / cut.run * num_ranks_ + rank_) * cut.run + i % cut.run;
      outs_.back()[shift_ + place] = ins_.back()[shift_ + i];
    }
  }

  // Element i of the result, of a leaf whose inputs begin with the value `first`.
  T expected_in(const Cut& cut, int64_t first, int64_t i) const {
    if (is_whole(cut)) return expected_at<T>(num_ranks_, first + i);
    if (operation_ == Operation::kReduceScatter) {
      const int64_t row = i / cut.run, place = row * num_ranks_ + rank_;
      return expected_at<T>(num_ranks_, first + place * cut.run + i % cut.run);
    }
    const bool is_exchanged = operation_ == Operation::kAllToAll;
    const int64_t run = is_exchanged ? out_run(cut) : cut.run;
    const int64_t row = i / run / num_ranks_, owner = i / run % num_ranks_;
    int64_t of_owner = row * run + i % run;
    if (is_exchanged) {
      of_owner = (of_owner / cut.run * num_ranks_ + rank_) * cut.run + of_owner % cut.run;
    }
    return element_of<T>(value_at(static_cast<int>(owner), first + of_owner));
  }

  bool is_whole(const Cut& cut) const {
    return cut.stays_whole && operation_ == Operation::kReduceScatter;
  }

  int64_t num_slices(const Cut& cut) const { return is_whole(cut) ? 1 : num_ranks_; }

  static int64_t out_run(const Cut& cut) {
    return std::max<int64_t>(cut.out_run == 0 ? cut.run : cut.out_run, 1);
  }

  const Operation operation_;
  const int rank_, num_ranks_;
  const std::vector<Cut> cuts_;
  const int shift_;
  const int64_t salt_;
  const bool in_place_;
  std::vector<std::vector<T>> ins_, outs_;
};

}  // namespace jdp
