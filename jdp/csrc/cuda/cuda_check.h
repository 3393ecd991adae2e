// CUDA calls that return a Status.

#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "../common/status.h"

namespace jdp {

inline Status of_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // clears the error, which is reported here
  return {Code::kUnavailable, std::string("jdp: ") + what + ": " + cudaGetErrorString(error)};
}

// Makes a device current, and restores the previous one when destroyed. If `status` is an error,
// another device is current and no CUDA call may follow.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device), before_(device) {
    status_ = of_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (status_.ok() && before_ != device)
      status_ = of_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() {
    if (status_.ok() && before_ != device_) cudaSetDevice(before_);
  }

  const Status& status() const { return status_; }

 private:
  const int device_;
  int before_;
  Status status_;
};

}  // namespace jdp

#define JDP_ON_DEVICE(device)        \
  ::jdp::OnDevice on_device(device); \
  if (!on_device.status().ok()) return on_device.status()
#define JDP_CUDA(call) JDP_RETURN_IF_ERROR(::jdp::of_cuda(call, #call))
