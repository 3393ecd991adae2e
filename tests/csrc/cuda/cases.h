// Reads cases of an all-reduce from standard input and writes results to standard output;
// ring_cases.py is the other end. `run` runs a case, with host threads (host_model.cc) or with
// virtual ranks on one GPU (virtual_ranks.cu).

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/arguments.h"

namespace jdp {

// In the layout that ring_cases.py packs.
struct CaseHeader {
  Layout layout;
  int32_t type;
  int32_t algorithm;
  int32_t num_channels;
  int32_t num_calls;    // in sequence, all from the same leaves; 1 if `in_place`
  int32_t num_threads;  // of a block, on the host
  int32_t num_leaves;
  int32_t in_place;
  int32_t missing_rank;   // rank that does not take part; -1: none
  uint32_t first_number;  // initial value of all message counters
  uint32_t seed;          // of random delays; 0: none
  int32_t shift_bytes;    // of each leaf from a multiple of 16
  int32_t timeout_ms;
  int32_t timeout_rank;  // the only rank with a deadline; -1: all have one
  int32_t abort_rank;    // rank whose host has aborted before the first call; -1: none
  int32_t odd_rank;      // rank that reduces another bucket; -1: none
  int32_t odd_call;      // from this call on
  double scale;
};

struct Case {
  CaseHeader header;
  std::vector<int64_t> sizes;  // of the leaves, elements
  // [rank]: its leaves, each at the offset that `place` returns.
  std::vector<std::vector<char>> in;

  Type type() const { return static_cast<Type>(header.type); }
  Algorithm algorithm() const { return static_cast<Algorithm>(header.algorithm); }
  int num_ranks() const { return header.layout.num_ranks; }
  int64_t bytes(int leaf) const { return sizes[leaf] * bytes_of(type()); }

  // Leaves begin at multiples of 256 bytes, as in XLA, plus `shift_bytes`.
  int64_t place(int leaf) const {
    int64_t begin = header.shift_bytes;
    for (int i = 0; i < leaf; ++i) begin += (bytes(i) + 511) / 256 * 256;
    return begin;
  }
  int64_t room() const { return place(header.num_leaves) + 256; }
};

// The bytes between the leaves.
constexpr char kInFill = 0x55;
constexpr char kOutFill = 0x33;

struct Result {
  std::vector<std::vector<char>> out;  // [rank], as Case::in
  std::vector<Report> reports;         // [rank]
};

inline void read_all(void* to, size_t size) {
  if (size && fread(to, size, 1, stdin) != 1) {
    fprintf(stderr, "the input ended within a case\n");
    exit(2);
  }
}

inline bool read_case(Case* one) {
  if (fread(&one->header, sizeof one->header, 1, stdin) != 1) return false;
  one->sizes.resize(one->header.num_leaves);
  read_all(one->sizes.data(), one->sizes.size() * sizeof(int64_t));
  one->in.assign(one->num_ranks(), std::vector<char>(one->room(), kInFill));
  for (auto& memory : one->in) {
    for (int leaf = 0; leaf < one->header.num_leaves; ++leaf) {
      read_all(memory.data() + one->place(leaf), one->bytes(leaf));
    }
  }
  return true;
}

// Ends the program if a byte between the leaves is no longer `fill`.
inline void check_gaps(const Case& one, const std::vector<char>& memory, char fill) {
  int64_t begin = 0;
  for (int leaf = 0; leaf <= one.header.num_leaves; ++leaf) {
    const bool is_end = leaf == one.header.num_leaves;
    const int64_t end = is_end ? one.room() : one.place(leaf);
    for (int64_t i = begin; i < end; ++i) {
      if (memory[i] == fill) continue;
      fprintf(stderr, "something was written %lld bytes before leaf %d\n",
              static_cast<long long>(end - i), leaf);
      exit(4);
    }
    if (!is_end) begin = end + one.bytes(leaf);
  }
}

inline void write_result(const Case& one, const Result& result) {
  for (int rank = 0; rank < one.num_ranks(); ++rank) {
    check_gaps(one, result.out[rank], one.header.in_place ? kInFill : kOutFill);
    fwrite(&result.reports[rank], sizeof(Report), 1, stdout);
    for (int leaf = 0; leaf < one.header.num_leaves; ++leaf) {
      fwrite(result.out[rank].data() + one.place(leaf), one.bytes(leaf), 1, stdout);
    }
  }
  fflush(stdout);
}

// Returns the bucket that rank `rank` reduces in call `call`.
inline int32_t bucket_of(const Case& one, int rank, int call) {
  return rank == one.header.odd_rank && call >= one.header.odd_call ? 8 : 7;
}

// Returns the arguments of `rank` without `staging`, `report` and `scale`; `bucket` is that of the
// first call.
inline Arguments arguments_of(const Case& one, int rank, const char* in, char* out) {
  Arguments arguments = {};
  arguments.layout = one.header.layout;
  const bool has_deadline = one.header.timeout_rank < 0 || one.header.timeout_rank == rank;
  arguments.timeout_ns = has_deadline ? one.header.timeout_ms * uint64_t{1000000} : 0;
  arguments.rank = rank;
  arguments.bucket = bucket_of(one, rank, 0);
  arguments.num_channels = one.header.num_channels;
  arguments.algorithm = one.algorithm();
  for (int leaf = 0; leaf < one.header.num_leaves; ++leaf) {
    if (one.sizes[leaf] == 0) continue;
    arguments.segments[arguments.num_segments++] = {in + one.place(leaf), out + one.place(leaf),
                                                    one.sizes[leaf], arguments.num_vectors};
    arguments.num_vectors += static_cast<int32_t>((one.bytes(leaf) + 15) / 16);
  }
  return arguments;
}

// Sets all counters as if `number` messages had been sent, received and freed.
inline void set_counters(const Layout& layout, Staging staging, uint32_t number) {
  for (int channel = 0; channel < layout.num_channels; ++channel) {
    ChannelFlags* flags = staging.channel(channel);
    flags->head = flags->credit = number;
    for (uint32_t& exchanged : flags->exchanged) exchanged = number;
    flags->state = {number, number, number, 0};
  }
}

}  // namespace jdp
