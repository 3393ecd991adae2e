// Runs cases (see cases.h) with all ranks on one GPU.

#include "virtual_ranks.cuh"

namespace jdp {
namespace {

VirtualKernel kernel_of(Type type, Algorithm algorithm) {
  switch (type) {
    case Type::kF32:
      return virtual_kernel_of<float>(algorithm);
    case Type::kF64:
      return virtual_kernel_of<double>(algorithm);
    case Type::kBF16:
      return virtual_kernel_of<BFloat16>(algorithm);
    case Type::kF16:
      return virtual_kernel_of<Float16>(algorithm);
    case Type::kU8:
      return virtual_kernel_of<uint8_t>(algorithm);
    case Type::kU16:
      return virtual_kernel_of<uint16_t>(algorithm);
    case Type::kU32:
      return virtual_kernel_of<uint32_t>(algorithm);
    case Type::kU64:
      return virtual_kernel_of<uint64_t>(algorithm);
  }
  return nullptr;
}

Result run(const Case& one) {
  const int num_ranks = one.num_ranks();
  VirtualRanks ranks(one.header.layout);
  ranks.reset(one.header.first_number, one.header.abort_rank);
  char* in;
  char* out;
  void* scale;
  CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&in), num_ranks * one.room()));
  CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&out), num_ranks * one.room()));
  CHECK_CUDA(cudaMalloc(&scale, sizeof(double)));
  const float single = static_cast<float>(one.header.scale);
  const bool is_double = one.type() == Type::kF64;
  CHECK_CUDA(cudaMemcpy(scale, is_double ? static_cast<const void*>(&one.header.scale) : &single,
                        is_double ? sizeof(double) : sizeof(float), cudaMemcpyDefault));
  CHECK_CUDA(cudaMemset(out, kOutFill, num_ranks * one.room()));
  std::vector<Arguments> arguments;
  for (int rank = 0; rank < num_ranks; ++rank) {
    char* mine = in + rank * one.room();
    char* target = one.header.in_place ? mine : out + rank * one.room();
    CHECK_CUDA(cudaMemcpy(mine, one.in[rank].data(), one.room(), cudaMemcpyDefault));
    arguments.push_back(arguments_of(one, rank, mine, target));
    arguments[rank].scale = scale;
  }
  ranks.set_arguments(arguments);
  const VirtualKernel kernel = kernel_of(one.type(), one.algorithm());
  if (!ranks.fits(kernel)) {
    fprintf(stderr, "%d ranks of %d blocks do not fit on this GPU at once\n", num_ranks,
            one.header.num_channels);
    exit(3);
  }
  for (int call = 0; call < one.header.num_calls; ++call) {
    if (call > 0 && call == one.header.odd_call) {
      CHECK_CUDA(cudaDeviceSynchronize());
      for (int rank = 0; rank < num_ranks; ++rank) {
        arguments[rank].bucket = bucket_of(one, rank, call);
      }
      ranks.set_arguments(arguments);
    }
    ranks.launch(kernel, nullptr, one.header.missing_rank, one.header.seed);
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  Result result;
  for (int rank = 0; rank < num_ranks; ++rank) {
    result.reports.push_back(ranks.report(rank));
    result.out.emplace_back(one.room());
    CHECK_CUDA(cudaMemcpy(result.out[rank].data(),
                          (one.header.in_place ? in : out) + rank * one.room(), one.room(),
                          cudaMemcpyDefault));
  }
  CHECK_CUDA(cudaFree(in));
  CHECK_CUDA(cudaFree(out));
  CHECK_CUDA(cudaFree(scale));
  return result;
}

}  // namespace
}  // namespace jdp

int main() {
  jdp::Case one;
  while (jdp::read_case(&one)) jdp::write_result(one, jdp::run(one));
}
