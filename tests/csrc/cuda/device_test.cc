// OnDevice makes contexts on no other device, and restores the device of a thread that has one.

#include <cstdio>
#include <cstdlib>
#include <set>

#include "cuda/cuda_check.h"

extern void* current_context;  // of driver.cc

namespace {

char devices[8];  // device i has its context at &devices[i]
std::set<int> contexts;
int refused = -1;

int current() {
  return current_context ? static_cast<int>(static_cast<char*>(current_context) - devices) : 0;
}

void require(bool is_right, const char* what) {
  if (is_right) return;
  fprintf(stderr, "%s\n", what);
  exit(1);
}

}  // namespace

cudaError_t cudaGetDevice(int* device) {
  *device = current();
  return cudaSuccess;
}

// As of CUDA 12: makes the context at once.
cudaError_t cudaSetDevice(int device) {
  if (device == refused) return 101;
  contexts.insert(device);
  current_context = &devices[device];
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused"; }

int main() {
  {
    const jdp::OnDevice on_device(3);
    require(on_device.status().ok() && current() == 3, "device 3 is not current");
  }
  require(contexts == std::set<int>{3}, "a thread without a context has made one on device 0");

  current_context = &devices[2];
  contexts = {2};
  {
    const jdp::OnDevice outer(5);
    {
      const jdp::OnDevice inner(3);
      require(current() == 3, "device 3 is not current");
    }
    require(current() == 5, "device 5 is not current again");
    const jdp::OnDevice same(5);
  }
  require(current() == 2, "device 2 is not current again");
  require(contexts == std::set<int>{2, 3, 5}, "other devices have contexts");

  refused = 6;
  {
    const jdp::OnDevice on_device(6);
    require(!on_device.status().ok(), "a device that was refused is current");
  }
  require(current() == 2, "device 2 is not current after an error");
  return 0;
}
