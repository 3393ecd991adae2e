// Calls to CUDA, with a Status for its errors.

#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "../status.h"

namespace jdp {

inline Status of_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // it is told here, not to the next caller
  return {Code::kUnavailable, std::string("jdp: ") + what + ": " + cudaGetErrorString(error)};
}

// Makes a device current, and then the one that was.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
    if (before_ != device) cudaSetDevice(device);
    device_ = device;
  }
  ~OnDevice() {
    if (before_ != device_) cudaSetDevice(before_);
  }

 private:
  int before_;
  int device_;
};

}  // namespace jdp

#define JDP_CUDA(call) JDP_RETURN_IF_ERROR(::jdp::of_cuda(call, #call))
