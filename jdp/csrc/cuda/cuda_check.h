// CUDA calls that return a Status.

#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <string>

#include "../common/status.h"

namespace jdp {

inline Status of_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // clears the error, which is reported here
  return {Code::kUnavailable, std::string("jdp: ") + what + ": " + cudaGetErrorString(error)};
}

// Asks the driver, which is loaded if there is one.
inline bool has_context() {
  using Get = int (*)(void**);
  static std::atomic<Get> found{nullptr};
  Get get = found;
  if (!get) {
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!driver) return false;
    get = reinterpret_cast<Get>(dlsym(driver, "cuCtxGetCurrent"));
    dlclose(driver);
    if (!get) return false;
    found = get;
  }
  void* context = nullptr;
  return get(&context) == 0 && context;
}

// Makes a device current, and restores the previous one. If `status` is an error, another device is
// current and no CUDA call may follow.
//
// On a thread without a context, device 0 is said to be current. To restore it would make a context
// there, which takes some 500 MB of a GPU that another process may drive.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(device) {
    status_ = of_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (!status_.ok() || before_ == device) return;
    const bool is_before_used = has_context();
    status_ = of_cuda(cudaSetDevice(device), "cudaSetDevice");
    restores_ = status_.ok() && is_before_used;
  }
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() {
    if (restores_) cudaSetDevice(before_);
  }

  const Status& status() const { return status_; }

 private:
  int before_;
  bool restores_ = false;
  Status status_;
};

}  // namespace jdp

#define JDP_ON_DEVICE(device)        \
  ::jdp::OnDevice on_device(device); \
  if (!on_device.status().ok()) return on_device.status()
#define JDP_CUDA(call) JDP_RETURN_IF_ERROR(::jdp::of_cuda(call, #call))
