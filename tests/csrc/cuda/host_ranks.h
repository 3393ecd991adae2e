// Runs a case (see cases.h) with the kernels' source on host threads: `num_threads` threads act as
// one block.

#pragma once

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cases.h"
#include "cuda/reduce_channel.cuh"
#include "host_block.h"

namespace jdp {

// Memory with the alignment of device memory, filled with garbage instead of zeros.
class Memory {
 public:
  explicit Memory(int64_t bytes, int fill)
      : pointer_(static_cast<char*>(aligned_alloc(256, (bytes + 255) / 256 * 256))) {
    memset(pointer_, fill, bytes);
  }
  Memory(const Memory&) = delete;
  ~Memory() { free(pointer_); }
  char* get() const { return pointer_; }

 private:
  char* const pointer_;
};

template <typename T>
void reduce(const Arguments& arguments, int channel, const HostBlock& block) {
  switch (arguments.algorithm) {
    case Algorithm::kRing:
      return reduce_channel<T, Algorithm::kRing>(arguments, channel, block);
    case Algorithm::kOneShot:
      return reduce_channel<T, Algorithm::kOneShot>(arguments, channel, block);
    case Algorithm::kTwoShot:
      return reduce_channel<T, Algorithm::kTwoShot>(arguments, channel, block);
  }
}

inline void reduce(Type type, const Arguments& arguments, int channel, const HostBlock& block) {
  switch (type) {
    case Type::kF32:
      return reduce<float>(arguments, channel, block);
    case Type::kF64:
      return reduce<double>(arguments, channel, block);
    case Type::kBF16:
      return reduce<BFloat16>(arguments, channel, block);
    case Type::kF16:
      return reduce<Float16>(arguments, channel, block);
    case Type::kU8:
      return reduce<uint8_t>(arguments, channel, block);
    case Type::kU16:
      return reduce<uint16_t>(arguments, channel, block);
    case Type::kU32:
      return reduce<uint32_t>(arguments, channel, block);
    case Type::kU64:
      return reduce<uint64_t>(arguments, channel, block);
  }
}

// Runs the launches of one rank's kernel in sequence, for one block.
inline void run_block(const Case& one, Arguments arguments, int channel, HostBlock block) {
  std::minstd_rand random(one.header.seed + 977 * arguments.rank + 31 * channel + block.index);
  if (one.header.seed) block.random = &random;
  for (int call = 0; call < one.header.num_calls; ++call) {
    arguments.bucket = bucket_of(one, arguments.rank, call);
    reduce(one.type(), arguments, channel, block);
    block.barrier->arrive(false);  // the end of a launch
  }
}

inline Result run(const Case& one) {
  const Layout& layout = one.header.layout;
  const float scale = static_cast<float>(one.header.scale);
  std::vector<std::unique_ptr<Memory>> staging, in, out;
  std::vector<Arguments> arguments;
  Result result;
  result.reports.resize(one.num_ranks());
  for (int rank = 0; rank < one.num_ranks(); ++rank) {
    staging.push_back(std::make_unique<Memory>(staging_bytes(layout), 0xa5));
    memset(staging.back()->get(), 0, flags_bytes(layout));
    set_counters(layout, {staging.back()->get()}, one.header.first_number);
    in.push_back(std::make_unique<Memory>(one.room(), 0));
    memcpy(in.back()->get(), one.in[rank].data(), one.room());
    out.push_back(std::make_unique<Memory>(one.room(), kOutFill));
    char* target = one.header.in_place ? in[rank]->get() : out[rank]->get();
    arguments.push_back(arguments_of(one, rank, in[rank]->get(), target));
    arguments[rank].report = &result.reports[rank];
    result.reports[rank].abort = rank == one.header.abort_rank;
    arguments[rank].scale = one.type() == Type::kF64 ? static_cast<const void*>(&one.header.scale)
                                                     : static_cast<const void*>(&scale);
  }
  std::vector<std::unique_ptr<Barrier>> barriers;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < one.num_ranks(); ++rank) {
    for (int peer = 0; peer < one.num_ranks(); ++peer) {
      arguments[rank].staging[peer] = {staging[peer]->get()};
    }
    if (rank == one.header.missing_rank) continue;
    for (int channel = 0; channel < one.header.num_channels; ++channel) {
      barriers.push_back(std::make_unique<Barrier>(one.header.num_threads));
      for (int i = 0; i < one.header.num_threads; ++i) {
        const HostBlock block = {barriers.back().get(), nullptr, i, one.header.num_threads};
        threads.emplace_back([&one, &mine = arguments[rank], channel, block] {
          run_block(one, mine, channel, block);
        });
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < one.num_ranks(); ++rank) {
    const char* target = one.header.in_place ? in[rank]->get() : out[rank]->get();
    result.out.emplace_back(target, target + one.room());
  }
  return result;
}

}  // namespace jdp
